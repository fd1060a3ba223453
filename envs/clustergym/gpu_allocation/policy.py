"""Trained allocation policies, loaded from checkpoints of ``ppo_gpu_alloc.py`` and ``ppo_gpu_alloc_lstm.py``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from clustergym.common.checkpoints import CheckpointError, load_checkpoint
from clustergym.gpu_allocation.space import MAX_CORES, MAX_MEMORY_MB, action_for
from clustergym.gpu_allocation.state import Floats

MIN_SHARES = (0.1, 0.5)
"""Smallest shares of the requested cores and memory that a categorical policy can choose."""
KINDS = ("ppo_gpu_alloc", "ppo_gpu_alloc-model", "ppo_gpu_alloc_lstm", "ppo_gpu_alloc_lstm-model")
OBS_CLIP = 10.0


def share_actions(obs: Floats, chosen: npt.NDArray[Any], levels: int) -> Floats:
    """(B, 2) actions that grant shares of the requests, which are the first two numbers of an observation.

    Args:
        obs: (B, features) observations, not normalised.
        chosen: (B, 2) indices of the shares of cores and memory: 0 is the smallest of ``MIN_SHARES``, levels − 1 is 1.
        levels: number of shares.

    >>> share_actions(np.array([[0.5, 0.25]]), np.array([[4, 0]]), 5).round(4).tolist()  # 50 % of the GPU, 4096 MB
    [[0.4444, 0.1111]]
    """
    low = np.array(MIN_SHARES)
    shares = low + (1.0 - low) * chosen / (levels - 1)
    cores, memory = (obs[:, :2].astype(float) * shares * (MAX_CORES, MAX_MEMORY_MB)).T
    return np.stack(action_for(cores, memory), 1).clip(0.0, 1.0).astype(np.float32)


def read_policy(path: str | Path) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Tensor] | None]:
    """Read a checkpoint.pt or model.pt of ``ppo_gpu_alloc.py`` or ``ppo_gpu_alloc_lstm.py``.

    Returns:
        The arguments of the trainer, the state dict of its network, and the running ``mean`` and ``var`` of the
        observations, None if they were not normalised.
    """
    try:
        state = load_checkpoint(Path(path), KINDS)
    except CheckpointError as error:
        raise CheckpointError(f"{path} holds no allocation policy: {error}") from error
    parts = state.get("shared", state)  # a checkpoint has more than the model
    return state["args"], parts["agent"], parts["statistics"] if state["args"]["norm_obs"] else None


class AllocationPolicy:
    """The most probable action of a trained policy. The statistics of the observations stay as they were saved.

    Args:
        agent: state dict of a trainer's network.
        statistics: running ``mean`` and ``var`` of observations; None if the trainer did not normalise them.
    """

    def __init__(self, agent: dict[str, Tensor], statistics: dict[str, Tensor] | None) -> None:
        self.recurrent = "lstm.weight_ih_l0" in agent
        self.levels = 0
        """Number of shares that a categorical policy chooses from; 0 for a Gaussian one."""
        # New layers draw random weights. The random numbers of a training stay as they are.
        with torch.random.fork_rng(devices=[]):
            self._make_layers(agent)
        self.statistics = statistics
        self.state: tuple[Tensor, Tensor] | None = None

    def _make_layers(self, agent: dict[str, Tensor]) -> None:
        if self.recurrent:
            hidden, self.n_features = agent["encoder.0.weight"].shape
            self.encoder = nn.Sequential(nn.Linear(self.n_features, hidden), nn.ReLU())
            self.lstm = nn.LSTM(hidden, hidden)
            self.actor = nn.Sequential(nn.Linear(hidden, 2), nn.Sigmoid())
            self._load(self.encoder, agent, "encoder.")
            self._load(self.lstm, agent, "lstm.")
        else:
            hidden, self.n_features = agent["actor.0.weight"].shape
            outputs = len(agent["actor.4.bias"])
            self.levels = outputs // 2 if outputs > 2 else 0
            self.actor = nn.Sequential(
                nn.Linear(self.n_features, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(),
                nn.Linear(hidden, outputs), nn.Identity() if self.levels else nn.Sigmoid(),
            )  # fmt: skip
        self._load(self.actor, agent, "actor.")

    @staticmethod
    def _load(module: nn.Module, agent: dict[str, Tensor], prefix: str) -> None:
        module.load_state_dict({key.removeprefix(prefix): t for key, t in agent.items() if key.startswith(prefix)})
        module.eval()

    @classmethod
    def load(cls, path: str | Path) -> AllocationPolicy:
        """Load a checkpoint.pt or model.pt of ``ppo_gpu_alloc.py`` or ``ppo_gpu_alloc_lstm.py``."""
        _, agent, statistics = read_policy(path)
        return cls(agent, statistics)

    def reset(self) -> None:
        """Clear the recurrent state before new episodes."""
        self.state = None

    def normalize(self, obs: Tensor) -> Tensor:
        """Normalise observations as in training."""
        if self.statistics is None:
            return obs.clone()
        scaled = (obs - self.statistics["mean"]) / torch.sqrt(self.statistics["var"] + 1e-8)
        return scaled.clamp(-OBS_CLIP, OBS_CLIP).float()

    def act(self, obs: Floats) -> Floats:
        """(B, 2) actions for observations (B, features). A recurrent policy updates its state."""
        if obs.ndim != 2 or obs.shape[1] != self.n_features:
            raise ValueError(
                f"observations have shape {obs.shape}, but the policy was trained on (…, {self.n_features}): "
                "GPUAllocation-v0 has 5 numbers, GPUAllocationHistory-v0 has 19"
            )
        with torch.inference_mode():
            rows = self.normalize(torch.from_numpy(obs))
            if self.recurrent:
                features, self.state = self.lstm(self.encoder(rows)[None], self.state)
                rows = features[0]
            action: Tensor = self.actor(rows)
        if self.levels:
            return share_actions(obs, action.view(-1, 2, self.levels).argmax(-1).numpy(), self.levels)
        return action.numpy()
