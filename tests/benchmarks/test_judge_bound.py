"""The direct search of judge_bound.py has the judge's formula, and finds an optimum that is known."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

import independent_judge as judge
import judge_bound
from clustergym.traces import SyntheticConfig, TokenTrace, synthetic_trace

EXPERTS = 64


@pytest.fixture(scope="module")
def trace() -> TokenTrace:
    return synthetic_trace(SyntheticConfig(n_tokens=5_000, n_layers=2, first_layer=0, popularity_skew=0.5), seed=3)


def spread_slots() -> npt.NDArray[np.int64]:
    """(GPUs, slots) every expert once, and a copy of the first expert of the next GPU."""
    once = np.arange(EXPERTS).reshape(judge.GPUS, 4)
    return np.concatenate([once, np.roll(once[:, :1], -1, axis=0)], axis=1)


def test_the_formula_is_that_of_the_judge(trace: TokenTrace) -> None:
    """On plans with copies on one GPU, on one node and far away."""
    rng = np.random.default_rng(0)
    for layer in range(trace.n_layers):
        passes = judge_bound.draw(trace, 3, seed=layer)
        slots = rng.permutation(np.concatenate([np.arange(EXPERTS), rng.integers(0, EXPERTS, 16)])).reshape(16, 5)
        chosen = judge.serving_gpus(slots, EXPERTS)
        known = [
            judge.pass_us(trace.experts[rows, layer].astype(int), chosen, "decode", "weights and tokens")
            for rows in passes
        ]
        found = judge_bound.plan_us(judge_bound.tokens_of(trace, layer, passes), slots)
        assert found == pytest.approx(np.mean(known), rel=1e-12)


def test_the_search_finds_a_known_optimum() -> None:
    """In pass i, rank i has 1000 tokens for expert 0. There are 16 spare slots: best is a copy on every GPU."""
    tokens = np.zeros((EXPERTS, judge.GPUS, judge.GPUS), np.int64)
    tokens[0] = 1000 * np.eye(judge.GPUS, dtype=np.int64)
    begin = spread_slots()
    found, slots = judge_bound.search(tokens, begin, 500_000, judge_bound.HEAT_US, np.random.default_rng(0))
    assert found == pytest.approx(5.0 + 1000 * 0.05)
    assert (slots == 0).any(1).all()
    assert set(slots.ravel()) == set(range(EXPERTS))
    # At the start GPUs 0 and 15 have the expert: six ranks have it on their node, eight do not.
    # 1000 copies are 6144 kB.
    far, near = 6144 / 50, 6144 / 200
    assert judge_bound.plan_us(tokens, begin) == pytest.approx(55 + (8 * far + 6 * near) / 16)


def test_an_expert_twice_on_a_gpu_is_refused() -> None:
    """The search knows only whether a GPU holds an expert, not how often."""
    slots = spread_slots()
    slots[7, 4] = slots[7, 2]
    with pytest.raises(ValueError, match="a GPU holds an expert twice"):
        judge_bound.search(np.ones((EXPERTS, 1, 16), np.int64), slots, 1, (1.0, 0.1), np.random.default_rng(0))


def test_passes_of_the_judge_are_drawn(trace: TokenTrace) -> None:
    """Without a number, no token is in two passes and less than a pass is left over."""
    (once, size), several = np.shape(judge_bound.draw(trace, 0, seed=0)), judge_bound.draw(trace, 24, seed=0)
    assert (once, size) == (trace.n_tokens // 512, 512)
    assert len(np.unique(judge_bound.draw(trace, 0, seed=0))) == once * size
    assert all(len(np.unique(rows)) == 512 for rows in several)
    assert len(several) == 24
    known = judge.draw_passes(trace, "decode", np.random.default_rng(1))
    assert np.array_equal(known, judge_bound.draw(trace, judge.PASSES, seed=1))
