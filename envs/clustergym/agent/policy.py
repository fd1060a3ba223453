"""One version of the policy, as the server uses it: the actor in numpy, because a request is a single row."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from clustergym.agent.rails import Amounts
from clustergym.gpu_allocation.policy import MIN_SHARES, OBS_CLIP
from clustergym.gpu_allocation.space import (
    MAX_CORES,
    MAX_MEMORY_MB,
    MIN_CORES,
    MIN_MEMORY_MB,
    UNIT_PERCENT,
    limit_grant,
    transform_action,
)

Vector = NDArray[np.float64]


class Policy:
    """The actor of a checkpoint.

    A categorical policy (``--preset levels``) chooses shares of the requested cores and memory. A Gaussian one
    (``--preset seed``) chooses cores and memory of the GPU, and a pod gets at most its request.
    """

    def __init__(self, state: dict[str, Any]) -> None:
        weights, statistics = state["agent"], state["statistics"]
        self.version: int = state["version"]
        self.layers = [
            (weights[f"actor.{i}.weight"].double().numpy().T, weights[f"actor.{i}.bias"].double().numpy())
            for i in (0, 2, 4)
        ]
        outputs = len(self.layers[-1][1])
        self.levels = outputs // 2 if outputs > 2 else 0
        """Number of shares to choose from; 0 for a Gaussian policy."""
        self.std = np.zeros(2) if self.levels else weights["log_std"].double().exp().numpy()
        self.mean, self.var = statistics["mean"].double().numpy(), statistics["var"].double().numpy()
        found = self.outputs(self.mean)
        if found.shape not in ((2,), (2, self.levels)) or not np.isfinite([*found.flat, *self.std]).all():
            raise ValueError("its actor does not give two finite actions")

    @property
    def obs_size(self) -> int:
        return len(self.mean)

    def outputs(self, obs: NDArray[Any]) -> Vector:
        """For an observation: logits (2, levels) of the shares, or the means (2,) of the actions."""
        x: Vector = np.clip((obs - self.mean) / np.sqrt(self.var + 1e-8), -OBS_CLIP, OBS_CLIP)
        *hidden, (weight, bias) = self.layers
        for w, b in hidden:
            x = np.maximum(x @ w + b, 0.0)
        x = x @ weight + bias
        return x.reshape(2, self.levels) if self.levels else 1.0 / (1.0 + np.exp(-x))

    def best(self, outputs: Vector) -> Vector:
        """The most probable action (2,): indices of shares, or the means."""
        return outputs.argmax(1).astype(float) if self.levels else outputs

    def sample(self, outputs: Vector, rng: np.random.Generator) -> tuple[Vector, float]:
        """A sampled action (2,) and its log-probability."""
        if not self.levels:
            noise = rng.standard_normal(2)
            action = outputs + self.std * noise
            return action, float(-(0.5 * noise**2 + np.log(self.std) + 0.5 * np.log(2 * np.pi)).sum())
        logprobs = outputs - np.logaddexp.reduce(outputs, 1, keepdims=True)
        # Gumbel's trick: the largest sum of log-probability and noise is a sample.
        action = (logprobs + rng.gumbel(size=logprobs.shape)).argmax(1)
        return action.astype(float), float(logprobs[[0, 1], action].sum())

    def amounts(self, action: Vector, obs: NDArray[Any], requested: Amounts) -> Amounts:
        """What an action gives to a pod, in whole units, as in the simulator."""
        if self.levels:
            shares = [low + (1.0 - low) * i / (self.levels - 1) for low, i in zip(MIN_SHARES, action, strict=True)]
        else:
            # The observation holds the request in the units of the task, where every GPU has the same memory.
            cores, memory_mb = transform_action(action.tolist())
            shares = [cores / (MAX_CORES * obs[0]), memory_mb / (MAX_MEMORY_MB * obs[1])]
        cores = max(min(shares[0], 1.0) * requested.cores, MIN_CORES)
        memory_mb = max(min(shares[1], 1.0) * requested.memory_mb, MIN_MEMORY_MB)
        return Amounts(*limit_grant(float(cores), float(memory_mb), *requested, UNIT_PERCENT))
