"""Intervals, paired differences, and the rows of the comparison."""

from __future__ import annotations

import numpy as np
import pytest

from clustergym import SyntheticConfig, synthetic_trace
from clustergym.moe_offload.evaluation import change, compare, make_environment, play, policy_names, stall_interval
from clustergym.moe_offload.kernels.state import HITS, LOADS, N_STATS, NEEDED, PREFETCHES
from clustergym.moe_offload.rules import RULES, Outcome, Workload, start_values
from clustergym.moe_offload.simulator import build_task
from clustergym.moe_offload.specs import OffloadConfig
from clustergym.moe_offload.tables import Tables


def outcome(stall_ms: np.ndarray, tokens: np.ndarray) -> Outcome:
    n = len(tokens)
    return Outcome(tokens, stall_ms, np.ones(n), np.ones((n, N_STATS), np.int64))


def test_interval_of_a_ratio_agrees_with_its_standard_error() -> None:
    rng = np.random.default_rng(0)
    tokens = rng.integers(50, 150, 400)
    per_token = rng.normal(2.0, 0.5, 400)
    found = outcome(per_token * tokens, tokens)
    mean = found.stall_ms_per_token
    error = np.sqrt((((per_token - mean) * tokens) ** 2).sum()) / tokens.sum()
    assert stall_interval(found) == pytest.approx((mean - 1.96 * error, mean + 1.96 * error), abs=0.2 * error)


def test_equal_sequences_leave_no_doubt() -> None:
    found = outcome(np.full(20, 30.0), np.full(20, 10))
    assert stall_interval(found) == (3.0, 3.0)


def test_a_paired_difference_does_not_depend_on_the_sequences() -> None:
    rng = np.random.default_rng(0)
    tokens = rng.integers(50, 150, 30)
    stall_ms = rng.exponential(1.0, 30) * tokens
    value, (low, high) = change(outcome(0.9 * stall_ms, tokens), outcome(stall_ms, tokens))
    assert (value, low, high) == pytest.approx((-0.1, -0.1, -0.1))
    assert stall_interval(outcome(stall_ms, tokens))[1] > 1.2 * stall_interval(outcome(stall_ms, tokens))[0]


def test_the_mean_of_policies_is_that_of_each_episode() -> None:
    tokens = np.array([5, 10])
    found = Outcome.mean([outcome(np.array([1.0, 8.0]), tokens), outcome(np.array([3.0, 4.0]), tokens)])
    assert found.stall_ms.tolist() == [2.0, 6.0]
    assert found.stall_ms_per_token == 8 / 15
    assert found.generated == 2


@pytest.fixture(scope="module")
def workload() -> Workload:
    config = SyntheticConfig(n_tokens=600, n_layers=6, n_experts=16, top_k=2, mean_seq_len=30, seq_len_spread=0.5)
    trace = synthetic_trace(config)
    tables = Tables.count(trace)
    return Workload(build_task(OffloadConfig(trace, "all"), tables), trace, tables)


def test_rows_of_rules_and_bounds(workload: Workload) -> None:
    tuned = {name: (RULES[name], start_values(RULES[name])) for name in ("lru", "decayed-lfu", "belady", "clairvoyant")}
    rows = {row.policy: row for row in compare(workload, tuned, 0.375)}
    assert [rows[name].kind for name in tuned] == ["rule", "rule", "bound", "bound"]
    assert rows["belady"].belady_regret_ms == 0
    assert rows["clairvoyant"].stall_ms_per_token < rows["belady"].stall_ms_per_token
    best = min(("lru", "decayed-lfu"), key=lambda name: rows[name].stall_ms_per_token)
    assert rows[best].against_best_rule == 0
    assert rows["belady"].against_best_rule_ci95[1] < 0
    for name, row in rows.items():
        found = workload.run(*tuned[name])
        assert row.ci95[0] < row.stall_ms_per_token < row.ci95[1]
        served = found.stall_ms.sum() + found.compute_ms.sum()
        assert row.tokens_per_s == pytest.approx(1000 * workload.trace.n_tokens / served)
        assert row.hit_rate == pytest.approx(1 - row.loads_per_token / (6 * 2))


def test_a_policy_in_the_environment_equals_the_same_rule(workload: Workload) -> None:
    """An agent that evicts a resident of the current layer at random and never prefetches stalls as its loads say."""
    rng = np.random.default_rng(0)
    shown: list[int] = []

    def act(obs: dict[str, np.ndarray]) -> np.ndarray:
        shown.append(len(obs["action_mask"]))
        actions = []
        for mask in obs["action_mask"]:
            row, node = map(int, rng.permutation(np.argwhere(mask))[0])
            if mask[:, 0].any():  # PLACE where there is nothing to move ends the visit
                row, node = int(np.flatnonzero(mask[:, 0])[0]), 0
            actions.append((row, node))
        return np.array(actions)

    env = make_environment("MoEOffload-v0", 7, trace=workload.trace, split="all", fit_on=workload.trace, slots=0.375)
    notes: list[str] = []
    found = play(env, act, workload, progress=lambda step, note: notes.append(note))
    env.close()
    n = len(workload.task.groups)
    assert notes == [f"{i}/{n} episodes" for i in range(1, n + 1)]
    assert set(shown) == {7}
    assert found.generated == workload.trace.n_tokens
    assert found.stats[:, PREFETCHES].sum() == 0
    assert found.stall_ms == pytest.approx(found.stats[:, LOADS] * workload.task.load_ms)
    assert np.array_equal(found.stats[:, NEEDED], workload.lengths * 6 * 2)
    assert np.array_equal(found.stats[:, HITS], found.stats[:, NEEDED] - found.stats[:, LOADS])
    compute = workload.task.layer_ms + 2 * workload.task.expert_ms
    assert found.compute_ms == pytest.approx(workload.lengths * 6 * compute)
    belady = workload.run(RULES["belady"], start_values(RULES["belady"]))
    static = workload.run(RULES["random"], start_values(RULES["random"]))
    assert belady.stall_ms_per_token < found.stall_ms_per_token < 1.3 * static.stall_ms_per_token


def test_words_of_the_command_line() -> None:
    names, others = policy_names(["lru", "bounds", "runs/x", "lru"], with_predictor=False)
    assert names == ["lru", "belady", "next-layer", "next-3-layers", "clairvoyant"]
    assert others == ["runs/x"]
    with pytest.raises(ValueError, match="control needs a predictor"):
        policy_names(["control"], with_predictor=False)
