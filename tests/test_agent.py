"""The allocation agent's parts: policy, learning, store and history, against closed forms and slow references."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import sqlite3
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from clustergym.gpu_allocation import dynamics, history
from clustergym.training import CheckpointError, load_checkpoint, save_checkpoint
from trainers import load_trainer

online = load_trainer("ppo_gpu_alloc_online")
ARGS = online.Args()
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


# -- history --------------------------------------------------------------------------------------------------------

SHARE = st.floats(0, 1, width=32)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(SHARE, SHARE, st.booleans(), st.booleans(), SHARE), max_size=40))
def test_history_is_what_the_simulator_keeps(pods: list[tuple[float, float, bool, bool, float]]) -> None:
    ours, theirs = history.new_history(), np.zeros(dynamics.N_HISTORY, np.float32)
    for pod in pods:
        history.remember(ours, *pod)
        dynamics.remember.py_func(theirs, *pod)
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def pressure_of(ask: list[float], out: list[float]) -> float:
    """What monitoring would show of a pod: its load, or its latency against its objective."""
    latency = out[dynamics.O_LATENCY]
    return max(ask[dynamics.ASK_RATE] / ask[dynamics.ASK_BATCH] * latency, latency / ask[dynamics.ASK_SLO])


def test_features_are_what_the_simulator_shows() -> None:
    """A whole episode: each observation of the simulator, rebuilt from what an agent hears."""
    from clustergym.gpu_allocation.batch import AllocationBatch, AllocationConfig
    from clustergym.gpu_allocation.space import encode_state

    batch = AllocationBatch(AllocationConfig(history=True), 1)
    batch.seed([5])
    batch.reset()
    owners: dict[int, list[float]] = {}
    rng = np.random.default_rng(0)
    for _ in range(100):
        ask, obs = batch.state["ask"][0].tolist(), batch.obs[0].tolist()
        owner = int(ask[dynamics.ASK_OWNER])
        known = owners.setdefault(owner, history.new_history())
        state = encode_state(ask[dynamics.ASK_CORES], ask[dynamics.ASK_MEMORY], obs[2], obs[3], round(10 * obs[4]))
        rebuilt = state + history.features(known, state[0], state[1], ask[dynamics.ASK_SENSITIVE] > 0.5)
        np.testing.assert_allclose(rebuilt, obs, rtol=1e-4, atol=1e-5)
        batch.step(rng.random((1, 2)), autoreset=False)
        out = batch.outcome[0].tolist()
        needed = min(pressure_of(ask, out) * out[dynamics.O_CORES] / out[dynamics.O_REQUEST], 1.0)
        history.remember(
            known, needed, out[dynamics.O_CORES] / out[dynamics.O_REQUEST],
            out[dynamics.O_MET] > 0.5, out[dynamics.O_OOM] > 0.5, out[dynamics.O_USED_MB] / out[dynamics.O_REQUEST_MB],
        )  # fmt: skip


# -- policy and learning --------------------------------------------------------------------------------------------


def trained_state() -> dict[str, Any]:
    """A checkpoint whose every number differs from where it started."""
    state = online.initial_state(ARGS)
    generator = torch.Generator().manual_seed(3)
    state["agent"] = {
        name: tensor + 0.3 * torch.randn(tensor.shape, generator=generator) for name, tensor in state["agent"].items()
    }
    return state


def test_the_served_policy_is_the_network() -> None:
    state = trained_state()
    agent, statistics = online.make_agent(state)
    policy, rng = online.Policy(state), np.random.default_rng(0)
    for _ in range(20):
        obs = rng.random(19).astype(np.float32)
        prepared = online.normalize_obs(torch.from_numpy(obs), statistics)
        with torch.no_grad():
            mean, _ = agent(prepared)
            action, log_prob = policy.act(obs, rng)
            expected = online.gaussian_logprob(torch.from_numpy(action).float(), mean, agent.std())
        np.testing.assert_allclose(policy.mean(obs), mean.numpy(), atol=1e-5)
        assert math.isclose(log_prob, float(expected), abs_tol=1e-3)
        np.testing.assert_array_equal(policy.act(obs, None)[0], policy.mean(obs))


def experiences(policy: Any, n: int, rng: np.random.Generator, through: int) -> Any:
    """Decisions whose reward has a known best answer: cores 0.3 where the first feature is below a half, else 0.7."""
    obs = rng.random((n, 19)).astype(np.float32)
    acted = [policy.act(row, rng) for row in obs]
    actions = np.array([action for action, _ in acted], np.float32)
    best = np.where(obs[:, 0] < 0.5, 0.3, 0.7)
    rewards = 1 - 10 * (actions[:, 0] - best) ** 2
    return online.Experiences(
        torch.from_numpy(obs), torch.from_numpy(actions), torch.tensor([p for _, p in acted], dtype=torch.float32),
        torch.tensor(rewards, dtype=torch.float32), through,
    )  # fmt: skip


def test_learning_finds_a_known_optimum() -> None:
    state, rng = online.initial_state(ARGS), np.random.default_rng(0)
    for i in range(150):
        state, metrics = online.learn_once(state, experiences(online.Policy(state), 32, rng, i), ARGS, CPU)
    policy = online.Policy(state)
    obs = rng.random((200, 19)).astype(np.float32)
    chosen = np.array([policy.mean(row)[0] for row in obs])
    low, high = obs[:, 0] < 0.4, obs[:, 0] > 0.6
    assert abs(chosen[low].mean() - 0.3) < 0.06
    assert abs(chosen[high].mean() - 0.7) < 0.06
    assert metrics["charts/std_cores"] >= ARGS.min_std * 0.999
    assert (state["version"], state["experiences"], state["learned_through"]) == (150, 150 * 32, 149)


def test_an_update_is_the_same_whenever_it_is_made() -> None:
    """After a crash between an update and its checkpoint, the same batch gives the same policy."""
    state, rng = trained_state(), np.random.default_rng(0)
    batch = experiences(online.Policy(state), 40, rng, 7)
    first, _ = online.learn_once(state, batch, ARGS, CPU)
    torch.manual_seed(99)
    second, _ = online.learn_once(state, batch, ARGS, CPU)
    assert all(torch.equal(first["agent"][name], second["agent"][name]) for name in first["agent"])


def test_an_update_that_is_not_finite_is_thrown_away() -> None:
    state, rng = trained_state(), np.random.default_rng(0)
    batch = experiences(online.Policy(state), 32, rng, 7)
    batch.rewards[3] = math.inf
    after, metrics = online.learn_once(state, batch, ARGS, CPU)
    assert metrics == {"charts/thrown_away": 1.0}
    assert (after["version"], after["learned_through"]) == (state["version"], 7)
    assert all(torch.equal(after["agent"][name], state["agent"][name]) for name in state["agent"])


@pytest.mark.parametrize("kind", ["ppo_gpu_alloc", "ppo_gpu_alloc-model"])
@pytest.mark.parametrize("norm_obs", [True, False])
@pytest.mark.parametrize("env_id", ["GPUAllocation-v0", "GPUAllocationHistory-v0"])
def test_it_starts_from_what_the_offline_trainer_writes(tmp_path: Path, kind: str, norm_obs: bool, env_id: str) -> None:
    offline = load_trainer("ppo_gpu_alloc")
    torch.manual_seed(0)
    size = 5 if env_id == "GPUAllocation-v0" else 19
    agent, statistics = offline.Agent(size, 2, 32, 0.3), offline.RunningMeanStd((size,))
    statistics.update(torch.rand(100, size))
    with torch.no_grad():
        for parameter in agent.parameters():
            parameter += 0.3 * torch.randn(parameter.shape)
    given = vars(offline.Args()) | {
        "hidden": 32, "action_scale": 0.3, "norm_obs": norm_obs, "env_id": env_id, "workload": None, "run_dir": None,
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
        expected = agent(prepared)[0].numpy()
    np.testing.assert_allclose([policy.mean(row) for row in obs.numpy()], expected, atol=1e-5)
    np.testing.assert_allclose(policy.std, agent.std().detach().numpy(), rtol=1e-6)


def test_other_checkpoints_are_refused(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "c.pt", "ppo", {"agent": {}})
    with pytest.raises(CheckpointError, match="belongs to 'ppo'"):
        online.initial_state(dataclasses.replace(ARGS, init_checkpoint=tmp_path / "c.pt"))
    (tmp_path / "d.pt").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(CheckpointError, match="no clustergym checkpoint"):
        online.initial_state(dataclasses.replace(ARGS, init_checkpoint=tmp_path / "d.pt"))


def test_the_exported_model_is_the_policy(tmp_path: Path) -> None:
    state = trained_state()
    online.export_model(dataclasses.replace(ARGS, store=tmp_path), state)
    again = online.pretrained(tmp_path / "model.pt")
    obs = np.random.default_rng(0).random(19).astype(np.float32)
    np.testing.assert_allclose(
        online.Policy(again | {"version": 0}).mean(obs), online.Policy(state).mean(obs), atol=1e-6
    )
    assert load_checkpoint(tmp_path / "model.pt", "ppo_gpu_alloc-model")["args"]["env_id"] == "GPUAllocationHistory-v0"


# -- store ----------------------------------------------------------------------------------------------------------


def allocation(store: Any, owner: str = "team/a", created_s: float | None = None, **changes: Any) -> Any:
    made = online.Allocation(
        store.next_seq, "0" * 32, time.time() if created_s is None else created_s, owner, 80.0, 4000.0, False, 60.0,
        3000.0, 0, True,
    )  # fmt: skip
    store.next_seq += 1
    store.add(dataclasses.replace(made, **changes), np.zeros(19), np.zeros(2), 0.0, None)
    return store.find(made.id)


def accept(store: Any, made: Any, reward: float = 1.0, learnable: bool = True) -> None:
    store.add_feedback(made, "accepted", (time.time(), 30.0, True, 1, 2000.0, False, reward, 0.375), learnable)
    store.remember(made, 0.375, True, False, 2000.0)


def test_experiences_are_read_once_in_order_and_only_when_there_are_enough(tmp_path: Path) -> None:
    store = online.Store(tmp_path, "process")
    connection = online.connect(tmp_path, "process")
    reader = online.ExperienceReader(connection, ARGS)
    for i in range(40):
        accept(store, allocation(store), reward=i / 10, learnable=i % 2 == 0)
    store.flush()
    assert reader.read(0, 0) is None  # 20 of 32
    for i in range(40, 70):
        accept(store, allocation(store), reward=i / 10)
    store.flush()
    batch = reader.read(0, 0)
    expected = [i / 10 for i in range(70) if i >= 40 or i % 2 == 0]
    np.testing.assert_allclose(batch.rewards, expected, rtol=1e-6)
    assert reader.read(batch.through, 1) is None
    store.close()
    connection.close()


def test_experiences_of_policies_long_gone_are_passed_over(tmp_path: Path) -> None:
    store = online.Store(tmp_path, "process")
    for version in [0] * 10 + [5] * 32:
        accept(store, allocation(store, version=version))
    store.flush()
    batch = online.ExperienceReader(store.connection, ARGS).read(0, 5 + ARGS.max_policy_lag)
    assert (len(batch.rewards), batch.skipped, batch.through) == (32, 10, 42)
    store.close()


def test_stale_experiences_at_the_head_do_not_stop_learning(tmp_path: Path) -> None:
    args = dataclasses.replace(ARGS, max_batch=ARGS.batch_size)
    store = online.Store(tmp_path, "process")
    reader = online.ExperienceReader(store.connection, args)
    for _ in range(3 * args.max_batch):
        accept(store, allocation(store, version=0))
    store.flush()
    version = args.max_policy_lag + 1
    assert reader.read(0, version) is None  # only stale ones
    for _ in range(args.batch_size - 1):
        accept(store, allocation(store, version=1))
    store.flush()
    assert reader.read(0, version) is None  # one is missing
    accept(store, allocation(store, version=1))
    store.flush()
    batch = reader.read(0, version)
    assert (len(batch.rewards), batch.skipped, batch.through) == (32, 96, 128)
    assert reader.read(batch.through, version) is None
    store.close()


def test_what_was_not_committed_is_not_believed(tmp_path: Path) -> None:
    store = online.Store(tmp_path, "process")
    made = allocation(store)
    store.flush()
    blocker = sqlite3.connect(tmp_path / "store.db", isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")

    async def refused() -> None:
        accept(store, made)
        store.count("feedback:accepted")
        await store.committed()

    with pytest.raises(online.Unwritable, match="locked"):
        asyncio.run(refused())
    blocker.execute("ROLLBACK")
    blocker.close()
    assert store.find(made.id).feedback is None
    assert store.counters() == {"allocations": 1}
    assert store.history(made.owner) == history.new_history()
    accept(store, store.find(made.id))
    store.flush()
    assert online.Store(tmp_path, "process").find(made.id).feedback == "accepted"
    store.close()


@pytest.mark.parametrize("written_every_s", [0.0, 1e9])
def test_histories_are_whole_after_a_kill_whether_they_had_been_written_or_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written_every_s: float
) -> None:
    monkeypatch.setattr(online.Store, "HISTORIES_S", written_every_s)
    store = online.Store(tmp_path, "process")
    for i in range(20):
        accept(store, allocation(store, owner=f"team/{i % 3}"))
        if i % 4 == 0:
            store.flush()
    store.flush()
    expected = {f"team/{i}": list(store.history(f"team/{i}")) for i in range(3)}
    (written,) = store.connection.execute("SELECT count(*) FROM owners").fetchone()
    assert written == (3 if written_every_s == 0 else 0)
    # The first store is not closed: this is what a killed process leaves.
    again = online.Store(tmp_path, "process")
    assert {owner: again.history(owner) for owner in expected} == expected
    again.close()
    store.connection.close()


def test_old_rows_go_and_their_numbers_do_not_come_again(tmp_path: Path) -> None:
    store = online.Store(tmp_path, "process")
    old = allocation(store, created_s=1000.0)
    accept(store, old)
    new = allocation(store)
    store.flush()
    assert store.oldest_rows(2000.0) == 1
    assert store.find(old.id) is None
    assert store.find(new.id) is not None
    assert store.oldest_rows(2000.0) == 0
    store.oldest_rows(time.time() + 1)
    store.close()
    again = online.Store(tmp_path, "process")
    assert again.next_seq == 3
    made = allocation(again)
    accept(again, made)
    again.flush()
    # Feedback numbers go on as well: a checkpoint that has learned up to 1 must see this one as new.
    assert again.connection.execute("SELECT seq FROM feedback").fetchall() == [(2,)]
    again.close()


def test_an_id_needs_both_halves(tmp_path: Path) -> None:
    store = online.Store(tmp_path, "process")
    made = allocation(store)
    assert store.find(made.id) is made
    for forged in (
        f"{made.seq:x}-{'1' * 32}",
        f"{made.seq:x}",
        f"{made.seq:x}-",
        "",
        "x",
        "1-" + "g" * 32,
        f"2-{'0' * 32}",
    ):
        assert store.find(forged) is None
    store.close()


def test_a_store_of_another_schema_is_refused(tmp_path: Path) -> None:
    online.Store(tmp_path, "process").close()
    with sqlite3.connect(tmp_path / "store.db") as connection:
        connection.execute("UPDATE meta SET value = 99 WHERE key = 'schema'")
    connection.close()
    with pytest.raises(ValueError, match="has schema 99; this agent reads 1"):
        online.Store(tmp_path, "process")


def test_a_log_that_has_grown_is_moved_into_the_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(online.Store, "LOG_BYTES", 1)
    store = online.Store(tmp_path, "process")
    made = allocation(store)
    store.flush()
    before = (tmp_path / "store.db").stat().st_size
    asyncio.run(store.tidy())
    assert (tmp_path / "store.db").stat().st_size > before
    assert store.find(made.id) is made
    store.close()


@pytest.mark.parametrize(
    ("qos_class", "sensitive"),
    [
        ("best-effort", False), ("BestEffort", False), ("BE", False), ("Burstable", False), ("burstable ", False),
        ("latency-sensitive", True), ("LS", True), ("Guaranteed", True), ("", True), ("anything", True),
    ],
)  # fmt: skip
def test_who_is_not_known_to_be_best_effort_is_treated_with_care(qos_class: str, sensitive: bool) -> None:
    assert online.is_latency_sensitive(qos_class) is sensitive


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"host": "0.0.0.0"}, "anybody on the network could teach the agent"),
        ({"tls_cert": Path("x")}, "--tls-cert and --tls-key come together"),
        ({"batch_size": 0}, "--batch-size is 0: expected more than 0"),
        ({"max_batch": 8}, "--max-batch 8 is less than --batch-size 32"),
        ({"gamma": 1.5}, "--gamma is 1.5"),
    ],
)
def test_settings_that_cannot_work_are_refused(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        online.check(dataclasses.replace(ARGS, **change))
