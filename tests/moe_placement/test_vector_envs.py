"""Vector environments of the trainers: flat observations, masks, statistics of episodes, and autoreset modes."""

from __future__ import annotations

import math
from itertools import chain
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from clustergym.training import (
    EpisodeStatistics,
    VectorEnvs,
    action_mask,
    flat_size,
    flatten,
    play_episodes,
)
from clustergym.training.vector import make_vector_env


def test_observations_are_flattened() -> None:
    spaces = gym.spaces
    space = spaces.Dict(
        image=spaces.Box(0, 255, (2, 2), np.uint8),
        kind=spaces.Discrete(3, start=5),
        flags=spaces.MultiBinary(2),
        action_mask=spaces.Box(0, 1, (4,), np.int8),
    )
    obs = {
        "image": np.arange(8).reshape(2, 2, 2),
        "kind": np.array([5, 7]),
        "flags": np.array([[0, 1], [1, 0]]),
        "action_mask": np.array([[1, 0, 1, 1], [0, 1, 0, 0]]),
    }
    rows = {"flags": [0, 1], "image": [0, 1, 2, 3], "kind": [1, 0, 0]}
    flat = flatten(space, obs)
    assert flat.shape == (2, flat_size(space)) == (2, 9)
    assert flat[0].tolist() == list(chain(*(rows[key] for key in space if key != "action_mask")))
    assert action_mask(obs, {}).tolist() == [[True, False, True, True], [False, True, False, False]]
    with pytest.raises(TypeError, match="Tuple"):
        flat_size(spaces.Tuple([space]))


def test_episode_statistics_by_hand() -> None:
    statistics = EpisodeStatistics(2)
    assert math.isnan(statistics.charts()["charts/mean_return_100"])
    every = np.ones(2, bool)
    statistics.step(np.array([1.0, 2.0]), np.array([False, True]), every)
    statistics.step(np.array([3.0, 5.0]), np.array([True, False]), every)
    expected = {"charts/mean_return_100": 3.0, "charts/episodic_return": 3.0, "charts/episodic_length": 1.5}
    assert statistics.charts() == expected
    # A reset step has no length, and unfinished episodes are forgotten after restart().
    statistics.step(np.array([0.0, 1.0]), np.array([False, True]), np.array([False, True]))
    statistics.step(np.array([7.0, 9.0]), np.array([True, False]), every)
    expected = {"charts/mean_return_100": 4.75, "charts/episodic_return": 6.5, "charts/episodic_length": 1.5}
    assert statistics.charts() == expected
    statistics.step(np.array([50.0, 50.0]), np.array([False, False]), every)
    statistics.restart()
    statistics.step(np.array([1.0, 1.0]), np.array([True, True]), every)
    assert statistics.charts()["charts/episodic_return"] == 1.0
    statistics.add([0.0] * 200, [1] * 200)
    assert statistics.charts()["charts/mean_return_100"] == statistics.mean_return_100 == 0.0


class Countdown(gym.Env[Any, Any]):
    """Reward 1 per step. An episode has 2 + seed % 3 steps."""

    observation_space = gym.spaces.Discrete(9)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[int, dict[str, Any]]:
        self.left = 2 + (seed or 0) % 3
        return self.left, {}

    def step(self, action: Any) -> tuple[int, float, bool, bool, dict[str, Any]]:
        self.left -= 1
        return self.left, float(action), self.left == 0, False, {}


@pytest.mark.parametrize("mode", gym.vector.AutoresetMode)
def test_play_episodes_counts_one_episode_per_environment(mode: gym.vector.AutoresetMode) -> None:
    envs = VectorEnvs(gym.vector.SyncVectorEnv([Countdown] * 3, autoreset_mode=mode), seed=3)
    assert play_episodes(envs, lambda obs, _: torch.ones(len(obs), dtype=torch.int64)) == [2.0, 3.0, 4.0]


class Masked(Countdown):
    """The mask in the info names the number of steps left."""

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[int, dict[str, Any]]:
        obs, _ = super().reset(seed=seed, options=options)
        return obs, {"action_mask": np.arange(5) == self.left}

    def step(self, action: Any) -> tuple[int, float, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, _ = super().step(action)
        return obs, reward, truncated, terminated, {"action_mask": np.arange(5) == self.left}


class MaskInObservation(Masked):
    """The mask is part of the observation."""

    observation_space = gym.spaces.Dict(action_mask=gym.spaces.MultiBinary(5), left=gym.spaces.Discrete(9))

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        obs, info = super().reset(seed=seed, options=options)
        return info | {"left": obs}, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, info = super().step(action)
        return info | {"left": obs}, reward, terminated, truncated, {}


@pytest.mark.parametrize("env", [Masked, MaskInObservation])
@pytest.mark.parametrize("mode", gym.vector.AutoresetMode)
def test_observations_masks_and_last_observations_for_every_autoreset_mode(
    mode: gym.vector.AutoresetMode, env: type[Masked]
) -> None:
    """Environments count down from 2, 3 and 4. Ends are truncations with observation 0 (one-hot, so column 0)."""
    statistics = EpisodeStatistics(3)
    envs = VectorEnvs(gym.vector.SyncVectorEnv([env] * 3, autoreset_mode=mode), seed=3, episodes=statistics)
    lengths = []
    for _ in range(12):
        left = envs.obs.argmax(1)
        assert envs.masks is not None
        assert torch.equal(envs.masks.int().argmax(1), left)
        step = envs.step(torch.ones(3, dtype=torch.int64))
        assert step.rewards.dtype == torch.float32
        assert torch.equal(step.valid, left > 0)
        assert step.valid.all() or mode == gym.vector.AutoresetMode.NEXT_STEP
        assert torch.equal(step.truncated, left == 1)
        cut, last_obs = step.final_obs
        assert torch.equal(cut, step.truncated.nonzero().squeeze(1))
        assert bool((last_obs.argmax(1) == 0).all())
        lengths += [1] * int(step.truncated.sum())
    charts = statistics.charts()
    # Later episodes start without a seed and have two steps.
    assert charts["charts/episodic_return"] == charts["charts/episodic_length"]
    assert 2 <= charts["charts/episodic_length"] < 3
    envs.close()


class OneComponent(Masked):
    action_space = gym.spaces.MultiDiscrete([3])

    def step(self, action: Any) -> tuple[Any, ...]:
        assert action.shape == (1,)
        return super().step(1)


def test_actions_have_the_shape_of_the_action_space() -> None:
    """A policy over one component returns one number per environment."""
    envs = VectorEnvs(gym.vector.SyncVectorEnv([OneComponent] * 3), seed=3)
    assert envs.step(torch.ones(3, dtype=torch.int64)).valid.all()
    envs.close()


def test_an_environment_of_the_users_own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(
        "import gymnasium\n"
        "gymnasium.register('Mine-v0', 'gymnasium.envs.classic_control:CartPoleEnv', max_episode_steps=7)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    envs = make_vector_env("mine:Mine-v0", 2, "discrete")
    assert envs.num_envs == 2
    assert envs.spec is not None
    assert envs.spec.max_episode_steps == 7
    envs.close()
