"""Readers for recordings of serving engines, one module per engine.

:func:`read_trace` returns a :class:`~clustergym.traces.TokenTrace` if tokens were recorded, and a
:class:`~clustergym.traces.LoadTrace` if only counts were. Files may be hostile: their content is validated, code in
them never runs, and sizes are validated before memory is allocated.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from clustergym.traces.load_trace import LoadTrace
from clustergym.traces.readers.base import ReadOptions
from clustergym.traces.readers.detect import detect
from clustergym.traces.token_trace import TokenTrace

ENGINES = {
    "sglang": "recorder dumps (stat, per_pass, per_token: .pt), or HTTP responses (.json, .jsonl, base64 lines)",
    "vllm": "routed_experts as .npy, or HTTP responses (.json, .jsonl, base64 lines)",
    "tensorrt-llm": "expert statistics: the folder with meta_info.json and rank*.safetensors",
    "load-table": "loads per layer and expert as .csv",
}
"""Engine → files that it writes."""


def read_trace(
    paths: Sequence[str | Path], engine: str | None = None, options: ReadOptions | None = None
) -> TokenTrace | LoadTrace:
    """Read the trace in the files or folders. Without ``engine``, it is detected from the files."""
    if not paths:
        raise ValueError("no files given: nothing to import")
    found = [Path(path) for path in paths]
    engine = detect(found) if engine is None else engine
    if engine not in ENGINES:
        raise ValueError(f"unknown engine {engine!r}; the engines are: {', '.join(ENGINES)}")
    module = import_module(f"{__name__}.{engine.replace('-', '_')}")
    trace: TokenTrace | LoadTrace = module.read(found, options or ReadOptions())
    return trace


__all__ = ["ENGINES", "ReadOptions", "detect", "read_trace"]
