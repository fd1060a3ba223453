"""History, policy and learning of the allocation agent, against the simulator and known results."""

from __future__ import annotations

import dataclasses
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from clustergym import cli
from clustergym.agent.learner import Experiences
from clustergym.agent.policy import Policy
from clustergym.agent.rails import Amounts
from clustergym.agent.settings import ServerSettings
from clustergym.agent.store import Store
from clustergym.agent.traffic import pressure_of
from clustergym.agent.versions import add_version
from clustergym.common.checkpoints import CheckpointError, save_checkpoint
from clustergym.gpu_allocation import history, simulator
from clustergym.gpu_allocation import state as columns
from clustergym.gpu_allocation.batch import AllocationBatch
from clustergym.gpu_allocation.policy import AllocationPolicy, share_actions
from clustergym.gpu_allocation.specs import AllocationConfig
from trainers import load_trainer

online = load_trainer("ppo_gpu_alloc_online")
LEVELS = online.Args()
GAUSSIAN = online.Args(**online.PRESETS["seed"])


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


# History

SHARE = st.floats(0, 1, width=32)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(SHARE, SHARE, st.booleans(), st.booleans(), SHARE), max_size=40))
def test_history_matches_the_simulator(pods: list[tuple[float, float, bool, bool, float]]) -> None:
    ours, theirs = history.new_history(), np.zeros(history.N_HISTORY, np.float32)
    for pod in pods:
        history.remember(ours, *pod)
        simulator.remember(theirs, *pod)
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_features_match_the_simulator() -> None:
    """Each observation of an episode can be rebuilt from what the agent knows."""
    from clustergym.gpu_allocation.space import MAX_PODS, encode_state

    batch = AllocationBatch(AllocationConfig(history=True), 1)
    batch.seed([5])
    batch.reset()
    owners: dict[int, list[float]] = {}
    rng = np.random.default_rng(0)
    for _ in range(100):
        ask, obs = batch.state.ask[0].tolist(), batch.obs[0].tolist()
        owner = int(ask[columns.ASK_OWNER])
        known = owners.setdefault(owner, history.new_history())
        _, _, gpu_util, mem_util, pods, *_ = obs
        state = encode_state(
            ask[columns.ASK_CORES], ask[columns.ASK_MEMORY], gpu_util, mem_util, round(MAX_PODS * pods)
        )
        cores, memory, *_ = state
        rebuilt = state + history.features(known, cores, memory, ask[columns.ASK_SENSITIVE] > 0.5)
        np.testing.assert_allclose(rebuilt, obs, rtol=1e-4, atol=1e-5)
        batch.step(rng.random((1, 2)))
        out = batch.outcome[0].tolist()
        share = out[columns.OUTCOME_CORES] / out[columns.OUTCOME_REQUEST]
        needed = min(pressure_of(ask, out) * out[columns.OUTCOME_CORES] / out[columns.OUTCOME_REQUEST], 1.0)
        memory_share = out[columns.OUTCOME_USED_MB] / out[columns.OUTCOME_REQUEST_MB]
        met, oom = out[columns.OUTCOME_MET] > 0.5, out[columns.OUTCOME_OOM] > 0.5
        history.remember(known, needed, share, met, oom, memory_share)


# Policy


def first_state(args: Any = LEVELS) -> dict[str, Any]:
    return dict(online.initial_state(args)) | {"version": 0, "learned_through": 0}


def trained_state(args: Any = LEVELS) -> dict[str, Any]:
    """A version in which every weight differs from its initial value."""
    state, generator = first_state(args), torch.Generator().manual_seed(3)
    state["agent"] = {
        name: tensor + 0.3 * torch.randn(tensor.shape, generator=generator) for name, tensor in state["agent"].items()
    }
    return state


@pytest.mark.parametrize("args", [LEVELS, GAUSSIAN], ids=["levels", "seed"])
def test_numpy_policy_matches_the_network(args: Any) -> None:
    state = trained_state(args)
    agent, policy, rng = online.make_agent(state), Policy(state), np.random.default_rng(0)
    statistics = state["statistics"]
    for _ in range(20):
        obs = rng.random(policy.obs_size).astype(np.float32)
        with torch.no_grad():
            prepared = (torch.from_numpy(obs) - statistics["mean"]) / torch.sqrt(statistics["var"] + 1e-8)
            distribution = agent.get_policy(prepared.float())
        outputs = policy.outputs(obs)
        action, log_prob = policy.sample(outputs, rng)
        assert math.isclose(log_prob, float(distribution.log_prob(torch.from_numpy(action).float())), abs_tol=1e-3)
        np.testing.assert_allclose(policy.best(outputs), distribution.mode, atol=1e-5)


def test_samples_follow_the_distribution() -> None:
    policy, rng = Policy(first_state()), np.random.default_rng(0)
    probabilities = np.array([np.arange(1, 25), np.arange(24, 0, -1)]) / 300
    chosen = np.array([policy.sample(np.log(probabilities), rng)[0] for _ in range(20_000)], int)
    found = [np.bincount(column, minlength=24) / len(chosen) for column in chosen.T]
    np.testing.assert_allclose(found, probabilities, atol=0.01)
    gaussian = Policy(first_state(GAUSSIAN))
    actions = np.array([gaussian.sample(np.array([0.3, 0.7]), rng)[0] for _ in range(20_000)])
    np.testing.assert_allclose(actions.mean(0), [0.3, 0.7], atol=0.03)
    np.testing.assert_allclose(actions.std(0), [1.0, 1.0], atol=0.03)


@pytest.mark.parametrize("args", [LEVELS, GAUSSIAN], ids=["levels", "seed"])
def test_grants_are_those_of_the_simulator(args: Any) -> None:
    """The same action gives the same cores and memory in the agent and in the simulator."""
    policy, rng = Policy(first_state(args)), np.random.default_rng(0)
    batch = AllocationBatch(AllocationConfig(history=args is LEVELS), 64)
    batch.reset()
    for _ in range(20):
        requests = batch.state.ask[:, [columns.ASK_CORES, columns.ASK_MEMORY]].astype(float)
        actions = rng.integers(0, 24, (64, 2)) if policy.levels else rng.normal(0.5, 0.5, (64, 2))
        rows = zip(actions.astype(float), batch.obs, requests, strict=True)
        ours = [policy.amounts(action, obs, Amounts(*request)) for action, obs, request in rows]
        chosen = share_actions(batch.obs, actions, 24) if policy.levels else actions
        batch.step(chosen)
        theirs = batch.outcome[:, [columns.OUTCOME_CORES, columns.OUTCOME_MEMORY]]
        # Observations are rounded to float32, so an amount between two units can be rounded the other way.
        np.testing.assert_allclose(ours, theirs, atol=1.0)
        assert (np.array(ours) == theirs).mean() > 0.95


def test_the_example_of_the_task() -> None:
    """a = [0.56, 0.08] is 60 % and 3092 MB; a pod never gets more than it requests."""
    policy = Policy(first_state(GAUSSIAN))
    obs = np.array([0.8, 4000 / 32768, 0.45, 0.3, 0.2], np.float32)
    assert policy.amounts(np.array([0.56, 0.08]), obs, Amounts(80, 4000)) == (60, 3092)
    assert policy.amounts(np.array([1.7, 0.08]), obs, Amounts(80, 3000)) == (80, 2319)  # 3092 of a request of 4000
    assert policy.amounts(np.array([-1.0, -1.0]), obs, Amounts(80, 4000)) == (10, 512)


def test_an_untrained_policy_grants_the_request() -> None:
    """… and explores all shares, small ones less often."""
    policy, rng = Policy(first_state()), np.random.default_rng(0)
    for _ in range(50):
        obs = rng.random(19).astype(np.float32)
        outputs = policy.outputs(obs)
        assert policy.amounts(policy.best(outputs), obs, Amounts(80, 4000)) == (80, 4000)
    counts = np.bincount([int(policy.sample(outputs, rng)[0][0]) for _ in range(5_000)], minlength=24)
    assert 0 < counts[0] < counts[12] < counts[23]


# Learning


def experiences(policy: Policy, n: int, rng: np.random.Generator) -> Experiences:
    """Decisions with a known optimum: the share of cores should be 0.4 if the first feature is below 0.5, else 0.8.

    For a Gaussian policy, the first component of the action should be that.
    """
    obs = rng.random((n, policy.obs_size)).astype(np.float32)
    acted = [policy.sample(policy.outputs(row), rng) for row in obs]
    actions = np.array([action for action, _ in acted], np.float32)
    shares = 0.1 + 0.9 * actions[:, 0] / 23 if policy.levels else actions[:, 0]
    rewards = 1 - 10 * (shares - np.where(obs[:, 0] < 0.5, 0.4, 0.8)) ** 2
    logprobs = torch.tensor([log_prob for _, log_prob in acted])
    found, next_obs = torch.from_numpy(obs), torch.from_numpy(obs)
    return Experiences(found, torch.from_numpy(actions), logprobs, torch.from_numpy(rewards), next_obs, 0)


@pytest.mark.parametrize(
    ("args", "updates"),
    [(LEVELS, 150), (dataclasses.replace(GAUSSIAN, learning_rate=2e-3, gamma=0.0, initial_std=0.3, ent_coef=0.0), 200)],
    ids=["levels", "gaussian"],
)
def test_learning_finds_a_known_optimum(args: Any, updates: int) -> None:
    state, rng = first_state(args), np.random.default_rng(0)
    for version in range(updates):
        state, metrics = online.update(state | {"version": version}, experiences(Policy(state), 32, rng), args)
    policy = Policy(state)
    obs = rng.random((200, policy.obs_size)).astype(np.float32)
    chosen = np.array([policy.best(policy.outputs(row))[0] for row in obs])
    shares = 0.1 + 0.9 * chosen / 23 if policy.levels else chosen
    assert abs(shares[obs[:, 0] < 0.4].mean() - 0.4) < 0.08
    assert abs(shares[obs[:, 0] > 0.6].mean() - 0.8) < 0.08
    assert state["experiences"] == updates * 32
    if policy.levels:
        assert metrics["entropy"] > 1.0  # it goes on exploring


@pytest.mark.parametrize("kind", ["levels", "seed"])
def test_an_update_is_that_of_the_formulas(kind: str) -> None:
    """One minibatch, two epochs, every experience on its own: A_t = sum of (γλ)^k δ_{t+k}, clipped loss, Adam."""
    args = dataclasses.replace(
        LEVELS if kind == "levels" else GAUSSIAN,
        gamma=0.9, gae_lambda=0.8, update_epochs=2, minibatch_size=100, target_kl=None, max_grad_norm=0.1,
    )  # fmt: skip
    state = trained_state(args)
    batch = experiences(Policy(state), 12, np.random.default_rng(0))
    batch.next_obs = batch.obs.flip(0)
    batch.logprobs -= 0.3 * torch.rand(12, generator=torch.Generator().manual_seed(1))  # of an older policy
    after, metrics = online.update(state, batch, args)

    agent = online.make_agent(state)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)
    mean, var = state["statistics"]["mean"], state["statistics"]["var"]
    obs = [((row - mean) / (var + 1e-8).sqrt()).float() for row in batch.obs]
    next_obs = [((row - mean) / (var + 1e-8).sqrt()).float() for row in batch.next_obs]
    with torch.no_grad():
        values = [float(agent.get_value(row)) for row in obs]
        deltas = [float(batch.rewards[t] + 0.9 * agent.get_value(next_obs[t])) - values[t] for t in range(12)]
    advantages = [sum(0.72**k * deltas[t + k] for k in range(12 - t)) for t in range(12)]
    for _ in range(2):
        loss = torch.zeros(())
        for t in range(12):
            outputs = agent.actor(obs[t])
            if kind == "levels":
                logits = outputs.view(2, 24).log_softmax(1)
                chosen = batch.actions[t].long()
                logprob = logits[0, chosen[0]] + logits[1, chosen[1]]
                entropy = -(logits.exp() * logits).sum()
            else:
                std = agent.log_std.exp()
                z = (batch.actions[t] - torch.sigmoid(outputs)) / std
                logprob = -(z**2 / 2 + std.log() + math.log(2 * math.pi) / 2).sum()
                entropy = (std.log() + 0.5 + math.log(2 * math.pi) / 2).sum()
            ratio = (logprob - batch.logprobs[t]).exp()
            surrogate = torch.min(ratio * advantages[t], ratio.clamp(0.8, 1.2) * advantages[t])
            error = (agent.get_value(obs[t]) - advantages[t] - values[t]) ** 2
            loss = loss + (-surrogate - args.ent_coef * entropy + args.vf_coef * error / 2) / 12
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(agent.parameters(), 0.1)
        optimizer.step()
    for name, tensor in agent.state_dict().items():
        torch.testing.assert_close(after["agent"][name], tensor, atol=2e-5, rtol=1e-4)
    assert metrics["grad_norm"] > 0.1  # the limit mattered
    assert metrics["batch"] == 12


def test_an_update_is_reproducible() -> None:
    """After a crash between an update and its commit, the same batch must give the same policy."""
    state = trained_state()
    batch = experiences(Policy(state), 40, np.random.default_rng(0))
    first, _ = online.update(state, batch, LEVELS)
    torch.manual_seed(99)
    second, _ = online.update(state, batch, LEVELS)
    assert all(torch.equal(first["agent"][name], second["agent"][name]) for name in first["agent"])


def test_an_update_with_non_finite_weights_is_discarded() -> None:
    state = trained_state()
    batch = experiences(Policy(state), 32, np.random.default_rng(0))
    batch.rewards[3] = math.inf
    after, metrics = online.update(state, batch, LEVELS)
    assert metrics == {"discarded": 1.0}
    assert after is state


# Checkpoints


@pytest.mark.parametrize("levels", [0, 7], ids=["default", "levels"])
@pytest.mark.parametrize("norm_obs", [True, False])
def test_init_checkpoint_takes_the_policy_of_the_offline_trainer(tmp_path: Path, levels: int, norm_obs: bool) -> None:
    offline = load_trainer("ppo_gpu_alloc")
    torch.manual_seed(0)
    agent = offline.Agent(19, 32, levels)
    with torch.no_grad():
        for parameter in agent.parameters():
            parameter += 0.3 * torch.randn(parameter.shape)
    statistics = {"mean": torch.rand(19).double(), "var": 0.1 + torch.rand(19).double(), "count": torch.tensor(9.0)}
    content = {"agent": agent.state_dict(), "statistics": statistics, "args": {"norm_obs": norm_obs}}
    save_checkpoint(tmp_path / "c.pt", "ppo_gpu_alloc-model", content)
    theirs = AllocationPolicy.load(tmp_path / "c.pt")
    ours = Policy(first_state(dataclasses.replace(LEVELS, init_checkpoint=tmp_path / "c.pt")))
    for obs in torch.rand(10, 19):
        with torch.no_grad():
            expected = theirs.actor(theirs.normalize(obs[None]).float())[0].view(-1, max(levels, 1)).squeeze()
        np.testing.assert_allclose(ours.outputs(obs.numpy()), expected, atol=1e-4)


def test_init_checkpoint_refuses_other_files(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "c.pt", "ppo", {"agent": {}})
    with pytest.raises(CheckpointError, match="belongs to 'ppo'"):
        online.initial_state(dataclasses.replace(LEVELS, init_checkpoint=tmp_path / "c.pt"))
    (tmp_path / "d.pt").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(CheckpointError, match="not a clustergym checkpoint"):
        online.initial_state(dataclasses.replace(LEVELS, init_checkpoint=tmp_path / "d.pt"))


def test_the_exported_version_has_the_same_policy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store, state = Store(tmp_path), trained_state()
    add_version(store.connection, state, "initial", None, {})
    store.close()
    path = tmp_path / "model.pt"
    assert cli.main(["agent", "versions", "--store", str(tmp_path), "--export", str(path)]) == 0
    assert "initial" in capsys.readouterr().out
    obs = np.random.default_rng(0).random(19).astype(np.float32)
    again = Policy(first_state(dataclasses.replace(LEVELS, init_checkpoint=path)))
    np.testing.assert_allclose(again.outputs(obs), Policy(state).outputs(obs), atol=1e-5)
    assert AllocationPolicy.load(path).act(obs[None]).shape == (1, 2)


# Settings


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"host": "0.0.0.0"}, "would let anybody on the network train the agent"),
        ({"tls_cert": Path("x")}, "--tls-cert and --tls-key must be given together"),
        ({"webhook_token_file": Path("x")}, "need --token-file"),
        ({"port": 99_999}, "--port is 99999: expected 0 to 65535"),
        ({"batch_size": 0}, "--batch-size is 0: expected more than 0"),
        ({"max_batch": 8}, "--max-batch 8 is less than --batch-size 32"),
        ({"grant_floor": 2}, "--grant-floor is 2: expected 0 to 1"),
    ],
)
def test_invalid_settings_are_refused(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        dataclasses.replace(ServerSettings(), **change).check()


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--gamma", "1.5"], "error: --gamma is 1.5: expected a number from 0 to 1"),
        (["--levels", "1"], "error: --levels is 1: expected 2 or more, or 0 for a Gaussian policy"),
        (["--max-batch", "8"], "error: --max-batch 8 is less than --batch-size 32"),
    ],
)
def test_invalid_flags_end_the_program_with_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], reason: str
) -> None:
    with pytest.raises(SystemExit) as stop:
        online.main(["--store", str(tmp_path / "store"), *flags])
    assert reason in (stop.value.code, capsys.readouterr().err.strip())
    assert not (tmp_path / "store").exists()


def test_a_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(SystemExit, match=r"uvicorn is not installed: pip install 'clustergym\[agent\]'$"):
        online.main(["--store", str(tmp_path)])
