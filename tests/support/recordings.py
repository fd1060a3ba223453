"""A small routing, and how tests read recordings of it."""

from __future__ import annotations

from typing import Any

import numpy as np

import engine_files as files
from clustergym import TokenTrace
from clustergym.moe_placement.specs import ModelSpec
from clustergym.traces import LoadTrace
from clustergym.traces.readers import ReadOptions, read_trace

TOKENS, LAYERS, TOP_K, EXPERTS, DENSE = 60, 4, 3, 12, 2
LENS = [25, 15, 20]
SMALL = ModelSpec("small", LAYERS, EXPERTS, TOP_K, 64, 32, n_dense=DENSE)
LOGICAL = files.routing(TOKENS, LAYERS, TOP_K, EXPERTS)
SLOTS = files.slot_map(DENSE + LAYERS, EXPERTS, 4)
PASSES = [
    {"n": 40, "mode": 1, "lens": [25, 15], "pad": 5},
    {"n": 12, "mode": 2, "lens": None},
    {"n": 8, "mode": 2, "lens": None, "pad": 1},
]
"""Forward passes of a recording of SGLang: prefill (mode 1) of two requests, then decode."""


def tokens_of(paths: Any, engine: str | None = None, **options: Any) -> TokenTrace:
    trace = read_trace(paths if isinstance(paths, list) else [paths], engine, ReadOptions(**options))
    assert isinstance(trace, TokenTrace)
    return trace


def loads_of(paths: Any, engine: str | None = None, **options: Any) -> LoadTrace:
    trace = read_trace(paths if isinstance(paths, list) else [paths], engine, ReadOptions(**options))
    assert isinstance(trace, LoadTrace)
    return trace


def expect(trace: TokenTrace, logical: Any = LOGICAL, first_layer: int = DENSE, lens: Any = None) -> None:
    np.testing.assert_array_equal(trace.experts, logical)
    assert trace.layer_ids.tolist() == list(range(first_layer, first_layer + logical.shape[1]))
    if lens is not None:
        assert trace.seq_lens.tolist() == list(lens)


def counts_of(logical: Any, n_experts: int) -> Any:
    """(L, E)"""
    return np.stack([np.bincount(logical[:, l].ravel(), minlength=n_experts) for l in range(logical.shape[1])])
