"""FLAME-MoE routing traces (CMU-FLAME/FLAME-MoE-Traces): ``actives/iter_NNNN/layer_NN.parquet``, one row per token.

The column ``indices`` has the experts of a token. Layers are counted from 1, as in Megatron.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from clustergym.traces.readers.base import Ids, ReadOptions, TokenBlocks, expand
from clustergym.traces.readers.parquet import open_parquet
from clustergym.traces.token_trace import MAX_EXPERTS, TokenTrace

N_EXPERTS = 64
"""Routed experts of all released models."""
SEQUENCE_TOKENS = 2048
"""Tokens per training sequence. The files do not mark where sequences begin."""
NAME = re.compile(r"layer_(\d{1,4})\.parquet")
_ROWS = 1 << 16


def read(paths: Sequence[Path], options: ReadOptions) -> TokenTrace:
    """Read one folder per checkpoint. Checkpoints become domains."""
    checkpoints: dict[Path, dict[int, Path]] = {}
    for path in expand(paths, "layer_*.parquet"):
        match = NAME.fullmatch(path.name)
        if match is None or int(match[1]) < 1:
            raise ValueError(f"{path}: expected a file named layer_NN.parquet, counted from 1")
        checkpoints.setdefault(path.parent, {})[int(match[1]) - 1] = path
    blocks = TokenBlocks()
    for folder, layers in checkpoints.items():
        left = None if options.max_tokens is None else options.max_tokens - blocks.n_tokens
        if left is not None and left <= 0:
            break
        ordered = sorted(layers)
        columns = [_read_layer(layers[layer], left) for layer in ordered]
        if len({column.shape for column in columns}) > 1:
            raise ValueError(f"{folder}: layers of different shapes {sorted({c.shape for c in columns})}")
        block = np.stack(columns, axis=1)
        full, rest = divmod(len(block), SEQUENCE_TOKENS)
        lengths = [SEQUENCE_TOKENS] * full + [rest] * (rest > 0)
        blocks.add(block, np.array(ordered), lengths, folder.resolve().name or "all", str(folder))
    fields = blocks.fields()
    options.check_moe_layers(fields["layer_ids"].tolist())
    n_experts = options.expected_experts or max(N_EXPERTS, int(fields["experts"].max()) + 1)
    return TokenTrace(**fields, n_experts=n_experts, model=options.model_name, name=options.name)


def _read_layer(path: Path, max_tokens: int | None) -> Ids:
    """(tokens, K) expert ids."""
    parts: list[Ids] = []
    rows = 0
    for batch in open_parquet(path, ("indices",), _ROWS):
        lists = batch["indices"]
        if max_tokens is not None:
            lists = lists[: max_tokens - rows]
        if lists.dtype.kind not in "iu" or lists.ndim != 2:
            raise ValueError(f"{path}: column 'indices' is not a list of expert ids per token")
        if lists.size and (lists.min() < -1 or lists.max() >= MAX_EXPERTS):
            raise ValueError(f"{path}: expert ids from {lists.min()} to {lists.max()}: these are not routed experts")
        if parts and parts[0].shape[1] != lists.shape[1]:
            raise ValueError(f"{path}: tokens with {parts[0].shape[1]} and with {lists.shape[1]} experts")
        parts.append(lists.astype(np.int16))
        rows += len(lists)
        if max_tokens is not None and rows >= max_tokens:
            break
    if not rows:
        raise ValueError(f"{path}: no token in the file")
    return np.concatenate(parts)
