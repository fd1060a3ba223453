"""Shared code of the readers: options, dense layers, blocks of tokens, slot maps, numbers in text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from clustergym.traces.token_trace import MAX_EXPERTS

Ids = npt.NDArray[np.int16]


class ModelSizes(Protocol):
    """The sizes of a model that readers need. :class:`clustergym.moe_placement.ModelSpec` has them."""

    @property
    def name(self) -> str: ...
    @property
    def layer_ids(self) -> tuple[int, ...]:
        """Global index of each MoE layer."""

    @property
    def mtp_layer_ids(self) -> tuple[int, ...]:
        """Global index of each multi-token prediction layer."""

    @property
    def total_layers(self) -> int:
        """Layers that the engine counts, dense ones included, MTP layers not."""

    @property
    def n_experts(self) -> int:
        """Logical experts per layer."""

    @property
    def top_k(self) -> int:
        """Experts per token and layer."""


@dataclass
class DroppedTokens:
    """Tokens that the engine did not capture, by the place where they were found."""

    by_place: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return sum(self.by_place.values())

    def add(self, where: str, tokens: int) -> None:
        self.by_place[where] = self.by_place.get(where, 0) + tokens

    def describe(self, places: int = 10) -> str:
        """One sentence with the first places."""
        named = ", ".join(f"{where} ({n})" for where, n in list(self.by_place.items())[:places])
        more = f" and {len(self.by_place) - places} more places" if len(self.by_place) > places else ""
        return f"dropped {self.total} tokens that the engine did not capture (all experts are 0): {named}{more}"


@dataclass(frozen=True)
class ReadOptions:
    """Facts that a file does not contain. Most of them follow from the model."""

    model: ModelSizes | None = None
    """Sizes of the model. The other options override them."""
    n_layers: int | None = None
    """Number of layers that the engine counts, including dense ones."""
    dense_layers: tuple[int, ...] | None = None
    """Global indices of the dense layers."""
    top_k: int | None = None
    """Experts per token and layer."""
    n_experts: int | None = None
    """Logical experts per layer."""
    slot_plan: Path | None = None
    """The plan that the engine ran with, if it counted tokens per slot and not per expert."""
    strict: bool = False
    """Refuse a file with tokens that the engine did not capture. Otherwise they are dropped and counted."""
    dropped: DroppedTokens = field(default_factory=DroppedTokens, compare=False)
    """Counts the dropped tokens."""
    name: str = "imported"
    """Name of the trace."""

    @property
    def model_name(self) -> str | None:
        return self.model.name if self.model else None

    @property
    def expected_experts(self) -> int:
        """Logical experts per layer, 0 if unknown."""
        return self.n_experts or (self.model.n_experts if self.model else 0)

    @property
    def expected_layers(self) -> int:
        """Layers that the engine counts, 0 if unknown."""
        return self.n_layers or (self.model.total_layers if self.model else 0)

    @property
    def expected_top_k(self) -> int:
        """Experts per token and layer, 0 if unknown."""
        return self.top_k or (self.model.top_k if self.model else 0)

    def check_layer_count(self, found: int) -> None:
        """Refuse a recording whose number of MoE layers is not that of the model. MTP layers may be included."""
        if self.model is None:
            return
        expected = len(self.model.layer_ids)
        if found not in (expected, expected + len(self.model.mtp_layer_ids)):
            raise ValueError(f"{found} MoE layers recorded, but {self.model.name} has {expected}")

    def check_moe_layers(self, found: Sequence[int]) -> None:
        """Refuse a recording whose global layer indices are not the MoE layers of the model. MTP layers may follow."""
        if self.model is None:
            return
        expected = self.model.layer_ids
        if missing := sorted(set(expected) - set(found)):
            raise ValueError(
                f"{len(found)} MoE layers recorded, but {self.model.name} has {len(expected)}: "
                f"layer {missing[0]} is missing"
            )
        if extra := sorted(set(found) - set(expected) - set(self.model.mtp_layer_ids)):
            raise ValueError(
                f"{len(found)} MoE layers recorded, but {self.model.name} has {len(expected)}: "
                f"layer {extra[0]} is not one of them"
            )


def moe_layers(found: int, options: ReadOptions, where: str) -> npt.NDArray[np.int64] | None:
    """(found,) global index of each recorded layer, −1 if it is dense. None if the options do not say."""
    ids = np.arange(found)
    if options.dense_layers is not None:
        bad = [l for l in options.dense_layers if not 0 <= l < found]
        if bad:
            raise ValueError(f"{where}: dense layer {bad[0]} given, but layers 0 … {found - 1} were recorded")
        ids[list(options.dense_layers)] = -1
        return ids
    if options.model is None:
        return None
    model = options.model
    for extra in ((), model.mtp_layer_ids):  # the MTP layers are recorded, or not
        experts = np.array([*model.layer_ids, *extra])
        if found == len(experts):  # dense layers were left out already
            return experts
        if found == model.total_layers + len(extra):
            ids[~np.isin(ids, experts)] = -1
            return ids
    dense = model.total_layers - len(model.layer_ids)
    raise ValueError(
        f"{where}: {found} layers recorded, but {model.name} has {len(model.layer_ids)} MoE layers"
        + (f" and {dense} dense ones" if dense else "")
    )


class TokenBlocks:
    """Blocks of routed tokens, joined without keeping a second copy of all of them.

    A block is a (tokens, layers, K) array without dense layers, with −1 as padding. All blocks have the same layers. K
    may differ: narrower blocks are padded. Blocks are joined by ascending ``order``; equal ones as they were added.
    """

    def __init__(self) -> None:
        self.layer_ids: npt.NDArray[np.int64] | None = None
        self._blocks: list[Ids] = []
        self._seq_lens: list[npt.NDArray[np.int64]] = []
        self._domains: list[npt.NDArray[np.str_]] = []
        self._order: list[int] = []

    @property
    def n_tokens(self) -> int:
        return sum(len(block) for block in self._blocks)

    def add(
        self,
        block: Ids,
        layer_ids: npt.NDArray[np.int64],
        seq_lens: Sequence[int],
        domain: str,
        where: str,
        order: int = 0,
    ) -> None:
        if self.layer_ids is None:
            self.layer_ids = layer_ids
        elif not np.array_equal(self.layer_ids, layer_ids):
            raise ValueError(
                f"{where}: layers {layer_ids.tolist()} recorded, but earlier files have {self.layer_ids.tolist()}: "
                "import the files of one model together"
            )
        if not len(block):
            return
        self._blocks.append(block)
        self._seq_lens.append(np.asarray(seq_lens, np.int64))
        self._domains.append(np.full(len(seq_lens), domain))
        self._order.append(order)

    def _sort(self) -> None:
        places = sorted(range(len(self._order)), key=self._order.__getitem__)
        self._blocks = [self._blocks[i] for i in places]
        self._seq_lens = [self._seq_lens[i] for i in places]
        self._domains = [self._domains[i] for i in places]

    def fields(self) -> dict[str, Any]:
        """Arguments of a TokenTrace. Each block is freed as soon as it is copied, so this works only once."""
        if not self._blocks:
            raise ValueError("no tokens in the files: nothing to import")
        self._sort()
        tokens, width = sum(len(b) for b in self._blocks), max(b.shape[2] for b in self._blocks)
        seq_lens, domains = np.concatenate(self._seq_lens), np.concatenate(self._domains)
        if len(self._blocks) == 1:
            experts = self._blocks.pop()
        else:
            experts = np.empty((tokens, self._blocks[0].shape[1], width), np.int16)
            end = tokens
            while self._blocks:
                block = self._blocks.pop()
                experts[end - len(block) : end, :, : block.shape[2]] = block
                experts[end - len(block) : end, :, block.shape[2] :] = -1
                end -= len(block)
        experts.setflags(write=False)
        return {"experts": experts, "layer_ids": self.layer_ids, "seq_lens": seq_lens, "domains": domains}


@dataclass
class DenseZeros:
    """Removes dense layers from recordings that fill them with 0, as if every token used expert 0 K times."""

    options: ReadOptions
    kept: npt.NDArray[np.int64] | None = field(default=None)

    def strip(self, ids: npt.NDArray[np.integer[Any]], where: str) -> tuple[Ids, npt.NDArray[np.int64]]:
        """((tokens, MoE layers, K) int16, global indices of these layers) from a recording of all layers."""
        tokens, layers, top_k = ids.shape
        if (expected := self.options.expected_top_k) and top_k != expected:
            raise ValueError(f"{where}: {top_k} experts per token recorded, expected top-{expected}")
        if self.kept is None:
            self.kept = self._decide(ids, where)
        if layers != len(self.kept):
            raise ValueError(f"{where}: {layers} layers recorded, but earlier files have {len(self.kept)}")
        used = np.argwhere(ids[:, self.kept < 0] > 0)
        if len(used):
            token, layer = int(used[0][0]), int(np.flatnonzero(self.kept < 0)[used[0][1]])
            raise ValueError(
                f"{where}: layer {layer} is treated as dense, but token {token} uses expert "
                f"{ids[token, layer].max()} there: give --dense-layers"
            )
        if ids.dtype.itemsize > 1 and tokens and (int(ids.max()) > MAX_EXPERTS or int(ids.min()) < -1):
            raise ValueError(f"{where}: expert ids from {ids.min()} to {ids.max()}: these are not routed experts")
        captured = self._captured(ids[:, self.kept >= 0], where)
        return ids[captured][:, self.kept >= 0].astype(np.int16), self.kept[self.kept >= 0]

    def _captured(self, ids: npt.NDArray[np.integer[Any]], where: str) -> npt.NDArray[np.bool_]:
        """(tokens,) False for tokens of (tokens, MoE layers, K) that the engine did not capture: K times expert 0."""
        if ids.shape[2] == 1:  # a token may well use expert 0 in a layer
            return np.ones(len(ids), bool)
        lost = (ids == 0).all(2).any(1)
        if lost.any():
            if self.options.strict:
                raise ValueError(
                    f"{where}: token {int(lost.argmax())} was not captured, its experts are all 0: without --strict "
                    "such tokens are dropped"
                )
            self.options.dropped.add(where, int(lost.sum()))
        return np.asarray(~lost)

    def check_dropped(self, kept: int) -> None:
        """Refuse a recording of which more is lost than kept: a dense layer would look like that."""
        if self.options.dropped.total > kept:
            raise ValueError(
                f"{self.options.dropped.describe(3)}; only {kept} tokens are left: is a layer dense? Give --model or "
                "--dense-layers"
            )

    def _decide(self, ids: npt.NDArray[np.integer[Any]], where: str) -> npt.NDArray[np.int64]:
        known = moe_layers(ids.shape[1], self.options, where)
        if known is not None:
            return known
        routed = ids[(ids != 0).any((1, 2))] if ids.shape[2] > 1 else ids  # without tokens that were not captured
        zero = (routed == 0).all((0, 2))
        if zero.any() and ids.shape[2] == 1:
            raise ValueError(
                f"{where}: layer {int(np.flatnonzero(zero)[0])} is 0 for every token: is it dense, or is it always "
                "expert 0? Give --model or --dense-layers"
            )
        if zero.all():
            raise ValueError(f"{where}: every layer is 0 for every token: give --model or --dense-layers")
        return np.where(zero, -1, np.arange(ids.shape[1]))


def to_logical(
    physical: npt.NDArray[np.integer[Any]], slots: npt.NDArray[np.integer[Any]], layer: int, where: str
) -> Ids:
    """Logical ids of physical slots of one layer. ``slots`` (P,) has the logical expert of each slot. −1 stays −1."""
    low, high = (int(physical.min()), int(physical.max())) if physical.size else (-1, -1)
    if low < -1 or high >= len(slots):
        raise ValueError(
            f"{where}: physical expert {low if low < -1 else high} in layer {layer}, but there are {len(slots)} slots"
        )
    # Index −1, the padding, picks the appended −1.
    return np.take(np.append(slots, -1).astype(np.int16), physical)


def slot_counts_to_logical(counts: npt.NDArray[Any], slots: npt.NDArray[Any], n_experts: int) -> npt.NDArray[np.int64]:
    """(E,) counts of logical experts from (P,) counts of slots. ``slots`` (P,) has the logical expert of each slot."""
    if len(slots) and slots.max() >= n_experts:
        raise ValueError(f"a slot holds expert {slots.max()}, but there are {n_experts} experts")
    # float64 sums of integers are exact below 2⁵³.
    return np.bincount(slots, weights=counts, minlength=n_experts).astype(np.int64)


def check_slot_map(slots: npt.NDArray[Any], where: str, n_experts: int = 0) -> npt.NDArray[np.int64]:
    """(L, P) validated map from physical slot to logical expert. Every expert has a slot, so it gives their number."""
    if slots.ndim != 2 or slots.dtype.kind not in "iu":
        raise ValueError(f"{where}: physical → logical map of shape {slots.shape}: expected (layers, slots) integers")
    if slots.size == 0 or slots.min() < 0 or slots.max() >= min(MAX_EXPERTS, slots.shape[1]):
        raise ValueError(
            f"{where}: the physical → logical map of {slots.shape[1]} slots names experts "
            f"{slots.min() if slots.size else '(none)'} … {slots.max() if slots.size else ''}"
        )
    if n_experts not in (0, int(slots.max()) + 1):
        raise ValueError(f"{where}: {slots.max() + 1} experts recorded, expected {n_experts}")
    return slots.astype(np.int64)


def expand(paths: Iterable[Path], *patterns: str) -> list[Path]:
    """The given files, and the matching files in given folders, in natural order (rank 2 before rank 10)."""
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = {f for pattern in patterns for f in path.rglob(pattern) if f.is_file()}
            if not inside:
                raise ValueError(f"{path}: no file named {' or '.join(patterns)} in this folder")
            files += sorted(inside, key=natural)
        elif path.is_file():
            files.append(path)
        else:
            raise ValueError(f"no file or folder at {path}")
    return files


def natural(path: Path) -> list[tuple[int, int, str]]:
    """Sort key that compares numbers in names by value."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", str(path))]


def parse_json(text: str | bytes, where: str) -> Any:
    """Parse JSON. Invalid JSON, and nesting that would exhaust the stack, is a ValueError that names the place."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not valid JSON: {error}") from error


def lines_of(path: Path) -> Iterator[tuple[int, bytes]]:
    """(line number from 1, line without its end) of a file. Empty lines are left out."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if line := line.strip():
                yield number, line
