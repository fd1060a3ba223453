"""Batches on a CUDA device: one thread per environment, on torch's current stream.

The arrays of the simulator are torch tensors on the device. What the host reads after every step is copied to it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import config, cuda

from clustergym.common.cuda_grid import launch, shared
from clustergym.moe_offload.kernels.episode import advance
from clustergym.moe_offload.kernels.episode import draw as _draw_one
from clustergym.moe_offload.kernels.observation import Observation, observe
from clustergym.moe_offload.kernels.state import State, Task
from clustergym.moe_offload.launchers.cpu import Flags, Indices

READ = ("clock", "time", "stats", "outcome", "reward", "n_events", "n_rows")
"""Small arrays of the state that the host reads after a step. It reads the events as far as there are any."""


@cuda.jit
def _draw(task, s, where):
    b = cuda.grid(1)
    if b < where.shape[0] and where[b]:
        _draw_one(task, s, b)


@cuda.jit
def _run(begins, task, s, o, rows, nodes, where, all_observed):
    b = cuda.grid(1)
    if b < where.shape[0]:
        if where[b]:
            advance(task, s, b, begins, rows[b], nodes[b])
        if where[b] or all_observed:
            observe(task, s, b, o)


class Launcher:
    """Runs the kernels on copies of the arrays on a device.

    Attributes:
        seen: the tensors of the last observation, on the device.
    """

    def __init__(self, task: Task, state: State, device: str = "cuda") -> None:
        self.host, self.host_task = state, task
        # In numba's simulator the device is the host.
        self.device = torch.device("cpu" if config.ENABLE_CUDASIM else device)
        self.task = {name: self._tensor(value) for name, value in task._asdict().items()}
        self.state = {name: self._tensor(array) for name, array in state._asdict().items()}
        self.seen: dict[str, torch.Tensor] = {}

    def _tensor(self, value: Any) -> Any:
        """A copy on the device; numbers stay as they are."""
        return torch.tensor(value, device=self.device) if isinstance(value, np.ndarray) else value

    def _arrays(self) -> tuple[Task, State]:
        task = {name: shared(x) if isinstance(x, torch.Tensor) else x for name, x in self.task.items()}
        return Task(**task), State(**{name: shared(tensor) for name, tensor in self.state.items()})

    def upload(self, *names: str) -> None:
        """Copy arrays of the state that the host has changed, and what a predictor says. Without names: all."""
        for name in names or State._fields:
            self.state[name].copy_(torch.from_numpy(getattr(self.host, name)))
        self.task["foresight"].copy_(torch.from_numpy(self.host_task.foresight))

    def download(self, *names: str) -> None:
        """Copy arrays of the state to the host. Without names: all."""
        for name in names or State._fields:
            getattr(self.host, name)[...] = self.state[name].cpu().numpy()

    def draw(self, where: Flags) -> None:
        """Draw the sequences of new episodes where ``where`` (N,) is true."""
        launch(_draw, len(where), *self._arrays(), shared(self._tensor(where)))
        self.download("clock")

    def run(
        self, begins: bool, o: Observation, rows: Indices, nodes: Indices, where: Flags, all_observed: bool
    ) -> None:
        """As the launcher of the CPU does. The observation is in ``seen``, and is copied to ``o``."""
        if all_observed:
            self.seen = {name: self._tensor(np.zeros_like(array)) for name, array in o._asdict().items()}
        seen = Observation(**{name: shared(tensor) for name, tensor in self.seen.items()})
        chosen = [shared(self._tensor(array)) for array in (rows, nodes, where)]
        launch(_run, len(where), begins, *self._arrays(), seen, *chosen, all_observed)
        self.download(*READ)
        n = int(self.host.n_events.max())
        self.host.events[:, :n] = self.state["events"][:, :n].cpu().numpy()
        for name, tensor in self.seen.items():
            getattr(o, name)[...] = tensor.cpu().numpy()
