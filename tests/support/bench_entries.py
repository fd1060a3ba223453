"""Functions that tests submit to the benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from clustergym.planners.eplb import EPLB
from clustergym.plans.integrations.eplb import rebalance_experts as ours

CALLS = 0


def rebalance_experts(
    weight: torch.Tensor, num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The arguments and results of deepseek-ai/EPLB."""
    print("what a function prints must not disturb the benchmark")
    return ours(weight, num_replicas, num_groups, num_nodes, num_gpus)


def in_order(weight: torch.Tensor, num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int) -> torch.Tensor:
    """Experts in order over the slots: the static placement."""
    return (torch.arange(num_replicas) % weight.shape[1]).repeat(len(weight), 1)


def twice_on_a_gpu(weight: torch.Tensor, num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int) -> Any:
    """Consecutive slots hold the same expert, as far as there is room."""
    spare = num_replicas - weight.shape[1]
    copies = torch.tensor([2] * spare + [1] * (weight.shape[1] - spare))
    return torch.repeat_interleave(torch.arange(weight.shape[1]), copies).repeat(len(weight), 1)


def keep(history: Sequence[Any], placement: np.ndarray, simulator: Any) -> np.ndarray:
    """Our arguments: change nothing."""
    assert len(history) >= 1
    assert simulator.n_gpus == placement.shape[1]
    return placement


class OurEPLB(EPLB):
    """A subclass of Planner."""


def wrong_shape(weight: torch.Tensor, *sizes: int) -> Any:
    return np.zeros((2, 3), np.int64)


def fails_every_second_time(weight: torch.Tensor, *sizes: int) -> Any:
    global CALLS
    CALLS += 1
    if CALLS % 2:
        raise ValueError("odd call")
    return in_order(weight, *sizes)  # type: ignore[call-arg]


def sets_the_clock(weight: torch.Tensor, *sizes: int) -> Any:
    """Takes 50 ms and pretends that no time passes."""
    import time

    time.sleep(0.05)
    time.perf_counter = time.monotonic = time.time = lambda: 0.0  # type: ignore[assignment]
    return in_order(weight, *sizes)  # type: ignore[call-arg]


def do_nothing(obs: dict[str, np.ndarray]) -> np.ndarray:
    """An agent of the placement task: PLACE expert 0 where it is."""
    return np.array([0, obs["pairs"][0, :, 0].argmax()])


def out_of_range(obs: dict[str, np.ndarray]) -> np.ndarray:
    return np.array([-1, -1])


class Half:
    """An agent of the allocation task, as Stable-Baselines3 has them: the action and a state."""

    def predict(self, obs: np.ndarray) -> tuple[np.ndarray, None]:
        assert obs.ndim == 1
        return np.full(2, 0.5, np.float32), None


def always_0(obs: dict[str, np.ndarray] | np.ndarray) -> int:
    """An agent of the flat placement task."""
    return 0
