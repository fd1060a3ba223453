"""Rails of the agent: limits on grants, levels of owners, the VPA rule, hindsight, versions and rollback."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_client import Server, agent_server
from clustergym import cli
from clustergym.agent import versions
from clustergym.agent.hindsight import Measured, best_reward, would_be
from clustergym.agent.owners import POLICY, REQUEST, VPA, GuardSettings, OwnerState
from clustergym.agent.rails import Bounds, RailSettings, bound, limit
from clustergym.agent.service import vpa_amounts
from clustergym.agent.traffic import SimulatedNode
from clustergym.agent.versions import CHECKPOINT_KIND, SequentialTest
from clustergym.common.checkpoints import load_checkpoint, save_checkpoint
from clustergym.gpu_allocation import compute_reward
from clustergym.gpu_allocation import state as columns
from clustergym.gpu_allocation.rules import RULES
from processes import wait_until
from trainers import load_trainer

# The VPA rule


def test_the_vpa_rule_is_that_of_the_simulator() -> None:
    node = SimulatedNode(5, 400)
    rule, owners = RULES["vpa-fraction"](node.batch), [OwnerState() for _ in range(6)]
    for _ in range(300):
        ask = node.batch.state["ask"][0].tolist()
        owner = owners[int(ask[columns.ASK_OWNER])]
        cores, memory = (float(amount[0]) for amount in rule.decide())  # type: ignore[attr-defined]
        ours, ours_mb = vpa_amounts(owner, ask[columns.ASK_CORES], ask[columns.ASK_MEMORY])
        assert ours == pytest.approx(np.ceil(cores - 1e-6), abs=1e-6)
        assert ours_mb == pytest.approx(np.ceil(memory - 1e-6), abs=1)
        node.batch.step(rule.act(), autoreset=False)
        rule.learn()
        out = node.batch.outcome[0].tolist()
        oom, used_mb = out[columns.OUTCOME_OOM] > 0.5, out[columns.OUTCOME_USED_MB]
        needed_mb = max(1.2 * used_mb, used_mb + 100) if oom else used_mb
        request, request_mb = out[columns.OUTCOME_REQUEST], out[columns.OUTCOME_REQUEST_MB]
        owner.remember(
            time_s=out[columns.OUTCOME_TIME], share=1.0, memory_share=1.0, needed=0.5, oom=oom,
            usage_share=out[columns.OUTCOME_USAGE] / request, needed_mb=needed_mb,
            needed_memory_share=needed_mb / request_mb,
        )  # fmt: skip


def test_the_state_of_an_owner_survives_storage() -> None:
    state, rng = OwnerState(), np.random.default_rng(0)
    for i in range(50):
        remember(state, needed=float(rng.random()), time_s=1.7e9 + 3600.5 * i)
        state.judge(True, True, True, 0.1, GuardSettings())
    again = OwnerState.from_array(np.frombuffer(state.to_array().tobytes(), np.float32))
    assert again.level == state.level
    np.testing.assert_allclose(again.to_array(), state.to_array())
    assert again.cores.time_s == pytest.approx(state.cores.time_s, abs=0.01)
    assert again.cores.recommend() == state.cores.recommend()


# Rails


def remember(owner: OwnerState, **changes: Any) -> None:
    usual: dict[str, Any] = {
        "time_s": 0.0, "share": 1.0, "memory_share": 1.0, "needed": 0.4, "usage_share": 0.4, "needed_mb": 1000.0,
        "needed_memory_share": 0.25, "oom": False,
    }  # fmt: skip
    owner.remember(**(usual | changes))


SHARE = st.floats(0, 1)


@settings(max_examples=200, deadline=None)
@given(SHARE, SHARE, SHARE, SHARE, st.floats(1, 100), st.floats(1, 50_000), st.booleans(), SHARE, st.floats(0, 40_000))
def test_no_grant_breaks_a_rail(
    cores_share: float, memory_share: float, last: float, last_memory: float, requested: float, requested_mb: float,
    sensitive: bool, need: float, peak_mb: float,
) -> None:  # fmt: skip
    owner, rails = OwnerState(share=0.0, memory_share=0.0, peak_need=need, peak_memory_mb=peak_mb), RailSettings()
    cores, memory = limit(
        cores_share * requested, memory_share * requested_mb, requested, requested_mb, sensitive, owner, last,
        last_memory, rails,
    )  # fmt: skip
    assert 0 < cores <= requested
    assert 0 < memory <= requested_mb
    assert memory >= min(1.2 * peak_mb, requested_mb)
    assert cores >= min(1.1 * need * requested, requested) - 1e-9
    assert cores >= min(0.1 * requested, requested) - 1e-9
    assert cores >= min((last - 0.1) * requested, requested) - 1e-6
    assert memory >= min((last_memory - 0.1) * requested_mb, requested_mb) - 1e-6


def test_few_pods_give_a_latency_sensitive_pod_a_large_margin() -> None:
    """The margin is 1.4 × (1 + 50 / pods that used cores) for cores, and the same with all pods for memory."""
    owner = OwnerState()
    assert limit(1, 1, 100, 4000, True, owner, 0, 0, RailSettings()) == (100, 4000)
    for pods in range(1, 201):
        # Every other pod is idle: it tells about memory, not about cores.
        remember(owner, needed=0.1 * (pods % 2), needed_mb=400.0, needed_memory_share=0.1)
    owner.share = owner.memory_share = 0.0
    cores, memory = limit(1, 1, 100, 4000, True, owner, 0, 0, RailSettings())
    # After 200 pods, 100 of them active. The peak of cores has faded a little since the last active pod.
    assert (cores, memory) == (math.ceil(100 * 0.1 * OwnerState.FADE * 1.4 * 1.5), math.ceil(4000 * 0.1 * 1.4 * 1.25))
    best_effort = limit(1, 1, 100, 4000, False, owner, 0, 0, RailSettings())
    assert best_effort[0] == 11


def test_bounds_of_the_workload_hold_within_the_request() -> None:
    assert bound(50, 3000, 80, 4000, Bounds(60, 100, 0, 2000)) == (60, 2000)
    assert bound(50, 3000, 80, 4000, Bounds(90, 100, 5000, 9000)) == (80, 4000)
    assert bound(50, 3000, 80, 4000, Bounds()) == (50, 3000)


# Levels


def judge(owner: OwnerState, met: bool, n: int = 1, sensitive: bool = True, **changes: Any) -> list[str | None]:
    found = []
    for _ in range(n):
        remember(owner)
        usual = {"advised_met": True, "advantage": 0.1}
        found.append(owner.judge(sensitive, met, **(usual | changes), settings=GuardSettings()))
    return found


def test_an_owner_rises_pod_by_pod_and_falls_with_its_qos() -> None:
    owner = OwnerState()
    assert judge(owner, True, 4) == [None] * 4
    assert owner.level == REQUEST
    judge(owner, True)
    assert owner.level == VPA
    judge(owner, True, 9)
    assert owner.level == VPA
    judge(owner, True)
    assert owner.level == POLICY
    # One missed objective of a latency-sensitive pod is enough.
    (reason,) = judge(owner, False)
    assert (owner.level, reason) == (VPA, "QoS 0.95 is below the guard 0.97")
    judge(owner, False)
    assert owner.level == REQUEST
    # Hysteresis: it must recover above the guard, and wait longer than before.
    waited = next(i for i in range(1000) if judge(owner, True)[0])
    assert waited >= 20
    assert owner.qos >= 0.985
    assert owner.level == VPA


def test_best_effort_owners_may_miss_more() -> None:
    owner = OwnerState()
    judge(owner, True, 30, sensitive=False)
    judge(owner, False, sensitive=False)
    assert owner.level == POLICY
    judge(owner, False, 2, sensitive=False)
    assert owner.level == VPA


@pytest.mark.parametrize("change", [{"advised_met": False}, {"advantage": -0.1}])
def test_the_policy_must_be_good_in_hindsight_before_it_decides(change: dict[str, Any]) -> None:
    owner = OwnerState()
    judge(owner, True, 100, **change)
    assert owner.level == VPA


def test_a_policy_that_becomes_worse_than_the_vpa_rule_is_replaced() -> None:
    owner = OwnerState()
    judge(owner, True, 30)
    assert owner.level == POLICY
    reasons = [reason for reason in judge(owner, True, 60, advantage=-0.2) if reason]
    assert reasons[0] is not None
    assert "the VPA rule is better by 0.03" in reasons[0]
    assert owner.level == VPA


# Hindsight


def test_would_be_knows_what_was_enough() -> None:
    measured = Measured(requested_cores=80, usage=30, needed_cores=40, needed_mb=2000, pods=2)
    assert would_be(measured, 60, 3000) == (compute_reward(60, 3000, 30, True, 2), True)
    assert would_be(measured, 39, 3000) == (compute_reward(39, 3000, 30, False, 2), False)
    assert would_be(measured, 20, 3000) == (compute_reward(20, 3000, 20, False, 2), False)
    assert would_be(measured, 60, 1999) == (compute_reward(60, 1999, 0, False, 2), False)
    best = max(would_be(measured, cores, 2000)[0] for cores in range(10, 81))
    assert best_reward(measured) == best == compute_reward(40, 2000, 30, True, 2)


# Sequential test


def verdict(differences: Any) -> tuple[str | None, int]:
    test = SequentialTest()
    for i, difference in enumerate(differences):
        found = test.add(float(difference))
        if found is not None:
            return found, i + 1
    return None, len(differences)


def test_equal_versions_are_rarely_called_worse() -> None:
    """With alpha 0.001, at most 0.1 % of tests; 400 tests of 3,000 noisy samples each."""
    rng = np.random.default_rng(0)
    worse = sum(verdict(rng.normal(0, 0.5, 3000))[0] == "worse" for _ in range(400))
    assert worse <= 2


@pytest.mark.parametrize(("loss", "within"), [(0.5, 60), (0.1, 1500)])
def test_a_worse_version_is_found(loss: float, within: int) -> None:
    rng = np.random.default_rng(1)
    found = [verdict(rng.normal(-loss, 0.3, 5000)) for _ in range(20)]
    assert {one for one, _ in found} == {"worse"}
    assert np.median([n for _, n in found]) < within


def test_a_better_version_is_accepted() -> None:
    rng = np.random.default_rng(2)
    assert verdict(rng.normal(0.1, 0.3, 5000))[0] == "fine"


# Versions


def make_store(folder: Path, n: int = 3) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for version in range(n):
        state = {
            "agent": {"w": torch.full((2,), float(version))}, "optimizer": {}, "statistics": {},
            "version": version, "learned_through": 10 * version, "experiences": 32 * version,
        }  # fmt: skip
        versions.save_version(folder, state)
    return state


def test_versions_are_kept_and_the_champion_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "KEPT_VERSIONS", 3)
    make_store(tmp_path, 2)
    versions.write_champion(tmp_path, 1)
    for version in range(2, 9):
        state = load_checkpoint(tmp_path / "checkpoint.pt", CHECKPOINT_KIND) | {"version": version}
        versions.save_version(tmp_path, state)
    assert versions.kept_versions(tmp_path) == [1, 6, 7, 8]
    versions.keep_version(tmp_path, 8)  # again, as after a restart
    assert not list((tmp_path / "versions").glob("*.[0-9a-f]*[0-9a-f]"))
    # The checkpoint and its version are one file on the disk.
    assert os.path.samefile(tmp_path / "checkpoint.pt", versions.version_path(tmp_path, 8))


def test_a_rollback_has_old_weights_and_a_new_number(tmp_path: Path) -> None:
    state = make_store(tmp_path)
    versions.request_rollback(tmp_path, 1, "test")
    after = versions.handle_request(tmp_path, state, through=99)
    assert (after["version"], after["learned_through"], after["experiences"]) == (3, 99, 64)
    assert after["agent"]["w"].tolist() == [1.0, 1.0]
    assert versions.read_champion(tmp_path) == 3
    assert versions.read_request(tmp_path) is None


def test_a_rollback_is_not_repeated_after_a_kill(tmp_path: Path) -> None:
    """The process is killed after the checkpoint was written, before the request was deleted."""
    state = make_store(tmp_path)
    request = versions.request_rollback(tmp_path, 1, "test")
    after = versions.handle_request(tmp_path, state, 99)
    (tmp_path / "rollback.json").write_text(json.dumps(request._asdict()))
    assert versions.handle_request(tmp_path, after, 120) is after
    assert not (tmp_path / "rollback.json").exists()


def test_a_rollback_that_is_not_possible_changes_nothing(tmp_path: Path) -> None:
    state = make_store(tmp_path)
    versions.request_rollback(tmp_path, 17, "test")
    assert versions.handle_request(tmp_path, state, 99) is state
    assert versions.read_request(tmp_path) is None
    (tmp_path / "rollback.json").write_text("{")
    assert versions.read_request(tmp_path) is None


def test_the_command_refuses_versions_that_do_not_exist(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["agent", "rollback", "--store", str(tmp_path)]) == 2
    make_store(tmp_path)
    assert cli.main(["agent", "rollback", "--store", str(tmp_path)]) == 2
    assert cli.main(["agent", "rollback", "--store", str(tmp_path), "--to", "9"]) == 2
    errors = capsys.readouterr().err
    for text in ("is not the store of an agent", "choose one with --to", "the versions are 0, 1, 2"):
        assert text in errors


# With a running agent

REQUEST_BODY = {"owner": "team/Deployment/web", "cores": 80, "memory": 4000, "qos_class": "best-effort"}


def round_trip(server: Server, usage: float = 20, **changes: Any) -> dict[str, Any]:
    """One pod that needs 25 % of the GPU and 1000 MB."""
    status, made = server.post("/allocate", REQUEST_BODY | changes)
    assert status == 200, made
    body = {
        "allocation_id": made["allocation_id"], "actual_usage": usage, "qos_met": made["cores"] >= 25, "pods": 1,
        "memory_used": min(1000, made["memory"]), "oom": made["memory"] < 1000, "pressure": 25 / made["cores"],
    }  # fmt: skip
    status, answer = server.post("/feedback", body)
    assert (status, answer["status"]) in ((200, "accepted"), (200, "stale")), answer
    return dict(made)


def version(server: Server) -> int:
    return int(json.loads(server.get("/readyz"))["policy_version"])


def test_grants_go_down_in_steps_and_never_below_the_peaks(tmp_path: Path) -> None:
    with agent_server(tmp_path, "--explore", "off") as server:
        made = [round_trip(server) for _ in range(40)]
        assert [(one["cores"], one["decided_by"]) for one in made[:5]] == [(80, "request")] * 5
        assert {one["decided_by"] for one in made[5:10]} == {"vpa"}
        for before, after in itertools.pairwise(made):
            assert after["cores"] >= before["cores"] - 8
            assert after["memory"] >= before["memory"] - 400
        assert made[-1]["cores"] < 50
        assert min(one["cores"] for one in made) >= 27  # 1.1 × 25
        assert min(one["memory"] for one in made) >= 1200
        # The workload's own bounds.
        bounded = round_trip(server, min_cores=70, max_memory=1100)
        assert (bounded["cores"], bounded["memory"]) == (70, 1100)
        # A sample of a running pod raises the peaks at once.
        status, pod = server.post("/allocate", REQUEST_BODY)
        sample = {"actual_usage": 20, "qos_met": True, "memory_used": 3000, "final": False}
        assert server.post("/feedback", sample | {"allocation_id": pod["allocation_id"]})[1] == {
            "status": "sample",
            "reward": None,
        }
        assert server.post("/allocate", REQUEST_BODY)[1]["memory"] >= 3600
        # Feedback under another owner's name is not accepted.
        wrong = sample | {"allocation_id": pod["allocation_id"], "owner": "somebody/else", "final": True}
        assert server.post("/feedback", wrong)[1]["status"] == "unknown"
        assert status == 200
        server.kill()
    with agent_server(tmp_path, "--explore", "off") as server:
        # Levels and peaks survive a kill.
        again = server.post("/allocate", REQUEST_BODY)[1]
        assert again["decided_by"] in ("vpa", "policy")
        assert again["memory"] >= 1200


def test_shadow_mode_grants_requests_scores_recommendations_and_learns(tmp_path: Path) -> None:
    with agent_server(tmp_path, "--shadow", "--update-interval-s", 0.05) as server:
        made = [round_trip(server) for _ in range(40)]
        assert {(one["cores"], one["memory"], one["decided_by"]) for one in made} == {(80, 4000, "shadow")}
        # The request, then the VPA rule in steps of 10 % of the request: it wants 24 %, but the rail is 1.1 × 25 %.
        recommended_cores = [one["recommended_cores"] for one in made]
        assert recommended_cores[:15] == [80] * 5 + [72, 64, 56, 48, 40, 32, 28, 28, 28, 28]
        # Then the policy, which explores: every recommendation is within the rails.
        assert min(recommended_cores[15:]) >= 28
        assert all(after >= before - 8 for before, after in itertools.pairwise(recommended_cores))
        wait_until(lambda: version(server) >= 1, "an update from what would have been granted")
        metrics = server.metrics()
        label = '{qos_class="best-effort"}'
        assert metrics[f"clustergym_recommended_qos_mean{label}"] == 1
        granted, recommended = (metrics[f"clustergym_{name}_mean{label}"] for name in ("reward", "recommended_reward"))
        assert granted == pytest.approx(compute_reward(80, 4000, 20, True, 1))
        # The last recommendations are smaller, so the same use is more efficient.
        assert recommended > granted
        assert 0 < metrics[f"clustergym_regret_mean{label}"] < compute_reward(25, 1000, 20, True, 1) - granted


def test_an_operator_can_roll_back_a_running_agent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with agent_server(tmp_path, "--update-interval-s", 0.05) as server:
        while version(server) < 2:
            for _ in range(32):
                round_trip(server)
        assert cli.main(["agent", "versions", "--store", str(tmp_path)]) == 0
        assert cli.main(["agent", "rollback", "--store", str(tmp_path), "--to", "1"]) == 0
        assert "the running agent goes back to version 1" in capsys.readouterr().out
        wait_until(lambda: not (tmp_path / "rollback.json").exists(), "the rollback")
        state = load_checkpoint(tmp_path / "checkpoint.pt", CHECKPOINT_KIND)
        old = load_checkpoint(versions.version_path(tmp_path, 1), CHECKPOINT_KIND)
        assert all(torch.equal(state["agent"][name], old["agent"][name]) for name in old["agent"])
        assert state["rolled_back_to"] == 1
        wait_until(lambda: version(server) == state["version"], "the server uses it")
        assert "by the operator" in server.log.read_text()
        children = psutil.Process(server.process.pid).children()
        server.kill()
        wait_until(lambda: not any(child.is_running() for child in children), "the learner process ends")
    # And one that is not running.
    assert cli.main(["agent", "rollback", "--store", str(tmp_path), "--to", "0"]) == 0
    assert f"version {state['version'] + 1} has the weights of version 0" in capsys.readouterr().out


def test_a_harmful_version_is_rolled_back_automatically(tmp_path: Path) -> None:
    """A policy that advises the whole request replaces one that advises half of it: the test must find it."""
    flags = ("--update-interval-s", 0.05, "--batch-size", 1000, "--max-batch", 1000, "--shadow", "--grant-step", 1)
    online = load_trainer("ppo_gpu_alloc_online")
    half = online.initial_state(online.Args())
    half["agent"]["actor.4.bias"] = -(torch.arange(24.0) - 10).abs().repeat(2)
    online.export_model(online.Args(run_dir=tmp_path / "half"), half)
    with agent_server(tmp_path, *flags, "--init-checkpoint", tmp_path / "half" / "model.pt") as server:
        for _ in range(10):
            round_trip(server)
        good = load_checkpoint(tmp_path / "checkpoint.pt", CHECKPOINT_KIND)
        wait_until(lambda: versions.kept_versions(tmp_path) == [0], "the first version is kept")
        bad = {**good["agent"], "actor.4.bias": torch.linspace(0.0, 5.0, 24).repeat(2)}
        save_checkpoint(tmp_path / "checkpoint.pt", CHECKPOINT_KIND, good | {"agent": bad, "version": 1})
        wait_until(lambda: version(server) == 1, "the bad version is in use")
        for i in range(800):
            round_trip(server, usage=24, cores=100)
            if i % 20 == 0 and server.metrics()["clustergym_rollbacks_total"]:
                break
        assert server.metrics()["clustergym_rollbacks_total"] == 1
        assert "versions after 0 are worse" in server.log.read_text()
        wait_until(lambda: "rolled back from version" in server.log.read_text(), "the learner has rolled back")
        state = load_checkpoint(tmp_path / "checkpoint.pt", CHECKPOINT_KIND)
        assert torch.equal(state["agent"]["actor.4.bias"], good["agent"]["actor.4.bias"])


def test_rails_can_be_configured() -> None:
    from clustergym.agent.settings import ServerSettings

    with pytest.raises(ValueError, match="--grant-floor is 2: expected 0 to 1"):
        dataclasses.replace(ServerSettings(), grant_floor=2).check()
