"""The policy planners: their observations, plans, policy files and the pretrained policy."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_ppo_moe_marl import exported, make_args, marl

from clustergym import SyntheticConfig, TokenTrace, synthetic_trace
from clustergym.moe_placement import (
    ClusterSpec,
    Interval,
    IntervalStream,
    ModelSpec,
    PlacementBatch,
    PlacementConfig,
    Simulator,
    Traffic,
)
from clustergym.moe_placement.kernels.cost import mean_pass_time, migration_time
from clustergym.moe_placement.kernels.state import CLOCK_LAYER
from clustergym.planners.evaluation import Protocol, compare, teach
from clustergym.planners.kernels.surrogate import NOW, estimate
from clustergym.planners.policy.estimate import Estimate
from clustergym.planners.policy.export import (
    NETWORK_VERSION,
    PRETRAINED,
    PolicySettings,
    load_policy,
    read_policy,
    save_policy,
)
from clustergym.planners.policy.inputs import (
    PER_CENT,
    Inputs,
    gains,
    policy_inputs,
    same_node_weights,
    similar_experts,
)
from clustergym.planners.policy.network import MASKED_LOGIT, PolicyNetwork
from clustergym.planners.policy.planner import Policy, PolicyGuided
from clustergym.training import CheckpointError, save_checkpoint

MODEL = ModelSpec("small", 2, 12, 3, 1024, 256)
CLUSTER = ClusterSpec("2x2", 2, 2, 4)


@pytest.fixture(scope="module")
def trace() -> TokenTrace:
    return synthetic_trace(SyntheticConfig(n_tokens=3000, n_layers=2, n_experts=12, top_k=3, mean_seq_len=40), seed=2)


TRAFFIC = Traffic("prefill", 32, 2)


class Played:
    """Environments as the trainer and the planner see them."""

    def __init__(self, batch: PlacementBatch) -> None:
        self.batch, self.rows = batch, torch.arange(batch.num_envs)

    def inputs(self) -> Inputs:
        obs = self.batch.obs
        return policy_inputs(obs, similar_experts(obs["affinity"]), same_node_weights(self.batch.cluster))

    def look(self, expert: torch.Tensor) -> torch.Tensor:
        return self.batch.lookahead(expert[:, None])[:, 0] * PER_CENT

    def legal(self, expert: torch.Tensor) -> torch.Tensor:
        return self.batch.obs["joint_mask"][self.rows, expert].bool()


def played(trace: TokenTrace, envs: int = 3) -> Played:
    config = PlacementConfig(
        trace=trace, split="all", cluster=CLUSTER, model=MODEL, intervals=2, tokens_per_rank=32, ops_per_layer=3,
        start="eplb", memory=True, lookahead_norm=4,
    )  # fmt: skip
    batch = PlacementBatch(config, envs)
    batch.seed(np.arange(envs))
    batch.reset()
    return Played(batch)


def random_steps(view: Played, steps: int, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        expert = torch.multinomial(view.inputs()["expert_mask"].float(), 1, generator=generator).squeeze(-1)
        view.look(expert)
        view.batch.step(expert, torch.multinomial(view.legal(expert).float(), 1, generator=generator).squeeze(-1))


def test_an_expert_without_operation_is_masked_until_the_placement_changes(trace: TokenTrace) -> None:
    view = played(trace, envs=2)
    expert = view.inputs()["expert_mask"].int().argmax(-1)
    stay = view.batch.obs["placement"][view.rows, expert].argmax(-1)
    best = view.look(expert)[..., [0, 2]].sum(-1).amax(-1)
    view.batch.step(expert, stay)
    inputs = view.inputs()
    assert not bool(inputs["expert_mask"][view.rows, expert].any())
    assert bool((inputs["memory"][view.rows, expert, 1] == 1).all())
    torch.testing.assert_close(inputs["memory"][view.rows, expert, 0], best)
    other = inputs["expert_mask"].int().argmax(-1)
    legal = view.legal(other).clone()
    legal[:, :4] &= view.batch.obs["placement"][view.rows, other] == 0
    view.batch.step(other, legal.int().argmax(-1))
    assert bool(view.inputs()["expert_mask"][view.rows, expert].all())


def seen(launcher: str) -> dict[str, np.ndarray]:
    """Observations of a few steps that cross the end of a layer, on the given launcher."""
    from clustergym.moe_placement.launchers import cpu, cuda

    made = synthetic_trace(n_tokens=120, n_layers=2, n_experts=6, top_k=2, n_domains=2, mean_seq_len=12.0, seed=3)
    model = ModelSpec("tiny", 2, 6, 2, 64, 64, kernel_start_us=4, kernel_expert_us=1, kernel_pair_us=0.2)
    config = PlacementConfig(
        trace=made, split="all", cluster=ClusterSpec("tiny", 2, 2, 2), model=model, tokens_per_rank=4, ops_per_layer=2,
        start="eplb", memory=True, lookahead_norm=4,
    )  # fmt: skip
    batch = PlacementBatch(config, 2)
    batch.launcher = {"cpu": cpu, "cuda": cuda}[launcher]
    view = Played(batch)
    batch.seed(np.array([5, 6]))
    batch.reset()
    arrays = {}
    for step in range(3):
        expert = view.inputs()["expert_mask"].int().argmax(-1)
        arrays[f"look{step}"] = view.look(expert).numpy().copy()
        _, reward, _ = batch.step(expert, view.legal(expert).int().argmax(-1))
        arrays[f"reward{step}"] = reward.numpy().copy()
        arrays |= {f"{key}{step}": each.numpy().copy() for key, each in view.inputs().items()}
    interval = next(IntervalStream(made, 4, batch.traffic, seed=1))
    batch.load_placement(batch.simulator.static(2), interval)
    arrays |= {f"loaded {key}": each.numpy().copy() for key, each in view.inputs().items()}
    expert = view.inputs()["expert_mask"].int().argmax(-1)
    batch.finish_layer(expert, view.legal(expert).int().argmax(-1))
    return arrays | {"finished": batch.episode["slots"].numpy().copy()}


SIMULATE = """
import sys
import numpy as np
from test_policy_planner import seen
np.savez(sys.argv[1], **seen("cuda"))
"""


def test_the_cuda_launcher_gives_the_observations_of_the_cpu(tmp_path: Path) -> None:
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path, os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": paths, "NUMBA_ENABLE_CUDASIM": "1"}
    subprocess.run([sys.executable, "-c", SIMULATE, str(tmp_path / "cuda.npz")], check=True, env=environment)
    with np.load(tmp_path / "cuda.npz") as simulated:
        for name, array in seen("cpu").items():
            np.testing.assert_allclose(simulated[name], array, rtol=1e-5, atol=1e-6, err_msg=name)


def test_finish_layer_applies_the_last_operation_without_a_next_layer(trace: TokenTrace) -> None:
    ended, finished = played(trace), played(trace)
    for view in (ended, finished):
        random_steps(view, 2)  # of three
    expert = ended.inputs()["expert_mask"].float().argmax(-1)
    node = ended.legal(expert).float().argmax(-1)
    ended.batch.step(expert, node)
    finished.batch.finish_layer(expert, node)
    np.testing.assert_array_equal(finished.batch.episode["slots"][:, 0], ended.batch.episode["slots"][:, 0])
    assert (finished.batch.episode["clock"][:, CLOCK_LAYER] == 0).all()
    assert (ended.batch.episode["clock"][:, CLOCK_LAYER] == 1).all()


# Planners


def intervals(trace: TokenTrace, n: int = 3) -> list[Interval]:
    return IntervalStream(trace, 4, TRAFFIC, seed=1).take(n)


def smooth_us(planner: Policy, interval: Interval, plan: np.ndarray) -> np.ndarray:
    """(L,) what the policy minimizes: the smooth time plus migration, spread over its horizon."""
    sim = planner.simulator.spread_migration(planner.settings.passes(planner.simulator.passes_per_interval))
    costs, state = sim.costs(interval.n_tokens), sim.count(interval, plan, sim.static(len(plan)))
    return np.array(
        [
            mean_pass_time(state, b, 0, interval.n_passes, sim.topology, costs, 2) + migration_time(state, b, costs)
            for b in range(len(plan))
        ]
    )


EXACT: dict[str, Any] = {"estimate": False}
"""Options with which the look-ahead is that of the training."""


def untrained(operations: int = 6) -> tuple[PolicyNetwork, PolicySettings]:
    args = make_args(hidden=8)
    torch.manual_seed(0)
    return exported(marl.Agent(args), args), PolicySettings(operations=operations)


def test_a_plan_is_not_worse_than_the_placement_on_the_observed_interval(trace: TokenTrace) -> None:
    """In the norm that the policy plans with, no layer is worse and at least one is better."""
    sim = Simulator(MODEL, CLUSTER)
    planner, interval = Policy(sim, policy=untrained(), mix_tokens=0, **EXACT), intervals(trace)[0]
    plan = sim.check(planner.plan([interval], sim.static(2)))
    before, after = (smooth_us(planner, interval, slots) for slots in (sim.static(2), plan))
    assert (after <= before + 1e-6).all()
    assert (after < before).any()


def test_the_best_of_all_candidates_is_the_best_single_operation(trace: TokenTrace) -> None:
    """With a GPU actor that follows the look-ahead, against one plan per expert."""
    sim, interval = Simulator(MODEL, CLUSTER), intervals(trace)[0]

    def best_us(candidates: int, favourite: int | None = None) -> np.ndarray:
        network, settings = untrained(operations=1)
        torch.nn.init.zeros_(network.node_head[-1].weight)
        if favourite is not None:
            scores = torch.nn.functional.one_hot(torch.tensor(favourite), MODEL.n_experts).float()
            network.expert_logits = lambda *_: scores.expand(2, -1)  # type: ignore[method-assign]
        planner = Policy(sim, policy=(network, settings), candidates=candidates, mix_tokens=0, **EXACT)
        return smooth_us(planner, interval, planner.plan([interval], sim.static(2)))

    each = np.array([best_us(1, expert) for expert in range(MODEL.n_experts)])
    np.testing.assert_allclose(best_us(MODEL.n_experts), each.min(0), rtol=1e-5)
    assert (each.min(0) < np.median(each, 0)).all()


def test_the_policy_plans_on_tokens_that_are_dealt_over_the_ranks(trace: TokenTrace) -> None:
    """Which rank had a token is chance. The plan does not depend on it, except through the order of the rows."""
    sim, interval = Simulator(MODEL, CLUSTER), intervals(trace)[0]
    planner = Policy(sim, policy=untrained(), mix_tokens=256, **EXACT)
    mixed = interval.mixed(256, planner.seed)
    expected = Policy(sim, policy=untrained(), mix_tokens=0, **EXACT).plan([mixed], sim.static(2))
    np.testing.assert_array_equal(planner.plan([interval], sim.static(2)), expected)
    assert planner.environments(mixed).traffic.sizes == (1, mixed.n_tokens // sim.n_gpus)


def test_guided_search_is_never_worse_than_the_policy(trace: TokenTrace) -> None:
    sim, interval = Simulator(MODEL, CLUSTER), intervals(trace)[0]
    policy = untrained()
    alone, guided = Policy(sim, policy=policy), PolicyGuided(sim, policy=policy, iterations=300)
    plans = [planner.plan([interval], sim.static(2)) for planner in (alone, guided)]
    seen = guided.search.observe([interval])
    objective = guided.search.objective(seen, None)
    alone_us, guided_us = (guided.search.objectives(sim.count(seen, plan, sim.static(2)), objective) for plan in plans)
    assert (guided_us <= alone_us + 1e-6).all()
    assert (guided_us < alone_us).any()


def test_guided_search_keeps_its_time_budget(trace: TokenTrace) -> None:
    sim, interval = Simulator(MODEL, CLUSTER), intervals(trace)[0]
    planner = PolicyGuided(sim, policy=untrained(), seconds=0.2)
    planner.plan([interval], sim.static(2))
    began = time.perf_counter()
    planner.plan([interval], sim.static(2))
    assert 0.15 < time.perf_counter() - began < 3


def test_guided_search_skips_the_policy_if_time_is_short(trace: TokenTrace) -> None:
    sim, interval = Simulator(MODEL, CLUSTER), intervals(trace)[0]
    for seconds, asked in ((0.0005, False), (0.2, True)):
        planner = PolicyGuided(sim, policy=untrained(), seconds=seconds)
        planner.plan([interval], sim.static(2))
        assert (planner._batch is not None) == asked


def test_guided_search_learns_from_a_split_that_is_not_served(trace: TokenTrace) -> None:
    for split, taught in (("all", False), ("test", True)):
        planner = PolicyGuided(Simulator(MODEL, CLUSTER), policy=untrained())
        teach(planner, trace, Protocol(TRAFFIC, split=split))
        assert (planner.search.traffic is not None) == taught
        assert planner.search.spread == (planner.spread if taught else 0)


def test_one_network_plans_for_any_model_and_cluster(trace: TokenTrace) -> None:
    policy = untrained()
    for nodes, gpus, experts, top_k, layers in ((1, 3, 5, 1, 1), (4, 2, 40, 4, 3)):
        model = ModelSpec("other", layers, experts, top_k, 512, 128)
        sim = Simulator(model, ClusterSpec("other", nodes, gpus))
        made = synthetic_trace(
            SyntheticConfig(n_tokens=800, n_layers=layers, n_experts=experts, top_k=top_k, mean_seq_len=20), seed=3
        )
        interval = next(IntervalStream(made, sim.n_gpus, Traffic("prefill", 8, 1)))
        sim.check(Policy(sim, policy=policy).plan([interval], sim.static(layers)))


def test_reset_clears_the_history_of_the_policy(trace: TokenTrace) -> None:
    sim, history = Simulator(MODEL, CLUSTER), intervals(trace)
    planner = Policy(sim, policy=untrained())
    first = planner.plan(history[:1], sim.static(2))
    planner.plan(history[:2], first)
    planner.reset()
    np.testing.assert_array_equal(planner.plan(history[:1], sim.static(2)), first)


# The estimate of the look-ahead


def estimated(trace: TokenTrace, placement: np.ndarray, slots: int = 4) -> tuple[Estimate, Policy]:
    """An estimate that begins with ``placement``."""
    sim = Simulator(MODEL, ClusterSpec("2x2", 2, 2, slots), "sglang-prefill")
    planner = Policy(sim, policy=untrained())
    planner.estimator.restart = False
    return Estimate(planner.estimator, intervals(trace)[:1], placement), planner


class FromScratch:
    """The estimate of placements that nothing led to step by step, migration from ``before`` included."""

    def __init__(self, planner: Policy, trace: TokenTrace, before: np.ndarray) -> None:
        self.search, history = planner.estimator, intervals(trace)[:1]
        self.state, self.objective = self.search.prepare_estimate(history, before, self.search.topics(history))
        self.before = before

    def us(self, placement: np.ndarray) -> np.ndarray:
        """(L,)"""
        return self.search.take(self.state, placement, self.objective)

    def layer_us(self, layer: int, slots: np.ndarray) -> float:
        after = self.before.copy()
        after[layer] = slots
        return float(self.us(after)[layer])


def replicated(slots: int) -> np.ndarray:
    """All slots are taken, and some experts have two replicas or three."""
    rng, found = np.random.default_rng(4), np.full((2, 4, slots), -1, np.int16)
    for layer in found:
        experts = rng.permutation(12).reshape(4, 3)
        for g in range(4):
            others = rng.permutation(np.setdiff1d(np.arange(12), experts[g]))
            layer[g] = np.concatenate([experts[g], others])[:slots]
    return found


def ways(slots: np.ndarray, expert: int, node: int) -> list[np.ndarray]:
    """All placements (G, S) that PLACE, ADD or DELETE of an expert can lead to."""
    kind, g = divmod(node, 4)
    holders = np.flatnonzero((slots == expert).any(1))

    def changed(*cells: tuple[int, int, int]) -> np.ndarray:
        after = slots.copy()
        for gpu, old, new in cells:
            after[gpu, list(slots[gpu]).index(old)] = new
        return after

    if kind == 2:
        return [changed((g, expert, -1))] if g in holders and len(holders) > 1 else []
    if g in holders:
        return []
    has_room = -1 in slots[g]
    found = []
    for source in holders if kind == 0 else [-1]:
        for victim in [-1] if has_room else slots[g]:
            if kind == 0 and (victim < 0 or victim not in slots[source]):
                found.append(changed((source, expert, victim), (g, victim, expert)))
            elif kind == 1 and (victim < 0 or (slots == victim).any(1).sum() > 1):
                found.append(changed((g, victim, expert)))
    return found


def before_operations(slots: int) -> np.ndarray:
    before = replicated(slots)
    if slots == 5:  # room for ADD
        before[:, :, 4] = -1
    return before


@pytest.mark.parametrize("slots", [4, 5])
def test_the_estimate_of_an_operation_is_that_of_the_best_placement_after_it(trace: TokenTrace, slots: int) -> None:
    before = before_operations(slots)
    look, planner = estimated(trace, before, slots)
    parts, legal = look.look_ahead(torch.arange(12).expand(2, -1))
    scratch, compared = FromScratch(planner, trace, before), {0: 0, 1: 0, 2: 0}
    start = scratch.us(before)
    for b, expert, node in np.ndindex(2, 12, 12):
        after = [scratch.layer_us(b, placement) for placement in ways(before[b], expert, node)]
        assert bool(legal[b, expert, node]) == bool(after)
        expected = (start[b] - min(after)) / start[b] if after else 0.0
        assert float(gains(parts[b, expert, node])) == pytest.approx(expected, abs=2e-6)
        compared[node // 4] += len(after) > (1 if slots == 4 and node < 8 else 0)
    assert min(compared[0], compared[1], compared[2] if slots == 4 else 1) > 0
    best = gains(parts).amax(-1).clamp(min=0)
    torch.testing.assert_close(look.memory, torch.stack([best, torch.ones(2, 12)], -1))


@pytest.mark.parametrize("slots", [4, 5])
def test_an_operation_is_the_best_that_saves_time_and_the_estimate_follows_it(trace: TokenTrace, slots: int) -> None:
    before, made = before_operations(slots), 0
    for expert in range(12):
        look, planner = estimated(trace, before, slots)
        scratch = FromScratch(planner, trace, before)
        start = scratch.us(before)
        saved = look.operate(torch.full((2, 1), expert), torch.zeros(2, 1, 12), per_gain=1.0)
        found = scratch.us(look.placement)
        assert saved == pytest.approx(((start - found) / start).mean(), abs=2e-6)
        made += saved > 0
        for b in range(2):
            after = [scratch.layer_us(b, each) for node in range(8) for each in ways(before[b], expert, node)]
            assert found[b] == pytest.approx(min([start[b], *after]), rel=1e-6)
            now = estimate(look.state, b, NOW, look.objective, look.state.load[b].sum())
            assert now == pytest.approx(found[b], rel=1e-5)
    assert made > 3


def test_operations_are_made_until_none_saves_time(trace: TokenTrace) -> None:
    before = replicated(4)
    look, planner = estimated(trace, before)
    experts, scores, scratch = (
        torch.arange(12).expand(2, -1),
        torch.zeros(2, 12, 12),
        FromScratch(planner, trace, before),
    )
    times = [scratch.us(before)]
    while look.operate(experts, scores, per_gain=1.0):
        times.append(scratch.us(look.placement))
        assert (times[-1] <= times[-2] * (1 + 1e-6)).all()
    assert (times[-1] < times[0]).all()
    for b in range(2):
        after = [
            scratch.layer_us(b, each)
            for expert in range(12)
            for node in range(8)
            for each in ways(look.placement[b], expert, node)
        ]
        assert min(after) >= times[-1][b] * (1 - 1e-6)


def test_scores_choose_among_operations_that_save_time(trace: TokenTrace) -> None:
    before = replicated(4)
    parts, _ = estimated(trace, before)[0].look_ahead(torch.arange(12).expand(2, -1))
    worth = gains(parts)[0, :, :8]
    expert = int((worth > 0).sum(-1).argmax())
    saving = torch.nonzero(worth[expert] > 0)[:, 0]
    assert 2 <= len(saving) < 8
    for node in range(8):
        look, _ = estimated(trace, before)
        scores = torch.full((2, 1, 12), MASKED_LOGIT)
        scores[0, 0, node] = 5.0
        assert (look.operate(torch.full((2, 1), expert), scores, per_gain=1.0) > 0) == (node in saving)
        held = (look.placement[0, node % 4] == expert).any()
        assert held == (node in saving or (before[0, node % 4] == expert).any())
        np.testing.assert_array_equal(look.placement[1], before[1])  # all of its operations are masked


def test_past_traffic_changes_the_estimate_and_gives_a_plan_to_start_from(trace: TokenTrace) -> None:
    sim, history = Simulator(MODEL, CLUSTER, "sglang-prefill").spread_migration(10**12), intervals(trace)[:1]
    planner = Policy(sim, policy=untrained())
    alone = Estimate(planner.estimator, history, sim.static(2))
    planner.learn(trace)
    both = Estimate(planner.estimator, history, sim.static(2))
    assert alone.state.deviation.shape[2] == 0
    assert both.state.deviation.any()
    assert not np.allclose(alone.state.load, both.state.load)
    usual = planner.estimator.usual
    assert usual is not None
    np.testing.assert_array_equal(both.placement, sim.check(usual))


def test_there_is_another_round_if_the_last_one_saved_enough(
    trace: TokenTrace, monkeypatch: pytest.MonkeyPatch
) -> None:
    sim, history, asked = Simulator(MODEL, CLUSTER, "sglang-prefill"), intervals(trace)[:1], list[int]()
    savings: list[float] = []
    monkeypatch.setattr(Estimate, "operate", lambda _, experts, *__: (asked.append(experts.shape[1]), savings.pop())[1])
    for saved, operations, rounds in (
        ([0.004], None, [2]),
        ([0.01, 0.006, 0.004], None, [2, 2, 2]),
        ([1.0] * 5, None, [2] * 5),
        ([1.0] * 2, 3, [2, 1]),
    ):
        asked.clear()
        savings[:] = saved[::-1]
        Policy(sim, policy=untrained(), candidates=2, operations=operations).plan(history, sim.static(2))
        assert asked == rounds
        assert not savings


# Policy files


def save_untrained(path: Path) -> None:
    network, settings = untrained()
    save_policy(path, asdict(network.config), network.state_dict(), settings, {"made": "here"})


def test_a_saved_policy_is_loaded_unchanged(tmp_path: Path) -> None:
    network, settings = untrained()
    save_untrained(tmp_path / "policy.pt")
    loaded, loaded_settings = load_policy(tmp_path)
    assert (loaded_settings, loaded.config) == (settings, network.config)
    assert read_policy(tmp_path)["about"] == {"made": "here"}
    for name, tensor in network.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name])


def test_policy_files_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "policy.pt"
    save_untrained(path)
    content = read_policy(path)
    save_checkpoint(path, "moe-policy", content | {"features": [1, 2, 3]})
    with pytest.raises(CheckpointError, match=r"reads \[1, 2, 3\] features.*train it again"):
        load_policy(path)
    save_checkpoint(path, "moe-policy", content | {"network_version": NETWORK_VERSION - 1})
    with pytest.raises(CheckpointError, match=r"earlier clustergym.*train it again"):
        load_policy(path)
    del content["weights"]["look_scale"]
    save_checkpoint(path, "moe-policy", content)
    with pytest.raises(RuntimeError, match="look_scale"):
        load_policy(path)
    save_checkpoint(path, "ppo", {})
    with pytest.raises(CheckpointError, match="belongs to 'ppo'"):
        load_policy(path)
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        load_policy(tmp_path / "nowhere.pt")


def test_the_pretrained_policy_is_small_and_names_its_origin() -> None:
    assert PRETRAINED.stat().st_size < 2_000_000
    about = read_policy("pretrained")["about"]
    assert "'pretrain_states': 65536" in about["args"]["pretrain"]
    assert not [value for value in about["args"].values() if value.startswith("/")], "folders of one machine"
    card = (PRETRAINED.parent / "README.md").read_text()
    assert "benchmarks/moe_marl/pretrained.py" in card


PLAN_WITHOUT_TORCH_GEOMETRIC = """
import sys
sys.modules["torch_geometric"] = None  # importing it raises ImportError
from clustergym import TokenTrace
from clustergym.moe_placement import IntervalStream, Simulator, Traffic
from clustergym.planners.registry import make_planner
simulator, trace = Simulator("deepseek-v2-lite", "h800-4x4"), TokenTrace.load("synthetic").select(layers=[0])
planner = make_planner("policy", simulator)
interval = next(IntervalStream(trace, 16, Traffic("prefill", 16, 1)))
simulator.check(planner.plan([interval], simulator.static(1)))
"""


def test_the_policy_planner_works_without_torch_geometric() -> None:
    subprocess.run([sys.executable, "-c", PLAN_WITHOUT_TORCH_GEOMETRIC], check=True)


def test_the_pretrained_policy_beats_every_eplb_on_the_bundled_trace() -> None:
    """The training used other synthetic traces, not this one."""
    trace = TokenTrace.load("synthetic").select(layers=[0, 2])
    sim = Simulator("deepseek-v2-lite", "h800-4x4")
    names = ["eplb-once", "eplb", "eplb-ema", "eplb-threshold", "policy"]
    protocol = Protocol(Traffic("prefill", schedule="drift", allow_reuse=True), intervals=3, streams=2)
    results = {r.planner: r.total_us for r in compare(trace, sim, names, protocol)}
    policy = results.pop("policy")
    assert policy < 0.99 * results["eplb"]
    assert policy < min(results.values())
