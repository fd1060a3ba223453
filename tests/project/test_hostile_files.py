"""Hostile files: every format refuses broken files with one sentence, and mutated files never crash a reader.

``CLUSTERGYM_FUZZ=10000 pytest tests/project/test_hostile_files.py -k mutated`` tries that many mutated files.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from untrusted_files import FORMATS

EXAMPLES = -(-int(os.environ.get("CLUSTERGYM_FUZZ", "280")) // len(FORMATS))

BROKEN = {
    "empty": b"",
    "zeros": bytes(4096),
    "noise": bytes((i * 197 + i // 7) % 256 for i in range(4096)),
    "null": b"null\n",
    "number": b"1e400\n",
    "nested": b'{"a": ' + b"[" * 50_000,
    "nested lines": b"- " * 20_000,
    "text": "größer\n".encode("latin-1"),
}
"""Content that no format accepts."""


def write(name: str, folder: Path) -> Path:
    path = folder / FORMATS[name].path
    FORMATS[name].write(path)
    return path


def refused(name: str, path: Path) -> str:
    with pytest.raises(ValueError) as error:
        FORMATS[name].read(path)
    return str(error.value)


@pytest.mark.parametrize("name", FORMATS)
def test_the_valid_file_is_read(name: str, tmp_path: Path) -> None:
    """So that the tests below test what they break."""
    FORMATS[name].read(write(name, tmp_path))


@pytest.mark.parametrize("kind", BROKEN)
@pytest.mark.parametrize("name", FORMATS)
def test_broken_files_are_refused(name: str, kind: str, tmp_path: Path) -> None:
    """30 formats × 8 contents."""
    path = write(name, tmp_path)
    path.write_bytes(BROKEN[kind])
    assert len(refused(name, path)) < 2000


# Formats whose files say how long they are, or end with a closing bracket: half of one is never valid.
CLOSED = [name for name in FORMATS if not FORMATS[name].path.endswith((".yaml", ".csv", ".txt", ".jsonl"))]


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("name", CLOSED)
def test_truncated_files_are_refused(name: str, share: float, tmp_path: Path) -> None:
    path = write(name, tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    refused(name, path)


def _unclosed_header(data: bytes) -> bytes:
    return data.replace(b"), }", b"), [")


def _unknown_zip_version(data: bytes) -> bytes:
    at = data.index(b"PK\x01\x02") + 6  # version needed to extract, in the directory
    return data[:at] + bytes([64, 0]) + data[at + 2 :]


def _member_before_the_file(data: bytes) -> bytes:
    # Offset of the directory, in the record of large files (torch) or of others. zipfile shifts all members by the
    # difference to where it finds the directory.
    large = data.find(b"PK\x06\x06")
    at = large + 48 if large >= 0 else data.index(b"PK\x05\x06") + 16
    return data[:at] + (int.from_bytes(data[at : at + 4], "little") + 1000).to_bytes(4, "little") + data[at + 4 :]


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("vllm-npy", _unclosed_header),
        ("token-trace", _unknown_zip_version),
        ("load-trace", _unknown_zip_version),
        ("load-trace", _member_before_the_file),
        ("sglang-tokens", _member_before_the_file),
    ],
)
def test_files_that_the_fuzzer_found_are_refused(name: str, damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    """numpy parses a header as Python source; zipfile raises NotImplementedError and OSError."""
    path = write(name, tmp_path)
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    assert path.read_bytes() != whole
    refused(name, path)


@pytest.mark.parametrize("name", FORMATS)
@settings(
    max_examples=EXAMPLES, deadline=None, derandomize=EXAMPLES < 50, database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
@given(
    cut=st.floats(0, 1),
    flips=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), max_size=6),
    inserted=st.one_of(
        st.just(b""),
        st.binary(max_size=12),
        st.sampled_from([b"-1", b"99999999999999999999", b"null", b"1e999", b"[[", b"}"]),
    ),
    at=st.floats(0, 1),
)
def test_mutated_files_are_read_or_refused(
    name: str, cut: float, flips: list[tuple[float, int]], inserted: bytes, at: float, tmp_path: Path
) -> None:
    """A reader returns, or raises a ValueError. Any other exception is a bug."""
    path = tmp_path / FORMATS[name].path
    valid = tmp_path / "valid"
    if not valid.exists():
        FORMATS[name].write(path)
        valid.write_bytes(path.read_bytes())
    data = bytearray(valid.read_bytes())
    for place, value in flips:
        data[int(place * len(data))] = value
    where = int(at * len(data))
    data[where:where] = inserted
    if cut < 0.3:  # most files keep their end
        del data[int(cut / 0.3 * len(data)) :]
    path.write_bytes(data)
    with contextlib.suppress(ValueError):
        FORMATS[name].read(path)
