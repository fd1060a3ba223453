"""Parts of the allocation agent: history, policy and learning, against the simulator and known results."""

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
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import HistogramMetricFamily

from clustergym.agent.learner import Experiences
from clustergym.agent.metrics import Seconds
from clustergym.agent.server import serve
from clustergym.agent.service import is_latency_sensitive, share_amounts
from clustergym.agent.settings import ServerSettings
from clustergym.agent.traffic import pressure_of
from clustergym.common.checkpoints import CheckpointError, load_checkpoint, save_checkpoint
from clustergym.gpu_allocation import dynamics, history
from clustergym.gpu_allocation import state as columns
from trainers import load_trainer

online = load_trainer("ppo_gpu_alloc_online")
ARGS = online.Args()
SETTINGS = ServerSettings()
CPU = torch.device("cpu")


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
        dynamics.remember(theirs, *pod)
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_features_match_the_simulator() -> None:
    """Each observation of an episode can be rebuilt from what the agent knows."""
    from clustergym.gpu_allocation.batch import AllocationBatch, AllocationConfig
    from clustergym.gpu_allocation.space import MAX_PODS, encode_state

    batch = AllocationBatch(AllocationConfig(history=True), 1)
    batch.seed([5])
    batch.reset()
    owners: dict[int, list[float]] = {}
    rng = np.random.default_rng(0)
    for _ in range(100):
        ask, obs = batch.state["ask"][0].tolist(), batch.obs[0].tolist()
        owner = int(ask[columns.ASK_OWNER])
        known = owners.setdefault(owner, history.new_history())
        _, _, gpu_util, mem_util, pods, *_ = obs
        state = encode_state(
            ask[columns.ASK_CORES], ask[columns.ASK_MEMORY], gpu_util, mem_util, round(MAX_PODS * pods)
        )
        cores, memory, *_ = state
        rebuilt = state + history.features(known, cores, memory, ask[columns.ASK_SENSITIVE] > 0.5)
        np.testing.assert_allclose(rebuilt, obs, rtol=1e-4, atol=1e-5)
        batch.step(rng.random((1, 2)), autoreset=False)
        out = batch.outcome[0].tolist()
        share = out[columns.OUTCOME_CORES] / out[columns.OUTCOME_REQUEST]
        needed = min(pressure_of(ask, out) * out[columns.OUTCOME_CORES] / out[columns.OUTCOME_REQUEST], 1.0)
        memory_share = out[columns.OUTCOME_USED_MB] / out[columns.OUTCOME_REQUEST_MB]
        met, oom = out[columns.OUTCOME_MET] > 0.5, out[columns.OUTCOME_OOM] > 0.5
        history.remember(known, needed, share, met, oom, memory_share)


# Policy and learning


def trained_state() -> dict[str, Any]:
    """A checkpoint in which every weight differs from its initial value."""
    state = online.initial_state(ARGS)
    generator = torch.Generator().manual_seed(3)
    state["agent"] = {
        name: tensor + 0.3 * torch.randn(tensor.shape, generator=generator) for name, tensor in state["agent"].items()
    }
    return state


def test_numpy_policy_matches_the_network() -> None:
    state = trained_state()
    agent, statistics = online.make_agent(state)
    policy, rng = online.Policy(state), np.random.default_rng(0)
    for _ in range(20):
        obs = rng.random(19).astype(np.float32)
        prepared = online.normalize_obs(torch.from_numpy(obs), statistics)
        with torch.no_grad():
            shares = torch.distributions.Categorical(logits=agent(prepared)[0].view(2, 24))
        logits, value = policy.evaluate(obs)
        np.testing.assert_array_equal(logits, policy.logits(obs))
        assert math.isclose(value, agent.get_value(prepared).item(), abs_tol=1e-4)
        chosen, log_prob = policy.choose(logits, rng)
        assert math.isclose(log_prob, float(shares.log_prob(torch.from_numpy(chosen)).sum()), abs_tol=1e-4)
        chosen, log_prob = policy.choose(logits, None)
        np.testing.assert_array_equal(chosen, shares.probs.argmax(1))
        assert log_prob == 0.0  # always the same choice


def test_choices_follow_the_probabilities() -> None:
    policy, rng = online.Policy(online.initial_state(ARGS)), np.random.default_rng(0)
    probabilities = np.array([np.arange(1, 25), np.arange(24, 0, -1)]) / 300
    chosen = np.array([policy.choose(np.log(probabilities), rng)[0] for _ in range(20_000)])
    found = [np.bincount(column, minlength=24) / len(chosen) for column in chosen.T]
    np.testing.assert_allclose(found, probabilities, atol=0.006)


def test_grants_are_those_of_the_simulator() -> None:
    """The same choice of shares gives the same cores and memory in the agent and in the simulator."""
    from clustergym.gpu_allocation.batch import AllocationBatch, AllocationConfig
    from clustergym.gpu_allocation.policy import share_actions

    policy, rng = online.Policy(online.initial_state(ARGS)), np.random.default_rng(0)
    batch = AllocationBatch(AllocationConfig(history=True), 64)
    batch.reset()
    for _ in range(20):
        asked = batch.state["ask"][:, [columns.ASK_CORES, columns.ASK_MEMORY]].double().numpy()
        chosen = rng.integers(0, 24, (64, 2))
        ours = [share_amounts(policy.shares(one), *request) for one, request in zip(chosen, asked, strict=True)]
        batch.step(share_actions(batch.obs, torch.from_numpy(chosen), 24))
        theirs = batch.outcome[:, [columns.OUTCOME_CORES, columns.OUTCOME_MEMORY]]
        # Observations are rounded to float32, so an amount between two units can be rounded the other way.
        np.testing.assert_allclose(ours, theirs, atol=1.0)
        assert (np.array(ours) == theirs.numpy()).mean() > 0.95


def test_an_untrained_policy_grants_the_request() -> None:
    """… and explores all shares, small ones less often."""
    policy, rng = online.Policy(online.initial_state(ARGS)), np.random.default_rng(0)
    for _ in range(50):
        logits = policy.logits(rng.random(19).astype(np.float32))
        assert policy.shares(policy.choose(logits, None)[0]) == (1.0, 1.0)
    counts = np.bincount([policy.choose(logits, rng)[0][0] for _ in range(5_000)], minlength=24)
    assert 0 < counts[0] < counts[12] < counts[23]


def experiences(policy: Any, n: int, rng: np.random.Generator, through: int) -> Any:
    """Decisions with a known optimum: the share of cores should be 0.4 if the first feature is below 0.5, else 0.8."""
    obs = rng.random((n, 19)).astype(np.float32)
    acted = [policy.choose(policy.logits(row), rng) for row in obs]
    actions = np.array([chosen for chosen, _ in acted], np.float32)
    best = np.where(obs[:, 0] < 0.5, 0.4, 0.8)
    rewards = 1 - 10 * (np.array([policy.shares(chosen)[0] for chosen, _ in acted]) - best) ** 2
    return Experiences(
        torch.from_numpy(obs), torch.from_numpy(actions), torch.tensor([p for _, p in acted], dtype=torch.float32),
        torch.tensor(rewards, dtype=torch.float32), torch.zeros(n), torch.from_numpy(obs), torch.zeros(n).bool(),
        through,
    )  # fmt: skip


def test_learning_finds_a_known_optimum() -> None:
    state, rng = online.initial_state(ARGS), np.random.default_rng(0)
    for i in range(150):
        state, metrics = online.learn_once(state, experiences(online.Policy(state), 32, rng, i), ARGS, CPU)
    policy = online.Policy(state)
    obs = rng.random((200, 19)).astype(np.float32)
    chosen = np.array([policy.shares(policy.choose(policy.logits(row), None)[0])[0] for row in obs])
    low, high = obs[:, 0] < 0.4, obs[:, 0] > 0.6
    assert abs(chosen[low].mean() - 0.4) < 0.06
    assert abs(chosen[high].mean() - 0.8) < 0.06
    assert metrics["losses/entropy"] > 1.0  # it goes on exploring
    assert (state["version"], state["experiences"], state["learned_through"]) == (150, 150 * 32, 149)


def test_an_update_is_reproducible() -> None:
    """After a crash between an update and its checkpoint, the same batch must give the same policy."""
    state, rng = trained_state(), np.random.default_rng(0)
    batch = experiences(online.Policy(state), 40, rng, 7)
    first, _ = online.learn_once(state, batch, ARGS, CPU)
    torch.manual_seed(99)
    second, _ = online.learn_once(state, batch, ARGS, CPU)
    assert all(torch.equal(first["agent"][name], second["agent"][name]) for name in first["agent"])


def test_an_update_with_non_finite_weights_is_discarded() -> None:
    state, rng = trained_state(), np.random.default_rng(0)
    batch = experiences(online.Policy(state), 32, rng, 7)
    batch.rewards[3] = math.inf
    after, metrics = online.learn_once(state, batch, ARGS, CPU)
    assert metrics == {"charts/discarded": 1.0}
    assert (after["version"], after["learned_through"]) == (state["version"], 7)
    assert all(torch.equal(after["agent"][name], state["agent"][name]) for name in state["agent"])


@pytest.mark.parametrize("kind", ["ppo_gpu_alloc", "ppo_gpu_alloc-model"])
@pytest.mark.parametrize("norm_obs", [True, False])
@pytest.mark.parametrize("env_id", ["GPUAllocation-v0", "GPUAllocationHistory-v0"])
def test_init_checkpoint_takes_the_policy_of_the_offline_trainer(
    tmp_path: Path, kind: str, norm_obs: bool, env_id: str
) -> None:
    offline = load_trainer("ppo_gpu_alloc")
    torch.manual_seed(0)
    size = 5 if env_id == "GPUAllocation-v0" else 19
    agent, statistics = offline.Agent(size, 2, 32, levels=7), offline.RunningMeanStd((size,))
    statistics.update(torch.rand(100, size))
    with torch.no_grad():
        for parameter in agent.parameters():
            parameter += 0.3 * torch.randn(parameter.shape)
    given = vars(offline.Args()) | {
        "hidden": 32, "levels": 7, "norm_obs": norm_obs, "env_id": env_id, "workload": None, "run_dir": None,
    }  # fmt: skip
    content = {"args": given, "agent": agent.state_dict()}
    content |= (
        {"rollouts": {"statistics": statistics.state_dict()}}
        if kind == "ppo_gpu_alloc"
        else {"statistics": statistics.state_dict()}
    )
    save_checkpoint(tmp_path / "c.pt", kind, content)
    policy = online.Policy(online.initial_state(dataclasses.replace(ARGS, init_checkpoint=tmp_path / "c.pt")))
    obs = torch.rand(10, size)
    prepared = offline.normalize_obs(obs, statistics) if norm_obs else obs
    with torch.no_grad():
        expected = agent(prepared)[0].view(10, 2, 7).numpy()
    np.testing.assert_allclose(policy.logits(obs.numpy()), expected, atol=1e-4)
    np.testing.assert_allclose([policy.logits(row) for row in obs.numpy()], expected, atol=1e-4)
    assert policy.shares(np.array([6, 0])) == (1.0, 0.5)


def test_init_checkpoint_refuses_other_files(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "c.pt", "ppo", {"agent": {}})
    with pytest.raises(CheckpointError, match="belongs to 'ppo'"):
        online.initial_state(dataclasses.replace(ARGS, init_checkpoint=tmp_path / "c.pt"))
    (tmp_path / "d.pt").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(CheckpointError, match="not a clustergym checkpoint"):
        online.initial_state(dataclasses.replace(ARGS, init_checkpoint=tmp_path / "d.pt"))
    gaussian = {"args": {"norm_obs": True}, "agent": load_trainer("ppo_gpu_alloc").Agent(19).state_dict()}
    gaussian["statistics"] = online.RunningMeanStd((19,)).state_dict()
    save_checkpoint(tmp_path / "e.pt", "ppo_gpu_alloc-model", gaussian)
    with pytest.raises(ValueError, match="holds a Gaussian policy: the agent needs a categorical one"):
        online.initial_state(dataclasses.replace(ARGS, init_checkpoint=tmp_path / "e.pt"))


def test_exported_model_has_the_same_policy(tmp_path: Path) -> None:
    state = trained_state()
    online.export_model(dataclasses.replace(ARGS, run_dir=tmp_path), state)
    again = online.pretrained(tmp_path / "model.pt")
    obs = np.random.default_rng(0).random(19).astype(np.float32)
    np.testing.assert_allclose(
        online.Policy(again | {"version": 0}).logits(obs), online.Policy(state).logits(obs), atol=1e-6
    )
    assert load_checkpoint(tmp_path / "model.pt", "ppo_gpu_alloc-model")["args"]["env_id"] == "GPUAllocationHistory-v0"


@pytest.mark.parametrize(
    ("qos_class", "sensitive"),
    [
        ("best-effort", False), ("BestEffort", False), ("BE", False), ("Burstable", False), ("burstable ", False),
        ("latency-sensitive", True), ("LS", True), ("Guaranteed", True), ("", True), ("anything", True),
    ],
)  # fmt: skip
def test_unknown_qos_classes_are_latency_sensitive(qos_class: str, sensitive: bool) -> None:
    assert is_latency_sensitive(qos_class) is sensitive


# Settings


def test_durations_are_written_as_the_client_library_writes_them() -> None:
    durations, registry, own = Seconds(), CollectorRegistry(), CollectorRegistry()
    library = Histogram("x", "text", ("path",), buckets=Seconds.BOUNDS, registry=registry)
    for seconds in (0.0, 0.001, 0.0011, 0.03, 0.25, 1.0, 7.0):
        durations.observe(seconds)
        library.labels("/a").observe(seconds)

    class Collector:
        def collect(self) -> Any:
            family = HistogramMetricFamily("x", "text", labels=["path"])
            family.add_metric(["/a"], durations.buckets, durations.sum)
            return [family]

    own.register(Collector())
    expected = [line for line in generate_latest(registry).splitlines() if b"created" not in line]
    assert generate_latest(own).splitlines() == expected


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"host": "0.0.0.0"}, "would let anybody on the network train the agent"),
        ({"tls_cert": Path("x")}, "--tls-cert and --tls-key must be given together"),
        ({"client_ca": Path("x")}, "--client-ca requires both"),
        ({"port": 99_999}, "--port is 99999: expected 0 to 65535"),
        ({"batch_size": 0}, "--batch-size is 0: expected more than 0"),
        ({"max_batch": 8}, "--max-batch 8 is less than --batch-size 32"),
    ],
)
def test_invalid_settings_are_refused(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        dataclasses.replace(SETTINGS, **change).check()


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--gamma", "1.5"], "error: --gamma is 1.5: expected 0 to 1"),
        (["--levels", "1"], "error: --levels is 1: expected 2 or more"),
        (["--max-batch", "8"], "error: --max-batch 8 is less than --batch-size 32"),
    ],
)
def test_invalid_flags_end_the_program_with_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str], reason: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["agent", "--store", str(tmp_path / "store"), *flags])
    with pytest.raises(SystemExit) as stop:
        online.main()
    assert stop.value.code == reason
    assert not (tmp_path / "store").exists()


def test_a_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    never: Any = None
    with pytest.raises(ImportError, match=r"^uvicorn is not installed: pip install 'clustergym\[agent\]'$"):
        serve(
            dataclasses.replace(SETTINGS, store=tmp_path), seed=1, resume=True, initial_state=never, make_policy=never,
            learn_once=never, open_logger=never,
        )  # fmt: skip
