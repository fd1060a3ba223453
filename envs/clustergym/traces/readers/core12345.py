"""Expert selections per query: the public data set core12345/MoE_expert_selection_trace, one JSON file per query.

A file is a list. Its first entry is the prompt, each further entry is one generated token. An entry maps a layer to the
experts of its tokens, one row per token, or to null if the layer is dense.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from clustergym.traces.readers.base import Ids, ReadOptions, TokenBlocks, expand, parse_json
from clustergym.traces.token_trace import MAX_EXPERTS, TokenTrace


def read(paths: Sequence[Path], options: ReadOptions) -> TokenTrace:
    """Each file is one sequence. Its folder, the subject of the query, is the domain."""
    blocks = TokenBlocks()
    for path in expand(paths, "*.json"):
        block, layers = _read_query(path)
        if (expected := options.expected_top_k) and block.shape[2] != expected:
            raise ValueError(f"{path}: {block.shape[2]} experts per token recorded, expected top-{expected}")
        blocks.add(block, layers, [len(block)], path.resolve().parent.name or "all", str(path))
        if options.max_tokens is not None and blocks.n_tokens >= options.max_tokens:
            break
    fields = blocks.fields()
    options.check_moe_layers(fields["layer_ids"].tolist())
    return TokenTrace(**fields, n_experts=options.expected_experts, model=options.model_name, name=options.name)


def _read_query(path: Path) -> tuple[Ids, npt.NDArray[np.int64]]:
    """((tokens, layers, K) expert ids, (layers,) global indices)."""
    document = parse_json(path.read_bytes(), str(path))
    if not isinstance(document, list) or not document:
        raise ValueError(f"{path}: expected a list with the prompt and each generated token")
    entries = [_layers_of(entry, f"{path}, entry {i}") for i, entry in enumerate(document)]
    layers = sorted(entries[0])
    if not layers:
        raise ValueError(f"{path}, entry 0: no layer has experts")
    parts: list[Ids] = []
    for i, entry in enumerate(entries):
        if sorted(entry) != layers:
            raise ValueError(f"{path}, entry {i}: layers {sorted(entry)}, but {layers} in entry 0")
        shapes = {rows.shape for rows in entry.values()}
        if len(shapes) > 1 or (parts and parts[0].shape[2] != next(iter(shapes))[1]):
            raise ValueError(f"{path}, entry {i}: layers have different numbers of tokens or experts")
        parts.append(np.stack([entry[layer] for layer in layers], axis=1))
    return np.concatenate(parts), np.array(layers, np.int64)


def _layers_of(entry: Any, where: str) -> dict[int, Ids]:
    """Layer → (tokens, K) expert ids, dense layers left out."""
    if not isinstance(entry, dict):
        raise ValueError(f"{where}: expected an object that maps layers to experts, found {type(entry).__name__}")
    found = {}
    for key, rows in entry.items():
        if not key.isdecimal() or len(key) > 5:
            raise ValueError(f"{where}: {key[:40]!r} is not a layer")
        if rows is not None:
            found[int(key)] = _ids(rows, f"{where}, layer {key}")
    return found


def _ids(rows: Any, where: str) -> Ids:
    try:
        ids = np.array(rows)
    except ValueError as error:
        raise ValueError(f"{where}: rows of different lengths") from error
    if ids.ndim != 2 or ids.dtype.kind not in "iu" or ids.size == 0:
        raise ValueError(f"{where}: {ids.dtype} of shape {ids.shape}: expected rows of expert ids")
    if ids.min() < 0 or ids.max() >= MAX_EXPERTS:
        raise ValueError(f"{where}: expert {ids.min() if ids.min() < 0 else ids.max()}: this is not an expert id")
    return ids.astype(np.int16)
