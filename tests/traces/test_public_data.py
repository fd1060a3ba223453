"""Where benchmarks find public recordings."""

from __future__ import annotations

from pathlib import Path

import pytest

from public_data import data_file, data_files, find_data


def test_files_are_found_in_the_folder_of_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [tmp_path / "moe" / name for name in ("a.npz", "b.npz")]
    files[0].parent.mkdir()
    for file in reversed(files):
        file.touch()
    monkeypatch.setenv("CLUSTERGYM_DATA", str(tmp_path))
    assert find_data("moe/*.npz") == data_files("moe/*.npz") == files
    assert data_file("moe/b.npz") == files[1]
    assert find_data("hw/*") == []
    with pytest.raises(SystemExit, match=f"CLUSTERGYM_DATA is {tmp_path}: expected a folder with hw/x.parquet"):
        data_file("hw/x.parquet")


def test_without_the_variable_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CLUSTERGYM_DATA", raising=False)
    assert find_data("*") == []
    with pytest.raises(SystemExit, match="CLUSTERGYM_DATA is not set: expected a folder with moe/x"):
        data_file("moe/x.npz")
