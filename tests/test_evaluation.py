"""The comparison of planners: what they see and when, what is counted, and how it is averaged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
from scipy import stats

from clustergym import TokenTrace
from clustergym.common.statistics import ci95
from clustergym.moe_placement import ClusterSpec, ModelSpec, Placement, Simulator, Window
from clustergym.moe_placement.evaluation import Protocol, Result, compare, evaluate_planner
from clustergym.moe_placement.planner_registry import PLANNERS, Entry
from clustergym.moe_placement.planners.base import Planner
from clustergym.moe_placement.planners.eplb import EPLB
from clustergym.moe_placement.simulator import Stream
from clustergym.traces import SyntheticConfig, synthetic_trace

N_LAYERS, N_EXPERTS, WINDOWS, TOKENS = 2, 8, 4, 64
STREAMED = ("drift", "switch", "replay")


class Recorder(Planner):
    """Records its input, and moves the experts of each GPU to the next GPU, so that everything moves."""

    made: ClassVar[list[Recorder]] = []

    def __init__(self, simulator: Simulator, seed: int = 0) -> None:
        super().__init__(simulator, seed)
        self.seen: list[list[Window]] = []
        self.placements: list[Placement] = []
        self.plans: list[Placement] = []
        self.tokens: list[int | None] = []
        self.resets = 0
        self.made.append(self)

    def reset(self) -> None:
        self.resets += 1

    def plan(self, history: Sequence[Window], placement: Placement, tokens: int | None = None) -> Placement:
        self.seen.append(list(history))
        self.placements.append(placement.copy())
        self.tokens.append(tokens)
        self.plans.append(np.roll(placement, 1, axis=1))
        return self.plans[-1]


class SeesFuture(Recorder):
    needs_future = True


class KeepsPlacement(Recorder):
    keeps_placement = True


@pytest.fixture(scope="module")
def trace() -> TokenTrace:
    config = SyntheticConfig(
        n_tokens=2000, n_layers=N_LAYERS, n_experts=N_EXPERTS, top_k=2, mean_seq_len=25, popularity_skew=0.6
    )
    return synthetic_trace(config, seed=3)


@pytest.fixture(scope="module")
def sim() -> Simulator:
    model = ModelSpec("small", N_LAYERS, N_EXPERTS, 2, 2048, 1024)
    return Simulator(model, ClusterSpec("2x2", 2, 2, 3), passes_per_window=50)


def protocol(schedule: str, **options: Any) -> Protocol:
    return Protocol(schedule, windows=WINDOWS, window_tokens=TOKENS, **options)


def same_window(a: Window, b: Window) -> bool:
    return np.array_equal(a.rows, b.rows) and np.array_equal(a.home, b.home)


def same_windows(a: Sequence[Window], b: Sequence[Window]) -> bool:
    return len(a) == len(b) and all(same_window(x, y) for x, y in zip(a, b, strict=True))


def without_decision_time(result: Result) -> dict[str, object]:
    return {key: value for key, value in result.as_dict().items() if key != "decision_ms"}


def stream_windows(test: TokenTrace, sim: Simulator, p: Protocol, n: int, stream: int = 0) -> list[Window]:
    return Stream(test, sim.n_gpus, p.window_tokens, p.schedule, p.rate, seed=p.seed + stream).take(n)


# Who sees what


@pytest.mark.parametrize("schedule", STREAMED)
def test_planner_sees_only_windows_already_served(schedule: str, trace: TokenTrace, sim: Simulator) -> None:
    p, planner = protocol(schedule, seed=5), Recorder(sim)
    train, test = p.split(trace)
    result = evaluate_planner(planner, "recorder", train, test, p)
    windows = stream_windows(test, sim, p, WINDOWS + 1)
    assert not any(same_window(a, b) for i, a in enumerate(windows) for b in windows[:i])
    assert len(planner.seen) == WINDOWS
    assert planner.tokens == [TOKENS] * WINDOWS
    for i, seen in enumerate(planner.seen):
        assert same_windows(seen, windows[: i + 1])  # the next one to be served is windows[i + 1]
    # Windows 1 … n are counted, each on the plan made just before it. Window 0 is only observed.
    served = [sim.evaluate(windows[i + 1], planner.plans[i], planner.placements[i]) for i in range(WINDOWS)]
    totals = [float((s.time_us + s.migration_us).mean()) for s in served]
    assert result.window_totals_us == pytest.approx(totals)
    assert result.total_us == pytest.approx(np.mean(totals))
    assert result.served_us == pytest.approx(np.mean([s.time_us for s in served]))
    assert result.migration_us == pytest.approx(np.mean([s.migration_us for s in served]))
    assert result.migration_us > 0
    assert result.moves == pytest.approx(np.mean([s.moves for s in served]))
    assert result.balancedness == pytest.approx(np.mean([s.balancedness for s in served]))
    assert result.gpus_per_token == pytest.approx(np.mean([s.gpus_per_token for s in served]))
    assert result.inter_node_mb == pytest.approx(np.mean([s.inter_node_bytes for s in served]) / 1e6)


@pytest.mark.parametrize("schedule", STREAMED)
def test_only_planners_that_need_it_see_the_next_window(schedule: str, trace: TokenTrace, sim: Simulator) -> None:
    p, planner = protocol(schedule), SeesFuture(sim)
    train, test = p.split(trace)
    evaluate_planner(planner, "sees-future", train, test, p)
    windows = stream_windows(test, sim, p, WINDOWS + 1)
    for i, seen in enumerate(planner.seen):
        assert same_windows(seen, windows[: i + 2])
    assert [name for name, entry in PLANNERS.items() if entry.planner.needs_future] == ["oracle"]


def test_stationary_planner_of_the_future_plans_for_each_window(trace: TokenTrace, sim: Simulator) -> None:
    p, planner = protocol("stationary"), SeesFuture(sim)
    train, test = p.split(trace)
    evaluate_planner(planner, "sees-future", train, test, p)
    assert same_windows([seen[0] for seen in planner.seen], stream_windows(test, sim, p, WINDOWS))
    assert {len(seen) for seen in planner.seen} == {1}


@pytest.mark.parametrize("schedule", STREAMED)
def test_all_planners_but_static_start_from_eplb(schedule: str, trace: TokenTrace, sim: Simulator) -> None:
    p = protocol(schedule)
    train, test = p.split(trace)
    eplb = EPLB(sim)
    first = stream_windows(test, sim, p, 1)[0]
    assert [name for name, entry in PLANNERS.items() if entry.planner.keeps_placement] == ["static"]
    for kind, start in ((Recorder, eplb.pack(eplb.loads(first))), (KeepsPlacement, sim.static(N_LAYERS))):
        planner = kind(sim)
        evaluate_planner(planner, "recorder", train, test, p)
        np.testing.assert_array_equal(planner.placements[0], start)
        for plan, placement in zip(planner.plans, planner.placements[1:], strict=False):
            np.testing.assert_array_equal(plan, placement)


def test_stationary_planner_plans_once_on_the_whole_planning_part(trace: TokenTrace, sim: Simulator) -> None:
    p, planner = protocol("stationary"), Recorder(sim)
    train, test = p.split(trace)
    result = evaluate_planner(planner, "recorder", train, test, p)
    assert len(planner.seen) == 1
    (observed,) = planner.seen[0]
    assert observed.n_tokens == train.n_tokens
    np.testing.assert_array_equal(observed.loads(N_EXPERTS), train.loads())
    assert planner.tokens == [TOKENS]
    np.testing.assert_array_equal(planner.placements[0], sim.static(N_LAYERS))
    assert (planner.plans[0] != planner.placements[0]).any()  # but migration costs nothing
    assert (result.migration_us, result.moves) == (0.0, 0.0)
    served = [sim.evaluate(w, planner.plans[0]).time_us.mean() for w in stream_windows(test, sim, p, WINDOWS)]
    assert result.window_totals_us == pytest.approx(served)


def test_stationary_planners_do_not_count_migration(
    trace: TokenTrace, sim: Simulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading the plan costs nothing, so a planner that counted migration would be at a disadvantage."""
    monkeypatch.setitem(PLANNERS, "recorder", Entry(Recorder))
    window, static = Window.whole(trace, sim.n_gpus), sim.static(N_LAYERS)
    for schedule in ("stationary", "drift"):
        compare(trace, sim, ["recorder"], protocol(schedule))
        cost = Recorder.made[-1].simulator.evaluate(window, np.roll(static, 1, axis=1), static)
        assert (cost.migration_us < 1e-6).all() == (schedule == "stationary")
        assert cost.time_us == pytest.approx(sim.evaluate(window, np.roll(static, 1, axis=1)).time_us)


def test_illegal_plans_are_refused(trace: TokenTrace, sim: Simulator) -> None:
    class LosesExperts(Recorder):
        def plan(self, history: Sequence[Window], placement: Placement, tokens: int | None = None) -> Placement:
            return np.zeros_like(placement)

    p = protocol("drift")
    with pytest.raises(ValueError, match="holds expert 0 twice"):
        evaluate_planner(LosesExperts(sim), "loses-experts", *p.split(trace), p)


# The split


@pytest.mark.parametrize("holdout", [0.25, 0.5, 0.75])
def test_planning_and_held_out_part_share_no_sequence(holdout: float) -> None:
    """Every sequence uses an expert of its own, which identifies its tokens."""
    lengths = np.random.default_rng(0).integers(3, 12, 40)
    trace = TokenTrace(np.repeat(np.arange(40), lengths)[:, None], seq_lens=lengths)
    train, test = Protocol(holdout=holdout, seed=4).split(trace)
    planned, kept = set(train.experts.ravel().tolist()), set(test.experts.ravel().tolist())
    assert not planned & kept
    assert planned | kept == set(range(40))
    assert train.n_tokens + test.n_tokens == trace.n_tokens
    assert test.n_tokens / trace.n_tokens == pytest.approx(holdout, abs=12 / trace.n_tokens)
    assert train.n_tokens >= test.n_tokens or holdout > 0.5


def test_single_sequence_is_refused(sim: Simulator) -> None:
    trace = TokenTrace(np.zeros((20, N_LAYERS), int), n_experts=N_EXPERTS, name="single")
    with pytest.raises(ValueError, match="single: the trace has one sequence, so nothing can be held out"):
        compare(trace, sim, ["static"], protocol("drift"))


# Numbers


def test_ci95_of_known_numbers() -> None:
    # Mean 2.5, standard deviation 1.29099, t(3) = 3.18245: 3.18245 · 1.29099 / √4.
    assert ci95([1.0, 2.0, 3.0, 4.0]) == pytest.approx(2.05426, abs=1e-5)
    values = [3.0, 1.5, 8.0, 2.0, 2.5]
    low, high = stats.t.interval(0.95, 4, loc=np.mean(values), scale=stats.sem(values))
    assert ci95(values) == pytest.approx((high - low) / 2)
    assert ci95([7.0]) == 0.0
    assert ci95([7.0, 7.0]) == 0.0


@pytest.mark.parametrize("schedule", ["stationary", *STREAMED])
def test_totals_add_up(schedule: str, trace: TokenTrace, sim: Simulator) -> None:
    for r in compare(trace, sim, ["static", "eplb", "bottleneck"], protocol(schedule, streams=3)):
        assert r.total_us == pytest.approx(r.served_us + r.migration_us)
        assert len(r.stream_totals_us) == 3
        assert len(r.window_totals_us) == WINDOWS
        assert r.total_us == pytest.approx(np.mean(r.stream_totals_us))
        assert r.total_us == pytest.approx(np.mean(r.window_totals_us))
        assert r.total_ci95_us == pytest.approx(ci95(r.stream_totals_us))
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
    train, test = p.split(trace)
    evaluate_planner(planner, "recorder", train, test, p)
    assert planner.resets == 2
    for stream in range(2):
        last = planner.seen[(stream + 1) * WINDOWS - 1]
        assert same_windows(last, stream_windows(test, sim, p, WINDOWS, stream))


@pytest.mark.parametrize("schedule", ["stationary", "drift"])
def test_results_depend_on_the_seed_and_not_on_other_planners(schedule: str, trace: TokenTrace, sim: Simulator) -> None:
    names = ["eplb-ema", "eplb-once", "random-best", "anneal", "oracle"]
    options: dict[str, dict[str, object]] = {"anneal": {"iterations": 300}, "oracle": {"iterations": 300}}

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
        ({"schedule": "driftt"}, "unknown schedule 'driftt'; expected one of: stationary, drift, switch, replay"),
        ({"windows": 0}, "windows is 0: expected at least 1"),
        ({"window_tokens": 0}, "window_tokens is 0: expected at least 1"),
        ({"streams": -1}, "streams is -1: expected at least 1"),
        ({"holdout": 0.0}, "holdout is 0.0: expected more than 0 and less than 1"),
        ({"holdout": 1.0}, "holdout is 1.0: expected more than 0 and less than 1"),
    ],
)
def test_impossible_protocols_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Protocol(**options)
