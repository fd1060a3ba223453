"""The data of one picture. Without pygame, so that environments can build frames before anything is drawn."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

KINDS = ("place", "swap", "add", "delete", "nothing", "illegal")


@dataclass(frozen=True)
class Operation:
    """The last operation of the agents. Experts and GPUs are indices from 0; -1 means none."""

    kind: str  # one of KINDS
    expert: int
    gpu: int  # the chosen GPU, 0 to G - 1, for every kind
    source: int = -1  # GPU that held the moved replica (place, swap)
    victim: int = -1  # expert that a swap moves to `source` in exchange

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"operation kind is {self.kind!r}, expected one of {', '.join(KINDS)}")


@dataclass(frozen=True)
class Frame:
    """What one picture shows: one layer of one interval of one environment. G GPUs, S slots per GPU, E experts."""

    slots: npt.NDArray[np.int16]  # (G, S) expert in each slot, -1 if empty
    expert_load: npt.NDArray[np.float64]  # (E,) tokens routed to each expert in this layer of the observed interval
    gpu_pairs: npt.NDArray[np.float64]  # (G,) token-expert pairs that each GPU computes
    gpu_compute_us: npt.NDArray[np.float64]  # (G,)
    traffic_bytes: npt.NDArray[np.float64]  # (G, G) dispatch bytes from row to column
    gpus_per_node: int
    layer: int  # position among the layers of the environment, from 0
    n_layers: int
    layer_id: int  # number of the layer in the model
    interval: int  # from 0
    n_intervals: int
    op: int  # operations done in this layer, 0 to ops_per_layer
    ops_per_layer: int
    layer_time_us: float  # time of this layer in the observed interval with the current placement
    start_time_us: float  # the same with the placement from before this interval's operations
    static_time_us: float  # the same with the static placement
    migrated: npt.NDArray[np.bool_]  # (G, S) slots filled in this interval, whose weights must be fetched
    last_op: Operation | None
    saved: list[float]  # share of the time saved in each interval served so far; may be negative

    def __post_init__(self) -> None:
        if self.slots.ndim != 2 or 0 in self.slots.shape:
            raise ValueError(f"slots has shape {self.slots.shape}, expected (GPUs, slots) with at least one of each")
        gpus, slots = self.slots.shape
        if self.expert_load.ndim != 1 or not self.expert_load.size:
            raise ValueError(f"expert_load has shape {self.expert_load.shape}, expected (experts,) with at least one")
        shapes = {
            "gpu_pairs": (gpus,),
            "gpu_compute_us": (gpus,),
            "traffic_bytes": (gpus, gpus),
            "migrated": (gpus, slots),
        }
        for name, shape in shapes.items():
            found = getattr(self, name).shape
            if found != shape:
                raise ValueError(f"{name} has shape {found}, but slots has shape {(gpus, slots)}: expected {shape}")
        for name in ("expert_load", "gpu_pairs", "gpu_compute_us", "traffic_bytes"):
            values = getattr(self, name)
            if not (np.isfinite(values).all() and values.min() >= 0):
                raise ValueError(f"{name} holds {values.min()} to {values.max()}, expected finite values from 0")
        for name in ("layer_time_us", "start_time_us", "static_time_us"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}, expected a finite time from 0")
        if self.gpus_per_node < 1 or gpus % self.gpus_per_node:
            raise ValueError(f"gpus_per_node is {self.gpus_per_node}, which does not divide the {gpus} GPUs of slots")
        experts = self.expert_load.size
        if self.slots.min() < -1 or self.slots.max() >= experts:
            found = f"{self.slots.min()} to {self.slots.max()}"
            raise ValueError(f"slots holds experts {found}, expected -1 to {experts - 1} (expert_load has {experts})")
        if op := self.last_op:
            ranges = {"gpu": (0, gpus), "source": (-1, gpus), "expert": (0, experts), "victim": (-1, experts)}
            for name, (low, end) in ranges.items():
                if not low <= getattr(op, name) < end:
                    raise ValueError(f"last_op.{name} is {getattr(op, name)}, expected {low} to {end - 1}")
        if not all(map(math.isfinite, self.saved)):
            raise ValueError(f"saved holds {self.saved}, expected finite numbers")


def describe(op: Operation) -> str:
    """The operation in words: 'swap: E17 GPU 3 → GPU 9, E4 back'."""
    origin = f"GPU {op.source} " if op.source >= 0 else ""
    back = f", E{op.victim} back" if op.victim >= 0 else ""
    return {
        "place": f"place: E{op.expert} {origin}→ GPU {op.gpu}",
        "swap": f"swap: E{op.expert} {origin}→ GPU {op.gpu}{back}",
        "add": f"add: E{op.expert} replica on GPU {op.gpu}",
        "delete": f"delete: E{op.expert} replica from GPU {op.gpu}",
        "nothing": f"nothing: E{op.expert} stays on GPU {op.gpu}",
        "illegal": f"illegal: E{op.expert}, GPU {op.gpu} (nothing changed)",
    }[op.kind]
