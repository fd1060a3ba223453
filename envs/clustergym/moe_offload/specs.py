"""Links, models and the arguments of the offloading task.

All times are assumptions from bandwidths and sizes: nothing was measured on a GPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clustergym.moe_offload.tables import Tables
from clustergym.traces.token_trace import TokenTrace

LINKS = {"pcie4": 25.0, "pcie5": 50.0}
"""GB/s from host memory to a GPU over 16 lanes, as copies reach it in practice."""
EXPERT_MB = {"gpt-oss-20b": 13.2, "gpt-oss-120b": 13.2, "deepseek-v2-lite": 17.3, "olmoe-1b-7b": 12.6}
"""Weights of one expert by model: 3 matrices of hidden size × expert size, in the model's own precision."""
DEFAULT_EXPERT_MB = 13.2
"""For traces of other models, the bundled one among them: as large as an expert of gpt-oss-20b."""
DEFAULT_TRACE = "tiny_decode"


@dataclass(frozen=True)
class OffloadConfig:
    """Arguments of the offloading task. The environments take these fields as keyword arguments."""

    trace: str | Path | TokenTrace = DEFAULT_TRACE
    """Decode trace: a file, a bundled name, or a :class:`TokenTrace`."""
    split: str = "train"
    """Part of the trace whose sequences are served: ``train``, ``validation``, ``test``, ``all``, or a split that the
    recording defines."""
    fit_on: str | Path | TokenTrace | Tables | None = None
    """Trace whose part ``fit`` counts popularity and transitions, or the counted tables. Default: ``trace``."""
    slots: float = 0.375
    """Share of all experts that the GPUs hold together; the default is 12 of 32 experts of each layer."""
    per_layer: bool = False
    """Whether every layer has its own, equal share of the slots. Otherwise all layers share one pool per GPU."""
    gpus: int = 1
    """GPUs of the node. Each has its own link to the host and its own slots; an expert is on one of them at most."""
    batch: int = 1
    """Sequences that are served together, each about as long as the others."""
    link: str | float = "pcie5"
    """Link from host memory to a GPU: ``pcie4``, ``pcie5``, or GB/s."""
    peer_gb_s: float = 400.0
    """GB/s from one GPU to another."""
    expert_mb: float | None = None
    """MB of one expert. Default: the model's, if it is known."""
    layer_ms: float = 0.12
    """Time of a layer without its experts."""
    expert_ms: float = 0.02
    """Time of each expert that the layer uses (of those on the GPU that has most)."""
    horizon: int = 3
    """Layers ahead from which experts can be prefetched."""
    max_tokens: int | None = None
    """Serve only the first tokens of each sequence."""
    low_rows: int = 16
    """Residents of other layers with the lowest decayed counts that can be evicted, at least."""
    load_rows: int = 24
    """Missing experts of the next layers that can be prefetched."""
    context_rows: int = 0
    """Experts of the last visits that the agents see as neighbours in the graph, for example 12. Without any the graph
    is empty, and training is faster. The columns of transition scores say nearly the same."""
    predictor: Any = None
    """A fitted predictor (a folder or an object, see :mod:`clustergym.moe_offload.predictor`), or None."""

    def __post_init__(self) -> None:
        for key, low in (("gpus", 1), ("batch", 1), ("horizon", 1), ("low_rows", 1), ("load_rows", 1)):
            if getattr(self, key) < low:
                raise ValueError(f"{key} is {getattr(self, key)}: expected at least {low}")
        if self.context_rows < 0:
            raise ValueError(f"context_rows is {self.context_rows}: expected 0 or more")
        if self.gpus > 127:
            raise ValueError(f"gpus is {self.gpus}: expected 1 … 127")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"max_tokens is {self.max_tokens}: expected at least 1")
        if not 0 < self.slots <= 1:
            raise ValueError(f"slots is {self.slots}: expected a share of all experts, more than 0 and at most 1")
        for key in ("peer_gb_s", "expert_mb"):
            value = getattr(self, key)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ValueError(f"{key} is {value}: expected a number more than 0")
        for key in ("layer_ms", "expert_ms"):
            if not (math.isfinite(getattr(self, key)) and getattr(self, key) >= 0):
                raise ValueError(f"{key} is {getattr(self, key)}: expected 0 ms or more")
        self.link_gb_s  # noqa: B018  raises an error now

    @property
    def link_gb_s(self) -> float:
        if isinstance(self.link, str) and self.link in LINKS:
            return LINKS[self.link]
        try:
            found = float(self.link)
        except ValueError:
            found = math.nan
        if not (math.isfinite(found) and found > 0):
            raise ValueError(f"link is {self.link!r}: expected one of {', '.join(LINKS)}, or a number of GB/s")
        return found

    def megabytes(self, trace: TokenTrace) -> float:
        """MB of one expert of the trace's model."""
        if self.expert_mb is not None:
            return self.expert_mb
        return EXPERT_MB.get(trace.model or "", DEFAULT_EXPERT_MB)


def share(text: str) -> float:
    """A share of all experts: ``37%`` or ``0.37``."""
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 < value <= 1:
        raise ValueError(f"--slots {text}: expected a share of all experts, like 37% or 0.37")
    return value
