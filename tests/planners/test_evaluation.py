"""The comparison of planners: what they see and when, what is counted, and how it is averaged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from clustergym import TokenTrace
from clustergym.common.statistics import ci95_of_deals
from clustergym.moe_placement import Placement, Simulator
from clustergym.moe_placement.streams import Interval, IntervalStream, Traffic, sample_passes
from clustergym.planners.eplb import EPLB
from clustergym.planners.evaluation import Protocol, Result, compare, evaluate_planner, reused_share, same_mixture
from clustergym.planners.heldout import sample_tokens
from clustergym.planners.registry import PLANNERS, Entry, planner_class
from recorders import (
    INTERVALS,
    N_EXPERTS,
    N_GPUS,
    N_LAYERS,
    PASSES,
    STREAMED,
    TOKENS,
    KeepsPlacement,
    Recorder,
    SeesFuture,
    SeesLoads,
    SeesMixture,
    protocol,
    same_interval,
    same_intervals,
    stream_intervals,
    without_decision_time,
)
from recorders import sim as sim  # a fixture
from recorders import trace as trace  # a fixture

# Who sees what


@pytest.mark.parametrize("schedule", STREAMED)
def test_planner_sees_only_intervals_already_served(schedule: str, trace: TokenTrace, sim: Simulator) -> None:
    p, planner = protocol(schedule, seed=5), Recorder(sim)
    train, test = p.parts(trace)
    result = evaluate_planner(planner, "recorder", train, test, p)
    intervals = stream_intervals(test, p, INTERVALS + 1)
    assert not any(same_interval(a, b) for i, a in enumerate(intervals) for b in intervals[:i])
    assert len(planner.seen) == INTERVALS
    for i, seen in enumerate(planner.seen):
        assert same_intervals(seen, intervals[: i + 1])  # the next one to be served is intervals[i + 1]
    # Intervals 1 … n are counted, each on the plan made just before it. Interval 0 is only observed.
    served = [sim.evaluate(intervals[i + 1], planner.plans[i], planner.placements[i]) for i in range(INTERVALS)]
    totals = [float((s.time_us + s.migration_us).mean()) for s in served]
    assert result.interval_totals_us == pytest.approx(totals)
    assert result.total_us == pytest.approx(np.mean(totals))
    assert result.served_us == pytest.approx(np.mean([s.time_us for s in served]))
    assert result.migration_us == pytest.approx(np.mean([s.migration_us for s in served]))
    assert result.migration_us > 0
    assert result.moves == pytest.approx(np.mean([s.moves for s in served]))
    assert result.balancedness == pytest.approx(np.mean([s.balancedness for s in served]))
    assert result.gpus_per_token == pytest.approx(np.mean([s.gpus_per_token for s in served]))
    assert result.inter_node_mb == pytest.approx(np.mean([s.inter_node_bytes for s in served]) / 1e6)
    assert (result.reused, result.groups) == (0.0, 1)


@pytest.mark.parametrize("schedule", STREAMED)
def test_only_planners_that_need_it_see_the_next_interval(schedule: str, trace: TokenTrace, sim: Simulator) -> None:
    p, planner = protocol(schedule), SeesFuture(sim)
    evaluate_planner(planner, "sees-future", *p.parts(trace), p)
    intervals = stream_intervals(trace, p, INTERVALS + 1)
    for i, seen in enumerate(planner.seen):
        assert same_intervals(seen, intervals[: i + 2])
    kinds = {name: planner_class(name) for name in PLANNERS if not name.startswith("policy")}
    assert [name for name, kind in kinds.items() if kind.needs_future] == ["oracle"]
    assert [name for name, kind in kinds.items() if kind.needs_mixture] == ["forecast"]


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_forecast_sees_other_tokens_of_the_same_domains(phase: str, trace: TokenTrace) -> None:
    traffic = Traffic(phase, TOKENS, PASSES, "drift")
    first, following = IntervalStream(trace, N_GPUS, traffic, seed=1).take(2)
    domain = np.repeat(np.searchsorted(trace.domain_names, trace.domains), trace.seq_lens)
    for interval in (first, following):
        other = same_mixture(interval, trace, traffic, seed=4)
        assert other.rows.shape == interval.rows.shape
        assert not np.intersect1d(other.rows, interval.rows).size
        counts = [np.bincount(domain[rows.ravel()], minlength=4) for rows in (interval.rows, other.rows)]
        # Pieces are drawn whole, so that the counts may differ by a piece.
        assert np.abs(counts[0] - counts[1]).max() <= (0 if phase == "decode" else 4 * TOKENS)
        sequence = np.repeat(np.arange(trace.n_sequences), trace.seq_lens)
        if phase == "decode":  # a running sequence gives its next token to each pass
            assert (np.diff(other.rows, axis=0) == 1).all()
            assert (sequence[other.rows] == sequence[other.rows[0]]).all()


def test_planner_of_the_mixture_sees_it_after_the_history(trace: TokenTrace, sim: Simulator) -> None:
    p, planner = protocol("drift"), SeesMixture(sim)
    evaluate_planner(planner, "sees-mixture", *p.parts(trace), p)
    intervals = stream_intervals(trace, p, INTERVALS + 1)
    for i, seen in enumerate(planner.seen):
        assert same_intervals(seen[:-1], intervals[: i + 1])
        assert not np.intersect1d(seen[-1].rows, intervals[i + 1].rows).size


def test_stationary_planner_of_the_future_plans_for_each_interval(trace: TokenTrace, sim: Simulator) -> None:
    p, planner = protocol("stationary"), SeesFuture(sim)
    train, test = p.parts(trace)
    evaluate_planner(planner, "sees-future", train, test, p)
    assert same_intervals([seen[0] for seen in planner.seen], stream_intervals(test, p, INTERVALS))
    assert {len(seen) for seen in planner.seen} == {1}


@pytest.mark.parametrize("schedule", STREAMED)
def test_all_planners_but_static_start_from_eplb(schedule: str, trace: TokenTrace, sim: Simulator) -> None:
    p, eplb = protocol(schedule), EPLB(sim)
    first = stream_intervals(trace, p, 1)[0]
    kinds = {name: planner_class(name) for name in PLANNERS if not name.startswith("policy")}
    assert [name for name, kind in kinds.items() if kind.keeps_placement] == ["static"]
    for kind, start in ((Recorder, eplb.pack(eplb.loads(first))), (KeepsPlacement, sim.static(N_LAYERS))):
        planner = kind(sim)
        evaluate_planner(planner, "recorder", *p.parts(trace), p)
        np.testing.assert_array_equal(planner.placements[0], start)
        for plan, placement in zip(planner.plans, planner.placements[1:], strict=False):
            np.testing.assert_array_equal(plan, placement)


def test_stationary_planner_plans_once_on_passes_of_the_planning_part(trace: TokenTrace, sim: Simulator) -> None:
    p = protocol("stationary", plan_passes=5)
    train, test = p.parts(trace)
    for kind, passes in ((Recorder, 5), (SeesLoads, 256)):
        planner = kind(sim)
        result = evaluate_planner(planner, "recorder", train, test, p)
        assert len(planner.seen) == 1
        (observed,) = planner.seen[0]
        sample = sample_passes(train, N_GPUS, p.traffic, passes, p.seed)
        np.testing.assert_array_equal(observed.pass_loads(N_EXPERTS), sample.pass_loads(N_EXPERTS))
        assert kind is SeesLoads or same_interval(observed, sample)
        assert reused_share([sample]) == 0.0
        np.testing.assert_array_equal(planner.placements[0], sim.static(N_LAYERS))
        assert (planner.plans[0] != planner.placements[0]).any()  # but migration costs nothing
        assert (result.migration_us, result.moves) == (0.0, 0.0)
        served = [sim.evaluate(w, planner.plans[0]).time_us.mean() for w in stream_intervals(test, p, INTERVALS)]
        assert result.interval_totals_us == pytest.approx(served)
    # Planners on loads see nearly the whole planning part.
    assert sample.rows.size > 0.85 * train.n_tokens


def test_planners_on_tokens_see_a_sample_if_asked(trace: TokenTrace, sim: Simulator) -> None:
    p = protocol("drift", observe_tokens=10)
    intervals = stream_intervals(trace, p, INTERVALS + 1)
    on_tokens, on_loads = Recorder(sim), SeesLoads(sim)
    for planner in (on_tokens, on_loads):
        evaluate_planner(planner, "recorder", trace, trace, p)
    for i in range(INTERVALS):
        assert same_intervals(on_loads.seen[i], intervals[: i + 1])
        seen, whole = on_tokens.seen[i][-1], intervals[i]
        assert seen.rows.shape == whole.rows.shape
        assert len(np.unique(seen.rows)) == 10
        assert np.isin(seen.rows, whole.rows).all()
        counts = np.unique(seen.rows, return_counts=True)[1]
        assert counts.max() - counts.min() <= 1  # every sampled token stands for equally many
    whole = sample_tokens(intervals[0], 10**6, 0)
    np.testing.assert_array_equal(np.sort(whole.rows.ravel()), np.sort(intervals[0].rows.ravel()))


class Improves(Recorder):
    starts_from_eplb = True


def test_planners_that_improve_a_plan_get_that_of_eplb(trace: TokenTrace, sim: Simulator) -> None:
    p = protocol("stationary", plan_passes=5)
    train, test = p.parts(trace)
    planner = Improves(sim)
    evaluate_planner(planner, "improves", train, test, p)
    np.testing.assert_array_equal(planner.placements[0], EPLB(sim).plan(planner.seen[0], sim.static(N_LAYERS)))


def test_stationary_planners_do_not_count_migration(
    trace: TokenTrace, sim: Simulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading the plan costs nothing, so a planner that counted migration would be at a disadvantage."""
    monkeypatch.setitem(PLANNERS, "recorder", Entry(Recorder))
    interval, static = stream_intervals(trace, protocol("drift"), 1)[0], sim.static(N_LAYERS)
    for schedule in ("stationary", "drift"):
        compare(trace, sim, ["recorder"], protocol(schedule))
        cost = Recorder.made[-1].simulator.evaluate(interval, np.roll(static, 1, axis=1), static)
        assert (cost.migration_us < 1e-6).all() == (schedule == "stationary")
        assert cost.time_us == pytest.approx(sim.evaluate(interval, np.roll(static, 1, axis=1)).time_us)


def test_illegal_plans_are_refused(trace: TokenTrace, sim: Simulator) -> None:
    class LosesExperts(Recorder):
        def plan(self, history: Sequence[Interval], placement: Placement) -> Placement:
            return np.zeros_like(placement)

    p = protocol("drift")
    with pytest.raises(ValueError, match="holds expert 0 twice"):
        evaluate_planner(LosesExperts(sim), "loses-experts", trace, trace, p)


def test_traffic_of_another_phase_is_refused(trace: TokenTrace, sim: Simulator) -> None:
    p = Protocol(Traffic("prefill", TOKENS, PASSES, "drift"), INTERVALS)
    with pytest.raises(ValueError, match="traffic is prefill, but profile 'sglang-decode' serves the decode phase"):
        evaluate_planner(Recorder(sim), "recorder", trace, trace, p)


# Numbers


@pytest.mark.parametrize("schedule", ["stationary", *STREAMED])
def test_totals_add_up(schedule: str, trace: TokenTrace, sim: Simulator) -> None:
    for r in compare(trace, sim, ["static", "eplb", "greedy"], protocol(schedule, streams=3)):
        assert r.total_us == pytest.approx(r.served_us + r.migration_us)
        assert len(r.stream_totals_us) == 3
        assert len(r.interval_totals_us) == INTERVALS
        assert r.total_us == pytest.approx(np.mean(r.stream_totals_us))
        assert r.total_us == pytest.approx(np.mean(r.interval_totals_us))
        if schedule != "stationary":
            assert r.total_ci95_us == pytest.approx(ci95_of_deals(r.stream_totals_us, r.groups))
        assert r.total_ci95_us > 0
        assert 0 < r.balancedness <= 1
        assert 1 <= r.gpus_per_token <= 2
        assert r.decision_ms > 0
        if r.planner == "static" or schedule == "stationary":
            assert (r.migration_us, r.moves) == (0.0, 0.0)
        if r.planner == "eplb" and schedule != "stationary":
            assert r.migration_us > 0
            assert r.moves > 0


def test_streams_have_consecutive_seeds(trace: TokenTrace, sim: Simulator) -> None:
    p, planner = protocol("drift", streams=2, seed=9), Recorder(sim)
    evaluate_planner(planner, "recorder", trace, trace, p)
    assert planner.resets == 2
    for stream in range(2):
        last = planner.seen[(stream + 1) * INTERVALS - 1]
        assert same_intervals(last, stream_intervals(trace, p, INTERVALS, stream))


def test_difference_is_paired_by_stream() -> None:
    def result(*totals: float) -> Result:
        return Result("p", 0, 0, 0, 0, 0, groups=3, stream_totals_us=list(totals))

    # Streams differ by far more than the planners.
    mean, half = result(99.0, 198.0, 297.0).versus(result(100.0, 200.0, 300.0))
    assert (mean, half) == (pytest.approx(-0.01), pytest.approx(0.0, abs=1e-12))


@pytest.mark.parametrize("schedule", ["stationary", "drift"])
def test_results_depend_on_the_seed_and_not_on_other_planners(schedule: str, trace: TokenTrace, sim: Simulator) -> None:
    names = ["eplb", "greedy", "anneal", "forecast", "oracle"]
    options: dict[str, dict[str, object]] = {name: {"iterations": 300} for name in ("anneal", "forecast", "oracle")}

    def run(names: Sequence[str], seed: int) -> dict[str, dict[str, object]]:
        results = compare(trace, sim, names, protocol(schedule, streams=2, seed=seed), options=options)
        return {r.planner: without_decision_time(r) for r in results}

    together = run(names, 1)
    assert list(together) == names
    assert run(names[::-1], 1) == together
    assert run(["oracle"], 1)["oracle"] == together["oracle"]
    other = run(names, 2)
    assert all(other[name] != together[name] for name in names)


def test_progress_is_called_with_each_planner(trace: TokenTrace, sim: Simulator) -> None:
    called: list[str] = []
    compare(trace, sim, ["static", "eplb"], protocol("replay"), progress=called.append)
    assert called == ["static", "eplb"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"intervals": 0}, "intervals is 0: expected at least 1"),
        ({"plan_passes": 0}, "plan_passes is 0: expected at least 1"),
        ({"observe_tokens": 0}, "observe_tokens is 0: expected at least 1"),
        ({"streams": -1}, "streams is -1: expected at least 1"),
        ({"holdout": 0.0}, "holdout is 0.0: expected more than 0 and less than 1"),
        ({"holdout": 1.0}, "holdout is 1.0: expected more than 0 and less than 1"),
    ],
)
def test_impossible_protocols_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Protocol(**options)
