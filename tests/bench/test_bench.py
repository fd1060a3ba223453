"""The benchmark: frozen suites, submitted functions and agents with limits, result files, and the leaderboard."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bench_entries
from clustergym import cli
from clustergym.bench import results, running, suites
from clustergym.bench.entries import Entry, parse_entries
from clustergym.bench.leaderboard import Row, pareto, places, rows_of
from clustergym.bench.limited import CallFailed, LimitedFunction
from clustergym.bench.play import play
from clustergym.bench.submitted import drop_second_copies
from clustergym.bench.suites import AllocationTask, Limits, PlacementTask, Suite, load_suite
from clustergym.common.checkpoints import save_checkpoint
from clustergym.common.executors import LocalExecutor, make_executor
from clustergym.common.statistics import interquartile_mean, stratified_bootstrap
from clustergym.moe_placement.simulator import Placement
from clustergym.moe_placement.streams import Interval
from clustergym.planners.base import Planner
from clustergym.planners.evaluation import deal_streams
from clustergym.planners.registry import PLANNERS
from clustergym.planners.registry import Entry as PlannerEntry

FILE = bench_entries.__file__
LIGHT = str(Path(__file__).parents[1] / "support" / "bench_limits.py")
OPTIONS = {"num_replicas": 8, "num_groups": 1, "num_nodes": 1, "num_gpus": 4}
WEIGHT = np.arange(12).reshape(2, 6)
TASK = PlacementTask("t", "tiny_moe", "", "h800-2x2", "sglang-prefill", "drift", 16, 2, 2, 2, layers=(0, 3))
TINY = Suite("tiny-v0", "Two tasks for tests.", (TASK, replace(TASK, name="u", seed=7)), ("t",), "eplb")


@pytest.fixture
def tiny_suite(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Suite:
    """A suite with small tasks in place of the frozen ones."""
    tasks = tuple(
        replace(task, data_sha256=suites.trace_sha256(task.load())) if isinstance(task, PlacementTask) else task
        for task in TINY.tasks
    )
    suite = replace(TINY, tasks=tasks)
    (tmp_path / "frozen").mkdir()
    (tmp_path / "frozen" / "tiny-v0.json").write_text(json.dumps(suite.as_dict()))
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
        return play(TASK, Entry("named", "keep")).scores


# Suites


@pytest.mark.parametrize(
    ("name", "sha256"),
    [
        ("placement-v1", "54b8f2008a53debdc6d7fa45791b5007da7da8e6dd25c19fe4e1097a0f8bbcae"),
        ("allocation-v1", "e455e495111a02c873264b33b818c27f39c8783c158b025328d52f77ef658e82"),
    ],
)
def test_published_suites_have_not_changed(name: str, sha256: str) -> None:
    """A suite that must change gets a new version. See benchmarks/freeze_suites.py."""
    assert load_suite(name).sha256 == sha256


def test_every_run_of_a_frozen_task_has_its_own_sequences_of_the_test_split() -> None:
    tasks = [t for t in load_suite("placement-v1").tasks if isinstance(t, PlacementTask) and t.trace != "synthetic"]
    assert tasks
    for task in tasks:
        assert task.split == "test"
        assert not task.protocol.traffic.allow_reuse
        served = task.protocol.parts(task.load())[1]
        assert deal_streams(served, task.simulator.n_gpus, task.protocol).groups == task.streams


def test_other_data_are_refused() -> None:
    with pytest.raises(ValueError, match="frozen with 00000"):
        replace(TASK, data_sha256="0" * 64).load()


def test_the_hash_of_a_trace_depends_on_its_content() -> None:
    trace = TASK.load()
    parts = [trace.select(domains=trace.domain_names[:3]), trace.select(layers=[0])]
    assert len({suites.trace_sha256(t) for t in [trace, *parts]}) == 3
    assert suites.trace_sha256(trace.select()) == suites.trace_sha256(trace)


def test_unknown_suites_and_tasks_are_refused(tiny_suite: Suite, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown suite 'x'; the suites are: tiny-v0"):
        load_suite("x")
    with pytest.raises(ValueError, match="no task 'x'"):
        running.run_suite("tiny-v0", False, [], tmp_path, LocalExecutor(), ["x"])


# Submitted functions


def test_a_function_with_the_arguments_of_deepseek() -> None:
    with LimitedFunction(target("in_order"), "placement", OPTIONS, Limits()) as function:
        assert function.start() == "loads"
        assert function({"weight": WEIGHT}).tolist() == [[0, 1, 2, 3, 4, 5, 0, 1]] * 2
        assert 0 < function.seconds < 10


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
    with LimitedFunction(f"{LIGHT}:{name}", "agent", {}, Limits(seconds=60)) as function:
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
            LimitedFunction(f"{LIGHT}:{name}", "agent", {}, Limits()) as function,
            pytest.raises(CallFailed, match=message),
        ):
            function.start()


def test_second_copies_on_a_gpu_are_dropped() -> None:
    given = np.array([[[1, 1, 2], [2, 1, 2], [0, 0, 0]]])
    assert drop_second_copies(given).tolist() == [[[1, -1, 2], [2, 1, -1], [0, -1, -1]]]


# Playing tasks


def test_submitted_planners_score_as_the_planners_that_they_copy() -> None:
    eplb = play(TASK, Entry("named", "eplb"))
    assert eplb.scores == [0.0, 0.0]
    assert eplb.metrics["reused"] == 0
    subclass = play(TASK, Entry("function", target("OurEPLB")))
    assert subclass.scores == [0.0, 0.0]
    assert subclass.metrics["failed"] == 0
    kept = play(TASK, Entry("function", target("keep")))
    assert kept.scores == nothing_moved()
    assert kept.metrics["moves"] == 0
    deepseek = play(TASK, Entry("function", target("rebalance_experts")))
    assert deepseek.metrics["failed"] == 0
    # The same replicas and packing; only GPUs may be renamed.
    assert deepseek.metrics["served_us"] == pytest.approx(eplb.metrics["served_us"], rel=0.01)


def test_failed_decisions_keep_the_placement_and_are_counted() -> None:
    played = play(TASK, Entry("function", target("wrong_shape")))
    assert played.scores == nothing_moved()
    assert played.metrics["failed"] == 1
    assert "expected integers of shape (2, " in played.failures[0]
    half = play(TASK, Entry("function", target("fails_every_second_time")))
    assert half.metrics["failed"] == 0.5


def test_an_agent_that_does_nothing_scores_as_the_planner_that_does_nothing() -> None:
    agent = play(TASK, Entry("agent", target("do_nothing")))
    assert agent.scores == pytest.approx(nothing_moved(), abs=1e-6)
    assert agent.metrics["failed"] == 0
    with pytest.raises(ValueError, match="most actions fail, the last one: action"):
        play(TASK, Entry("agent", target("out_of_range")))


def test_allocation_scores_lie_between_the_references() -> None:
    task = AllocationTask("a", "GPUAllocation-v0", 4, options={"arrivals": 16})
    for rule, expected in (("grant", 0.0), ("oracle", 1.0)):
        assert np.mean(play(task, Entry("named", rule)).scores) == pytest.approx(expected)
    agent = play(task, Entry("agent", target("Half")))
    assert len(agent.scores) == 4
    assert agent.metrics["failed"] == 0
    assert np.mean(agent.scores) < 1


def test_each_allocation_task_gets_the_policy_that_takes_its_observation(tmp_path: Path) -> None:
    def save(name: str, n_features: int, action: float) -> None:
        """A policy that always answers the same."""
        layers = {"actor.0": (4, n_features), "actor.2": (4, 4), "actor.4": (2, 4)}
        agent = {f"{layer}.weight": torch.zeros(shape) for layer, shape in layers.items()}
        agent |= {f"{layer}.bias": torch.zeros(shape[0]) for layer, shape in layers.items()}
        agent["actor.4.bias"] += np.log(action / (1 - action))
        state = {"agent": agent, "args": {"norm_obs": False}, "statistics": None}
        save_checkpoint(tmp_path / name, "ppo_gpu_alloc-model", state)

    save("a.pt", 5, 0.5)
    save("b.pt", 19, 0.9)
    ids = ("GPUAllocation-v0", "GPUAllocationHistory-v0")
    five, history = tasks = [AllocationTask("a", name, 4, options={"arrivals": 16}) for name in ids]
    both = [play(task, Entry("checkpoint", str(tmp_path))) for task in tasks]
    alone = [play(task, Entry("checkpoint", f"{tmp_path}/{name}.pt")) for task, name in ((five, "a"), (history, "b"))]
    assert [one.scores for one in both] == [one.scores for one in alone]
    assert both[0].scores != both[1].scores
    with pytest.raises(ValueError, match="takes 19 numbers, but GPUAllocation-v0 has 5"):
        play(five, Entry("checkpoint", f"{tmp_path}/b.pt"))


def test_entries_of_the_command_line(tmp_path: Path) -> None:
    assert {e.target for e in parse_entries("placement", ["all"], [], [])} >= {"eplb", "anneal", "oracle"}
    assert parse_entries("allocation", ["vpa"], [], []) == [Entry("named", "vpa")]
    (entry,) = parse_entries("placement", [target("in_order")], [], [], "mine")
    assert (entry.name, entry.folder) == ("mine", "mine")
    assert len(entry.code_sha256) == 64
    for arguments, message in [
        ((["nonsense"], [], []), "unknown planner 'nonsense'"),
        (([f"{tmp_path}/absent.py:f"], [], []), "no file at"),
        ((["no_such_module:f"], [], []), "no module 'no_such_module'"),
        (([], [], [tmp_path / "absent.pt"]), "no checkpoint at"),
        (([], [], [tmp_path]), "no checkpoint at"),
        ((["eplb", "eplb"], [], []), "the same name"),
    ]:
        with pytest.raises(ValueError, match=message):
            parse_entries("placement", *arguments)


# Results and leaderboard


def test_a_run_is_resumed_and_submitted(tiny_suite: Suite, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, flags = tmp_path / "runs", ["--folder", str(tmp_path / "runs")]
    command = ["bench", "run", "tiny-v0", "--planner", "eplb", "swift", "oracle", *flags]
    assert cli.main(command + ["--task", "t"]) == 0
    first = {path: path.stat().st_mtime_ns for path in folder.rglob("*.json")}
    assert len(first) == 3
    assert cli.main(["bench", "submit", "tiny-v0", "--entry", "eplb", "-o", str(tmp_path / "e.json"), *flags]) == 2
    assert "no result of u" in capsys.readouterr().err
    assert cli.main(command) == 0
    assert len(list(folder.rglob("*.json"))) == 6
    assert cli.main(["bench", "table", "tiny-v0", "--task", "u", *flags]) == 0
    assert "tiny-v0: 1 tasks" in capsys.readouterr().out
    assert all(path.stat().st_mtime_ns == before for path, before in first.items())
    result = json.loads((folder / "tiny-v0" / "eplb" / "t.json").read_text())
    assert len(result["scores"]) == TASK.streams
    assert {"cpu", "cores", "python"} <= result["machine"].keys()
    assert {"clustergym", "numpy", "torch"} <= result["versions"].keys()
    assert len(result["code_sha256"]) == len(result["data_sha256"]) == len(result["task_sha256"]) == 64
    capsys.readouterr()
    board = tmp_path / "board"
    board.mkdir()
    for i, name in enumerate(["eplb", "swift", "oracle"]):
        assert cli.main(["bench", "submit", "tiny-v0", "--entry", name, "-o", str(board / f"{i}.json"), *flags]) == 0
    page = tmp_path / "docs" / "leaderboard.md"
    assert cli.main(["bench", "table", "--folder", str(board), "--leaderboard", str(page)]) == 0
    assert (page.parent / "images" / "leaderboard-tiny-v0.png").stat().st_size > 5000
    lines = page.read_text().splitlines()
    assert any(line.startswith("|  | oracle (sees the future) |") for line in lines)
    assert any("`t`, `u` draw from the same test sequences" in line for line in lines)
    assert sum(line.startswith(("| 1 | eplb", "| 1 | swift")) for line in lines) == 1


def test_results_of_another_version_of_a_task_are_refused(tiny_suite: Suite, tmp_path: Path) -> None:
    task, entry = tiny_suite.tasks[0], Entry("named", "eplb")
    result = results.result_of(tiny_suite, task, entry, play(task, entry), 1.0)
    path = results.result_path(tmp_path, tiny_suite, task, entry)
    results.save_result(path, result)
    assert results.is_done(path, task, entry)
    assert results.collect([tmp_path / "tiny-v0"], tiny_suite)["eplb"]["t"]["scores"] == [0.0, 0.0]
    for change, message in [
        ({"task_sha256": "0"}, "has changed since"),
        ({"data_sha256": "0"}, "the data are not those"),
        ({"scores": [0.0]}, "expected 2 scores"),
        ({"scores": [0.0, float("nan")]}, "not a finite number"),
        ({"format": "x"}, "not a result"),
        ({"schema": 99}, "schema 99"),
    ]:
        path.write_text(json.dumps(result | change))
        with pytest.raises(ValueError, match=message):
            results.collect([tmp_path / "tiny-v0"], tiny_suite)
    path.write_text("{")
    assert not results.is_done(path, task, entry)


def test_rows_have_the_definitions_of_rliable() -> None:
    """By hand: the middle half of the pooled scores of two tasks."""
    scores = [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0]]
    assert interquartile_mean(scores) == (2 + 3 + 4 + 5) / 4
    low, high = stratified_bootstrap(scores)
    assert 1 < low < 3.5 < high < 6
    # A task whose runs are equal adds no spread: runs are resampled within their task.
    assert stratified_bootstrap([[1.0] * 5, [3.0] * 5]) == (2.0, 2.0)


def test_the_aggregates_agree_with_rliable() -> None:
    try:
        from rliable import library, metrics
    except Exception as error:  # its dependency arch fails to import with some versions of pandas
        pytest.skip(f"rliable: {error}")
    scores = np.random.default_rng(0).gamma(2.0, 1.0, (10, 6))

    def aggregate(x: Any) -> np.ndarray:
        return np.array([metrics.aggregate_iqm(x)])

    point, interval = library.get_interval_estimates({"a": scores}, aggregate, reps=4000)
    ours = [scores[:, i].tolist() for i in range(6)]
    assert interquartile_mean(ours) == pytest.approx(point["a"][0])
    width = interval["a"][1, 0] - interval["a"][0, 0]
    assert stratified_bootstrap(ours, resamples=4000) == pytest.approx(interval["a"][:, 0].tolist(), abs=0.05 * width)


def row(name: str, score: float, decision_ms: float, hindsight: bool = False) -> Row:
    return Row(name, score, score, score, score, decision_ms, {}, hindsight, ())


def test_places_and_the_pareto_front() -> None:
    rows = [row("o", 0.9, 0.1, True), row("best", 0.5, 100.0), row("slow", 0.4, 200.0), row("fast", 0.3, 1.0)]
    assert places(rows) == [None, 1, 2, 3]
    assert [r.entry for r in pareto(rows)] == ["fast", "best"]


def test_rows_rank_by_the_interquartile_mean(tiny_suite: Suite) -> None:
    def found(scores: list[float]) -> dict[str, Any]:
        return {
            task.name: {"scores": scores, "metrics": {"decision_ms": 2.0, "x": None}, "hindsight": False}
            for task in tiny_suite.tasks
        }

    rows = rows_of({"a": found([0.1, 0.2]), "b": found([0.3, 0.4])}, tiny_suite)
    assert [r.entry for r in rows] == ["b", "a"]
    assert rows[0].score == pytest.approx(0.35)
    assert rows[0].metrics == {"decision_ms": 2.0, "x": None}
    assert rows_of({"a": {"t": found([0.1, 0.2])["t"]}}, tiny_suite)[0].missing == ("u",)


def public_balancedness(log2phy: np.ndarray, logcnt: np.ndarray, workload: np.ndarray, n_slots: int) -> float:
    """The definition of the public evaluator, in loops: even shares, means and maxima summed over layers."""
    total = np.zeros((len(workload), n_slots))
    for layer, loads in enumerate(workload):
        for expert, load in enumerate(loads):
            for replica in range(logcnt[layer, expert]):
                total[layer, log2phy[layer, expert, replica]] += load / logcnt[layer, expert]
    return float(total.mean(1).sum() / total.max(1).sum())


def history_file(path: Path, n_steps: int, n_experts: int = 256) -> Path:
    rng, mean = np.random.default_rng(0), 5000 / (1 + np.arange(n_experts))
    steps = [{"logical_expert_load": rng.poisson(mean, (2, n_experts)).tolist()} for _ in range(n_steps)]
    path.write_text(json.dumps({"load_history": steps}))
    return path


PUBLIC_PROGRAM = """
import torch

CALLS = 0

def rebalance_experts(weight, num_replicas, num_groups, num_nodes, num_gpus):
    # Experts in order over the slots. Every second answer exchanges the two halves of the cluster.
    global CALLS
    CALLS += 1
    n_layers, n_experts = weight.shape
    phy2log = (torch.arange(num_replicas) % n_experts).roll(CALLS % 2 * (num_replicas // 2)).repeat(n_layers, 1)
    logcnt = torch.nn.functional.one_hot(phy2log, n_experts).sum(1)
    log2phy = torch.full((n_layers, n_experts, int(logcnt.max())), -1)
    for expert in range(n_experts):
        where = (phy2log[0] == expert).nonzero()[:, 0]
        log2phy[:, expert, : len(where)] = where
    return phy2log, log2phy, logcnt
"""
"""A file in the format of the public benchmark."""


def test_executors_by_name() -> None:
    assert list(LocalExecutor().run(abs, [-1, 2])) == [(0, 1), (1, 2)]
    assert sorted(LocalExecutor(2).run(abs, [-1, 2, -3])) == [(0, 1), (1, 2), (2, 3)]
    with pytest.raises(ValueError, match="is for --executor ray"):
        make_executor("local", 1, "auto")
    with pytest.raises(ValueError, match="jobs is 0"):
        make_executor("local", 0)
