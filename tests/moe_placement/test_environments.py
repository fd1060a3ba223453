"""The Gymnasium and PettingZoo environments: their contracts, pictures and errors."""

from __future__ import annotations

import re
import subprocess
import sys
import warnings
from typing import Any

import gymnasium
import numpy as np
import pettingzoo
import pytest
from gymnasium.utils.env_checker import check_env
from pettingzoo.test import api_test, parallel_api_test, parallel_seed_test

import clustergym
from clustergym import TokenTrace, moe_placement_v0
from clustergym.moe_placement import ClusterSpec, ModelSpec
from clustergym.moe_placement.environment import MoEPlacementEnv
from clustergym.moe_placement.vector import MoEPlacementVectorEnv
from placement_task import IDS, TINY, legal_action


@pytest.fixture(autouse=True)
def no_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")


# Contracts


@pytest.mark.parametrize("env_id", IDS)
def test_check_env_is_silent(env_id: str) -> None:
    env = gymnasium.make(env_id, **TINY)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(env.unwrapped)
        env.close()


def test_defaults_pass_check_env_too() -> None:
    env = gymnasium.make("MoEPlacement-v0").unwrapped
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(env, skip_render_check=True)
    assert isinstance(env, MoEPlacementEnv)
    assert (env.batch.cluster.name, env.batch.n_slots, env.batch.model.name) == ("h800-4x4", 5, "tiny-moe")


def test_drift_id_serves_eight_drifting_intervals_from_eplb() -> None:
    config = gymnasium.make("MoEPlacementDrift-v0", **TINY).unwrapped.batch.config  # type: ignore[attr-defined]
    assert (config.intervals, config.schedule, config.start) == (8, "drift", "eplb")


def test_module_prefix_imports_the_package() -> None:
    program = """
import sys, gymnasium
assert "clustergym" not in sys.modules and "MoEPlacement-v0" not in gymnasium.registry
env = gymnasium.make("clustergym:MoEPlacement-v0", tokens_per_rank=8)
obs, _ = env.reset(seed=1)
print(sorted(obs), env.step([0, 0])[1:4])
"""
    found = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=False)
    # Where the kernels have not been compiled yet, a line says so.
    assert [line for line in found.stderr.splitlines() if not line.startswith("compiling the simulator")] == []
    assert found.stdout.strip() == (
        "['action_mask', 'context', 'expert_graph', 'experts', 'gpu_graph', 'gpus', 'pairs'] (0.0, False, False)"
    )


def test_pettingzoo_api() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parallel_api_test(moe_placement_v0.parallel_env(**TINY), num_cycles=60)
        parallel_seed_test(lambda: moe_placement_v0.parallel_env(**TINY))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        api_test(moe_placement_v0.env(**TINY), num_cycles=60)
    # PettingZoo remarks on what two different agents with action masks cannot avoid; nothing else may come.
    assert {str(w.message) for w in caught} <= {
        "Observation is not a NumPy array",
        'We recommend agents to be named in the format <descriptor>_<number>, like "player_0"',
        "Observation space for each agent probably should be gymnasium.spaces.box or gymnasium.spaces.discrete",
        "Agents have different observation space sizes",
    }


def test_pettingzoo_registry() -> None:
    parallel = pettingzoo.make("parallel", "moe_placement_v0", **TINY)
    assert parallel.possible_agents == ["expert", "gpu"]
    assert parallel.reset(seed=1)[0]["gpu"]["gpus"].shape == (12, 17)
    aec = pettingzoo.make("aec", "moe_placement_v0", **TINY)
    aec.reset(seed=1)
    assert aec.agent_selection == "expert"


def test_importing_twice_registers_once() -> None:
    import importlib

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        importlib.reload(clustergym)


# Pictures


def test_rgb_array_shows_the_last_operation() -> None:
    env = gymnasium.make("MoEPlacement-v0", render_mode="rgb_array", **TINY)
    obs, _ = env.reset(seed=0)
    before = env.render()
    env.step(legal_action(obs, np.random.default_rng(0)))
    after = env.render()
    for picture in (before, after):
        assert isinstance(picture, np.ndarray)
        assert (picture.ndim, picture.shape[2], picture.dtype) == (3, 3, np.uint8)
        assert len(np.unique(picture.reshape(-1, 3), axis=0)) > 10
    assert (before != after).any()
    # An action that names no expert or GPU at all is drawn too.
    for action in ([-5, -7], [99, 99]):
        env.step(action)
        assert np.shape(env.render()) == np.shape(before)


@pytest.mark.parametrize("make", [MoEPlacementEnv, moe_placement_v0.parallel_env])
def test_human_window_opens_and_closes_smoke(make: Any) -> None:
    env = make(render_mode="human", **TINY)
    env.reset(seed=0)
    action = [0, 1] if make is MoEPlacementEnv else {"expert": 0, "gpu": 1}
    env.step(action)
    assert env.render() is None
    assert env._screen is not None
    env.close()
    assert env._screen is None


def test_vector_env_renders_each_environment() -> None:
    env = MoEPlacementVectorEnv(2, render_mode="rgb_array", **TINY)
    env.reset(seed=0)
    pictures = env.render()
    assert pictures is not None
    assert len(pictures) == 2
    assert (pictures[0] != pictures[1]).any()


# Errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "random"}, "unknown schedule 'random'; expected one of: stationary, drift, switch, replay"),
        ({"profile": "fast"}, "unknown profile 'fast'; the profiles are: sglang-prefill, sglang-decode, sglang-lp,"),
        ({"profile": "sglang-lp"}, "splits tokens by a linear program, which is only for evaluation and planning"),
        ({"phase": "train"}, "unknown phase 'train'; expected one of: decode, prefill"),
        ({"split": "half"}, "unknown split 'half'; expected one of: train, validation, test, train-same-domains"),
        ({"start": "best"}, "unknown start 'best'; expected one of: static, eplb"),
        ({"migration": "lazy"}, "unknown migration 'lazy'; expected one of: blocking, async"),
        ({"intervals": 0}, "intervals is 0: expected at least 1"),
        ({"tokens_per_rank": 0}, "tokens_per_rank is 0: expected at least 1"),
        ({"sampled_passes": -1}, "sampled_passes is -1: expected at least 1"),
        ({"ops_per_layer": -1}, "ops_per_layer is -1: expected at least 1"),
        ({"passes_per_interval": 0}, "passes_per_interval is 0: expected at least 1"),
        ({"drift_rate": 1.5}, "rate is 1.5: expected 0 … 1"),
        ({"background_share": -0.5}, "background_share is -0.5: expected 0 … 1"),
        ({"intervals": 12}, "which fills 12 intervals, but 13 are needed"),
        ({"render_mode": "ansi"}, "unknown render_mode 'ansi'"),
        ({"trace": "nowhere"}, "unknown trace 'nowhere': give a .npz or .npy file, or one of the bundled names:"),
        ({"cluster": "b200"}, "unknown cluster 'b200'; the presets are: h800-1x8,"),
        ({"model": "gpt-9"}, "unknown model 'gpt-9'; the presets are: mixtral-8x7b,"),
        ({"model": "mixtral-8x7b", "trace": "synthetic"},
         "the trace is top-6 of 64 experts, but model 'mixtral-8x7b' is top-2 of 8"),
        ({"model": ModelSpec("short", 2, 8, 2, 8, 8)}, "the trace has 3 layers, but model 'short' has 2"),
        ({"cluster": ClusterSpec("small", 1, 3, 2)}, "too few slots: 3 GPUs × 2 slots = 6 for 8 experts"),
    ],
)  # fmt: skip
def test_bad_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    for make in (MoEPlacementEnv, moe_placement_v0.parallel_env, lambda **o: MoEPlacementVectorEnv(2, **o)):
        with pytest.raises(ValueError, match=re.escape(message)):
            make(**(TINY | options))


def test_unknown_arguments_raise_a_type_error() -> None:
    for make in (MoEPlacementEnv, moe_placement_v0.parallel_env, lambda **o: MoEPlacementVectorEnv(2, **o)):
        with pytest.raises(
            TypeError,
            match="unexpected keyword argument 'token_per_rank'; the environment takes: allow_reuse, background_share,",
        ):
            make(**TINY, token_per_rank=5)


@pytest.mark.parametrize("name", ["observation", "memory", "lookahead_norm", "reward_norm", "conditional"])
def test_removed_arguments_say_what_to_use_instead(name: str) -> None:
    for make in (MoEPlacementEnv, moe_placement_v0.env, lambda **o: MoEPlacementVectorEnv(2, **o)):
        with pytest.raises(TypeError, match=f"argument '{name}' was removed: "):
            make(**TINY, **{name: True})


def test_a_trace_without_a_model_asks_for_one_and_names_candidates() -> None:
    trace = TokenTrace(np.argsort(np.random.default_rng(0).random((90, 2, 8)), axis=2)[:, :, :2], name="mine")
    with pytest.raises(
        ValueError, match=r"mine: the trace does not say which model.*; mixtral-8x7b, .* has the trace's 8 experts"
    ):
        MoEPlacementEnv(trace=trace, split="all")
    assert (
        MoEPlacementEnv(trace=trace, split="all", model="mixtral-8x7b", tokens_per_rank=1).batch.model.name
        == "mixtral-8x7b"
    )


def test_vector_env_refuses_wrong_shapes_and_lengths() -> None:
    with pytest.raises(ValueError, match="num_envs is 0: expected at least 1"):
        MoEPlacementVectorEnv(0, **TINY)
    with pytest.raises(ValueError, match="max_episode_steps is 0: expected at least 1"):
        MoEPlacementVectorEnv(2, max_episode_steps=0, **TINY)
    env = MoEPlacementVectorEnv(2, **TINY)
    env.reset(seed=0)
    with pytest.raises(ValueError, match=re.escape("actions have shape (3, 2): expected (2, 2): expert, node")):
        env.step(np.zeros((3, 2), int))
    with pytest.raises(ValueError, match=r"device meta is not supported: expected 'cpu' or 'cuda'"):
        MoEPlacementVectorEnv(2, device="meta", **TINY)
