"""Sweep files translated to Ray Tune: distributions, early stopping, commands, and real small sweeps."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

ray = pytest.importorskip("ray")
from ray.tune.search.optuna import OptunaSearch  # noqa: E402

from clustergym import cli  # noqa: E402
from clustergym.sweeping import DISTRIBUTIONS, Outcome, Sweep, ranked, read_sweep, run_sweep, scheduler  # noqa: E402

PROGRAM = str(Path(__file__).resolve().parents[2] / "tests" / "support" / "sweep_program.py")


def write(path: Path, **changes: Any) -> Path:
    content = {
        "program": PROGRAM, "method": "grid", "metric": {"name": "score", "goal": "maximize"},
        "parameters": {"x": {"values": [1, 3]}},
    } | changes  # fmt: skip
    path.write_text(yaml.safe_dump({k: v for k, v in content.items() if v is not None}, sort_keys=False))
    return path


# Translation


@pytest.mark.parametrize(
    "spec",
    [
        {"distribution": "uniform", "min": -1, "max": 4.0},
        {"distribution": "int_uniform", "min": 1, "max": 40},
        {"distribution": "log_uniform", "min": -3.0, "max": 2.0},
        {"distribution": "log_uniform_values", "min": 1e-4, "max": 1e-1},
        {"distribution": "q_uniform", "min": 0, "max": 500, "q": 5},
        {"distribution": "q_uniform", "min": 0.0, "max": 10.0, "q": 0.25},
        {"distribution": "q_log_uniform_values", "min": 1, "max": 1000, "q": 1},
    ],
)
def test_distributions_have_the_quantiles_of_wandb(spec: dict[str, Any]) -> None:
    """Ten thousand samples, against the inverse distribution functions in wandb's own package."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        params = pytest.importorskip("sweeps.params")
    make = DISTRIBUTIONS[spec["distribution"]]
    samples = make(**{k: v for k, v in spec.items() if k != "distribution"}).sample(
        size=10_000, random_state=np.random.default_rng(0)
    )
    levels = np.array([0.1, 0.3, 0.5, 0.7, 0.9])
    expected = np.array(params.HyperParameter("p", spec).ppf(levels), dtype=float)
    # Ten thousand samples put a quantile within 0.02 of its level, six standard errors at most.
    low, high = np.quantile(samples, levels - 0.02), np.quantile(samples, levels + 0.02)
    assert (low <= expected).all()
    assert (expected <= high).all()
    if isinstance(spec.get("q", 0.5 if spec["distribution"] != "int_uniform" else 1), int):
        assert all(isinstance(sample, int | np.integer) for sample in samples)


def test_both_ends_of_integers_are_drawn() -> None:
    for kind, keys, expected in [
        ("int_uniform", (1, 4), {1, 2, 3, 4}),
        ("q_uniform", (2, 8, 2), {2, 4, 6, 8}),
        ("q_uniform", (1, 3, 1), {1, 2, 3}),
        ("q_log_uniform_values", (2, 4, 1), {2, 3, 4}),
    ]:
        domain = DISTRIBUTIONS[kind](*keys)
        assert set(domain.sample(size=500)) == expected
        found = OptunaSearch.convert_search_space({"p": domain})["p"]
        assert (found.low, found.high) == (min(expected), max(expected))
    assert set(DISTRIBUTIONS["categorical"](["a", 2]).sample(size=99)) == {"a", 2}


@pytest.mark.parametrize(
    ("early", "rungs"),
    [
        ({"min_iter": 3}, [3, 9, 27, 81]),
        ({"min_iter": 5, "eta": 2}, [5, 10, 20, 40]),
        ({"max_iter": 27, "s": 2}, [3, 9]),
        ({"max_iter": 32, "s": 9, "eta": 2}, [1, 2, 4, 8, 16]),
    ],
)
def test_rungs_of_hyperband(early: dict[str, Any], rungs: list[int]) -> None:
    """The bands in the documentation of wandb: min_iter·eta^k, or max_iter/eta, max_iter/eta², …, s of them."""
    asha = scheduler(Sweep("p", "grid", {"name": "m"}, {}, {"type": "hyperband"} | early))
    found = [rung for rung, _ in reversed(asha._brackets[0]._rungs)]
    assert found[: len(rungs)] == pytest.approx(rungs)
    assert len(found) == (20 if "min_iter" in early else len(rungs))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"colour": "blue"}, "the key 'colour' is not supported; supported are: program, method, metric"),
        ({"method": "annealing"}, "'annealing' is not supported; supported are: grid, random, bayes"),
        ({"program": None}, "no program"),
        ({"metric": {"goal": "maximize"}}, "metric: no name"),
        ({"metric": {"name": "m", "goal": "max"}}, "'max' is not supported; supported are: minimize, maximize"),
        ({"run_cap": "3"}, "run_cap is '3': expected int"),
        ({"command": ["${command}"]}, r"'\$\{command\}' is not supported; supported are: \$\{env\}"),
        ({"command": ["--out=${program}"]}, "is not supported; supported are"),
        ({"parameters": {"x": {"mu": 1}}}, "x: the key 'mu' is not supported; supported are: distribution, value"),
        ({"parameters": {"x": {"distribution": "beta"}}}, "'beta' is not supported; supported are: constant"),
        ({"parameters": {"x": {"min": 1}}}, "x: uniform: missing a required argument: 'max'"),
        ({"parameters": {"x": {"values": [1], "value": 2}}}, "x: constant: got an unexpected keyword argument"),
        ({"parameters": {"x": {"min": 3, "max": 1}}}, "min is 3 and max is 1"),
        ({"parameters": {"seed": {"values": [1, 2]}}}, "a search over seeds finds lucky ones"),
        ({"parameters": {"x": {"min": 0.0, "max": 1.0}}}, "grid: 'uniform' is not supported"),
        ({"parameters": {"x": {"value": 1}}, "method": "bayes"}, "nothing to search"),
        ({"method": "random", "parameters": {"x": {"distribution": "q_uniform", "min": 0, "max": 5, "q": 0.3}}}, "x: "),
        ({"early_terminate": {"type": "median"}}, "'median' is not supported; supported are: hyperband"),
        ({"early_terminate": {"type": "hyperband"}}, "expected min_iter, or max_iter and s"),
    ],
)
def test_what_is_not_translated_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        read_sweep(write(tmp_path / "s.yaml", **changes))


@pytest.mark.parametrize("text", ["a: [", "- 1", "!!python/object:os.x {}", ""])
def test_files_that_are_not_yaml_mappings_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(text)
    with pytest.raises(ValueError, match=r"not valid YAML|expected a mapping"):
        read_sweep(tmp_path / "s.yaml")


def test_macros_agree_with_the_wandb_agent() -> None:
    utils = pytest.importorskip("wandb.sdk.launch.sweeps.utils")
    parameters = {"lr": 0.1, "name": "a=b", "flag": True, "off": False, "layers": [1, 2]}
    theirs = utils.create_sweep_command_args({"args": {key: {"value": value} for key, value in parameters.items()}})
    ours = Sweep("p.py", "grid", {}, {}).macros(parameters)
    for macro in set(ours) - {"${env}", "${interpreter}", "${program}"}:
        assert ours[macro] == theirs[macro[2:-1]], macro
    sweep = Sweep("p.py", "grid", {}, {}, command=["torchrun", 7, "${program}", "${args}"])
    assert sweep.command_line({"lr": 0.1}) == ["torchrun", "7", "p.py", "--lr=0.1"]


def test_the_mean_ranks_not_the_best_seed() -> None:
    lucky, steady, failed = (Outcome({}, "", scores, "") for scores in ([0.0, 9.0], [5.0, 5.0], []))
    assert ranked([failed, lucky, steady], "max") == [steady, lucky, failed]
    assert ranked([failed, steady, lucky], "min") == [lucky, steady, failed]


# Real sweeps. One Ray session for all of them.


@pytest.fixture(scope="module")
def session() -> Iterator[str]:
    context = ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, namespace="sweeps")
    yield context.address_info["gcs_address"]
    ray.shutdown()


def starts(folder: Path) -> list[list[str]]:
    return [line.split() for file in folder.rglob("starts.txt") for line in file.read_text().splitlines()]


def alive(pid: str) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"


def wait_for(condition: Any, seconds: float = 120) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.1)


@pytest.mark.slow
def test_a_grid_with_seeds_is_ranked_and_failures_are_named(
    session: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path / "s.yaml", parameters={"x": {"values": [1, 9, 3]}, "steps": {"value": 1}})
    assert cli.main(["sweep", "run", str(file), "--seeds", "2", "--folder", str(tmp_path / "f")]) == 0
    shown = capsys.readouterr().out
    rows = [line.split("│") for line in shown.splitlines() if "│ finished" in line or "│ failed" in line]
    # −(x − 3)² + seed, seeds 1 and 2.
    assert [[cell.strip() for cell in row[1:-1]] for row in rows[-3:]] == [
        ["1", "1.5", "0.71", "3", "finished"],
        ["2", "-2.5", "0.71", "1", "finished"],
        ["–", "", "", "9", "failed"],
    ]
    assert "RuntimeError: cannot train with x = 9.0" in shown
    assert f"best: /usr/bin/env {sys.executable} {PROGRAM} --x=3 --steps=1" in shown
    assert len(starts(tmp_path / "f")) == 6
    assert cli.main(["sweep", "run", str(file), "--seeds", "2", "--folder", str(tmp_path / "f")]) == 2


@pytest.mark.slow
def test_hyperband_stops_bad_configurations(session: str, tmp_path: Path) -> None:
    parameters = {"x": {"values": [3, -20]}, "steps": {"value": 60}, "pause": {"value": 0.1}}
    early = {"type": "hyperband", "min_iter": 2, "eta": 2}
    sweep = read_sweep(write(tmp_path / "s.yaml", parameters=parameters, early_terminate=early))
    good, bad = ranked(run_sweep(sweep, tmp_path / "f", seeds=2, concurrent=1), "max")
    assert (good.parameters["x"], good.state, good.scores) == (3, "finished", [1, 2])
    assert (bad.parameters["x"], bad.state) == (-20, "stopped early")
    assert bad.scores[1] == bad.scores[0] + 1
    assert (
        sorted(int(file.read_text()) == 60 for file in (tmp_path / "f").rglob("checkpoint.pt"))
        == [False] * 2 + [True] * 2
    )
    assert not any(alive(pid) for pid, _, _ in starts(tmp_path / "f"))


@pytest.mark.slow
def test_bayes_searches_and_keeps_constants(session: str, tmp_path: Path) -> None:
    parameters = {"x": {"min": 0.0, "max": 6.0}, "steps": {"value": 1}}
    sweep = read_sweep(write(tmp_path / "s.yaml", method="bayes", run_cap=2, parameters=parameters))
    outcomes = run_sweep(sweep, tmp_path / "f", seeds=1, count=9)
    assert len({outcome.parameters["x"] for outcome in outcomes}) == 2
    for outcome in outcomes:
        assert outcome.parameters["steps"] == 1
        assert outcome.scores == pytest.approx([-((outcome.parameters["x"] - 3) ** 2) + 1])


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_lost_trial_takes_its_programs_with_it_and_is_resumed(number: int, session: str, tmp_path: Path) -> None:
    def kill() -> None:
        wait_for(lambda: len(list(tmp_path.rglob("checkpoint.pt"))) == 2)
        os.kill(int(starts(tmp_path)[0][1]), number)

    killer = threading.Thread(target=kill)
    killer.start()
    parameters = {"x": {"values": [3]}, "steps": {"value": 20}, "pause": {"value": 0.2}}
    (outcome,) = run_sweep(read_sweep(write(tmp_path / "s.yaml", parameters=parameters)), tmp_path / "f", seeds=2)
    killer.join()
    assert (outcome.state, outcome.scores) == ("finished", [1, 2])
    found = starts(tmp_path)
    assert sorted(how for _, _, how in found) == ["fresh", "fresh", "resumed", "resumed"]
    assert not any(alive(pid) for pid, _, _ in found)


@pytest.mark.slow
def test_a_killed_sweep_is_resumed(session: str, tmp_path: Path) -> None:
    """The second configuration is interrupted. The first one is not started again."""
    parameters = {"x": {"values": [3, 1]}, "steps": {"value": 20}, "pause": {"value": 0.3}}
    file, folder = write(tmp_path / "s.yaml", parameters=parameters), tmp_path / "f"
    flags = [str(file), "--seeds", "2", "--folder", str(folder), "--concurrent", "1", "--address", session]
    code = "import sys; from clustergym.cli import main; sys.exit(main())"
    driver = subprocess.Popen([sys.executable, "-c", code, "sweep", "run", *flags], stdout=subprocess.DEVNULL)
    wait_for(lambda: len(list(tmp_path.rglob("checkpoint.pt"))) == 4)
    time.sleep(1.5)  # Tune saves its state every second
    driver.kill()
    driver.wait()
    wait_for(lambda: not any(alive(pid) for pid, _, _ in starts(folder)))
    sweep = read_sweep(file)
    with pytest.raises(ValueError, match="another file, --seeds"):
        run_sweep(sweep, folder, seeds=3, resume=True)
    first, second = ranked(run_sweep(sweep, folder, seeds=2, concurrent=1, resume=True), "max")
    assert (first.parameters["x"], first.scores, second.parameters["x"], second.scores) == (3, [1, 2], 1, [-3, -2])
    assert sorted(how for _, _, how in starts(folder)) == ["fresh"] * 4 + ["resumed"] * 2
