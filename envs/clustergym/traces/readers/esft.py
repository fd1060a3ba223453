"""ESFT expert scores (deepseek-ai/ESFT): ``TASK/expert_weights_LAYER.txt``, one line per sequence."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from clustergym.traces.readers.base import Ids, ReadOptions, TokenBlocks, expand, parse_naturals
from clustergym.traces.token_trace import TokenTrace

# The model of the released scores.
MODEL, N_LAYERS, N_EXPERTS, TOP_K = "deepseek-v2-lite", 26, 64, 6
_NAME = re.compile(r"expert_weights_(\d+)\.txt")
# Text parsed at a time: large enough for vectorised code, small enough to save memory.
_BATCH_BYTES = 4 << 20


def read(paths: Sequence[Path], options: ReadOptions) -> TokenTrace:
    """Read one folder per task. Tasks become domains. Gate weights are counted but not used."""
    top_k = options.expected_top_k or TOP_K
    expected = options.n_layers or (len(options.model.layer_ids) if options.model else N_LAYERS)
    tasks: dict[Path, dict[int, Path]] = {}
    for path in expand(paths, "expert_weights_*.txt"):
        match = _NAME.fullmatch(path.name)
        if match is None:
            raise ValueError(f"{path}: expected a file named expert_weights_LAYER.txt")
        tasks.setdefault(path.parent, {})[int(match[1])] = path
    blocks = TokenBlocks()
    for folder, layers in tasks.items():
        ordered = sorted(layers)
        if len(ordered) != expected:
            raise ValueError(
                f"{folder}: files for {len(ordered)} layers, expected {expected} (--n-layers changes this)"
            )
        experts: Ids | None = None
        lengths: npt.NDArray[np.int64] | None = None
        for column, layer in enumerate(ordered):
            ids, seq_lens = _read_layer(layers[layer], top_k)
            if experts is None or lengths is None:
                experts, lengths = np.empty((len(ids), len(ordered), top_k), np.int16), seq_lens
            elif not np.array_equal(seq_lens, lengths):
                raise ValueError(f"{layers[layer]}: its sequences differ from those of {layers[ordered[0]].name}")
            experts[:, column] = ids
        assert experts is not None
        assert lengths is not None
        blocks.add(experts, np.array(ordered), lengths.tolist(), folder.name or "all", str(folder))
    return TokenTrace(
        **blocks.fields(),
        n_experts=options.expected_experts or N_EXPERTS,
        model=options.model_name or MODEL,
        name=options.name,
    )


def _read_layer(path: Path, top_k: int) -> tuple[Ids, npt.NDArray[np.int64]]:
    """((tokens, K) ids, (sequences,) lengths)."""
    pieces, lengths = [], []
    for batch, counts in _batches(path, top_k):
        ids = parse_naturals(batch, str(path))
        if len(ids) != sum(counts) * top_k:
            raise ValueError(f"{path}: an id is missing between two tabs")
        pieces.append(ids.astype(np.int16))
        lengths += counts
    if not pieces:
        raise ValueError(f"{path}: no sequence in the file")
    return np.concatenate(pieces).reshape(-1, top_k), np.array(lengths)


def _batches(path: Path, top_k: int) -> Iterator[tuple[bytes, list[int]]]:
    """(ids of some sequences joined by tabs, number of tokens in each of these sequences)."""
    parts: list[bytes] = []
    counts: list[int] = []
    size = 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            ids, gap, weights = line.rstrip(b"\r\n").partition(b"\t\t")
            if not ids and not gap:
                continue
            n = ids.count(b"\t") + 1
            if not gap or weights.count(b"\t") + 1 != n or not weights:
                raise ValueError(
                    f"{path}, line {number}: expected ids, two tabs, and as many gate weights: is the file truncated?"
                )
            if n % top_k:
                raise ValueError(f"{path}, line {number}: {n} ids are not a multiple of top-{top_k}")
            if ids.translate(None, b"0123456789\t"):
                raise ValueError(f"{path}, line {number}: expert ids must be numbers, found {ids[:40]!r}")
            parts.append(ids)
            counts.append(n // top_k)
            size += len(ids)
            if size > _BATCH_BYTES:
                yield b"\t".join(parts), counts
                parts, counts, size = [], [], 0
    if parts:
        yield b"\t".join(parts), counts
