"""SGLang: expert distribution recorder (``stat``, ``per_pass``, ``per_token``) and routed experts over HTTP."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from clustergym.traces.load_trace import LoadTrace
from clustergym.traces.readers.base import (
    DenseZeros,
    Ids,
    ReadOptions,
    TokenBlocks,
    check_slot_map,
    expand,
    slot_counts_to_logical,
    to_logical,
)
from clustergym.traces.readers.payloads import payloads
from clustergym.traces.readers.torch_files import load_tensors
from clustergym.traces.token_trace import TokenTrace

PHASES = {1: "prefill", 2: "decode", 3: "mixed"}
"""Values of the engine's ForwardMode that have a name of their own here."""


def read(paths: Sequence[Path], options: ReadOptions) -> TokenTrace | LoadTrace:
    files = expand(paths, "*.pt", "*.json", "*.jsonl")
    if all(f.suffix == ".pt" for f in files):
        return _recorded(files, options)
    if any(f.suffix == ".pt" for f in files):
        raise ValueError("recorder dumps (.pt) and HTTP answers are imported one kind at a time")
    return _routed(files, options)


# -- recorder dumps ----------------------------------------------------------------------------------------------


def _recorded(files: Sequence[Path], options: ReadOptions) -> TokenTrace | LoadTrace:
    kinds: dict[str, Path] = {}
    counts: dict[object, npt.NDArray[np.int64]] = {}
    blocks, seen = TokenBlocks(), _Seen()
    for path in files:
        dump = load_tensors(path)
        if not isinstance(dump, dict):
            raise ValueError(f"{path}: holds a {type(dump).__name__}: expected the dict that SGLang's recorder writes")
        kind = _kind(dump, path)
        kinds.setdefault(kind, path)
        if len(kinds) > 1:
            (a, at), (b, other) = list(kinds.items())[:2]
            raise ValueError(f"{at} is a {a} dump and {other} a {b} dump: import one kind at a time")
        if kind == "stat":
            _add_stat(dump, path, counts)
        elif kind == "per_pass":
            _add_passes(dump, path, counts, options)
        else:
            _add_tokens(dump, path, blocks, seen, options)
    if "per_token" in kinds:
        return TokenTrace(
            **blocks.fields(),
            n_experts=options.experts or seen.n_experts,
            model=options.model.name if options.model else None,
            name=options.name,
        )
    return _loads(counts, options)


def _kind(dump: dict[Any, Any], path: Path) -> str:
    if "logical_count" in dump:
        return "stat"
    if "records" not in dump or "last_physical_to_logical_map" not in dump:
        raise ValueError(
            f"{path}: has the keys {sorted(map(str, dump))}: expected 'logical_count' (stat) or 'records' and "
            "'last_physical_to_logical_map' (per_pass, per_token)"
        )
    records = dump["records"]
    if not isinstance(records, list) or not records or not all(isinstance(r, dict) for r in records):
        raise ValueError(f"{path}: 'records' is empty or not a list of dicts")
    return "per_token" if "topk_ids_of_layer" in records[0] else "per_pass"


def _tensor(value: Any, dims: int, what: str, where: str) -> npt.NDArray[Any]:
    if not isinstance(value, torch.Tensor) or value.ndim != dims or value.is_floating_point() or value.is_complex():
        shape = (
            f"shape {tuple(value.shape)} of {value.dtype}" if isinstance(value, torch.Tensor) else type(value).__name__
        )
        raise ValueError(f"{where}: {what} is {shape}: expected an integer tensor of {dims} dimensions")
    return value.numpy()


def _add_stat(dump: dict[Any, Any], path: Path, counts: dict[object, npt.NDArray[np.int64]]) -> None:
    recorded = _tensor(dump["logical_count"], 3, "logical_count (buffer, layers, experts)", str(path))
    # The buffer is a ring: steps that were never filled read 0.
    for step in np.flatnonzero(recorded.any((1, 2))):
        counts[(str(path), int(step))] = recorded[step].astype(np.int64)


def _add_passes(
    dump: dict[Any, Any], path: Path, counts: dict[object, npt.NDArray[np.int64]], options: ReadOptions
) -> None:
    slots = check_slot_map(_tensor(dump["last_physical_to_logical_map"], 2, "the slot map", str(path)), str(path))
    n_experts = options.experts or int(slots.max()) + 1
    for i, record in enumerate(dump["records"]):
        where = f"{path}, record {i}"
        physical = _tensor(record.get("global_physical_count"), 2, "global_physical_count (layers, slots)", where)
        if physical.shape != slots.shape:
            raise ValueError(f"{where}: counts of shape {physical.shape}, but the slot map has {slots.shape}")
        logical = np.stack(
            [slot_counts_to_logical(row, to, n_experts) for row, to in zip(physical, slots, strict=True)]
        )
        # Each rank writes a file about its own tokens: a pass is the sum over ranks.
        key = record.get("forward_pass_id", i)
        counts[key] = counts[key] + logical if key in counts else logical


def _loads(counts: dict[object, npt.NDArray[np.int64]], options: ReadOptions) -> LoadTrace:
    if not counts:
        raise ValueError("every step of the recording is empty: nothing to import")
    shapes = {c.shape for c in counts.values()}
    if len(shapes) > 1:
        raise ValueError(f"the files have counts of different shapes {sorted(shapes)}: import one model at a time")
    whole = np.stack(list(counts.values()))
    layers = np.flatnonzero(whole.any((0, 2)))  # dense layers have rows of zeros
    if not len(layers):
        raise ValueError("every layer of the recording is empty: nothing to import")
    model = options.model
    if model is not None and len(layers) != model.n_layers:
        raise ValueError(f"{len(layers)} layers with tokens, but {model.name} has {model.n_layers} MoE layers")
    return LoadTrace(whole[:, layers], layers, options.chosen, model.name if model else None, options.name)


class _Seen:
    """Passes that were read already: without data-parallel attention every rank records the same tokens."""

    def __init__(self) -> None:
        self.n_experts = 0
        self._passes: set[tuple[object, bytes]] = set()

    def again(self, pass_id: object, positions: bytes, block: Ids) -> bool:
        digest = hashlib.blake2b(positions)
        digest.update(np.ascontiguousarray(block).data)
        key = (pass_id, digest.digest())
        again = key in self._passes
        self._passes.add(key)
        return again


def _add_tokens(dump: dict[Any, Any], path: Path, blocks: TokenBlocks, seen: _Seen, options: ReadOptions) -> None:
    slots = check_slot_map(_tensor(dump["last_physical_to_logical_map"], 2, "the slot map", str(path)), str(path))
    seen.n_experts = max(seen.n_experts, int(slots.max()) + 1)
    moe: npt.NDArray[np.int64] | None = None
    for i, record in enumerate(dump["records"]):
        where = f"{path}, record {i}"
        routed = _tensor(record.get("topk_ids_of_layer"), 3, "topk_ids_of_layer (layers, tokens, 8)", where)
        if len(routed) != len(slots):
            raise ValueError(f"{where}: {len(routed)} layers routed, but the slot map has {len(slots)}")
        # Dense layers are −1 throughout. A pass without tokens cannot tell.
        here = np.flatnonzero((routed >= 0).any((1, 2)))
        if not len(here):
            continue
        moe = here if moe is None else moe
        if not np.array_equal(here, moe):
            raise ValueError(f"{where}: tokens in layers {here.tolist()}, but before in {moe.tolist()}")
        # The 8 columns are filled from the left; a pass may also be padded with rows that belong to no token.
        first = routed[moe[0]]
        width = options.chosen or max(int((routed[l] >= 0).sum(1).max()) for l in moe)
        rows = np.flatnonzero((first >= 0).any(1))
        block = np.empty((len(rows), len(moe), width), np.int16)
        for column, layer in enumerate(moe):
            ids = routed[layer] if len(rows) == len(first) else routed[layer][rows]
            if (ids[:, width:] >= 0).any():
                raise ValueError(f"{where}: layer {layer} uses more than top-{width} experts")
            block[:, column] = to_logical(ids[:, :width], slots[layer], int(layer), where)
        positions = np.asarray(_listed(record.get("positions"))).tobytes()
        if seen.again(record.get("forward_pass_id", (str(path), i)), positions, block):
            continue
        mode = _number(record.get("forward_mode"))
        phase = PHASES.get(mode, f"mode {mode}")
        blocks.add(block, moe, _sequences(record, rows, len(first), where), phase, where)


def _listed(value: Any) -> list[int]:
    if isinstance(value, torch.Tensor):
        return [int(x) for x in value.flatten().tolist()]
    return [int(x) for x in value] if isinstance(value, (list, tuple)) else []


def _number(value: Any) -> int:
    return int(value) if isinstance(value, (int, torch.Tensor)) else 0


def _sequences(record: dict[Any, Any], rows: npt.NDArray[np.int64], n_rows: int, where: str) -> list[int]:
    """Lengths of the sequences among the kept rows. A decoded token stands alone: the dump does not say whose it is."""
    lengths = _listed(record.get("extend_seq_lens"))
    if not lengths:
        return [1] * len(rows)
    if min(lengths) < 0 or sum(lengths) > n_rows:
        raise ValueError(f"{where}: extend_seq_lens sums to {sum(lengths)}, but there are {n_rows} tokens")
    lengths.append(n_rows - sum(lengths))  # rows behind the last sequence, pads as a rule
    kept = np.bincount(np.repeat(np.arange(len(lengths)), lengths)[rows], minlength=len(lengths))
    return [int(n) for n in kept if n]


# -- routed experts over HTTP ------------------------------------------------------------------------------------


def _routed(files: Sequence[Path], options: ReadOptions) -> TokenTrace:
    """Raw int32 of (tokens, all layers, K), logical ids, no header: the sizes must come from the model or the caller."""
    layers, top_k = options.all_layers, options.chosen
    if not layers or not top_k:
        raise ValueError(
            "SGLang sends routed experts without their shape: give --model, or --n-layers (dense ones too) and --top-k"
        )
    blocks, dense = TokenBlocks(), DenseZeros(options)
    for path in files:
        for where, data in payloads(path):
            if len(data) % (4 * layers * top_k):
                raise ValueError(
                    f"{where}: {len(data)} bytes are not whole tokens of {layers} layers × top-{top_k} × 4 bytes"
                )
            block, layer_ids = dense.strip(np.frombuffer(data, "<i4").reshape(-1, layers, top_k), where)
            blocks.add(block, layer_ids, [len(block)] if len(block) else [], "all", where)
    return TokenTrace(
        **blocks.fields(),
        n_experts=options.experts,
        model=options.model.name if options.model else None,
        name=options.name,
    )
