"""A tiny task with the observation of the MoE environments, a journal and a known optimum."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

R, G = 5, 2
SIZES = {
    "experts": (R, 3), "gpus": (3 * G, 4), "pairs": (R, G, 2), "expert_graph": (R, R), "gpu_graph": (G, G),
    "context": (2,),
}  # fmt: skip
DELAY = 3
"""Steps after which an event reports what a pick was worth."""


@dataclass
class Step:
    """What an environment showed, was asked and answered."""

    obs: dict[str, np.ndarray]
    action: np.ndarray
    reward: float
    elapsed: float
    no_op: bool
    terminated: bool
    truncated: bool
    successor: dict[str, np.ndarray]
    """Observation that the action led to, also at the end of an episode."""


class ScriptedMoE(gym.vector.VectorEnv[Any, Any, Any]):
    """Everything follows from the seed, the environment, and the number of its steps.

    The best row is the one with the largest first feature among those that can be picked. The best node of a row is on
    the GPU with the larger first pair feature, with the operation whose feature in ``gpus`` is 1. Both are worth 1 per
    step, and PLACE on the GPU ``row % G`` is the no-op, which is worth nothing. With ``events``, the reward is that of
    the node only: an event reports after ``DELAY`` steps whether the row was the best one.

    Episode e has 3 + e % 3 steps. With ``truncate``, every second episode is truncated.
    """

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
    instances: list[ScriptedMoE] = []
    """All that were created. ``journal`` has the steps of each environment."""

    def __init__(
        self,
        num_envs: int,
        autoreset_mode: AutoresetMode = AutoresetMode.SAME_STEP,
        events: bool = False,
        truncate: bool = False,
        split: str = "train",
    ) -> None:
        assert autoreset_mode == AutoresetMode.SAME_STEP
        self.num_envs, self.events, self.truncate = num_envs, events, truncate
        boxes: dict[str, gym.Space[Any]] = {key: gym.spaces.Box(-9, 9, size) for key, size in SIZES.items()}
        mask = gym.spaces.Box(0, 1, (R, 3 * G), np.int8)
        self.single_observation_space = gym.spaces.Dict(boxes | {"action_mask": mask})
        self.single_action_space = gym.spaces.MultiDiscrete([R, 3 * G])
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.counts, self.in_episode = np.zeros((2, num_envs), np.int64)
        self.episodes = np.arange(num_envs)
        self.right = np.zeros((num_envs, DELAY))
        self.journal: list[list[Step]] = [[] for _ in range(num_envs)]
        self.instances.append(self)

    def _draw(self, env: int) -> dict[str, np.ndarray]:
        rng = np.random.default_rng((self.base_seed, env, int(self.counts[env])))
        obs = {key: rng.normal(0, 1, size).astype(np.float32) for key, size in SIZES.items()}
        obs["expert_graph"], obs["gpu_graph"] = abs(obs["expert_graph"]), abs(obs["gpu_graph"])
        obs["gpus"] = np.tile(np.eye(3, 4, dtype=np.float32)[:, None], (1, G, 1)).reshape(3 * G, 4)
        obs["gpus"][:, 3] = np.repeat(np.eye(3)[rng.integers(3)], G)
        mask = np.ones((R, 3 * G), np.int8)
        mask[rng.integers(R)] = 0
        mask[rng.integers(R), rng.integers(3 * G)] = 0
        only = rng.integers(R)
        mask[only] = 0
        mask[only, rng.integers(3 * G)] = 1
        return obs | {"action_mask": mask}

    def _stack(self) -> dict[str, np.ndarray]:
        return {key: np.stack([each[key] for each in self.now]) for key in self.now[0]}

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        self.base_seed = int(seed or 0)
        self.now = [self._draw(env) for env in range(self.num_envs)]
        return self._stack(), {}

    def step(self, actions: np.ndarray) -> tuple[Any, ...]:
        n = self.num_envs
        rewards, elapsed, ended = np.zeros(n), np.zeros(n), np.zeros(n, bool)
        truncations, no_op, final = np.zeros(n, bool), np.zeros(n, bool), np.full(n, None, object)
        found: list[tuple[int, int, int, float]] = []
        for env, (row, node) in enumerate(actions.tolist()):
            obs = self.now[env]
            assert obs["action_mask"][row, node] == 1, "the action is invalid"
            no_op[env] = node == row % G
            right_row, right_node = (0.0, 0.0) if no_op[env] else self.judge(obs, row, node)
            rewards[env] = right_node + (0.0 if self.events else right_row)
            if self.events and self.in_episode[env] >= DELAY:
                found.append((env, row, DELAY, float(self.right[env, 0])))
            self.right[env] = [*self.right[env, 1:], right_row]
            elapsed[env] = (0.0, 1.0, 2.5)[self.counts[env] % 3]
            self.counts[env] += 1
            self.in_episode[env] += 1
            ended[env] = self.in_episode[env] >= 3 + self.episodes[env] % 3
            truncations[env] = ended[env] and self.truncate and self.episodes[env] % 2 == 1
            self.now[env] = final[env] = successor = self._draw(env)
            self.journal[env].append(
                Step(obs, actions[env].copy(), rewards[env], elapsed[env], bool(no_op[env]),
                     bool(ended[env] and not truncations[env]), bool(truncations[env]), successor)
            )  # fmt: skip
            if ended[env]:
                self.counts[env] += 1
                self.episodes[env] += 1
                self.in_episode[env] = 0
                self.now[env] = self._draw(env)
        infos: dict[str, Any] = {"elapsed": elapsed, "no_op": no_op, "expert": actions[:, 0].copy()}
        if self.events:
            columns = np.array(found, np.float64).reshape(-1, 4).T
            names = (("env", np.int64), ("expert", np.int64), ("age", np.int64), ("value", np.float64))
            infos["events"] = {name: column.astype(kind) for (name, kind), column in zip(names, columns, strict=True)}
        if ended.any():
            infos |= {"final_obs": np.where(ended, final, None), "_final_obs": ended}
        return self._stack(), rewards, ended & ~truncations, truncations, infos

    @staticmethod
    def judge(obs: dict[str, np.ndarray], row: int, node: int) -> tuple[float, float]:
        """What the choices of the row and of the node are worth, unless they are the no-op."""
        legal = obs["action_mask"].any(-1)
        right_row = row == np.where(legal, obs["experts"][:, 0], -99).argmax()
        operation, gpu = obs["gpus"][::G, 3].argmax(), obs["pairs"][row, :, 0].argmax()
        return float(right_row), float(node == operation * G + gpu)

    def get_state(self) -> dict[str, Any]:
        names = ("counts", "in_episode", "episodes", "right")
        return {"seed": np.array(self.base_seed)} | {name: getattr(self, name).copy() for name in names}

    def set_state(self, state: dict[str, Any]) -> None:
        self.base_seed = int(state["seed"])
        for name in ("counts", "in_episode", "episodes", "right"):
            setattr(self, name, np.array(state[name]))
        self.now = [self._draw(env) for env in range(self.num_envs)]


@contextmanager
def registered_script() -> Iterator[None]:
    gym.register("ScriptedMoE-v0", vector_entry_point=ScriptedMoE)
    ScriptedMoE.instances.clear()
    yield
    del gym.registry["ScriptedMoE-v0"]
