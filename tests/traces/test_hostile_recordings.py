"""Recordings that would run code or take all memory are refused, and nothing is written."""

from __future__ import annotations

import base64
import io
import pickle
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import engine_files as files
from clustergym import cli
from clustergym.traces.readers import read_trace
from recordings import DENSE, LAYERS, LOGICAL, PASSES, SLOTS, tokens_of


class Touch:
    """Creates a file when it is unpickled, so that a test can see whether that happened."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def repack(path: Path, method: int, change: Callable[[str, bytes], bytes] = lambda _, data: data) -> None:
    """Write the archive again with another compression, or with changed entries."""
    with zipfile.ZipFile(path) as archive:
        entries = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, data in entries.items():
            archive.writestr(name, change(name, data))


class Zeros:
    """A few bytes in a file that unpickle to a byte array of a terabyte."""

    def __reduce__(self) -> Any:
        return bytearray, (1 << 40,)


def expanded(path: Path) -> None:
    """A tensor of a trillion counts whose storage has one."""
    torch.save({"logical_count": torch.ones(1, 1, 1, dtype=torch.int32).expand(10_000, 10_000, 10_000)}, path)


def pickled(value: Callable[[Path], Any], path: Path) -> None:
    torch.save({"records": [value(path.parent / "witness")], "last_physical_to_logical_map": torch.ones(1, 1)}, path)


def packed_bomb(path: Path) -> None:
    torch.save({"logical_count": torch.zeros(1000, 100, 100, dtype=torch.int32)}, path)
    repack(path, zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 100_000


def unwrapped(path: Path) -> None:
    path.write_bytes(pickle.dumps(Touch(path.parent / "witness")))


HOSTILE: list[tuple[str, Callable[[Path], None], str]] = [
    ("bomb.pt", lambda p: pickled(Touch, p), r"creates objects|names .*, which no recording needs"),
    ("raw.pt", unwrapped, "not a complete file of torch.save"),
    ("packed.pt", packed_bomb, "is compressed, which torch.save never does"),
    ("expanded.pt", expanded, "has a storage of only 4 bytes"),
    ("array.pt", lambda p: pickled(lambda _: Zeros(), p), "names .*bytearray, which no recording needs"),
    ("empty.pt", lambda p: p.write_bytes(b"") and None, "not a complete file of torch.save"),
    ("deep.json", lambda p: p.write_text('{"routed_experts": ' + "[" * 100_000) and None, "not valid JSON"),
    ("object.npy", lambda p: np.save(p, np.array([Touch(p.parent / "witness")]), allow_pickle=True), "never loaded"),
    ("text.jsonl", lambda p: p.write_text('{"routed_experts": "%%%%"}\n') and None, "not base64"),
]


@pytest.mark.parametrize(("name", "make", "message"), HOSTILE, ids=[h[0] for h in HOSTILE])
def test_hostile_files_are_refused_and_nothing_is_written(
    name: str, make: Callable[[Path], None], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / name, tmp_path / "out" / "trace.npz"
    out.parent.mkdir()
    make(path)
    options = ["--n-layers", "2", "--top-k", "1"] if path.suffix in (".json", ".jsonl") else []
    engine = {".npy": "vllm"}.get(path.suffix, "sglang")
    assert cli.main(["trace", "import", engine, str(path), "-o", str(out), *options]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert name in said
    assert re.search(message, said), said
    assert "Traceback" not in said
    assert not list(out.parent.iterdir())
    assert not (tmp_path / "witness").exists()


def test_the_pickle_bomb_works_without_weights_only(tmp_path: Path) -> None:
    pickled(Touch, tmp_path / "bomb.pt")
    torch.load(tmp_path / "bomb.pt", weights_only=False)
    assert (tmp_path / "witness").exists()


@settings(max_examples=40, deadline=None)
@given(cut=st.floats(0, 1, exclude_max=True), flip=st.booleans(), value=st.integers(0, 255))
def test_broken_dumps_are_refused_or_still_valid(
    cut: float, flip: bool, value: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("broken") / "r.pt"
    files.sglang_per_token(path, LOGICAL, DENSE, SLOTS, PASSES)
    data = bytearray(path.read_bytes())
    if flip:
        data[int(cut * len(data))] = value
    else:
        data = data[: int(cut * len(data))]
    path.write_bytes(data)
    try:
        trace = tokens_of(path)
    except ValueError:
        return
    assert flip
    assert trace.n_layers == LAYERS


def test_a_false_npy_header_allocates_no_memory(tmp_path: Path) -> None:
    member = io.BytesIO()
    np.lib.format.write_array_header_1_0(member, {"descr": "|u1", "fortran_order": False, "shape": (10**12, 26, 6)})
    (tmp_path / "a.txt").write_text(base64.b64encode(member.getvalue() + bytes(12)).decode())
    with pytest.raises(ValueError, match="header announces 156000000000000 bytes, found 12"):
        read_trace([tmp_path / "a.txt"], "vllm")
