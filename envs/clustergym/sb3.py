"""Stable-Baselines3 and sb3-contrib: batched environments as a ``VecEnv``, and policies for the flat placement task.

Needs ``pip install "clustergym[libraries]"``. No other module imports this one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from sb3_contrib.common.maskable.policies import MaskableActorCriticPolicy
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.vec_env import VecEnv
from torch import Tensor, nn

from clustergym.moe_placement.kernels.candidates import N_CANDIDATE_FEATURES
from clustergym.moe_placement.kernels.observation import N_CONTEXT


class BatchedVecEnv(VecEnv):
    """A batched environment as a ``VecEnv``: ``BatchedVecEnv("MoEPlacementFlat-v0", 32)``.

    It steps many times faster than environments in a ``DummyVecEnv`` or ``SubprocVecEnv``. sb3-contrib finds the masks,
    and Stable-Baselines3 logs returns without a ``VecMonitor``.

    Args:
        env_id: a registered id that has a vector environment.
        num_envs: number of environments.
        options: keyword arguments of the environment.
    """

    def __init__(self, env_id: str, num_envs: int, **options: Any) -> None:
        self.envs: Any = gymnasium.make_vec(env_id, num_envs, autoreset_mode=AutoresetMode.SAME_STEP, **options)
        super().__init__(num_envs, self.envs.single_observation_space, self.envs.single_action_space)
        self._actions = np.zeros(0, np.int64)
        self._returns, self._lengths = np.zeros(num_envs), np.zeros(num_envs, np.int64)

    def reset(self) -> Any:
        seeds = None if self._seeds[0] is None else [int(seed) for seed in self._seeds if seed is not None]
        obs, _ = self.envs.reset(seed=seeds)
        self._reset_seeds()
        self._returns[:], self._lengths[:] = 0, 0
        return obs

    def step_async(self, actions: np.ndarray) -> None:
        self._actions = actions

    def step_wait(self) -> Any:
        obs, rewards, terminated, truncated, found = self.envs.step(self._actions)
        done = terminated | truncated
        self._returns += rewards
        self._lengths += 1
        infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        for i in np.flatnonzero(done):
            infos[i] = {name: values[i] for name, values in found["final_info"].items() if not name.startswith("_")}
            infos[i] |= {
                "terminal_observation": found["final_obs"][i],
                "TimeLimit.truncated": bool(truncated[i] and not terminated[i]),
                "episode": {"r": float(self._returns[i]), "l": int(self._lengths[i])},
            }
        self._returns[done], self._lengths[done] = 0, 0
        return obs, rewards.astype(np.float32), done, infos

    def close(self) -> None:
        self.envs.close()

    def has_attr(self, attr_name: str) -> bool:
        return hasattr(self.envs, attr_name)

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        return [getattr(self.envs, attr_name)] * len(list(self._get_indices(indices)))

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        raise NotImplementedError(
            f"{attr_name}: the environments of a batch share their attributes; give it at the start"
        )

    def env_method(self, method_name: str, *arguments: Any, indices: Any = None, **options: Any) -> list[Any]:
        """The result of a method of the batch, such as ``action_masks``, one part per environment."""
        parts = getattr(self.envs, method_name)(*arguments, **options)
        return [parts[i] for i in self._get_indices(indices)]

    def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:
        return [False] * len(list(self._get_indices(indices)))

    def get_images(self) -> Sequence[np.ndarray | None]:
        return self.envs.render() or [None] * self.num_envs


class ScoreCandidates(nn.Module):
    """One network for all candidates of ``MoEPlacementFlat-v0``: it does not matter in which place a candidate is.

    Args:
        n_features: length of the observation.
        n_candidates: candidates in it.
        width: of the hidden layers.
    """

    def __init__(self, n_features: int, n_candidates: int, width: int = 64) -> None:
        super().__init__()
        self.n_candidates, self.latent_dim_pi, self.latent_dim_vf = n_candidates, n_candidates + 1, width
        self.candidate = nn.Sequential(
            nn.Linear(N_CANDIDATE_FEATURES + N_CONTEXT, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh()
        )
        self.score, self.no_op = nn.Linear(width, 1), nn.Linear(width, 1)
        self.value = nn.Sequential(nn.Linear(2 * width + N_CONTEXT, width), nn.Tanh())
        for layer in (self.score, self.no_op):
            nn.init.orthogonal_(layer.weight, 0.01)
            nn.init.zeros_(layer.bias)

    def _encode(self, obs: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(B, k, width) of each candidate, (B, k, 1) whether it exists, (B, width) their mean, (B, 6) the context."""
        features = obs[:, : N_CANDIDATE_FEATURES * self.n_candidates].reshape(len(obs), self.n_candidates, -1)
        context, exists = obs[:, -N_CONTEXT:], features[..., :1]
        encoded = self.candidate(torch.cat([features, context[:, None].expand(-1, self.n_candidates, -1)], -1))
        return encoded, exists, (encoded * exists).sum(1) / exists.sum(1).clamp(min=1), context

    def forward_actor(self, obs: Tensor) -> Tensor:
        """(B, k + 1) logits of the no-op and of each candidate."""
        encoded, _, mean, _ = self._encode(obs)
        return torch.cat([self.no_op(mean), self.score(encoded).squeeze(-1)], 1)

    def forward_critic(self, obs: Tensor) -> Tensor:
        encoded, exists, mean, context = self._encode(obs)
        best = (encoded - 2 * (1 - exists)).amax(1)  # tanh is above −1
        latent: Tensor = self.value(torch.cat([mean, best, context], 1))
        return latent

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        return self.forward_actor(obs), self.forward_critic(obs)


class _ScoresCandidates:
    """Makes :class:`ScoreCandidates` the networks of a policy of Stable-Baselines3."""

    mlp_extractor: Any
    action_net: Any

    def _build_mlp_extractor(self: Any) -> None:
        self.mlp_extractor = ScoreCandidates(self.features_dim, self.action_space.n - 1)

    def _build(self: Any, lr_schedule: Any) -> None:
        super()._build(lr_schedule)  # type: ignore[misc]
        self.action_net = nn.Identity()  # the scores are the logits
        self.optimizer = self.optimizer_class(self.parameters(), lr=lr_schedule(1), **self.optimizer_kwargs)


class CandidatePolicy(_ScoresCandidates, ActorCriticPolicy):
    """A policy for ``PPO`` on the flat placement task: ``PPO(CandidatePolicy, env)``."""


class MaskableCandidatePolicy(_ScoresCandidates, MaskableActorCriticPolicy):
    """A policy for ``MaskablePPO`` on the flat placement task: ``MaskablePPO(MaskableCandidatePolicy, env)``."""
