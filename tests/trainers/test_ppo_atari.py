"""Details 14–22: each wrapper on a scripted game with known frames and scores, then on real games."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from trainers import load_trainer

gym = pytest.importorskip("gymnasium")
pytest.importorskip("ale_py")
pytest.importorskip("cv2")
atari = load_trainer("ppo_atari")


class Game(gym.Env):
    """A game whose frame t has brightness t and reward t. It loses lives at given frames and records all actions."""

    observation_space = gym.spaces.Box(0, 255, (210, 160, 3), np.uint8)
    action_space = gym.spaces.Discrete(4)

    def __init__(
        self, lose_life_at: tuple[int, ...] = (), length: int = 200, lives: int = 3, meanings: str = "NOOP FIRE UP DOWN"
    ) -> None:
        self.lose_life_at, self.length, self.start_lives, self.meanings = lose_life_at, length, lives, meanings.split()
        self.ale, self.games, self.seeds = self, 0, []

    def get_action_meanings(self) -> list[str]:
        return self.meanings

    def lives(self) -> int:
        return self.left

    def frame(self) -> np.ndarray:
        return np.full((210, 160, 3), self.t % 256, np.uint8)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.t, self.left, self.actions = 0, self.start_lives, []
        self.games += 1
        self.seeds.append(seed)
        return self.frame(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.t += 1
        self.actions.append(int(action))
        self.left -= self.t in self.lose_life_at
        return self.frame(), float(self.t), self.t >= self.length, False, {"t": self.t}


# 14: no-op reset


def test_game_starts_with_1_to_30_noop_frames() -> None:
    game = Game()
    env = atari.NoopReset(game)
    waits = set()
    for seed in range(300):
        obs, info = env.reset(seed=seed)
        assert set(game.actions) == {0}
        assert obs[0, 0, 0] == game.t == info["t"] == len(game.actions)
        waits.add(game.t)
    assert waits == set(range(1, 31))
    env.reset(seed=5)
    first = game.t
    env.reset(seed=5)
    assert game.t == first


def test_game_that_ends_during_noops_is_reset() -> None:
    game = Game(length=3)
    atari.NoopReset(game).reset(seed=1)
    assert game.t < 3


# 15: max and skip


def test_action_repeats_for_4_frames_and_the_last_2_are_merged() -> None:
    game = Game()
    env = atari.MaxAndSkip(game)
    env.reset()
    flicker = iter([(100, 0), (2, 100), (0, 7), (9, 0)])

    def frame() -> np.ndarray:
        left, right = next(flicker)
        return np.dstack([np.full((2, 1), left, np.uint8), np.full((2, 1), right, np.uint8)])

    game.frame = frame
    obs, reward, terminated, truncated, _ = env.step(2)
    assert game.actions == [2, 2, 2, 2]
    assert reward == 1 + 2 + 3 + 4
    assert not terminated
    assert not truncated
    assert obs[0, 0].tolist() == [9, 7]


def test_frame_skip_stops_at_the_end_of_the_game() -> None:
    game = Game(length=6)
    env = atari.MaxAndSkip(game)
    env.reset()
    env.step(0)
    obs, reward, terminated, _, _ = env.step(1)
    assert game.t == 6
    assert (reward, terminated) == (5 + 6, True)
    assert obs.max() == 6


# 16: episodic life


def test_lost_life_ends_the_episode_but_not_the_game() -> None:
    game = Game(lose_life_at=(2, 5), length=8)
    env = atari.EpisodicLife(game)
    env.reset(seed=1)
    assert [env.step(3)[2] for _ in range(2)] == [False, True]
    obs, _ = env.reset()
    assert (game.games, game.t) == (1, 3)
    assert obs.max() == 3
    assert game.actions == [3, 3, 0]
    assert [env.step(3)[2] for _ in range(2)] == [False, True]
    env.reset()
    assert [env.step(3)[2] for _ in range(2)] == [False, True]  # the end of the game
    assert game.games == 1
    env.reset()
    assert (game.games, game.t) == (2, 0)


def test_last_lost_life_does_not_end_the_episode_early() -> None:
    game = Game(lose_life_at=(2,), length=4, lives=1)
    env = atari.EpisodicLife(game)
    env.reset()
    assert [env.step(0)[2] for _ in range(4)] == [False, False, False, True]


def test_reset_with_a_seed_starts_a_new_game() -> None:
    game = Game(lose_life_at=(2,))
    env = atari.EpisodicLife(game)
    env.reset(seed=1)
    env.step(0)
    env.step(0)
    env.reset(seed=2)
    assert (game.games, game.t, game.seeds) == (2, 0, [1, 2])


# 17: fire reset


def test_fire_is_pressed_on_reset() -> None:
    game = Game()
    obs, _ = atari.FireReset(game).reset()
    assert game.actions == [1, 2]
    assert obs.max() == 2


# 18: warp frame


def test_frames_are_grayscale_and_84_by_84() -> None:
    frame = np.zeros((210, 160, 3), np.uint8)
    frame[:, 80:] = (255, 0, 0)
    out = atari.warp_frame(frame)
    assert out.shape == (84, 84)
    assert out.dtype == np.uint8
    assert out[:, :40].max() == 0
    # Pure red, 255, is 0.299 · 255 = 76 in grayscale.
    assert set(out[:, 44:].ravel().tolist()) == {76}


def test_resizing_averages_over_areas() -> None:
    frame = np.zeros((168, 168, 3), np.uint8)
    frame[::2] = 200
    assert set(atari.warp_frame(frame).ravel().tolist()) == {100}


# All wrappers on real games


def test_wrappers_of_training_and_evaluation_games() -> None:
    def names(env: Any) -> list[str]:
        found = []
        while isinstance(env, gym.Wrapper):
            found.append(type(env).__name__)
            env = env.env
        return [name for name in found if name not in ("OrderEnforcing", "PassiveEnvChecker")]

    training = atari.make_env("BreakoutNoFrameskip-v4", True, None)
    assert names(training) == [
        "FrameStackObservation",
        "TransformReward",
        "TransformObservation",
        "FireReset",
        "EpisodicLife",
        "MaxAndSkip",
        "NoopReset",
        "RecordEpisodeStatistics",
    ]
    reward = training.get_wrapper_attr("func")
    assert [reward(each) for each in (7.0, 0.0, -0.5, 400)] == [1, 0, -1, 1]
    held_out = atari.make_env("BreakoutNoFrameskip-v4", False, None)
    assert set(names(training)) - set(names(held_out)) == {"TransformReward", "EpisodicLife"}
    for env in (training, held_out):
        env.close()
    with pytest.raises(gym.error.Error, match="already skips frames"):
        atari.make_env("ALE/Breakout-v5", True, None)


def test_game_without_fire_has_no_fire_reset() -> None:
    env = atari.make_env("FreewayNoFrameskip-v4", True, None)
    assert "FireReset" not in str(env)
    env.reset(seed=1)
    env.close()


# 20: frame stacking


def test_four_frames_are_stacked_oldest_first() -> None:
    env = atari.make_env("BreakoutNoFrameskip-v4", True, None)
    first, _ = env.reset(seed=3)
    assert first.shape == (4, 84, 84)
    assert first.dtype == np.uint8
    assert all(np.array_equal(frame, first[3]) for frame in first), "the first frame fills the stack"
    second = env.step(2)[0]
    third = env.step(2)[0]
    assert np.array_equal(second[:3], first[1:])
    assert np.array_equal(third[:3], second[1:])
    assert not np.array_equal(third[3], third[2])
    env.close()


# 21 and 22: network and input scaling


class FourActions:
    single_action_space = gym.spaces.Discrete(4)


def test_network_is_the_nature_cnn_shared_by_both_heads() -> None:
    agent = atari.Agent(FourActions)
    convs = [m for m in agent.network if isinstance(m, nn.Conv2d)]
    shapes = [(c.in_channels, c.out_channels, c.kernel_size[0], c.stride[0]) for c in convs]
    assert all(c.padding == (0, 0) for c in convs)
    assert shapes == [(4, 32, 8, 4), (32, 64, 4, 2), (64, 64, 3, 1)]
    assert [m.out_features for m in agent.network if isinstance(m, nn.Linear)] == [512]
    assert sum(isinstance(m, nn.ReLU) for m in agent.network) == 4
    for layer, std in [(convs[0], 2**0.5), (agent.actor, 0.01), (agent.critic, 1.0)]:
        rows = layer.weight.flatten(1)
        torch.testing.assert_close(rows @ rows.T, std**2 * torch.eye(len(rows)), atol=1e-4, rtol=0)
    obs = torch.randint(0, 256, (2, 4, 84, 84), dtype=torch.uint8)
    _, logprob, _, value = agent.get_action_and_value(obs)
    for loss in (logprob.sum(), value.sum()):
        agent.zero_grad()
        loss.backward(retain_graph=True)
        assert convs[0].weight.grad.abs().sum() > 0
    torch.testing.assert_close(agent.get_value(obs), value)


def test_pixels_are_scaled_to_the_unit_interval() -> None:
    agent = atari.Agent(FourActions)
    seen: list[torch.Tensor] = []
    agent.network[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    obs = torch.zeros(1, 4, 84, 84, dtype=torch.uint8)
    obs[0, 0, 0, 0] = 255
    obs[0, 0, 0, 1] = 51
    agent.get_action_and_value(obs)
    assert seen[0].dtype == torch.float32
    assert seen[0][0, 0, 0, :3].tolist() == pytest.approx([1.0, 0.2, 0.0])


# Runs


def test_processes_are_used_on_demand_and_learn_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real game. --async-envs steps each environment in its own process."""
    used = []
    for name in ("SyncVectorEnv", "AsyncVectorEnv"):
        plain = getattr(gym.vector, name)

        def make(*given: Any, plain: Any = plain, name: str = name, **named: Any) -> Any:
            used.append(name)
            # torchrl, which other tests import, makes "spawn" the default, and a test module cannot be imported again.
            named |= {"context": "fork"} if name == "AsyncVectorEnv" else {}
            return plain(*given, **named)

        monkeypatch.setattr(gym.vector, name, make)
    weights = []
    for async_envs in (False, True):
        args = atari.Args(
            num_envs=2, num_steps=4, num_minibatches=2, update_epochs=1, total_timesteps=16, eval_episodes=0,
            checkpoint_interval=0, save_model=True, async_envs=async_envs, run_dir=tmp_path / str(async_envs),
        )  # fmt: skip
        atari.train(args)
        weights.append(torch.load(tmp_path / str(async_envs) / "model.pt", weights_only=True)["state"]["agent"])
    assert used == ["SyncVectorEnv", "AsyncVectorEnv"]
    assert all(torch.equal(weight, weights[1][key]) for key, weight in weights[0].items())


def test_charts_show_whole_games_with_the_real_score(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Games of 30 frames with rewards 1 … 30; a lost life at frame 10 ends an episode, not the game."""

    def make(env_id: str, training: bool, videos: Any) -> Any:
        game = gym.wrappers.RecordEpisodeStatistics(Game(lose_life_at=(10,), length=30))
        env = atari.MaxAndSkip(game)
        env = atari.EpisodicLife(env) if training else env
        env = gym.wrappers.TransformObservation(env, atari.warp_frame, gym.spaces.Box(0, 255, (84, 84), np.uint8))
        env = gym.wrappers.TransformReward(env, np.sign) if training else env
        return gym.wrappers.FrameStackObservation(env, 4)

    metrics: list[dict[str, float]] = []
    monkeypatch.setattr(atari, "make_env", make)
    monkeypatch.setattr(atari.Run, "log", lambda self, found, **shown: metrics.append(found))
    args = atari.Args(
        num_envs=2, num_steps=16, update_epochs=1, total_timesteps=32, eval_episodes=2, checkpoint_interval=0,
        run_dir=tmp_path,
    )  # fmt: skip
    result = atari.train(args)
    # A lost life takes one more frame, of the reset, so a game has 30 frames in about 8 steps.
    assert metrics[0]["charts/mean_return_100"] == 30 * 31 / 2
    assert metrics[0]["charts/episodic_length"] == 30
    assert result["mean_return"] == 30 * 31 / 2
