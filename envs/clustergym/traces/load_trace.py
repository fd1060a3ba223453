"""Load traces: how many tokens used each expert in each step, without the tokens themselves."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from clustergym.traces.arrays import (
    UNGIVEN,
    layer_indices,
    names_of_npz,
    one_integer,
    one_string,
    read_npz,
    write_trace,
)
from clustergym.traces.token_trace import MAX_EXPERTS, TokenTrace

MISSING = "which experts a token used together, and on which GPU it lived"
"""What the counts cannot tell."""


@dataclass(frozen=True, eq=False)
class LoadTrace:
    """Token counts of the experts, one row per step of the engine.

    Some engines record only this. It is enough for planners that balance loads, such as EPLB. It says nothing about
    the traffic between GPUs.

    Args:
        counts: (W, L, E) tokens routed to each expert of each layer in each step. A 2-D (L, E) array is one step.
        layer_ids: (L,) global index of each layer. Default: 0 … L−1.
        top_k: experts per token and layer, 0 if unknown.
        model: name of the model preset, if known.
        name: where the trace came from, for messages.
    """

    counts: npt.NDArray[np.int64]
    layer_ids: npt.NDArray[np.int64] = UNGIVEN
    top_k: int = 0
    model: str | None = None
    name: str = "counts"

    def __post_init__(self) -> None:
        counts = np.asarray(self.counts)
        if counts.dtype.kind not in "iu":
            raise ValueError(f"{self.name}: counts have dtype {counts.dtype}: expected integers")
        counts = counts[None] if counts.ndim == 2 else counts
        if counts.ndim != 3 or 0 in counts.shape:
            raise ValueError(
                f"{self.name}: counts have shape {counts.shape}: expected (steps, layers, experts), none of them 0"
            )
        if counts.shape[2] > MAX_EXPERTS:
            raise ValueError(f"{self.name}: counts for {counts.shape[2]} experts: expected at most {MAX_EXPERTS}")
        counts = counts.astype(np.int64)
        if (counts < 0).any():
            w, l, e = np.argwhere(counts < 0)[0]
            raise ValueError(f"{self.name}: step {w}, layer {l}, expert {e} has a count of {counts[w, l, e]}")
        idle = np.flatnonzero(counts.sum((0, 2)) == 0)
        if len(idle):
            raise ValueError(f"{self.name}: layer {idle[0]} has no token in any step: leave dense layers out")
        object.__setattr__(self, "counts", counts)
        object.__setattr__(self, "layer_ids", layer_indices(self.layer_ids, counts.shape[1], self.name))

    @property
    def n_steps(self) -> int:
        return int(self.counts.shape[0])

    @property
    def n_layers(self) -> int:
        return int(self.counts.shape[1])

    @property
    def n_experts(self) -> int:
        return int(self.counts.shape[2])

    def __repr__(self) -> str:
        top = f"top-{self.top_k} of " if self.top_k else ""
        return (
            f"LoadTrace({self.name!r}: {self.n_steps} steps, {self.n_layers} layers, {top}{self.n_experts} experts, "
            f"counts only, model {self.model})"
        )

    def loads(self) -> npt.NDArray[np.int64]:
        """(L, E) tokens routed to each expert of each layer, all steps together."""
        return np.asarray(self.counts.sum(0))

    def split(self, fraction: float = 0.5) -> tuple[LoadTrace, LoadTrace]:
        """Split into the first steps (about ``fraction`` of them) and the rest."""
        if self.n_steps < 2:
            raise ValueError(f"{self.name}: one step of counts cannot be split: record several")
        cut = min(max(1, round(fraction * self.n_steps)), self.n_steps - 1)
        return self._steps(slice(0, cut)), self._steps(slice(cut, None))

    def _steps(self, which: slice) -> LoadTrace:
        counts = self.counts[which]
        idle = np.flatnonzero(counts.sum((0, 2)) == 0)
        if len(idle):
            raise ValueError(
                f"{self.name}: layer {self.layer_ids[idle[0]]} has no token in one part of the trace: record more steps"
            )
        return LoadTrace(counts, self.layer_ids, self.top_k, self.model, self.name)

    @classmethod
    def load(cls, source: str | os.PathLike[str]) -> LoadTrace:
        """Load a file that :meth:`save` wrote. Pickled objects are never loaded."""
        path = Path(source)
        if not path.is_file():
            raise ValueError(f"no load trace at {path}")
        fields = read_npz(path, ("counts", "layer_ids", "top_k", "model"))
        if "counts" not in fields:
            raise ValueError(f"{path}: no array 'counts' in the file, found {sorted(names_of_npz(path))}")
        return cls(
            fields["counts"],
            layer_ids=fields.get("layer_ids", UNGIVEN),
            top_k=one_integer(fields, "top_k", path),
            model=one_string(fields, "model", path),
            name=path.stem,
        )

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write a compressed ``.npz`` file atomically. Returns the path."""
        fields: dict[str, Any] = {
            "counts": self.counts,
            "layer_ids": self.layer_ids,
            "model": np.str_(self.model or ""),
        }
        if self.top_k:
            fields["top_k"] = np.int64(self.top_k)
        return write_trace(path, fields)


def load_any_trace(source: str | os.PathLike[str]) -> TokenTrace | LoadTrace:
    """Load a token trace, by file or bundled name, or a load trace."""
    path = Path(source)
    names = names_of_npz(path) if path.suffix == ".npz" else []
    return LoadTrace.load(path) if "counts" in names and "experts" not in names else TokenTrace.load(source)
