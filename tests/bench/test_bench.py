"""The benchmark: frozen suites and their tracks, submitted code with limits, results, and the leaderboard."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

import bench_entries
from clustergym import cli
from clustergym.bench import results, suites
from clustergym.bench.budget import WithinBudget
from clustergym.bench.entries import Entry, drop_second_copies, parse_entries
from clustergym.bench.leaderboard import Row, pareto, places, rows_of
from clustergym.bench.run_task import run_task
from clustergym.bench.suites import AllocationTask, BudgetedPlacementTask, Limits, PlacementTask, Suite, load_suite
from clustergym.bench.worker_function import CallFailed, WorkerFunction
from clustergym.common.statistics import interquartile_mean, stratified_bootstrap
from clustergym.moe_placement.simulator import Placement
from clustergym.moe_placement.streams import Interval, IntervalStream
from clustergym.planners.base import Planner
from clustergym.planners.evaluation import deal_streams
from clustergym.planners.registry import PLANNERS
from clustergym.planners.registry import Entry as PlannerEntry

FILE = bench_entries.__file__
LIGHT = str(Path(__file__).parents[1] / "support" / "bench_limits.py")
OPTIONS = {"num_replicas": 8, "num_groups": 1, "num_nodes": 1, "num_gpus": 4}
WEIGHT = np.arange(12).reshape(2, 6)
SECRET = b"a secret of the tests"
TASK = PlacementTask(
    "t", "tiny_moe", "", "h800-2x2", "sglang-prefill", "drift", 16, 2, 2, 2, split="test", layers=(0, 3)
)  # fmt: skip


@pytest.fixture
def tiny_suite(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Suite:
    """A suite with small tasks in place of the frozen ones."""
    frozen = replace(TASK, data_sha256=suites.trace_sha256(TASK.load()))
    suite = Suite("tiny-v0", "Two tasks for tests.", (frozen, replace(frozen, name="u", seed=7)), ("t",))
    (tmp_path / "frozen").mkdir()
    (tmp_path / "frozen" / "tiny-v0.json").write_text(json.dumps(asdict(suite)))
    monkeypatch.setattr(suites, "FOLDER", tmp_path / "frozen")
    return suite


def target(name: str) -> str:
    return f"{FILE}:{name}"


class Keep(Planner):
    """Keeps EPLB's first placement."""

    def plan(self, history: Sequence[Interval], placement: Placement) -> Placement:
        return placement


@cache
def nothing_moved() -> list[float]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PLANNERS, "keep", PlannerEntry(Keep))
        return run_task(TASK, Entry("named", "keep")).scores


# Suites and tracks


@pytest.mark.parametrize(
    ("name", "sha256"),
    [
        ("placement-v2", "2f525b33456671c8fb83890f59662bff3181572bc7e4c337214a314ec448c1b3"),
        ("allocation-v2", "b4e1a10c579e9e6c726c7a845fd508f7760b82be5fb5511cee34d2e0b58265c2"),
        ("offload-v1", "3965394714f60490e8e47143ec6f122ad802066434c43b700190d0208098b03b"),
    ],
)
def test_published_suites_have_not_changed(name: str, sha256: str) -> None:
    """A suite that must change gets a new version. See benchmarks/placement/freeze_suites.py."""
    assert load_suite(name).sha256 == sha256


@pytest.mark.parametrize("secret", [None, SECRET])
def test_every_run_of_a_frozen_task_has_its_own_sequences(secret: bytes | None) -> None:
    tasks = [t for t in load_suite("placement-v2").on_track(secret).tasks if isinstance(t, PlacementTask)]
    for task in tasks[:4]:
        assert task.split == ("validation" if secret is None else "test")
        assert not task.protocol.traffic.allow_reuse
        served = task.protocol.parts(task.load())[1]
        assert deal_streams(served, task.simulator.n_gpus, task.protocol).groups == task.streams


def test_test_streams_cannot_be_made_without_the_secret() -> None:
    """Neither the streams nor the numbers of the experts nor a generated trace are those of another secret."""
    tasks = [TASK.on_track(SECRET), TASK.on_track(b"another secret, long"), TASK.on_track(SECRET)]
    served = []
    for task in tasks:
        part = deal_streams(task.protocol.parts(task.load())[1], 4, task.protocol).parts[0]
        interval = next(IntervalStream(part, 4, task.protocol.traffic, task.seed))
        served.append(interval.experts[:, interval.rows.ravel()])
    assert (served[0] == served[2]).all()
    assert (served[0] == served[1]).mean() < 0.5
    # The renumbered trace is the same traffic: sorted loads of each layer are equal.
    loads, own = (np.sort(trace.loads(), axis=1) for trace in (TASK.load(), tasks[0].load()))
    np.testing.assert_array_equal(loads, own)
    made = replace(TASK, trace="synthetic", synthetic={"n_tokens": 500, "n_layers": 2, "seed": 1}, layers=())
    hashes = {suites.trace_sha256(made.on_track(secret).load()) for secret in (None, SECRET, b"another secret, long")}
    assert len(hashes) == 3
    allocation = AllocationTask("a", "GPUAllocation-v0", 4)
    assert len({allocation.on_track(secret).seed for secret in (None, SECRET, b"another secret, long")}) == 3


def test_other_data_are_refused() -> None:
    with pytest.raises(ValueError, match="frozen with 00000"):
        replace(TASK, data_sha256="0" * 64).load()


def test_unknown_suites_and_tasks_are_refused(tiny_suite: Suite) -> None:
    with pytest.raises(ValueError, match="unknown suite 'x'; the suites are: tiny-v0"):
        load_suite("x")
    with pytest.raises(ValueError, match="no task 'x'"):
        tiny_suite.only(["x"])


# Submitted code


def test_a_function_with_the_arguments_of_deepseek() -> None:
    with WorkerFunction(target("in_order"), "planner", OPTIONS, Limits()) as function:
        assert function.start() == "loads"
        assert function({"weight": WEIGHT}).tolist() == [[0, 1, 2, 3, 4, 5, 0, 1]] * 2


@pytest.mark.parametrize(
    ("name", "message", "seconds"),
    [
        ("never_returns", "took more than 0.2 s", 0.2),
        ("too_much_memory", "MemoryError", 60),
        ("raises", "KeyError: 'no such expert'", 60),
        ("kills_itself", "the process ended with code -9", 60),
        ("pickled", "Object arrays cannot be saved when allow_pickle=False", 60),
    ],
)
def test_a_function_that_breaks_a_limit_fails_and_the_next_call_works(name: str, message: str, seconds: float) -> None:
    """The first call of each function works, the second fails, the third is answered by a process that is well."""
    with WorkerFunction(f"{LIGHT}:{name}", "agent", {}, Limits(seconds=60)) as function:
        assert function.start() == "obs"
        assert function({"obs": np.array(1)}) == 2
        function.limits = Limits(seconds=seconds)
        with pytest.raises(CallFailed, match=message):
            function({"obs": np.array(0)})
        function.limits = Limits(seconds=60)
        assert function({"obs": np.array(2)}) == 3


def test_a_function_that_cannot_be_imported() -> None:
    for name, message in (("absent", "has no 'absent'"), ("", "expected module:function")):
        with (
            WorkerFunction(f"{LIGHT}:{name}", "agent", {}, Limits()) as function,
            pytest.raises(CallFailed, match=message),
        ):
            function.start()


def test_second_copies_on_a_gpu_are_dropped() -> None:
    given = np.array([[[1, 1, 2], [2, 1, 2], [0, 0, 0]]])
    assert drop_second_copies(given).tolist() == [[[1, -1, 2], [2, 1, -1], [0, -1, -1]]]


# Playing tasks


def test_submitted_planners_score_as_the_planners_that_they_copy() -> None:
    eplb = run_task(TASK, Entry("named", "eplb"))
    assert eplb.scores == [0.0, 0.0]
    assert eplb.metrics["reused"] == 0
    subclass = run_task(TASK, Entry("planner", target("OurEPLB")))
    assert subclass.scores == [0.0, 0.0]
    assert subclass.metrics["failed"] == 0
    kept = run_task(TASK, Entry("planner", target("keep")))
    assert kept.scores == nothing_moved()
    assert kept.metrics["moves"] == 0
    deepseek = run_task(TASK, Entry("planner", target("rebalance_experts")))
    assert deepseek.metrics["failed"] == 0
    # The same replicas and packing; only GPUs may be renamed.
    assert deepseek.metrics["served_us"] == pytest.approx(eplb.metrics["served_us"], rel=0.01)


def test_failed_decisions_keep_the_placement_and_are_counted() -> None:
    found = run_task(TASK, Entry("planner", target("wrong_shape")))
    assert found.scores == nothing_moved()
    assert found.metrics["failed"] == 1
    assert "expected integers of shape (2, " in found.failures[0]
    half = run_task(TASK, Entry("planner", target("fails_every_second_time")))
    assert half.metrics["failed"] == 0.5


def test_submitted_code_does_not_hold_the_clock() -> None:
    found = run_task(TASK, Entry("planner", target("sets_the_clock")))
    assert found.metrics["failed"] == 0
    assert found.metrics["decision_ms"] * len(TASK.layers) > 50  # type: ignore[operator]


def test_an_agent_that_does_nothing_scores_as_the_planner_that_does_nothing() -> None:
    agent = run_task(TASK, Entry("agent", target("do_nothing")))
    assert agent.scores == pytest.approx(nothing_moved(), abs=1e-6)
    assert agent.metrics["failed"] == 0
    with pytest.raises(ValueError, match="most actions fail, the last one: action"):
        run_task(TASK, Entry("agent", target("out_of_range")))


def test_planners_with_the_budget_of_agents(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan is at most so many operations away from the placement before it."""
    pairs: list[tuple[Placement, Placement]] = []
    plan = WithinBudget.plan

    def recorded(planner: WithinBudget, history: Sequence[Interval], placement: Placement) -> Placement:
        pairs.append((placement, plan(planner, history, placement)))
        return pairs[-1][1]

    monkeypatch.setattr(WithinBudget, "plan", recorded)
    budgeted = BudgetedPlacementTask(**vars(replace(TASK, ops_per_layer=2)))
    assert results.task_sha256(budgeted) != results.task_sha256(replace(TASK, ops_per_layer=2))
    few = run_task(budgeted, Entry("named", "affinity-groups"))
    assert pairs
    for before, after in pairs:
        # An operation changes two GPUs at most.
        changed = (np.sort(before, axis=2) != np.sort(after, axis=2)).any(2).sum(1)
        assert changed.max() <= 4
    assert any((before != after).any() for before, after in pairs)
    many = run_task(replace(budgeted, ops_per_layer=99), Entry("named", "affinity-groups"))
    assert many.metrics["moves"] > few.metrics["moves"]  # type: ignore[operator]
    idle = run_task(replace(budgeted, ops_per_layer=0), Entry("named", "affinity-groups"))
    assert idle.scores == [0.0, 0.0]
    assert idle.metrics["moves"] == 0


def test_an_agent_acts_in_the_form_of_the_environment_that_it_names() -> None:
    """In the flat form, 0 is the action that changes nothing."""
    agent = run_task(TASK, Entry("agent", target("always_0"), "MoEPlacementFlat-v0"))
    assert agent.scores == pytest.approx(nothing_moved(), abs=1e-6)


def test_allocation_scores_lie_between_the_references() -> None:
    task = AllocationTask("a", "GPUAllocation-v0", 16, options={"arrivals": 32})
    assert np.mean(run_task(task, Entry("named", "grant")).scores) == pytest.approx(0)
    assert np.mean(run_task(task, Entry("named", "oracle")).scores) == pytest.approx(1)
    half = run_task(task, Entry("agent", target("Half")))
    assert half.metrics["failed"] == 0
    assert np.mean(half.scores) < 1


# Entries and results


def test_entries_of_the_command_line(tmp_path: Path) -> None:
    assert {e.target for e in parse_entries("placement", ["all"], [], "")} >= {"eplb", "anneal", "oracle"}
    assert "exact" not in {e.target for e in parse_entries("placement", [], [], "")}
    assert {e.target for e in parse_entries("allocation", [], [], "")} >= {"grant", "oracle"}
    agent = parse_entries("allocation", [], [target("Half")], "")
    assert [(e.kind, e.name) for e in agent] == [("agent", "bench_entries.py:Half")]
    for kind, planners, message in (
        ("placement", ["nope"], "unknown planner 'nope'"),
        ("placement", ["policy"], "'policy' was removed: use 'greedy'"),
        ("placement", ["absent.py:f"], "no file at absent.py"),
        ("placement", ["no_such_module:f"], "no module 'no_such_module'"),
        ("allocation", [target("in_order")], "takes rules by name"),
        ("allocation", ["nope"], "unknown rule 'nope'"),
        ("placement", ["eplb", "eplb"], "two entries have the same name"),
    ):
        with pytest.raises(ValueError, match=message):
            parse_entries(kind, planners, [], "")


def test_a_validation_run_is_resumed_and_ranks_nobody(
    tiny_suite: Suite, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["bench", "run", "tiny-v0", "--planner", "eplb", "swift", "oracle", "--folder", str(tmp_path / "runs")]
    assert cli.main([*command, "--task", "t"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "validation track" in said
    files = sorted((tmp_path / "runs").rglob("*.json"))
    assert [file.name for file in files] == ["t.json"] * 3
    before = [file.stat().st_mtime_ns for file in files]
    assert cli.main(command) == 0
    assert [file.stat().st_mtime_ns for file in files] == before
    assert len(list((tmp_path / "runs").rglob("*.json"))) == 6
    # Other code: everything is run again.
    monkeypatch.setattr(results, "code_sha256", lambda: "other")
    assert cli.main([*command, "--task", "t"]) == 0
    assert [file.stat().st_mtime_ns for file in files] != before
    capsys.readouterr()
    assert cli.main(["bench", "table", "tiny-v0", "--folder", str(tmp_path / "runs"), "--leaderboard", "x.md"]) == 2
    assert "--leaderboard needs the --secret" in capsys.readouterr().err


def test_only_what_the_holder_of_the_secret_computed_is_on_the_leaderboard(
    tiny_suite: Suite, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, secret, page = tmp_path / "runs", tmp_path / "secret", tmp_path / "leaderboard.md"
    secret.write_bytes(SECRET)
    flags = ["--folder", str(folder), "--secret", str(secret)]
    show = ["bench", "table", "tiny-v0", *flags, "--leaderboard", str(page)]
    assert cli.main(["bench", "run", "tiny-v0", "--planner", "eplb", "swift", "oracle", *flags]) == 0
    assert cli.main(show) == 0
    lines = page.read_text().splitlines()
    assert sum(line.startswith(("| 1 | eplb", "| 1 | swift")) for line in lines) == 1
    assert sum(line.startswith("|  | oracle (sees the future)") for line in lines) == 1
    data = (tmp_path / "data" / "leaderboard-tiny-v0.csv").read_text().splitlines()
    assert data[0].startswith('place,entry,"time saved vs EPLB')
    assert sum(line.startswith(("1,eplb,", "1,swift,")) for line in data) == 1
    file = folder / "tiny-v0" / "swift" / "t.json"
    honest = file.read_text()
    signed = results.read_result(file)

    def refused(content: str, *command: str) -> str:
        file.write_text(content)
        capsys.readouterr()
        assert cli.main(list(command) or show) == 2
        return capsys.readouterr().err

    # A better score by hand; a result of another secret; a result of the validation track; another schema.
    edited = json.dumps(signed | {"scores": [0.5, 0.5]})
    assert "not signed with this secret" in refused(edited)
    foreign = dict(signed, signature=results.signature(signed, b"another secret, long"))
    assert "not signed with this secret" in refused(json.dumps(foreign))
    assert "not signed" in refused(json.dumps({k: v for k, v in signed.items() if k != "signature"}))
    assert "schema 1, but this version reads 2" in refused(json.dumps(signed | {"schema": 1}))
    assert "not a result" in refused("[]")
    # The hashes are compared: even the holder cannot mix results of different specs or code.
    for name in ("specs_sha256", "code_sha256"):
        other = signed | {name: "0" * 64}
        other["signature"] = results.signature(other, SECRET)
        assert "made with other code or specs" in refused(json.dumps(other))
    other = signed | {"task_sha256": "0" * 64}
    other["signature"] = results.signature(other, SECRET)
    assert "has changed since this result" in refused(json.dumps(other))
    # A forged file is computed again.
    file.write_text(edited)
    assert cli.main(["bench", "run", "tiny-v0", "--planner", "swift", *flags]) == 0
    assert results.read_result(file)["scores"] == json.loads(honest)["scores"]
    secret.write_bytes(b"short")
    assert "expected at least 16 random ones" in refused(honest)


# Aggregates


def test_the_aggregates_have_the_definitions_of_rliable() -> None:
    scores = [np.array([0.0, 1.0, 2.0, 3.0]), np.array([4.0, 5.0, 6.0, 7.0])]
    assert interquartile_mean(scores) == pytest.approx(np.mean([2, 3, 4, 5]))
    low, high = stratified_bootstrap(scores)
    assert 2 < low < 3.5 < high < 5
    same = [np.full(4, 2.0)] * 2
    assert stratified_bootstrap(same) == (2.0, 2.0)


def row(entry: str, score: float, ms: float, hindsight: bool = False, missing: tuple[str, ...] = ()) -> Row:
    return Row(entry, score, score, score, score, ms, {}, hindsight, missing)


def test_places_and_the_pareto_front() -> None:
    rows = [row("bound", 0.9, 1, hindsight=True), row("best", 0.5, 9), row("part", 0.4, 1, missing=("t",)),
            row("quick", 0.3, 1), row("slow", 0.2, 5)]  # fmt: skip
    assert places(rows) == [None, 1, None, 2, 3]
    assert [r.entry for r in pareto(rows)] == ["quick", "best"]


def test_rows_rank_by_the_interquartile_mean(tiny_suite: Suite) -> None:
    def result(scores: list[float]) -> results.Result:
        return {"scores": scores, "metrics": {"decision_ms": 1.0}, "hindsight": False}

    found = {
        "steady": {"t": result([0.2, 0.2]), "u": result([0.2, 0.2])},
        "lucky": {"t": result([0.9, 0.0]), "u": result([0.0, 0.0])},
        "half": {"t": result([0.5, 0.5])},
    }
    rows = rows_of(found, tiny_suite)
    assert [(r.entry, r.missing) for r in rows] == [("half", ("u",)), ("steady", ()), ("lucky", ())]
