"""Machine code on disk is shared by copies of the package, renewed with its sources, and safe."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from clustergym.common.cache import cache_folder
from clustergym.common.code_cache import KEEP_S

MODULE = """
from pathlib import Path
from clustergym.common.compiling import compiler, source_fingerprint

@compiler(source_fingerprint([Path(__file__)]))
def twice(x):
    return 2 * x
"""
RUN = """
from example import twice
print(twice(21), sum(twice.stats.cache_hits.values()), sum(twice.stats.cache_misses.values()))
"""


def start(source: str, folder: Path, cache: Path) -> subprocess.Popen[str]:
    """Run ``twice(21)`` from a copy of its module in this folder."""
    folder.mkdir(exist_ok=True)
    (folder / "example.py").write_text(source)
    variables = {**os.environ, "CLUSTERGYM_CACHE": str(cache), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", RUN],
        cwd=folder,
        env=variables,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def run(source: str, folder: Path, cache: Path) -> tuple[int, str, int, int]:
    """The last line of its errors; its result, how often its code was found and not found on the disk."""
    process = start(source, folder, cache)
    out, error = process.communicate(timeout=120)
    result, found, missed = map(int, out.split() or (0, 0, 0))
    return result, error.strip().split("\n")[-1], found, missed


def test_copies_at_other_places_share_code_until_a_source_changes(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    assert run(MODULE, tmp_path / "a", cache) == (42, "", 0, 1)
    assert run(MODULE, tmp_path / "b", cache) == (42, "", 1, 0)
    assert (cache / "numba").stat().st_mode & 0o777 == 0o700
    assert run(MODULE.replace("2 * x", "3 * x"), tmp_path / "b", cache) == (63, "", 0, 1)
    assert run(MODULE, tmp_path / "b", cache) == (42, "", 1, 0)


def test_processes_that_compile_at_the_same_time(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    processes = [start(MODULE, tmp_path / str(i), cache) for i in range(3)]
    assert [p.communicate(timeout=120)[0].split()[0] for p in processes] == ["42"] * 3
    assert len(list((cache / "numba").iterdir())) == 1
    assert run(MODULE, tmp_path / "0", cache) == (42, "", 1, 0)


@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_a_folder_that_others_can_write_is_refused(tmp_path: Path, mode: int) -> None:
    cache = tmp_path / "cache"
    run(MODULE, tmp_path / "a", cache)
    (cache / "numba").chmod(mode)
    result, error, *_ = run(MODULE, tmp_path / "a", cache)
    assert result == 0
    assert f"has mode {mode:o}" in error
    assert f"`chmod go-w {cache / 'numba'}`" in error


def test_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir(mode=0o700)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "numba").symlink_to(tmp_path / "other")
    assert "expected a folder of your own" in run(MODULE, tmp_path / "a", tmp_path / "cache")[1]


def test_without_a_folder_to_write_every_process_compiles(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result, error, found, missed = run(MODULE, tmp_path / "a", tmp_path / "file")
    assert (result, found, missed) == (42, 0, 1)
    assert "set CLUSTERGYM_CACHE to a folder that you can write" in error


def test_entries_that_are_not_used_for_long_are_deleted(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    run(MODULE, tmp_path / "a", cache)
    (old,) = (cache / "numba").iterdir()
    almost = time.time() - KEEP_S + 3600
    os.utime(old, (almost, almost))
    assert run(MODULE, tmp_path / "a", cache)[2] == 1
    assert old.stat().st_mtime > time.time() - 3600, "a use makes it new"
    os.utime(old, (0, 0))
    run(MODULE.replace("2 * x", "3 * x"), tmp_path / "a", cache)
    assert not old.exists()
    assert len(list((cache / "numba").iterdir())) == 1


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CLUSTERGYM_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_folder() == Path("/x/clustergym")
    monkeypatch.setenv("CLUSTERGYM_CACHE", "/y")
    assert cache_folder() == Path("/y")
