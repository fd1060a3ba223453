"""Few tokens with the loads of much traffic."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import minimize

from clustergym.traces import LoadTrace, SyntheticConfig, TokenTrace, synthetic_trace
from clustergym.traces.match_loads import match_loads, token_weights


def test_weights_are_the_most_even_ones_that_give_the_loads() -> None:
    """The reference maximizes the entropy under the loads as constraints."""
    rng = np.random.default_rng(0)
    experts = np.stack([rng.permutation(5)[:2] for _ in range(30)])
    used = np.zeros((30, 5))
    np.put_along_axis(used, experts, 1.0, axis=1)
    loads = rng.dirichlet(np.ones(30)) @ used + 0.3 * used.mean(0)
    found = token_weights(experts, loads, rounds=3000)
    np.testing.assert_allclose(found @ used / (found @ used).sum(), loads / loads.sum(), atol=1e-6)
    target = loads / loads.sum() * 2
    exact = minimize(
        lambda w: float((w * np.log(w)).sum()), np.full(30, 1 / 30), bounds=[(1e-9, 1)] * 30, method="SLSQP",
        constraints=[{"type": "eq", "fun": lambda w: w @ used - target}], options={"maxiter": 500, "ftol": 1e-14},
    )  # fmt: skip
    np.testing.assert_allclose(found / 30, exact.x, atol=2e-5)


def test_unused_experts_and_padding() -> None:
    experts = np.array([[0, 1], [0, -1], [2, 1]])
    weights = token_weights(experts, np.array([6.0, 2.0, 1.0, 50.0]))
    loads = np.bincount(experts[experts >= 0], np.repeat(weights, 2)[experts.ravel() >= 0], 4)
    assert loads[3] == 0
    assert loads[0] > loads[1] > loads[2]
    np.testing.assert_array_equal(token_weights(experts, np.zeros(4)), 1)


@pytest.fixture(scope="module")
def recorded() -> tuple[TokenTrace, TokenTrace]:
    """Few tokens, and much traffic of another mixture of domains."""
    config = SyntheticConfig(n_tokens=12_000, n_layers=2, n_experts=32, top_k=4, domain_drift=0.4)
    trace = synthetic_trace(config, seed=3)
    few, rest = trace.split(0.2, seed=1)
    return few, rest.select(domains="domain0")


def test_drawn_tokens_have_the_loads_and_the_coactivation(recorded: tuple[TokenTrace, TokenTrace]) -> None:
    few, much = recorded
    loads = LoadTrace(much.loads(), much.layer_ids)
    drawn = match_loads(few, loads)

    def shares(trace: TokenTrace) -> np.ndarray:
        return trace.loads() / trace.loads().sum(1, keepdims=True)

    def together(trace: TokenTrace) -> np.ndarray:
        used = np.zeros((trace.n_tokens, 32))
        np.put_along_axis(used, trace.experts[:, 0].astype(int), 1.0, axis=1)
        return np.corrcoef(used.T)[np.triu_indices(32, 1)]

    before, after = (np.abs(shares(trace) - shares(much)).sum() for trace in (few, drawn))
    assert after < 0.25 * before
    assert np.corrcoef(together(drawn), together(few))[0, 1] > 0.8
    assert drawn.n_tokens == 32_768
    assert drawn.layer_ids.tolist() == few.layer_ids.tolist()
    np.testing.assert_array_equal(match_loads(few, loads).experts, drawn.experts)


def test_other_models_are_refused(recorded: tuple[TokenTrace, TokenTrace]) -> None:
    few, much = recorded
    with pytest.raises(ValueError, match=r"has layers 5 … 6 and 32 experts, but .* has layers 1 … 2 and 32 experts"):
        match_loads(few, LoadTrace(much.loads(), np.array([5, 6])))
