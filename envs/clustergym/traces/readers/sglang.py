"""SGLang: dumps of its expert distribution recorder (``stat``, ``per_pass``, ``per_token``), or HTTP responses."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from clustergym.common.extras import require
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
from clustergym.traces.token_trace import TokenTrace

PHASES = {1: "prefill", 2: "decode", 3: "mixed", 5: "speculative"}
"""SGLang's ForwardMode → domain of the trace. 5 is TARGET_VERIFY, which checks the tokens of a draft model."""


def read(paths: Sequence[Path], options: ReadOptions) -> TokenTrace | LoadTrace:
    """A token trace from ``per_token`` dumps and HTTP responses, a load trace from ``stat`` and ``per_pass`` dumps."""
    files = expand(paths, "*.pt", "*.json", "*.jsonl")
    if all(f.suffix == ".pt" for f in files):
        return _read_dumps(files, options)
    if any(f.suffix == ".pt" for f in files):
        raise ValueError("the files are recorder dumps (.pt) and HTTP responses: import one kind at a time")
    return _read_responses(files, options)


def _read_dumps(files: Sequence[Path], options: ReadOptions) -> TokenTrace | LoadTrace:
    require("torch", "engines")
    from clustergym.traces.readers.torch_files import load_tensors

    kinds: dict[str, Path] = {}
    counts: dict[object, npt.NDArray[np.int64]] = {}
    blocks, seen = TokenBlocks(), _Seen()
    for path in files:
        dump = load_tensors(path)
        if not isinstance(dump, dict):
            raise ValueError(f"{path}: contains a {type(dump).__name__}: expected the dict of SGLang's recorder")
        kind = _kind(dump, path)
        kinds.setdefault(kind, path)
        if len(kinds) > 1:
            (first, first_path), (second, second_path) = kinds.items()
            raise ValueError(
                f"{first_path} is a {first} dump and {second_path} a {second} dump: import one kind at a time"
            )
        if kind == "stat":
            _add_stat(dump, path, counts)
        elif kind == "per_pass":
            _add_passes(dump, path, counts, options)
        else:
            _add_tokens(dump, path, blocks, seen, options)
    if "per_token" in kinds:
        fields = blocks.fields()
        options.check_moe_layers(fields["layer_ids"].tolist())
        return TokenTrace(
            **fields, n_experts=options.expected_experts or seen.n_experts, model=options.model_name, name=options.name
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


def _is_tensor(value: Any) -> bool:
    import torch  # HTTP responses are read without it

    return isinstance(value, torch.Tensor)


def _tensor(value: Any, dims: int, what: str, where: str) -> npt.NDArray[Any]:
    if not _is_tensor(value) or value.ndim != dims or value.is_floating_point() or value.is_complex():
        shape = f"shape {tuple(value.shape)} of {value.dtype}" if _is_tensor(value) else type(value).__name__
        raise ValueError(f"{where}: {what} is {shape}: expected an integer tensor of {dims} dimensions")
    array: npt.NDArray[Any] = value.numpy()
    return array


def _slot_map(dump: dict[Any, Any], path: Path, options: ReadOptions) -> npt.NDArray[np.int64]:
    slots = _tensor(dump["last_physical_to_logical_map"], 2, "the slot map", str(path))
    return check_slot_map(slots, str(path), options.expected_experts)


def _add_stat(dump: dict[Any, Any], path: Path, counts: dict[object, npt.NDArray[np.int64]]) -> None:
    recorded = _tensor(dump["logical_count"], 3, "logical_count (buffer, layers, experts)", str(path))
    # Steps of the ring buffer that were never filled are 0.
    for step in np.flatnonzero(recorded.any((1, 2))):
        counts[(str(path), int(step))] = recorded[step].astype(np.int64)


def _add_passes(
    dump: dict[Any, Any], path: Path, counts: dict[object, npt.NDArray[np.int64]], options: ReadOptions
) -> None:
    slots = _slot_map(dump, path, options)
    n_experts = options.expected_experts or int(slots.max()) + 1
    for i, record in enumerate(dump["records"]):
        where = f"{path}, record {i}"
        physical = _tensor(record.get("global_physical_count"), 2, "global_physical_count (layers, slots)", where)
        if physical.shape != slots.shape:
            raise ValueError(f"{where}: counts of shape {physical.shape}, but the slot map has {slots.shape}")
        logical = np.stack(
            [slot_counts_to_logical(row, to, n_experts) for row, to in zip(physical, slots, strict=True)]
        )
        # Each rank writes a file with its own tokens: sum the counts of a forward pass over ranks.
        key = _pass_id(record, i)
        counts[key] = counts[key] + logical if key in counts else logical


def _loads(counts: dict[object, npt.NDArray[np.int64]], options: ReadOptions) -> LoadTrace:
    if not counts:
        raise ValueError("every step of the recording is empty: nothing to import")
    shapes = {c.shape for c in counts.values()}
    if len(shapes) > 1:
        raise ValueError(f"the files have counts of different shapes {sorted(shapes)}: import one model at a time")
    # Forward passes by id, whichever rank recorded them; steps of ring buffers in the order of the files.
    whole = np.stack([counts[key] for key in sorted(counts, key=lambda key: key if isinstance(key, int) else 0)])
    if options.expected_experts not in (0, whole.shape[2]):
        raise ValueError(f"{whole.shape[2]} experts recorded, expected {options.expected_experts}")
    layers = np.flatnonzero(whole.any((0, 2)))  # dense layers are 0
    if not len(layers):
        raise ValueError("every layer of the recording is empty: nothing to import")
    options.check_moe_layers(layers.tolist())
    return LoadTrace(whole[:, layers], layers, options.expected_top_k, options.model_name, options.name)


class _Seen:
    """Forward passes that were read before. Without data-parallel attention every rank records the same tokens."""

    def __init__(self) -> None:
        self.n_experts = 0
        self._passes: set[tuple[object, bytes]] = set()

    def add(self, pass_id: object, positions: bytes, block: Ids) -> bool:
        """Remember a forward pass. Returns whether it is new."""
        digest = hashlib.blake2b(positions)
        digest.update(np.ascontiguousarray(block).data)
        key = (pass_id, digest.digest())
        new = key not in self._passes
        self._passes.add(key)
        return new


def _add_tokens(dump: dict[Any, Any], path: Path, blocks: TokenBlocks, seen: _Seen, options: ReadOptions) -> None:
    slots = _slot_map(dump, path, options)
    seen.n_experts = max(seen.n_experts, int(slots.max()) + 1)
    moe: npt.NDArray[np.int64] | None = None
    for i, record in enumerate(dump["records"]):
        where = f"{path}, record {i}"
        routed = _tensor(record.get("topk_ids_of_layer"), 3, "topk_ids_of_layer (layers, tokens, 8)", where)
        if len(routed) != len(slots):
            raise ValueError(f"{where}: {len(routed)} layers routed, but the slot map has {len(slots)}")
        # Dense layers are −1 everywhere, but so are all layers of a forward pass without tokens.
        here = np.flatnonzero((routed >= 0).any((1, 2)))
        if not len(here):
            continue
        moe = here if moe is None else moe
        if not np.array_equal(here, moe):
            raise ValueError(f"{where}: tokens in layers {here.tolist()}, but earlier in {moe.tolist()}")
        # The 8 columns are filled from the left. Rows without experts are padding.
        first = routed[moe[0]]
        width = options.expected_top_k or max(int((routed[l] >= 0).sum(1).max()) for l in moe)
        if options.expected_top_k and (used := int((first >= 0).sum(1).max())) < width:
            raise ValueError(f"{where}: tokens use at most {used} experts, expected top-{width}")
        rows = np.flatnonzero((first >= 0).any(1))
        block = np.empty((len(rows), len(moe), width), np.int16)
        for column, layer in enumerate(moe):
            ids = routed[layer] if len(rows) == len(first) else routed[layer][rows]
            if (ids[:, width:] >= 0).any():
                raise ValueError(f"{where}: layer {layer} uses more than top-{width} experts")
            block[:, column] = to_logical(ids[:, :width], slots[layer], int(layer), where)
        positions = np.asarray(_listed(record.get("positions"))).tobytes()
        pass_id = _pass_id(record, i)
        if not seen.add(pass_id, positions, block):
            continue
        mode = _number(record.get("forward_mode"))
        phase = PHASES.get(mode, f"mode {mode}")
        blocks.add(block, moe, _sequences(record, rows, len(first), where), phase, where, pass_id)


def _pass_id(record: dict[Any, Any], position: int) -> int:
    """Id of the forward pass, the same on all ranks; without one, the position in the file."""
    return _number(record["forward_pass_id"]) if "forward_pass_id" in record else position


def _listed(value: Any) -> list[int]:
    if _is_tensor(value):
        return [int(x) for x in value.flatten().tolist()]
    return [int(x) for x in value] if isinstance(value, (list, tuple)) else []


def _number(value: Any) -> int:
    single = _is_tensor(value) and value.numel() == 1 and not value.is_floating_point()
    return int(value) if isinstance(value, int) or single else 0


def _sequences(record: dict[Any, Any], rows: npt.NDArray[np.int64], n_rows: int, where: str) -> list[int]:
    """Lengths of the sequences in ``rows``. Each decoded token is its own sequence: the dump has no request ids."""
    lengths = _listed(record.get("extend_seq_lens"))
    if not lengths:
        return [1] * len(rows)
    if min(lengths) < 0 or sum(lengths) > n_rows:
        raise ValueError(f"{where}: extend_seq_lens sums to {sum(lengths)}, but there are {n_rows} tokens")
    lengths.append(n_rows - sum(lengths))  # rows after the last sequence, usually padding
    kept = np.bincount(np.repeat(np.arange(len(lengths)), lengths)[rows], minlength=len(lengths))
    return [int(n) for n in kept if n]


def _read_responses(files: Sequence[Path], options: ReadOptions) -> TokenTrace:
    """Each response is int32 logical ids (tokens, all layers, K) without a header: the options must have the sizes."""
    layers, top_k = options.expected_layers, options.expected_top_k
    if not layers or not top_k:
        raise ValueError(
            "SGLang sends routed experts without their shape: give --model, or --n-layers (including dense layers) "
            "and --top-k"
        )
    blocks, dense = TokenBlocks(), DenseZeros(options)
    for path in files:
        for where, data in payloads(path):
            if len(data) % (4 * layers * top_k):
                raise ValueError(
                    f"{where}: {len(data)} bytes are not a multiple of {layers} layers × top-{top_k} × 4 bytes"
                )
            block, layer_ids = dense.strip(np.frombuffer(data, "<i4").reshape(-1, layers, top_k), where)
            blocks.add(block, layer_ids, [len(block)] if len(block) else [], "all", where)
    dense.check_dropped(blocks.n_tokens)
    return TokenTrace(
        **blocks.fields(), n_experts=options.expected_experts, model=options.model_name, name=options.name
    )
