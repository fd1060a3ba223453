"""Readers for what serving engines and trainers record, one module an engine.

``read_trace(paths, engine)`` gives a :class:`~clustergym.traces.TokenTrace` where tokens were recorded, and a
:class:`~clustergym.traces.LoadTrace` where only counts were. Files come from elsewhere: they are checked before they are believed, no code in
them runs, and no memory is taken that they do not bear out.
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
    "sglang": "recorder dumps (stat, per_pass, per_token: .pt), routed experts over HTTP (.json, .jsonl, one base64 a line)",
    "vllm": "routed_experts as .npy, or as base64 over HTTP (.json, .jsonl, one a line)",
    "tensorrt-llm": "expert statistics: the folder with meta_info.json and rank*.safetensors",
    "megatron": "router_trace_rank*.jsonl",
    "esft": "TASK/expert_weights_LAYER.txt",
}
"""Engine → what it writes."""


def read_trace(
    paths: Sequence[str | Path], engine: str | None = None, options: ReadOptions | None = None
) -> TokenTrace | LoadTrace:
    """The trace in the files or folders; the engine is found out where it is not named."""
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
