"""vLLM: ``CompletionOutput.routed_experts`` saved as ``.npy``, or HTTP responses with the base64 of a ``.npy`` file."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy.typing as npt

from clustergym.traces.arrays import read_npy
from clustergym.traces.readers.base import DenseZeros, ReadOptions, TokenBlocks, expand
from clustergym.traces.readers.payloads import payloads
from clustergym.traces.token_trace import TokenTrace


def read(paths: Sequence[Path], options: ReadOptions) -> TokenTrace:
    """Each response is one sequence: (tokens, all layers, K) logical ids, with 0 in dense layers."""
    blocks, dense = TokenBlocks(), DenseZeros(options)
    for path in expand(paths, "*.npy", "*.json", "*.jsonl"):
        for where, ids in _responses(path):
            if ids.ndim != 3 or ids.dtype.kind not in "iu" or 0 in ids.shape[1:]:
                raise ValueError(
                    f"{where}: {ids.dtype} of shape {ids.shape}: expected integers (tokens, layers, top-k)"
                )
            block, layer_ids = dense.strip(ids, where)
            blocks.add(block, layer_ids, [len(block)] if len(block) else [], "all", where)
    dense.check_dropped(blocks.n_tokens)
    return TokenTrace(
        **blocks.fields(), n_experts=options.expected_experts, model=options.model_name, name=options.name
    )


def _responses(path: Path) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    if path.suffix == ".npy":
        with open(path, "rb") as file:
            yield str(path), read_npy(file, path.stat().st_size, str(path))
        return
    for where, data in payloads(path):
        yield where, read_npy(io.BytesIO(data), len(data), where)
