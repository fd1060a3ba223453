"""Other people's libraries, the real packages, on the environments."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers import FlattenObservation, RecordVideo
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from gymnasium.wrappers.vector import RecordVideo as RecordVideos
from pettingzoo.test import api_test, parallel_api_test, parallel_seed_test, render_test, seed_test
from pettingzoo.test.max_cycles_test import max_cycles_test

from clustergym import gpu_allocation_v0, moe_placement_v0
from clustergym.moe_placement.kernels.candidates import N_CANDIDATE_FEATURES
from doc_commands import ROOT, blocks
from placement_task import GPUS, LAYERS, OPS, TINY

STEPS = LAYERS * OPS
IDS = ("MoEPlacement-v0", "MoEPlacementDrift-v0", "MoEPlacementFlat-v0", "GPUAllocation-v0", "GPUAllocationHistory-v0")
PAGE = ROOT / "docs" / "guides" / "libraries.md"
# Package that a section of the page needs.
PACKAGES = {
    "Gymnasium": "gymnasium", "PettingZoo": "pettingzoo", "Stable-Baselines3": "sb3_contrib",
    "Stable-Baselines3 in batches": "sb3_contrib", "TorchRL": "torchrl", "RLlib": "ray.rllib",
}  # fmt: skip


@pytest.fixture(autouse=True)
def no_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")


def options_of(name: str) -> dict[str, Any]:
    return TINY if name.startswith("MoE") else {}


def programs() -> dict[str, str]:
    """The program of each section of the page."""
    return dict(re.findall(r"^## ([^\n]+)\n\n```python\n(.+?)```", PAGE.read_text(), re.MULTILINE | re.DOTALL))


def test_the_page_has_a_program_for_every_library() -> None:
    assert programs().keys() == PACKAGES.keys()


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    """Ray in one process. RLlib would start it with all cores and leave it to the tests that follow."""
    ray = pytest.importorskip("ray")
    ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.mark.parametrize("library", PACKAGES)
def test_program_of_the_page(
    library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.chdir(tmp_path)
    pytest.importorskip(PACKAGES[library])
    if library == "RLlib":
        request.getfixturevalue("local_ray")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(compile(programs()[library], f"{PAGE}: {library}", "exec"), {})


# Gymnasium


@pytest.mark.parametrize("name", ["MoEPlacement-v0", "MoEPlacementFlat-v0"])
def test_max_episode_steps_of_a_single_environment(name: str) -> None:
    env = gymnasium.make(name, max_episode_steps=2, **TINY)
    env.reset(seed=1)
    action = env.unwrapped.noop_action()  # type: ignore[attr-defined]
    assert [env.step(action)[2:4] for _ in range(2)] == [(False, False), (False, True)]


def test_vector_wrappers_count_whole_episodes() -> None:
    for mode in ("SameStep", "NextStep"):
        envs = RecordEpisodeStatistics(gymnasium.make_vec("MoEPlacementFlat-v0", 2, autoreset_mode=mode, **TINY))
        envs.reset(seed=1)
        for _ in range(STEPS):
            infos = envs.step(np.ones(2, int))[4]
        assert infos["episode"]["l"].tolist() == [STEPS, STEPS]


@pytest.mark.parametrize("make", [
    lambda: gymnasium.make("GPUAllocation-v0", render_mode="rgb_array").unwrapped,
    lambda: gymnasium.make("GPUAllocationHistory-v0").unwrapped,
    lambda: gymnasium.make_vec("GPUAllocation-v0", 3),
    lambda: gpu_allocation_v0.parallel_env(n_nodes=2),
])  # fmt: skip
def test_copies_of_allocation_environments_continue_bit_for_bit(make: Callable[[], Any]) -> None:
    env, rng = make(), np.random.default_rng(0)
    env.reset(seed=1)
    parallel = hasattr(env, "possible_agents")
    shape = (env.num_envs, 2) if hasattr(env, "num_envs") else (2,)

    def act() -> Any:
        draw = rng.random(shape, dtype=np.float32)
        return {agent: rng.random(2, dtype=np.float32) for agent in env.agents} if parallel else draw

    for _ in range(5):
        env.step(act())
    others, state, actions = (
        [deepcopy(env), pickle.loads(pickle.dumps(env))],
        env.get_state(),
        [act() for _ in range(30)],
    )
    expected = [repr(env.step(action)) for action in actions]
    assert len(set(expected)) == len(expected)
    env.set_state(state)
    for other in (*others, env):
        assert [repr(other.step(action)) for action in actions] == expected


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_autoreset_modes_of_the_allocation_environment_are_those_of_gymnasium(mode: AutoresetMode) -> None:
    """The same arrays as Gymnasium's SyncVectorEnv of single environments."""
    mine = gymnasium.make_vec("GPUAllocation-v0", 3, autoreset_mode=mode.value, arrivals=6)
    theirs = gymnasium.make_vec("GPUAllocation-v0", 3, "sync", vector_kwargs={"autoreset_mode": mode}, arrivals=6)
    assert mine.metadata["autoreset_mode"] == mode
    rng, ends = np.random.default_rng(0), 0
    assert np.array_equal(mine.reset(seed=4)[0], theirs.reset(seed=4)[0])
    for _ in range(20):
        actions = rng.random((3, 2), dtype=np.float32)
        results = [env.step(actions) for env in (mine, theirs)]
        for one, other in zip(results[0][:4], results[1][:4], strict=True):
            assert np.array_equal(one, other)
        ended = results[0][3]
        ends += int(ended.sum())
        if mode != AutoresetMode.SAME_STEP and ended.any():
            for name in ("reward", "mean_reward", "qos"):
                assert (name in results[0][4]) == (name in results[1][4])
                if name in results[0][4]:
                    assert np.allclose(results[0][4][name], results[1][4][name])
        if mode == AutoresetMode.DISABLED and ended.any():
            with pytest.raises(gymnasium.error.ResetNeeded, match="reset_mask"):
                mine.step(actions)
            again = [env.reset(options={"reset_mask": ended.copy()})[0] for env in (mine, theirs)]
            assert np.array_equal(*again)
    assert ends >= 6


def test_videos(tmp_path: Path) -> None:
    pytest.importorskip("moviepy")
    env = gymnasium.make("MoEPlacementFlat-v0", render_mode="rgb_array", max_episode_steps=2, **TINY)
    single = RecordVideo(env, str(tmp_path / "single"), episode_trigger=lambda episode: True)
    single.reset(seed=1)
    while not single.step(1)[3]:
        pass
    single.close()
    envs = gymnasium.make_vec("MoEPlacementFlat-v0", 2, render_mode="rgb_array", **TINY)
    many = RecordVideos(envs, str(tmp_path / "many"), step_trigger=lambda step: step == 1, video_length=2)
    many.reset(seed=1)
    for _ in range(4):
        many.step(np.ones(2, int))
    many.close()
    assert [len(list((tmp_path / folder).glob("*.mp4"))) for folder in ("single", "many")] == [1, 1]


# PettingZoo


class Tiny:
    """``moe_placement_v0`` with a small task, as PettingZoo's tests take a module."""

    @staticmethod
    def parallel_env(**kwargs: Any) -> Any:
        return moe_placement_v0.parallel_env(**TINY, **kwargs)

    @staticmethod
    def env(**kwargs: Any) -> Any:
        return moe_placement_v0.env(**TINY, **kwargs)


def test_pettingzoo_api_seed_and_render() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        api_test(Tiny.env(), num_cycles=60)
        seed_test(Tiny.env, num_cycles=20)
        render_test(Tiny.env)


def test_pettingzoo_parallel_and_max_cycles() -> None:
    parallel_api_test(Tiny.parallel_env(), num_cycles=60)
    parallel_seed_test(Tiny.parallel_env)
    max_cycles_test(Tiny)
    with pytest.raises(ValueError, match="max_cycles is 0: expected at least 1"):
        Tiny.parallel_env(max_cycles=0)


# TorchRL


@pytest.mark.parametrize("name", IDS)
def test_torchrl_takes_every_kind_of_environment(name: str) -> None:
    pytest.importorskip("torchrl")
    from torchrl.envs import GymEnv, GymWrapper
    from torchrl.envs.utils import check_env_specs

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check_env_specs(GymEnv(name, **options_of(name)))
        vector = GymWrapper(gymnasium.make_vec(name, 2, autoreset_mode="SameStep", **options_of(name)))
        assert vector.rollout(3, break_when_any_done=False).batch_size == (2, 3)
    with pytest.raises(TypeError, match="unexpected keyword argument 'no_such_option'"):
        gymnasium.make(name, no_such_option=1)


@pytest.mark.parametrize("make", [moe_placement_v0.parallel_env, moe_placement_v0.env])
def test_torchrl_takes_both_agents(make: Callable[..., Any]) -> None:
    pytest.importorskip("torchrl")
    from torchrl.envs import PettingZooWrapper
    from torchrl.envs.utils import check_env_specs

    env = PettingZooWrapper(make(**TINY), use_mask=make is moe_placement_v0.env)
    check_env_specs(env)
    rollout = env.rollout(6)
    assert rollout["expert", "action"].shape[0] == 6


# Stable-Baselines3


def test_stable_baselines3_checker() -> None:
    pytest.importorskip("stable_baselines3")
    from stable_baselines3.common.env_checker import check_env

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in ("MoEPlacement-v0", "MoEPlacementFlat-v0"):
            check_env(gymnasium.make(name, **TINY).unwrapped, skip_render_check=True)


@pytest.mark.parametrize("name", ["MoEPlacement-v0", "MoEPlacementFlat-v0"])
def test_maskable_ppo_plays_no_illegal_action(name: str) -> None:
    pytest.importorskip("sb3_contrib")
    from sb3_contrib import MaskablePPO

    env: Any = gymnasium.make(name, **TINY)
    if "Flat" not in name:
        env = FlattenObservation(env)
    model = MaskablePPO("MlpPolicy", env, n_steps=32, batch_size=32, seed=1, device="cpu")
    model.learn(2 * STEPS)
    obs, _ = env.reset(seed=1)
    done = False
    while not done:
        action, _ = model.predict(obs, action_masks=env.unwrapped.action_masks(), deterministic=False)
        obs, _, done, _, info = env.step(action)
    assert info["illegal_actions"] == 0
    assert env.unwrapped.batch.n_gpus == GPUS


def test_the_batch_as_vec_env_of_stable_baselines3() -> None:
    """The same numbers as single environments in Stable-Baselines3's own vector environment, and masks."""
    pytest.importorskip("sb3_contrib")
    from sb3_contrib import MaskablePPO
    from stable_baselines3.common.monitor import Monitor
    from stable_baselines3.common.vec_env import DummyVecEnv

    from clustergym.sb3 import BatchedVecEnv, MaskableCandidatePolicy

    mine: Any = BatchedVecEnv("MoEPlacementFlat-v0", 3, **TINY)
    theirs: Any = DummyVecEnv([lambda: Monitor(gymnasium.make("MoEPlacementFlat-v0", **TINY))] * 3)
    rng, ends = np.random.default_rng(0), 0
    for env in (mine, theirs):
        env.seed(4)
    np.testing.assert_array_equal(mine.reset(), theirs.reset())
    for _ in range(STEPS):
        np.testing.assert_array_equal(*(np.stack(env.env_method("action_masks")) for env in (mine, theirs)))
        actions = rng.integers(0, mine.action_space.n, 3)
        (obs, rewards, dones, infos), (others, *rest, other_infos) = mine.step(actions), theirs.step(actions)
        for array, other in ((rewards, rest[0]), (dones, rest[1])):
            np.testing.assert_allclose(array, other, rtol=1e-5)
        for i in np.flatnonzero(dones):
            ends += 1
            np.testing.assert_array_equal(infos[i]["terminal_observation"], other_infos[i]["terminal_observation"])
            assert infos[i]["episode"]["r"] == pytest.approx(other_infos[i]["episode"]["r"], abs=1e-5)
            assert infos[i]["episode"]["l"] == other_infos[i]["episode"]["l"]
            assert infos[i]["saved_vs_start"] == other_infos[i]["saved_vs_start"]
        np.testing.assert_array_equal(obs[~dones], others[~dones])
    assert ends == 3
    model = MaskablePPO(MaskableCandidatePolicy, mine, n_steps=STEPS, batch_size=32, seed=1, device="cpu")
    model.learn(6 * STEPS)
    assert len(model.ep_info_buffer) >= 3
    assert sum(info["illegal_actions"] for info in infos) > 0
    # A candidate's score does not depend on its place.
    obs = torch.as_tensor(mine.reset())
    k, width = mine.action_space.n - 1, N_CANDIDATE_FEATURES
    turned = torch.cat([obs[:, width : k * width], obs[:, :width], obs[:, k * width :]], 1)
    scores, moved = (model.policy.mlp_extractor.forward_actor(each) for each in (obs, turned))
    torch.testing.assert_close(moved[:, 1:], scores[:, 1:].roll(-1, 1))


def test_the_zoo_plays_better_than_random() -> None:
    pytest.importorskip("sb3_contrib")
    (code,) = blocks(ROOT / "zoo" / "README.md", "python")
    names: dict[str, Any] = {}
    exec(code.replace('"zoo/', f'"{ROOT}/zoo/'), names)
    envs, saved = names["envs"], {}
    rng = np.random.default_rng(0)
    for agent in ("zoo", "random"):
        envs.seed(0)
        obs, done = envs.reset(), np.zeros(1, bool)
        while not done.any():
            masks = envs.envs.action_masks()
            if agent == "zoo":
                action = names["model"].predict(obs, action_masks=masks, deterministic=True)[0]
            else:
                action = (rng.random(masks.shape) * masks).argmax(1)
            obs, _, done, infos = envs.step(action)
        saved[agent] = np.mean([info["saved_vs_start"] for info in infos])
    assert saved["zoo"] > saved["random"] + 0.01


# RLlib


def weights_of(algorithm: Any) -> dict[str, np.ndarray]:
    return {f"{module}.{name}": np.array(value) for module, weights in algorithm.learner_group.get_weights().items()
            for name, value in weights.items() if not name.endswith("_const")}  # fmt: skip


def test_rllib_trains_and_restores(tmp_path: Path, local_ray: None) -> None:
    from ray.rllib.algorithms.algorithm import Algorithm
    from ray.rllib.algorithms.ppo import PPOConfig

    config = PPOConfig().environment("MoEPlacementFlat-v0", env_config=TINY)
    config = config.training(train_batch_size=64, minibatch_size=32, num_epochs=1).env_runners(num_env_runners=0)
    algorithm = config.build_algo()
    before = weights_of(algorithm)
    for _ in range(2):
        result = algorithm.train()
    trained = weights_of(algorithm)
    assert result["num_env_steps_sampled_lifetime"] == 128
    assert not any(np.array_equal(before[name], trained[name]) for name in before)
    restored = Algorithm.from_checkpoint(algorithm.save_to_path(tmp_path))
    assert restored.iteration == 2
    assert all(np.array_equal(value, trained[name]) for name, value in weights_of(restored).items())
    assert restored.train()["num_env_steps_sampled_lifetime"] == 192
    restored.stop()
    algorithm.stop()


# CleanRL

# CleanRL's file is for Gymnasium 0.29, where this argument did not exist. The file itself is not changed.
RUN_CLEANRL = """
import functools, runpy, sys
import gymnasium
wrapper = gymnasium.wrappers.TransformObservation
gymnasium.wrappers.TransformObservation = functools.partial(wrapper, observation_space=None)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("env_id", ["GPUAllocation-v0", "GPUAllocationHistory-v0"])
def test_cleanrl_trains_on_the_allocation_environment(env_id: str, tmp_path: Path) -> None:
    """CleanRL's own ppo_continuous_action.py, if ``CLUSTERGYM_CLEANRL`` names the file."""
    script = os.environ.get("CLUSTERGYM_CLEANRL", "")
    if not script:
        pytest.skip("CLUSTERGYM_CLEANRL does not name CleanRL's ppo_continuous_action.py")
    flags = ["--total-timesteps", "1024", "--num-steps", "512", "--update-epochs", "2", "--no-cuda"]
    run = subprocess.run(
        [sys.executable, "-c", RUN_CLEANRL, str(Path(script).resolve()), "--env-id", f"clustergym:{env_id}", *flags],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (run.returncode, run.stdout.count("SPS:")) == (0, 2), run.stderr
    assert list(tmp_path.glob("runs/*/events*"))
