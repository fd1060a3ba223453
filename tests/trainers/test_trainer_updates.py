"""The roll-outs and updates of every trainer, compared with slow references in scripted environments.

``update_reference.py`` has the formulas and ``update_cases`` the trainers. ``tests/details/mutants.py`` runs these
tests on mutated trainers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributions import Categorical, Independent, Normal

import tiny_moe
from clustergym.training import World
from update_cases import CASES, MASKED, NEXT_STEP, Case, LLMCase, Problem
from update_reference import Outcome, reference_update

pytestmark = pytest.mark.usefixtures("scripted", "reproducible")


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compute with 64 bits, so that small constants such as the ε of a division make a difference."""
    monkeypatch.setattr(tiny_moe, "grouped_mm", tiny_moe.grouped_mm_loop)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def shuffles(problem: Problem, world: World, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, float], list[Any]]:
    """Metrics of the trainer's update, and the order of the rows in each epoch."""
    orders: list[Tensor] = []
    plain = torch.randperm

    def randperm(*args: Any, **options: Any) -> Tensor:
        orders.append(plain(*args, **options))
        return orders[-1]

    with monkeypatch.context() as patch:
        patch.setattr(torch, "randperm", randperm)
        metrics = problem.update(world)
    return metrics, [order.tolist() for order in orders]


class TwoRanks(World):
    """Rank 0 of two. The other one has gradients of −0.3 everywhere, and a KL that is larger by 0.02."""

    def average_gradients(self, parameters: Any) -> None:
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.copy_((parameter.grad - 0.3) / 2)

    def mean(self, value: float) -> float:
        return value + 0.01


def reference(problem: Problem, orders: list[list[int]], two_ranks: bool) -> Outcome:
    other: dict[str, Any] = {}
    if two_ranks:
        other["average"] = lambda gradients: [(gradient - 0.3) / 2 for gradient in gradients]
        other["mean_kl"] = lambda kl: kl + 0.01
    epochs = [problem.split(order) for order in orders]
    return reference_update(
        problem.module.parameters(),
        epochs,
        problem.samples_of,
        problem.settings,
        after_step=problem.after_step,
        **other,
    )


def compare(case: Case, monkeypatch: pytest.MonkeyPatch, two_ranks: bool = False, **changes: Any) -> Outcome:
    """Run the update of the trainer and the reference from the same state; compare metrics, gradients and weights."""
    real, slow = case.problem(**changes), case.problem(**changes)
    metrics, orders = shuffles(real, TwoRanks(size=2) if two_ranks else World(), monkeypatch)
    rows = sorted(orders[0])
    assert rows == list(range(len(rows)))
    assert all(sorted(order) == rows != order for order in orders), "an epoch is not a shuffle of all rows"
    assert len({tuple(order) for order in orders}) == len(orders), "two epochs have the same order"
    outcome = reference(slow, orders, two_ranks)
    assert len(outcome.epochs) == len(orders)
    learned = [p for p in real.module.parameters() if p.requires_grad]
    for parameter, gradient in zip(learned, outcome.gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-8, atol=1e-11)
    for name, weight in real.module.state_dict().items():
        torch.testing.assert_close(weight, slow.module.state_dict()[name], rtol=1e-9, atol=1e-11, msg=f"{name} differs")
    expected = {f"losses/{name}": outcome.mean(name) for name in case.losses} | slow.more_metrics(outcome)
    if slow.values_and_targets is not None:
        values, targets = map(np.array, slow.values_and_targets)
        expected["losses/explained_variance"] = 1 - (targets - values).var() / targets.var()
    if case.logs_updates:
        expected["charts/updates"] = outcome.steps
    assert metrics.keys() == expected.keys()
    for name, value in expected.items():
        tolerance = 1e-6 if name == "losses/clipfrac" else 1e-7  # a mean of 32-bit numbers
        assert metrics[name] == pytest.approx(value, rel=tolerance, abs=1e-10), name
    return outcome


# Every case runs with those of these settings that change an argument of its trainer.
SETTINGS: dict[str, dict[str, Any]] = {
    "defaults": {"learning_rate": 1e-2},
    "without_clips": {
        "learning_rate": 1e-2, "norm_adv": False, "clip_vloss": False, "max_grad_norm": 100.0, "ent_coef": 0.2,
        "vf_coef": 0.9,
    },
    "two_ranks": {"learning_rate": 1e-2, "two_ranks": True, "clip_coef": 0.1, "max_grad_norm": 0.2},
    "kl_penalty": {"learning_rate": 1e-2, "use_clipping": False, "kl_coef": 0.7, "adaptive_kl_target": 1e-4},
    "loose_kl_target": {"learning_rate": 1e-2, "use_clipping": False, "adaptive_kl_target": 10.0},
    "masked": {"learning_rate": 1e-2, "masked": True},
    "masked_kl_penalty": {"learning_rate": 1e-2, "masked": True, "use_clipping": False, "adaptive_kl_target": 1e-4},
    "shared_network": {"learning_rate": 1e-2, "share_network": True, "hidden": 8},
    "without_neighbours": {"learning_rate": 1e-2, "use_comm_penalty": False},
    "one_minibatch": {"learning_rate": 1e-2, "minibatch_size": 1000, "num_minibatches": 1},
}  # fmt: skip


def applies(case: Case, name: str) -> bool:
    changes = SETTINGS[name]
    if name == "two_ranks":
        return case.has_world
    if name == "masked":
        return case.id in ("ppo", "ppo_recurrent", "ppo_federated")
    if name == "masked_kl_penalty":
        return case.id == "ppo_federated"
    needed = {"kl_penalty": "use_clipping", "loose_kl_target": "adaptive_kl_target", "shared_network": "share_network",
              "without_neighbours": "use_comm_penalty"}.get(name)  # fmt: skip
    return case.knows(needed) if needed else any(map(case.knows, changes))


@pytest.mark.parametrize(
    ("case", "setting"),
    [pytest.param(case, name, id=f"{case.id}-{name}") for case in CASES for name in SETTINGS if applies(case, name)],
)
@pytest.mark.usefixtures("double")
def test_update_matches_the_reference(case: Case, setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = compare(case, monkeypatch, **SETTINGS[setting])
    assert 0 < outcome.mean("clipfrac") < 1, "the clip range must matter for some rows"


@pytest.mark.parametrize("case", [case for case in CASES if case.has_early_stop], ids=lambda case: case.id)
@pytest.mark.parametrize("two_ranks", [False, True], ids=["one_rank", "two_ranks"])
@pytest.mark.usefixtures("double")
def test_update_stops_after_an_epoch_whose_last_kl_exceeds_the_target(
    case: Case, two_ranks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The targets lie just below and just above the KL at the end of each epoch."""
    if two_ranks and not case.has_world:
        pytest.skip("runs in one process")
    free = compare(case, monkeypatch, two_ranks, learning_rate=1e-2)
    last = [epoch[-1]["approx_kl"] + 0.01 * two_ranks for epoch in free.epochs]
    lengths = set()
    for kl in last:
        for target in (kl * (1 - 1e-6), kl * (1 + 1e-6)):
            stopped = compare(case, monkeypatch, two_ranks, learning_rate=1e-2, target_kl=target)
            above = [i for i, each in enumerate(last) if each > target]
            assert len(stopped.epochs) == (above[0] + 1 if above else len(last))
            lengths.add(len(stopped.epochs))
    assert len(lengths) > 1, "all targets have the same effect"


@pytest.mark.parametrize("case", CASES[:1], ids=lambda case: case.id)
def test_figures_that_an_update_only_logs(case: Case) -> None:
    """These functions are equal in all trainers."""
    assert math.isnan(case.trainer.explained_variance(torch.rand(5), torch.ones(5)))
    logratio = torch.tensor([-0.5, 0.0, 1.5])
    assert case.trainer.kl_estimators(logratio)[1].tolist() == [0.125, 0.0, 1.125]


@pytest.mark.parametrize(
    "case", [case for case in CASES if hasattr(case.trainer, "episode_charts")], ids=lambda case: case.id
)
def test_rollout_without_a_finished_episode_has_no_charts_of_episodes(case: Case) -> None:
    assert case.trainer.episode_charts([]) == {}


@pytest.mark.parametrize(
    "case", [case for case in CASES if hasattr(case.trainer, "gaussian_entropy")], ids=lambda case: case.id
)
def test_gaussian_functions_match_torch_distributions_for_one_deviation_per_row(case: Case) -> None:
    mean, std, actions = torch.randn(7, 2), torch.rand(7, 2) + 0.1, torch.randn(7, 2)
    known = Independent(Normal(mean, std), 1)
    torch.testing.assert_close(case.trainer.gaussian_logprob(actions, mean, std), known.log_prob(actions))
    torch.testing.assert_close(case.trainer.gaussian_entropy(std), known.entropy())


@pytest.mark.parametrize("case", [case for case in CASES if hasattr(case.trainer, "normalize_obs")], ids=lambda c: c.id)
def test_normalised_numbers_are_clipped_on_both_sides(case: Case) -> None:
    statistics = case.trainer.RunningMeanStd((3,))
    statistics.mean += 5
    obs = case.trainer.normalize_obs(torch.tensor([[-100.0, 6.0, 100.0]]), statistics)
    torch.testing.assert_close(obs, torch.tensor([[-10.0, 1.0, 10.0]]))
    statistics.mean, statistics.var = np.zeros(3), np.full(3, 3e-8)  # with the ε of 1e-8, a deviation of 2e-4
    obs = case.trainer.normalize_obs(torch.tensor([[-4e-4, 0.0, 6e-4]]), statistics)
    torch.testing.assert_close(obs, torch.tensor([[-2.0, 0.0, 3.0]]))
    if hasattr(case.trainer, "RewardScaler"):
        scaler = case.trainer.RewardScaler(3, 0.0)
        scaler.statistics.count = 1e12  # these rewards hardly change the variance of 1
        rewards = scaler(torch.tensor([-50.0, 2.0, 50.0]), torch.zeros(3, dtype=torch.bool))
        torch.testing.assert_close(rewards, torch.tensor([-10.0, 2.0, 10.0]))
        scaler.statistics.count, scaler.statistics.var = 1e30, np.array(3e-8)
        rewards = scaler(torch.tensor([-4e-4, 0.0, 6e-4]), torch.zeros(3, dtype=torch.bool))
        torch.testing.assert_close(rewards, torch.tensor([-2.0, 0.0, 3.0]))


@pytest.mark.parametrize("case", [case for case in CASES if case.id == "ppo_federated"], ids=lambda case: case.id)
def test_penalty_changes_only_beyond_its_bounds(case: Case) -> None:
    adapted = [case.trainer.adapted_beta(4.0, kl, 3.0) for kl in (1.99, 2.0, 3.0, 4.5, 4.51)]
    assert adapted == [2.0, 4.0, 4.0, 4.0, 8.0]


@pytest.mark.parametrize("case", [case for case in CASES if case.name == "ppo_federated"], ids=lambda case: case.id)
def test_agents_have_random_numbers_of_their_own(case: Case) -> None:
    """The roll-out and the update of an agent do not depend on torch's global generator."""
    weights = []
    for seed in (1, 2):
        learner = case.make_learner(case.args())
        torch.manual_seed(seed)
        learner.collect()
        learner.learn()
        weights.append(torch.nn.utils.parameters_to_vector(learner.agent.parameters()))
    assert torch.equal(*weights)


@pytest.mark.parametrize("case", [case for case in CASES if case.id == "ppo_federated"], ids=lambda case: case.id)
def test_mean_return_is_unknown_before_an_episode_has_ended(case: Case) -> None:
    charts = case.make_learner(case.args(num_steps=1, num_minibatches=1)).iterate()
    assert math.isnan(charts["charts/mean_return_100"])
    assert "charts/episodic_return" not in charts


# Roll-outs

ROLLOUTS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "short_sight": {"gamma": 0.6, "gae_lambda": 0.5, "norm_obs": False, "norm_reward": True},
    "ends_are_ends": {"gamma": 0.9, "bootstrap_truncated": False},
    "one_step_targets": {"gamma": 0.9, "returns": "td"},
    "masked": {"env_id": MASKED},
    "reset_steps": {"env_id": NEXT_STEP},
    "reset_steps_ends": {"env_id": NEXT_STEP, "bootstrap_truncated": False, "num_steps": 11},
    "without_gae": {"gae": False},
}  # fmt: skip


def plays(case: Case, name: str) -> bool:
    if name == "masked":
        return case.id in ("ppo", "ppo_recurrent", "ppo_federated")
    if name in ("reset_steps", "reset_steps_ends"):
        return case.id == "ppo"
    needed = {"ends_are_ends": "bootstrap_truncated", "one_step_targets": "returns", "without_gae": "gae"}.get(name)
    return case.has_rollout and (needed is None or case.knows(needed))


@pytest.mark.parametrize(
    ("case", "setting"),
    [pytest.param(case, name, id=f"{case.id}-{name}") for case in CASES for name in ROLLOUTS if plays(case, name)],
)
def test_rollout_matches_the_journals_of_its_environments(case: Case, setting: str) -> None:
    """Three consecutive roll-outs: observations, actions, probabilities, values, advantages, targets and charts."""
    played = case.play(3, **ROLLOUTS[setting])
    expected = case.expected(played)
    assert any(each is not None and each.truncated for steps in played.steps for step in steps for each in step)
    for (batch, _), columns in zip(played.rollouts, expected, strict=True):
        found = case.rows_of(batch)
        for name in ("obs", "logprobs", "values", "advantages", "returns"):
            assert len(found[name]) == len(columns[name])
            np.testing.assert_allclose(found[name], np.array(columns[name]), rtol=2e-5, atol=2e-5, err_msg=name)
        if setting == "masked":
            np.testing.assert_array_equal(batch.masks.flatten(0, -2), columns["mask"])
    for (_, charts), known in zip(played.rollouts, case.charts(played), strict=True):
        assert charts == {key: pytest.approx(value, rel=1e-5, nan_ok=True) for key, value in known.items()}


def check_frequencies(p: Tensor, actions: Tensor) -> None:
    """Compare actions (rows,) with their probabilities p (rows, actions), within 4 standard deviations."""
    p = p.double()
    chosen = torch.nn.functional.one_hot(actions, p.shape[1])
    assert p.max() > 0.5
    assert ((chosen - p).sum(0).abs() < 4 * (p * (1 - p)).sum(0).sqrt()).all()
    # The log-likelihood also tells the policy from one with another temperature.
    entropy = -torch.special.xlogy(p, p).sum(1)
    variance = (p * p.log().clamp(min=-50) ** 2).sum(1) - entropy**2
    assert (p.log()[chosen.bool()] + entropy).sum().abs() < 4 * variance.sum().sqrt()


@pytest.mark.parametrize("case", [case for case in CASES if case.has_rollout], ids=lambda case: case.id)
def test_actions_are_samples_of_the_policy(case: Case) -> None:
    """Frequencies of discrete actions, and means, deviations and correlation of continuous ones, within 4 σ."""
    if case.id in ("ppo", "ppo_federated"):
        # Many samples, to tell the distribution from that of noise with the wrong sign.
        played = case.play(1, num_steps=100, num_envs=60)
        (batch, _), *_ = played.rollouts
        with torch.no_grad():
            check_frequencies(case.distribution(played.agent, batch.obs, None).probs, batch.actions)
        return
    played = case.play(1, num_steps=260)
    rows = case.expected(played)[0]
    if isinstance(rows["distribution"][0], Categorical):
        check_frequencies(torch.stack([each.probs for each in rows["distribution"]]), torch.stack(rows["action"]))
        return
    noise = torch.stack([
        (action - each.base_dist.loc) / each.base_dist.scale
        for action, each in zip(rows["action"], rows["distribution"], strict=True)
    ])  # fmt: skip
    n = len(noise)
    assert (noise.mean(0).abs() < 4 / math.sqrt(n)).all()
    assert ((noise**2).mean(0) - 1).abs().max() < 4 * math.sqrt(2 / n)
    assert abs(float((noise[:, 0] * noise[:, 1]).mean())) < 4 / math.sqrt(n)
    assert abs(float((noise[1:] * noise[:-1]).mean())) < 4 / math.sqrt(n)


@pytest.mark.parametrize("kl_coef", [0.0, 0.4])
@pytest.mark.usefixtures("double")
def test_rollout_of_a_language_model_matches_its_responses_scored_one_by_one(kl_coef: float) -> None:
    LLMCase().compare_rollout(kl_coef)


# Schedules


@pytest.mark.parametrize("case", [case for case in CASES if case.has_schedule], ids=lambda case: case.id)
@pytest.mark.parametrize("annealed", [True, False], ids=["annealed", "constant"])
def test_schedules_reach_the_update(case: Case, annealed: bool, tmp_path: Path) -> None:
    """Four iterations. The numbers are small, so that a lower bound on the schedule would show."""
    initial = {"learning_rate": 4e-7, "clip_coef": 4e-5, "ent_coef": 4e-6}
    flags = {"anneal_lr": annealed, "anneal_clip": annealed, "anneal_ent": annealed}
    used = case.schedules(tmp_path, iterations=4, **initial, **flags)
    assert len(used) == 4
    shares = [1.0, 0.75, 0.5, 0.25] if annealed else [1.0] * 4
    for name, flag in zip(initial, flags, strict=True):
        for numbers, share in zip(used, shares, strict=True):
            if name in numbers:
                expected = initial[name] * (share if case.knows(flag) else 1.0)
                assert numbers[name] == pytest.approx(expected, rel=1e-6), name
