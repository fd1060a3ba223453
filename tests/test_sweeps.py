"""Local sweeps: the file format, macros and search algorithms of wandb, early stopping, and resuming."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from clustergym import cli
from clustergym.sweeping import Run, Runner, Store, load_sweep
from clustergym.sweeping.config import Sweep
from clustergym.sweeping.proposers import make_proposer
from clustergym.sweeping.scores import Scores, last_result, score
from clustergym.sweeping.store import ranked
from processes import wait_until
from sweep_program import write_events

PROGRAM = str(Path(__file__).parent / "sweep_program.py")
METRIC = {"name": "score", "goal": "maximize"}


def sweep_file(path: Path, **changes: Any) -> Path:
    config: dict[str, Any] = {
        "program": PROGRAM, "method": "grid", "metric": METRIC, "parameters": {"x": {"values": [1, 2, 3, 4]}},
    }  # fmt: skip
    path.write_text(yaml.safe_dump({k: v for k, v in (config | changes).items() if v is not None}))
    return path


def run(tmp_path: Path, count: int | None = None, jobs: int = 2, **changes: Any) -> list[Run]:
    options = {k: changes.pop(k) for k in ("proposer", "seed", "run_dir_flag") if k in changes}
    sweep = load_sweep(sweep_file(tmp_path / "s.yaml", **changes))
    return Runner(sweep, tmp_path / "sweep", jobs, **options).run(count)


def starts(folder: Path) -> list[list[str]]:
    return [line.split() for line in (folder / "starts.txt").read_text().splitlines()]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "annealing"}, "'annealing' is not one of"),
        ({"method": "custom"}, "cannot run locally; expected grid, random, bayes"),
        ({"parameters": {}}, "no parameters"),
        ({"parameters": {"x": {"min": 3, "max": 1}}}, "min 3 is not less than max 1"),
        ({"parameters": {"x": {"values": [1], "value": 2}}}, "x"),
        ({"program": None}, "no program"),
        ({"metric": None, "method": "bayes"}, "bayes needs a metric"),
        ({"metric": None, "early_terminate": {"type": "hyperband", "min_iter": 2}}, "early_terminate needs a metric"),
        ({"early_terminate": {"type": "median"}}, "early_terminate|median"),
        ({"run_cap": 0}, "run_cap is 0"),
        ({"command": "python x.py"}, "'python x.py' is not of type 'array'"),
        ({"colour": "blue"}, "colour"),
    ],
)
def test_files_that_wandb_refuses_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        load_sweep(sweep_file(tmp_path / "s.yaml", **changes))


def test_missing_and_invalid_files_are_refused(tmp_path: Path) -> None:
    for text, message in [
        ("a: [", "not valid YAML"),
        ("- 1", "expected a mapping"),
        ("!!python/object:os.x {}", "YAML"),
    ]:
        (tmp_path / "s.yaml").write_text(text)
        with pytest.raises(ValueError, match=message):
            load_sweep(tmp_path / "s.yaml")
    with pytest.raises(ValueError, match="no sweep file"):
        load_sweep(tmp_path / "absent.yaml")


PARAMETERS = {"lr": 0.1, "name": "a b", "flag": True, "off": False, "layers": [1, 2]}


def agent_command(words: list[str], tmp_path: Path) -> list[str]:
    """The command that the code of the wandb agent makes from the words, except for the interpreter and the file."""
    from wandb.sdk.launch.sweeps import utils

    macros = utils.create_sweep_command_args({"args": {k: {"value": v} for k, v in PARAMETERS.items()}})
    macros |= {
        "env": ["/usr/bin/env"], "interpreter": [sys.executable], "program": ["p.py"],
        "args_json_file": [str(tmp_path / "args.json")],
    }  # fmt: skip
    out: list[str] = []
    for word in utils.create_sweep_command(words):
        out += macros.get(word[2:-1], []) if word.startswith("${") and word.endswith("}") else [word]
    return out


@pytest.mark.parametrize(
    "words",
    [
        ["${env}", "${interpreter}", "${program}", "${args}"],
        ["${interpreter}", "-m", "x", "${args_no_boolean_flags}"],
        ["${program}", "${args_no_hyphens}"],
        ["${program}", "${args_no_equals}"],
        ["${program}", "${args_append_hydra}", "${args_override_hydra}"],
        ["${program}", "--json", "${args_json}"],
        ["${program}", "--file", "${args_json_file}"],
        ["${envvar:SWEEP_TEST}", "--out=${envvar:SWEEP_TEST}/x", "${envvar:SWEEP_UNSET}"],
        ["torchrun", "--nproc-per-node=2", "${program}", "${args}", 7],
    ],
)
def test_macros_agree_with_the_wandb_agent(words: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWEEP_TEST", "/data")
    sweep = Sweep(tmp_path / "s.yaml", {"program": "p.py", "command": words}, None)
    made = sweep.command(PARAMETERS, tmp_path)
    assert made == agent_command([str(w) for w in words], tmp_path)
    if "${args_json_file}" in words:
        assert json.loads((tmp_path / "args.json").read_text()) == PARAMETERS


def test_macros_agree_with_the_documentation(tmp_path: Path) -> None:
    """The examples in the documentation of wandb."""

    def made(*words: str) -> list[str]:
        return Sweep(tmp_path, {"command": list(words)}, None).command(
            {"lr": 0.1, "flag": True, "off": False}, tmp_path
        )

    assert made("${args}") == ["--lr=0.1", "--flag=True", "--off=False"]
    assert made("${args_no_boolean_flags}") == ["--lr=0.1", "--flag"]
    assert made("${args_no_hyphens}") == ["lr=0.1", "flag=True", "off=False"]
    assert made("${args_json}") == ['{"lr": 0.1, "flag": true, "off": false}']
    with pytest.raises(ValueError, match=r"unknown macro \$\{arg\}"):
        made("${arg}")


def proposals(tmp_path: Path, n: int, proposer: str = "sweeps", seed: int = 0, **changes: Any) -> list[Any]:
    """The first n proposals. Each run has the score −(x − 3)²."""
    sweep = load_sweep(sweep_file(tmp_path / "p.yaml", **changes))
    made, runs = make_proposer(proposer, sweep, seed), []
    for i in range(n):
        parameters = made.propose(runs)
        if parameters is None:
            break
        value = -((parameters["x"] - 3) ** 2) if "x" in parameters else 0.0
        runs.append(Run(i + 1, parameters, "finished", tmp_path, metric=value, history=[value]))
    return [r.parameters for r in runs]


@pytest.mark.parametrize("proposer", ["sweeps", "optuna"])
def test_every_point_of_a_grid_is_proposed_once(proposer: str, tmp_path: Path) -> None:
    grid = {"x": {"values": [1, 2]}, "y": {"values": ["a", "b", "c"]}, "z": {"value": 7}}
    made = proposals(tmp_path, 20, proposer, parameters=grid)
    assert len(made) == 6
    assert {(p["x"], p["y"]) for p in made} == {(x, y) for x in (1, 2) for y in "abc"}
    assert all(p["z"] == 7 for p in made)


def test_a_grid_with_nested_parameters(tmp_path: Path) -> None:
    made = proposals(tmp_path, 9, parameters={"a": {"parameters": {"b": {"values": [1, 2]}}}, "x": {"values": [3, 4]}})
    assert sorted((p["a"]["b"], p["x"]) for p in made) == [(1, 3), (1, 4), (2, 3), (2, 4)]


DISTRIBUTIONS = {
    "x": {"min": 0.0, "max": 6.0},
    "n": {"min": 1, "max": 4},
    "lr": {"distribution": "log_uniform_values", "min": 1e-4, "max": 1e-1},
    "q": {"distribution": "q_uniform", "min": 0, "max": 10, "q": 2},
    "kind": {"values": ["a", "b"]},
    "fixed": {"value": 5},
}


@pytest.mark.parametrize("proposer", ["sweeps", "optuna"])
@pytest.mark.parametrize("method", ["random", "bayes"])
def test_proposals_are_within_bounds_and_depend_on_the_seed(proposer: str, method: str, tmp_path: Path) -> None:
    changes = {"method": method, "parameters": DISTRIBUTIONS}
    made = proposals(tmp_path, 8, proposer, **changes)
    for p in made:
        assert 0 <= p["x"] <= 6
        assert p["n"] in (1, 2, 3, 4)
        assert 1e-4 <= p["lr"] <= 1e-1
        assert p["q"] % 2 == 0
        assert p["kind"] in ("a", "b")
        assert p["fixed"] == 5
        assert json.loads(json.dumps(p)) == p  # plain numbers, because they are stored as JSON
    assert len({p["x"] for p in made}) == 8
    assert proposals(tmp_path, 8, proposer, **changes) == made
    assert proposals(tmp_path, 8, proposer, seed=1, **changes) != made


@pytest.mark.parametrize("proposer", ["sweeps", "optuna"])
def test_bayes_is_better_than_random(proposer: str, tmp_path: Path) -> None:
    """Mean distance of the last third from the optimum. Random proposals in 0 … 6 would give 1.5."""
    made = proposals(tmp_path, 24, proposer, method="bayes", parameters={"x": {"min": 0.0, "max": 6.0}})
    assert sum(abs(p["x"] - 3) for p in made[16:]) / 8 < 1.0


def test_optuna_refuses_unsupported_parameters(tmp_path: Path) -> None:
    for changes, message in [
        ({"parameters": {"x": {"distribution": "beta"}}, "method": "bayes"}, "'x' is beta, which is not supported"),
        ({"parameters": {"x": {"value": 1}}, "method": "bayes"}, "nothing to search"),
        ({"metric": None, "method": "random"}, "Optuna needs a metric"),
    ]:
        with pytest.raises(ValueError, match=message):
            proposals(tmp_path, 1, "optuna", **changes)
    with pytest.raises(ValueError, match="unknown proposer 'ax'; expected one of: sweeps, optuna"):
        proposals(tmp_path, 1, "ax")


def test_a_grid_runs_to_the_end(tmp_path: Path) -> None:
    runs = run(tmp_path, run_dir_flag="--run-dir")
    assert [(r.parameters["x"], r.state, r.metric, r.starts) for r in runs] == [
        (1, "finished", -4.0, 1), (2, "finished", -1.0, 1), (3, "finished", 0.0, 1), (4, "finished", -1.0, 1),
    ]  # fmt: skip
    assert ranked(runs, True)[0].parameters == {"x": 3}
    assert ranked(runs, False)[0].parameters == {"x": 1}
    assert sorted(name for name, _, _ in starts(tmp_path / "sweep")) == [f"run-000{i}" for i in (1, 2, 3, 4)]
    assert runs[0].result == {"score": -4.0, "steps": 2}
    # A second call has nothing to do.
    again = Runner(load_sweep(tmp_path / "s.yaml"), tmp_path / "sweep", 2).run(None)
    assert again == runs
    assert len(starts(tmp_path / "sweep")) == 4


def test_count_and_run_cap_limit_the_runs(tmp_path: Path) -> None:
    assert len(run(tmp_path, count=2)) == 2
    assert len(run(tmp_path, count=3)) == 3
    (tmp_path / "b").mkdir()
    assert len(run(tmp_path / "b", count=3, run_cap=1)) == 1


def test_scores_are_read_from_event_files(tmp_path: Path) -> None:
    runs = run(
        tmp_path,
        parameters={"x": {"values": [2, 3]}, "kind": {"value": "events"}},
        metric={"name": "eval/score", "goal": "maximize"},
    )
    assert [(r.state, r.metric, r.history) for r in runs] == [
        ("finished", -1.0, [-3.0, -2.0, -1.0]),
        ("finished", 0.0, [-2.0, -1.0, 0.0]),
    ]


def test_a_failed_run_is_reported_and_the_others_continue(tmp_path: Path) -> None:
    kinds = {"kind": {"values": ["crash", "result"]}, "x": {"values": [1]}}
    runs = run(tmp_path, parameters=kinds, jobs=1)
    assert [(r.state, r.exit_code, r.metric) for r in runs] == [("failed", 1, None), ("finished", 0, -4.0)]
    assert "RuntimeError: cannot train with x = 1.0" in (runs[0].note or "")


def test_three_failures_in_a_row_end_the_sweep(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"3 runs failed in a row; .*run-0003: exit code 1: .*cannot train"):
        run(tmp_path, parameters={"kind": {"value": "crash"}, "x": {"values": list(range(9))}}, jobs=1)
    store = Store(tmp_path / "sweep" / "sweep.db")
    assert [r.state for r in store.runs()] == ["failed"] * 3
    store.close()


def test_a_run_that_does_not_report_its_metric_has_failed(tmp_path: Path) -> None:
    runs = run(tmp_path, parameters={"kind": {"value": "silent"}, "x": {"values": [1]}})
    assert (runs[0].state, runs[0].note) == ("failed", "exit code 0, but reported no 'score'")


def test_a_missing_program_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = run(tmp_path, parameters={"x": {"values": [1]}}, command=["/nonexistent/program", "${args}"])
    assert runs[0].state == "failed"
    assert "/nonexistent/program" in (runs[0].note or "")
    path = sweep_file(tmp_path / "t.yaml", program="absent.py")
    assert cli.main(["sweep", "run", str(path), "--folder", str(tmp_path / "f")]) == 2
    assert "no program at absent.py" in capsys.readouterr().err


def test_hyperband_stops_a_bad_run(tmp_path: Path) -> None:
    """The third run is much worse than the first two at every band. It would otherwise wait for a minute."""
    metric = {"name": "eval/score", "goal": "maximize"}
    early = {"type": "hyperband", "min_iter": 1, "eta": 2}
    runs = run(
        tmp_path, jobs=1, metric=metric, early_terminate=early, method="grid",
        parameters={"kind": {"value": "events"}, "x": {"values": [3, 2]}},
    )  # fmt: skip
    assert [r.state for r in runs] == ["finished", "finished"]
    store = Store(tmp_path / "sweep" / "sweep.db")
    third = store.add({"x": 50, "kind": "linger"}, tmp_path / "sweep")
    store.close()
    runs = Runner(load_sweep(tmp_path / "s.yaml"), tmp_path / "sweep", 1).run(3)
    stopped = runs[third.id - 1]
    assert (stopped.state, stopped.note) == ("stopped", "stopped early")
    assert stopped.metric == -((50 - 3) ** 2)


def test_a_sweep_has_one_process_and_one_file(tmp_path: Path) -> None:
    sweep = load_sweep(sweep_file(tmp_path / "s.yaml"))
    first = Runner(sweep, tmp_path / "sweep")
    with pytest.raises(ValueError, match="another process is running this sweep"):
        Runner(sweep, tmp_path / "sweep")
    first.run(1)
    for changed, message in [
        (
            {"sweep": load_sweep(sweep_file(tmp_path / "t.yaml", parameters={"x": {"values": [9]}}))},
            "another sweep file",
        ),
        ({"seed": 5}, "another seed"),
        ({"proposer": "optuna"}, "another proposer"),
    ]:
        given = {"sweep": sweep, "folder": tmp_path / "sweep"} | changed
        with pytest.raises(ValueError, match=message):
            Runner(**given)  # type: ignore[arg-type]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["SIGKILL", "SIGTERM"])
def test_a_killed_sweep_resumes(number: int, tmp_path: Path) -> None:
    """Finished runs are kept. The two interrupted runs continue from their checkpoints under their own numbers."""
    hold = {"hold": {"value": 3}, "steps": {"value": 4}}
    sweep_file(tmp_path / "s.yaml", parameters={"x": {"values": [1, 2, 3, 4, 5]}} | hold)
    main = "import sys; from clustergym.cli import main; sys.exit(main(sys.argv[1:]))"
    arguments = ["sweep", "run", str(tmp_path / "s.yaml"), "--jobs", "2", "--folder", str(tmp_path / "sweep")]
    words = [sys.executable, "-c", main, *arguments]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        saved = [tmp_path / "sweep" / f"run-000{i}" / "checkpoint.pt" for i in (3, 4)]
        wait_until(lambda: all(path.is_file() and path.read_text() for path in saved), "two runs wait", process)
        process.send_signal(number)
        process.wait(30)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    begun = starts(tmp_path / "sweep")
    wait_until(lambda: not any(alive(int(pid)) for _, pid, _ in begun), "the runs die with the runner")
    store = Store(tmp_path / "sweep" / "sweep.db")
    before = store.runs()
    store.close()
    ended, cut = [r for r in before if r.state == "finished"], [r for r in before if r.state == "running"]
    assert [r.id for r in ended] == [1, 2]
    assert [r.id for r in cut] == [3, 4]
    assert len(before) == len(begun) == 4

    (tmp_path / "sweep" / "go").touch()
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    again = {name: how for name, _, how in starts(tmp_path / "sweep")[len(begun) :]}
    assert {name for name, how in again.items() if how == "resumed"} == {r.folder.name for r in cut}
    assert len(again) == len(cut) + 5 - len(before)
    store = Store(tmp_path / "sweep" / "sweep.db")
    runs = store.runs()
    store.close()
    assert [(r.parameters["x"], r.state, r.metric) for r in runs] == [
        (x, "finished", -((x - 3) ** 2)) for x in (1, 2, 3, 4, 5)
    ]
    assert [r.starts for r in runs] == [2 if r.id in {c.id for c in cut} else 1 for r in runs]
    assert [dataclasses.asdict(r) for r in runs if r.id in {e.id for e in ended}] == [
        dataclasses.asdict(e) for e in ended
    ]
    assert "best: run 3 in" in done.stdout
    assert "5 of 5 runs ended" in done.stdout


def test_a_run_that_ended_during_an_interruption_is_not_repeated(tmp_path: Path) -> None:
    sweep_file(tmp_path / "s.yaml")
    store_path = tmp_path / "sweep"
    store_path.mkdir()
    store = Store(store_path / "sweep.db")
    ended = store.add({"x": 1}, store_path)
    ended.state, ended.starts = "running", 1
    store.save(ended)
    store.add({"x": 2}, store_path)
    store.close()
    ended.folder.mkdir()
    (ended.folder / "output.log").write_text('training …\nresult {"score": -4.0}\n')
    runs = Runner(load_sweep(tmp_path / "s.yaml"), store_path).run(2)
    assert [(r.state, r.metric, r.starts) for r in runs] == [("finished", -4.0, 1), ("finished", -1.0, 1)]
    assert [name for name, _, _ in starts(store_path)] == ["run-0002"]


def test_a_run_with_checkpoints_in_subfolders_is_resumed(tmp_path: Path) -> None:
    """The federated trainer has one checkpoint per agent and refuses to start again without --resume."""
    sweep_file(tmp_path / "s.yaml")
    folder = tmp_path / "sweep"
    folder.mkdir()
    store = Store(folder / "sweep.db")
    interrupted = store.add({"x": 1}, folder)
    store.close()
    (interrupted.folder / "agent_0").mkdir(parents=True)
    (interrupted.folder / "agent_0" / "checkpoint.pt").touch()
    runs = Runner(load_sweep(tmp_path / "s.yaml"), folder).run(2)
    assert [run.state for run in runs] == ["finished", "finished"]
    assert [(name, how) for name, _, how in starts(folder)] == [("run-0001", "resumed"), ("run-0002", "fresh")]


def test_score_prefers_the_result_line(tmp_path: Path) -> None:
    log = tmp_path / "o.log"
    assert last_result(log) is None
    log.write_text('result {"a": 1}\nmore\nresult {"a": 2.5}\n')
    assert last_result(log) == {"a": 2.5}
    log.write_text('result {"a": 1}\nresult {"a": 2.')
    assert last_result(log) is None
    assert score("a", {"a": 2.5}, [1.0]) == 2.5
    assert score("b", {"a": 2.5}, [1.0, 4.0]) == 4.0
    assert score("a", {"a": float("nan")}, []) is None
    assert score(None, {"a": 1}, [1.0]) is None
    assert Scores(tmp_path / "absent", "a").history() == []


def test_history_averages_agents(tmp_path: Path) -> None:
    """Curves in subfolders are averaged at common steps. A curve in the run folder itself has priority."""
    write_events(tmp_path / "agent_0", [1.0, 2.0, float("nan"), 4.0], "a")
    write_events(tmp_path / "agent_1", [3.0, 6.0, 7.0], "a")
    write_events(tmp_path / "agent_2", [9.0], "other")
    scores = Scores(tmp_path, "a")
    assert scores.history() == [2.0, 4.0]
    write_events(tmp_path, [0.5], "a")
    assert scores.history() == [0.5]
    assert Scores(tmp_path, "absent").history() == []


def test_the_command_shows_a_leaderboard(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, folder = sweep_file(tmp_path / "s.yaml"), tmp_path / "f"
    assert cli.main(["sweep", "run", str(path), "--jobs", "2", "--count", "3", "--folder", str(folder)]) == 0
    shown = capsys.readouterr().out
    first = next(line for line in shown.splitlines() if line.startswith("│ 1 "))
    assert [cell.strip() for cell in first.split("│")[1:6]] == ["1", "3", "0", "3", "finished"]
    assert f"best: run 3 in {folder}/run-0003" in shown
    assert cli.main(["sweep", "show", str(folder)]) == 0
    assert (
        first.split("│")[1:5]
        == next(line for line in capsys.readouterr().out.splitlines() if line.startswith("│ 1 ")).split("│")[1:5]
    )
    for arguments, message in [
        (["run", str(sweep_file(tmp_path / "r.yaml", method="random"))], "a random search has no end"),
        (["run", str(path), "--count", "0"], "count is 0"),
        (["run", str(path), "--jobs", "0", "--folder", str(tmp_path / "g")], "jobs is 0"),
        (["show", str(tmp_path)], "no sweep in"),
    ]:
        assert cli.main(["sweep", *arguments]) == 2
        assert message in " ".join(capsys.readouterr().err.split())
