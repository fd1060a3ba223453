"""The VPA rule, rails, guard, hindsight, and the trial that lets the policy decide."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from clustergym.agent.hindsight import Measured, best_reward, would_be
from clustergym.agent.owners import GuardSettings, OwnerState
from clustergym.agent.rails import Amounts, RailSettings, apply_bounds, apply_rails
from clustergym.agent.service import vpa_amounts
from clustergym.agent.traffic import SimulatedNode
from clustergym.agent.trial import LENGTH, Trial
from clustergym.gpu_allocation import compute_reward
from clustergym.gpu_allocation import state as columns
from clustergym.gpu_allocation.rules import RULES


def measure(owner: OwnerState, share: float, time_s: float = 0.0, credit: float = 1.0, oom: bool = False) -> None:
    """A pod that used this share of its requested cores and memory (4000 MB)."""
    owner.measure(time_s, credit, share, share, 4000 * share, share, oom)


# The VPA rule


def test_the_vpa_rule_is_that_of_the_simulator() -> None:
    node = SimulatedNode(5, 400)
    rule, owners = RULES["vpa-fraction"](node.batch), [OwnerState() for _ in range(6)]
    for _ in range(300):
        ask = node.batch.state.ask[0].tolist()
        owner = owners[int(ask[columns.ASK_OWNER])]
        cores, memory = (float(amount[0]) for amount in rule.decide())  # type: ignore[attr-defined]
        ours = vpa_amounts(owner, Amounts(ask[columns.ASK_CORES], ask[columns.ASK_MEMORY]))
        assert ours.cores == pytest.approx(np.ceil(cores - 1e-6), abs=1e-6)
        assert ours.memory_mb == pytest.approx(np.ceil(memory - 1e-6), abs=1)
        node.batch.step(rule.act())
        rule.learn()
        out = node.batch.outcome[0].tolist()
        oom, used_mb = out[columns.OUTCOME_OOM] > 0.5, out[columns.OUTCOME_USED_MB]
        needed_mb = max(1.2 * used_mb, used_mb + 100) if oom else used_mb
        usage = out[columns.OUTCOME_USAGE] / out[columns.OUTCOME_REQUEST]
        owner = owners[int(out[columns.OUTCOME_OWNER])]
        memory_share = needed_mb / out[columns.OUTCOME_REQUEST_MB]
        owner.measure(out[columns.OUTCOME_TIME], 1.0, usage, usage, needed_mb, memory_share, oom)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1e5), st.floats(0, 1), st.booleans()), max_size=20))
def test_the_state_of_an_owner_survives_storage(pods: list[tuple[float, float, float, bool]]) -> None:
    owner = OwnerState()
    for share, time_s, credit, met in pods:
        measure(owner, share, time_s, credit)
        owner.finish(share, 0.5, met, False, share)
        owner.judge(True, met, credit, GuardSettings())
    again = OwnerState.from_json(owner.to_json())
    assert again.to_json() == owner.to_json()
    request = Amounts(80, 4000)
    assert vpa_amounts(again, request) == vpa_amounts(owner, request)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("evidence", "many"), ("evidence", float("nan")), ("qos", 1e300), ("qos", -0.1), ("hold", float("-inf")),
        ("peak_need", None), ("history", [0.0]), ("cores", {"weights": {"115": 1.0}, "time_s": 0.0}),
        ("memory", {"weights": {"3": -1.0}, "time_s": 0.0}), ("cores", []), ("another", 1.0),
    ],
)  # fmt: skip
def test_a_damaged_state_is_refused(field: str, value: Any) -> None:
    content = json.loads(OwnerState().to_json())
    with pytest.raises(ValueError):
        OwnerState.from_json(json.dumps(content | {field: value}))


@pytest.mark.parametrize("field", json.loads(OwnerState().to_json()))
def test_a_state_without_a_field_is_refused(field: str) -> None:
    content = json.loads(OwnerState().to_json())
    del content[field]
    with pytest.raises(ValueError):
        OwnerState.from_json(json.dumps(content))


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", "[" * 100_000])
def test_what_is_no_state_is_refused(text: str) -> None:
    with pytest.raises((ValueError, RecursionError)):
        OwnerState.from_json(text)


def test_a_steady_owner_gets_what_the_rule_says() -> None:
    """Pods that use 18 of 80 %: 1.15 × 18 rounded up to a bucket, and for sensitive pods 1.4 × 18 in the long run."""
    owner, request = OwnerState(), Amounts(80, 4000)
    for _ in range(5):
        measure(owner, 18 / 80)
    # No step below the last grant limits it: after the first pods 1.1 × 18 × (1 + 2 / 5).
    rule = apply_rails(vpa_amounts(owner, request), request, False, owner, RailSettings())
    assert rule.amounts.cores == 28
    for _ in range(345):
        measure(owner, 18 / 80)
    rule = apply_rails(vpa_amounts(owner, request), request, False, owner, RailSettings())
    assert 20.7 <= rule.amounts.cores <= 20.7 * 1.05 + 1
    sensitive = apply_rails(vpa_amounts(owner, request), request, True, owner, RailSettings())
    assert sensitive.amounts.cores == 29  # 1.4 × 18 × (1 + 50 / 350) = 28.8
    assert "rail on cores: largest need" in sensitive.limits


# Rails

AMOUNT = st.tuples(st.floats(1, 100), st.floats(1, 1 << 20)).map(lambda pair: Amounts(*pair))


@settings(max_examples=200, deadline=None)
@given(
    AMOUNT,
    AMOUNT,
    st.booleans(),
    st.floats(0, 500),
    st.floats(0, 1),
    st.floats(0, 1e6),
    st.floats(0, 1),
    AMOUNT,
    AMOUNT,
)
@example(Amounts(1, 1), Amounts(80, 4000), False, 5e-324, 0.0, 0.0, 0.0, Amounts(1, 1), Amounts(100, 1e5))
def test_no_grant_breaks_a_rail_or_bound(
    proposal: Amounts, request: Amounts, sensitive: bool, pods: float, need: float, peak_mb: float, peak: float,
    least: Amounts, most: Amounts,
) -> None:  # fmt: skip
    owner, rails = OwnerState(), RailSettings()
    owner.evidence = owner.active = pods
    owner.peak_need, owner.peak_memory_mb, owner.peak_memory_share = need, peak_mb, peak
    found, limits = apply_rails(proposal, request, sensitive, owner, rails)
    assert found.cores <= request.cores
    assert found.memory_mb <= request.memory_mb
    cores, memory = request
    if pods:
        rare = 50 if sensitive else 2
        cores = (1.4 if sensitive else 1.1) * need * request.cores * (pods + rare) / pods
        memory = (1.4 if sensitive else 1.2) * peak * request.memory_mb * (pods + rare) / pods
    memory = max(memory, 1.2 * peak_mb)
    assert found.cores >= min(max(cores, 0.1 * request.cores, 10), request.cores) - 1e-6
    assert found.memory_mb >= min(max(memory, 0.1 * request.memory_mb, 512), request.memory_mb) - 1e-6
    # What changed the proposal upwards has a name.
    raised = [unit for unit, a, b in zip(("cores", "memory"), found, proposal, strict=True) if a > b]
    assert [limit.split()[2].rstrip(":") for limit in limits] == raised
    bounded = apply_bounds(found, request, least, most).amounts
    for amount, low, high, asked, before in zip(bounded, least, most, request, found, strict=True):
        assert amount == min(max(min(before, high), low), asked)


def test_few_pods_give_a_latency_sensitive_pod_a_large_margin() -> None:
    request, grants = Amounts(100, 10_000), []
    for pods in (0, 10, 50, 1000):
        owner = OwnerState()
        for _ in range(pods):
            measure(owner, 0.2)
        grants.append(apply_rails(Amounts(10, 512), request, True, owner, RailSettings()).amounts)
    assert grants == [(100, 10_000), (100, 10_000), (56, 5600), (30, 2940)]


# Guard


def judge(owner: OwnerState, met: bool, n: int = 1, sensitive: bool = True) -> list[str | None]:
    found = []
    for _ in range(n):
        owner.evidence += 1
        found.append(owner.judge(sensitive, met, 1.0, GuardSettings()))
    return found


def test_an_owner_is_reduced_after_the_first_pods_and_falls_with_its_qos() -> None:
    owner = OwnerState()
    assert judge(owner, True, 4) == [None] * 4
    assert not owner.reduced
    judge(owner, True)
    assert owner.reduced
    # One missed objective of a latency-sensitive pod is enough.
    assert judge(owner, False) == ["QoS 0.95 is below the guard 0.97"]
    assert not owner.reduced
    # Hysteresis: it must recover above the guard, and wait longer than before.
    assert next(i for i in range(1000) if judge(owner, True)[0]) >= 9
    assert owner.qos >= 0.985
    judge(owner, False)
    assert next(i for i in range(1000) if judge(owner, True)[0]) >= 19


def test_best_effort_owners_may_miss_more() -> None:
    owner = OwnerState()
    judge(owner, True, 30, sensitive=False)
    judge(owner, False, sensitive=False)
    assert owner.reduced
    judge(owner, False, 2, sensitive=False)
    assert not owner.reduced


# Hindsight


def test_would_be_knows_what_was_enough() -> None:
    measured = Measured(requested_cores=80, usage=30, needed_cores=40, needed_mb=2000, pods=2)
    assert would_be(measured, 60, 3000) == (compute_reward(60, 3000, 30, True, 2), True)
    assert would_be(measured, 39, 3000) == (compute_reward(39, 3000, 30, False, 2), False)
    assert would_be(measured, 20, 3000) == (compute_reward(20, 3000, 20, False, 2), False)
    assert would_be(measured, 60, 1999) == (compute_reward(60, 1999, 0, False, 2), False)
    best = max(would_be(measured, cores, 2000)[0] for cores in range(10, 81))
    assert best_reward(measured) == best == compute_reward(40, 2000, 30, True, 2)


# Trial


def play(differences: Any) -> tuple[Trial, list[int]]:
    """The trial after these differences, and when the deciding arm changed."""
    trial = Trial()
    return trial, [i for i, difference in enumerate(differences) if trial.add(float(difference))]


def test_a_policy_that_is_not_better_almost_never_takes_over() -> None:
    """With alpha 0.001 per trial: 200 policies, equal to the rule on average, with 15 trials each, so 3 expected."""
    rng = np.random.default_rng(0)
    taken = sum(len(play(rng.normal(0, 0.5, 15 * LENGTH))[1]) > 0 for _ in range(200))
    assert taken <= 8


@pytest.mark.parametrize(("gain", "within"), [(0.5, 60), (0.1, 1500)])
def test_a_better_policy_takes_over_and_a_worse_one_hands_back(gain: float, within: int) -> None:
    """The policy is better by ``gain`` for 5,000 pods and then worse by as much, as when the pods change."""
    rng, first, back = np.random.default_rng(1), [], []
    for _ in range(20):
        trial, changes = play(np.concatenate([rng.normal(gain, 0.3, 5000), rng.normal(-gain, 0.3, 5000)]))
        assert len(changes) == 2
        assert not trial.policy_decides
        first.append(changes[0])
        back.append(changes[1] - 5000)
    assert min(back) > 0
    assert np.median(first) < within
    assert np.median(back) < 4 * within  # the trial has to lose first what it had won


def test_old_losses_do_not_keep_a_policy_out_for_ever() -> None:
    """A policy that was worse for 100,000 pods and has learned takes over within two trials."""
    rng = np.random.default_rng(2)
    _, (changed,) = play(np.concatenate([rng.normal(-0.5, 0.3, 100_000), rng.normal(0.3, 0.3, 2 * LENGTH)]))
    assert changed > 100_000
