"""Detect which engine wrote a file from its name and its first bytes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from clustergym.traces.readers.payloads import KEY, NPY_BASE64

_HEAD = 1 << 16


def detect(paths: Sequence[Path]) -> str:
    """The engine that wrote the files. Raises a ValueError if it is unknown or the files are from several engines."""
    engines = {path: _engine_of(path) for path in paths}
    names = sorted(set(engines.values()))
    if len(names) > 1:
        first = {name: next(p for p, e in engines.items() if e == name) for name in names}
        raise ValueError(
            "the files are from different engines: " + ", ".join(f"{path} from {name}" for name, path in first.items())
        )
    return names[0]


def _engine_of(path: Path) -> str:
    if path.is_dir():
        for file in sorted(path.rglob("*")):
            if file.is_file() and (engine := _of_file(file)):
                return engine
        raise ValueError(f"{path}: no recording of a known engine in this folder: name the engine")
    if not path.is_file():
        raise ValueError(f"no file or folder at {path}")
    engine = _of_file(path)
    if engine is None:
        raise ValueError(f"{path}: not a recording of a known engine: name the engine before the files")
    return engine


def _of_file(path: Path) -> str | None:
    if path.suffix == ".pt":
        return "sglang"
    if path.suffix == ".safetensors" or path.name == "meta_info.json":
        return "tensorrt-llm"
    if path.suffix == ".npy":
        return "vllm"
    if path.suffix == ".csv":
        return "load-table"
    if path.suffix not in (".json", ".jsonl", ".txt", ".b64"):
        return None
    with open(path, "rb") as file:
        head = file.read(_HEAD).decode("ascii", "replace")
    # Both engines send base64. vLLM sends a .npy file.
    answer = re.search(rf'"{KEY}"\s*:\s*"(.{{0,8}})', head) or re.match(r"\s*([A-Za-z0-9+/]{8})", head)
    if answer is None:
        return None
    return "vllm" if answer[1].startswith(NPY_BASE64[:8]) else "sglang"
