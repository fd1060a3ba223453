"""Vector environments for trainers: creation, flat observations, saved states."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers.vector import RecordEpisodeStatistics

from clustergym.gpu_allocation.vector import GPUAllocationVectorEnv
from clustergym.training.envs import get_state, make_vec, play_episodes, set_state


class Several(gym.Env[Any, Any]):
    """An observation of several parts. Episodes have 2 + seed % 2 steps with rewards 1, 2, …"""

    observation_space = gym.spaces.Dict(image=gym.spaces.Box(0, 9, (2, 2)), kind=gym.spaces.Discrete(3))
    action_space = gym.spaces.Discrete(2)

    def observe(self) -> dict[str, Any]:
        return {"image": np.full((2, 2), self.count, np.float32), "kind": self.count % 3}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.count, self.length = 0, 2 + (seed or 0) % 2
        return self.observe(), {}

    def step(self, action: Any) -> Any:
        self.count += 1
        return self.observe(), float(self.count), False, self.count == self.length, {}


@pytest.fixture(autouse=True)
def _environments() -> Iterator[None]:
    gym.register("Several-v0", Several)
    yield
    del gym.registry["Several-v0"]


def test_observations_are_flattened_on_demand_the_last_ones_of_an_episode_too() -> None:
    envs = make_vec("Several-v0", 2, flatten=True)
    assert envs.reset(seed=0)[0].tolist() == [[0, 0, 0, 0, 1, 0, 0]] * 2
    envs.step(np.zeros(2, int))
    obs, _, _, truncated, infos = envs.step(np.zeros(2, int))
    assert truncated.tolist() == [True, False]
    assert infos["final_obs"][0].tolist() == [2, 2, 2, 2, 0, 0, 1]
    assert obs.tolist() == [[0, 0, 0, 0, 1, 0, 0], [2, 2, 2, 2, 0, 0, 1]]
    assert isinstance(make_vec("Several-v0", 2).single_observation_space, gym.spaces.Dict)


def test_vector_version_of_an_environment_is_used() -> None:
    envs = make_vec("GPUAllocation-v0", 3, flatten=True, arrivals=5)
    assert isinstance(envs.unwrapped, GPUAllocationVectorEnv)
    assert envs.unwrapped.batch.config.arrivals == 5


def test_vector_version_with_another_autoreset_mode_is_not_used() -> None:
    def next_step(num_envs: int, **options: Any) -> Any:
        return gym.vector.SyncVectorEnv([Several] * num_envs, autoreset_mode=AutoresetMode.NEXT_STEP)

    gym.register("Other-v0", Several, vector_entry_point=next_step)
    try:
        assert make_vec("Other-v0", 2).metadata["autoreset_mode"] == AutoresetMode.SAME_STEP
    finally:
        del gym.registry["Other-v0"]


def test_environment_of_the_users_own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(
        "import gymnasium\n"
        "gymnasium.register('Mine-v0', 'gymnasium.envs.classic_control:CartPoleEnv', max_episode_steps=7)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    envs = make_vec("mine:Mine-v0", 2)
    assert envs.num_envs == 2
    assert envs.spec is not None
    assert envs.spec.max_episode_steps == 7
    envs.close()


def test_one_episode_of_each_environment_counts() -> None:
    begun: list[int] = []
    returns = play_episodes(make_vec("Several-v0", 4), lambda obs, infos: np.zeros(4, int), 0, begun.append)
    assert returns == [3, 6, 3, 6]
    assert begun == [4]


def test_saved_environments_continue_with_their_statistics() -> None:
    envs, actions = RecordEpisodeStatistics(make_vec("GPUAllocation-v0", 3, arrivals=5)), np.full((3, 2), 0.4)
    envs.reset(seed=2)
    for _ in range(8):
        envs.step(actions)
    state = get_state(envs)
    assert state is not None
    expected = [envs.step(actions) for _ in range(8)]
    other = RecordEpisodeStatistics(make_vec("GPUAllocation-v0", 3, arrivals=5))
    other.reset(seed=9)
    set_state(other, state)
    for obs, rewards, *_, infos in expected:
        again = other.step(actions)
        np.testing.assert_array_equal(again[0], obs)
        np.testing.assert_array_equal(again[1], rewards)
        assert ("episode" in infos) == ("episode" in again[-1])
        if "episode" in infos:
            np.testing.assert_array_equal(again[-1]["episode"]["r"], infos["episode"]["r"])
    assert list(other.return_queue) == list(envs.return_queue)
    assert get_state(make_vec("CartPole-v1", 2)) is None
