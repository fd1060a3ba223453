"""Planners that record what they see, with a trace and a protocol, for tests of the comparison of planners."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import pytest

from clustergym import TokenTrace
from clustergym.moe_placement import ClusterSpec, ModelSpec, Placement, Simulator
from clustergym.moe_placement.streams import Interval, IntervalStream, Traffic
from clustergym.planners.base import Planner
from clustergym.planners.evaluation import (
    Protocol,
    Result,
    deal_streams,
)
from clustergym.traces import SyntheticConfig, synthetic_trace

N_LAYERS, N_EXPERTS, N_GPUS, INTERVALS, TOKENS, PASSES = 2, 8, 4, 3, 8, 2
STREAMED = ("drift", "switch", "replay")


class Recorder(Planner):
    """Records its input, and moves the experts of each GPU to the next GPU, so that everything moves."""

    made: ClassVar[list[Recorder]] = []

    def __init__(self, simulator: Simulator, seed: int = 0) -> None:
        super().__init__(simulator, seed)
        self.seen: list[list[Interval]] = []
        self.placements: list[Placement] = []
        self.plans: list[Placement] = []
        self.resets = 0
        self.made.append(self)

    def reset(self) -> None:
        self.resets += 1

    def plan(self, history: Sequence[Interval], placement: Placement) -> Placement:
        self.seen.append(list(history))
        self.placements.append(placement.copy())
        self.plans.append(np.roll(placement, 1, axis=1))
        return self.plans[-1]


class SeesFuture(Recorder):
    needs_future = True


class SeesMixture(Recorder):
    needs_mixture = True


class SeesLoads(Recorder):
    needs_tokens = False


class KeepsPlacement(Recorder):
    keeps_placement = True


@pytest.fixture(scope="module")
def trace() -> TokenTrace:
    config = SyntheticConfig(
        n_tokens=4000, n_layers=N_LAYERS, n_experts=N_EXPERTS, top_k=2, mean_seq_len=25, popularity_skew=0.6
    )
    return synthetic_trace(config, seed=3)


@pytest.fixture(scope="module")
def sim() -> Simulator:
    model = ModelSpec("small", N_LAYERS, N_EXPERTS, 2, 2048, 1024)
    return Simulator(model, ClusterSpec("2x2", 2, 2, 3), "sglang-decode", passes_per_interval=50)


def protocol(schedule: str, **options: Any) -> Protocol:
    return Protocol(Traffic("decode", TOKENS, PASSES, schedule), INTERVALS, **options)


def same_interval(a: Interval, b: Interval) -> bool:
    return np.array_equal(a.rows, b.rows) and np.array_equal(a.rank_start, b.rank_start)


def same_intervals(a: Sequence[Interval], b: Sequence[Interval]) -> bool:
    return len(a) == len(b) and all(same_interval(x, y) for x, y in zip(a, b, strict=True))


def without_decision_time(result: Result) -> dict[str, object]:
    return {key: value for key, value in result.as_dict().items() if key != "decision_ms"}


def stream_intervals(test: TokenTrace, p: Protocol, n: int, stream: int = 0) -> list[Interval]:
    part = deal_streams(test, N_GPUS, p).parts[stream]
    return IntervalStream(part, N_GPUS, p.traffic, seed=p.seed + stream).take(n)
