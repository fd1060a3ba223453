"""Translates wandb sweep files to Ray Tune and runs them: every configuration is trained with several seeds."""

from __future__ import annotations

import ctypes
import inspect
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import islice, product
from pathlib import Path
from typing import Any

import ray
import yaml
from ray import tune
from ray.tune.logger import JsonLoggerCallback
from ray.tune.schedulers import ASHAScheduler, FIFOScheduler, TrialScheduler
from ray.tune.search.basic_variant import BasicVariantGenerator
from ray.tune.search.optuna import OptunaSearch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from clustergym.common.files import write_atomically

OUTPUT, RESULT, CHECKPOINT = "output.log", "result.json", "checkpoint.pt"
_POLL_S = 0.5
_GRACE_S = 10.0
_RETRIES = 5
"""Times that Ray starts a configuration again after a host or process was lost."""
_PR_SET_PDEATHSIG = 1


# The file


@dataclass(frozen=True)
class Sweep:
    """A sweep file. The fields are its keys."""

    program: str
    method: str
    metric: dict[str, Any]
    parameters: dict[str, dict[str, Any]]
    early_terminate: dict[str, Any] | None = None
    run_cap: int | None = None
    command: list[Any] = field(default_factory=lambda: ["${env}", "${interpreter}", "${program}", "${args}"])
    name: str = ""  # this and the following keys are for the wandb service and have no effect here
    description: str = ""
    project: str = ""
    entity: str = ""

    @property
    def mode(self) -> str:
        return "max" if self.metric.get("goal") == "maximize" else "min"

    def macros(self, parameters: Mapping[str, Any]) -> dict[str, list[str]]:
        """What each macro in the command stands for, as with the wandb agent."""
        flags = {key: f"--{key}={value}" for key, value in parameters.items()}
        switches = {key: f"--{key}" for key, value in parameters.items() if value is True}
        on = {key: flag for key, flag in (flags | switches).items() if parameters[key] is not False}
        return {
            "${env}": ["/usr/bin/env"],
            "${interpreter}": [sys.executable],
            "${program}": [self.program],
            "${args}": list(flags.values()),
            "${args_no_boolean_flags}": list(on.values()),
            "${args_no_hyphens}": [flag[2:] for flag in flags.values()],
            "${args_no_equals}": [word for flag in flags.values() for word in flag.split("=", 1)],
            "${args_json}": [json.dumps(dict(parameters))],
        }

    def command_line(self, parameters: Mapping[str, Any]) -> list[str]:
        """The command of one configuration."""
        macros = self.macros(parameters)
        return [part for word in self.command for part in macros.get(word, [str(word)])]


def _check(where: str, found: Any, types: Mapping[str, Any], required: Iterable[str] = ()) -> None:
    """Raise a ValueError if this is not a mapping with the required keys, or has other keys or types."""
    if not isinstance(found, dict):
        raise ValueError(f"{where}: expected a mapping with {', '.join(types)}, found {type(found).__name__}")
    for key, value in found.items():
        if key not in types:
            raise ValueError(f"{where}: the key {key!r} is not supported; supported are: {', '.join(types)}")
        if not isinstance(value, types[key]):
            raise ValueError(f"{where}: {key} is {value!r}: expected {getattr(types[key], '__name__', types[key])}")
    for key in required:
        if key not in found:
            raise ValueError(f"{where}: no {key}")


def _check_choice(where: str, found: Any, supported: Iterable[str]) -> None:
    if found not in supported:
        raise ValueError(f"{where}: {found!r} is not supported; supported are: {', '.join(supported)}")


def read_sweep(path: Path) -> Sweep:
    """Read a sweep file. Raises a ValueError if it has anything that is not translated."""
    if not path.is_file():
        raise ValueError(f"no sweep file at {path}")
    types = {
        "program": str, "method": str, "metric": dict, "parameters": dict, "early_terminate": dict, "run_cap": int,
        "command": list, "name": str, "description": str, "project": str, "entity": str,
    }  # fmt: skip
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        _check("file", content, types, ("program", "method", "metric", "parameters"))
        sweep = Sweep(**content)
        _check("metric", sweep.metric, {"name": str, "goal": str}, ("name",))
        _check_choice("method", sweep.method, ("grid", "random", "bayes"))
        _check_choice("goal", sweep.metric.get("goal", "minimize"), ("minimize", "maximize"))
        for word in sweep.command:
            if "${" in str(word):
                _check_choice("command", word, sweep.macros({}))
        search_space(sweep)
        scheduler(sweep)
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: not valid YAML: {str(error).splitlines()[0]}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from error
    return sweep


# Translation


def _multiples(ints: Callable[..., Any], floats: Callable[..., Any]) -> Callable[..., Any]:
    """A distribution over the multiples of q, which are integers if everything is. Integers have their own types."""

    def make(min: float, max: float, q: float = 1) -> Any:
        if not all(isinstance(number, int) for number in (min, max, q)):
            return floats(min, max, q)
        return ints(min, max + 1 if q == 1 else max, q)  # Tune excludes max if q is 1

    return make


def _integers(min: int, max: int, q: int) -> Any:
    return tune.randint(min, max) if q == 1 else tune.qrandint(min, max, q)


def _log_integers(min: int, max: int, q: int) -> Any:
    return tune.lograndint(min, max) if q == 1 else tune.qlograndint(min, max, q)


DISTRIBUTIONS: dict[str, Callable[..., Any]] = {
    "constant": lambda value: value,
    "categorical": lambda values: tune.choice(values),
    "uniform": lambda min, max: tune.uniform(min, max),
    "int_uniform": lambda min, max: tune.randint(min, max + 1),
    "log_uniform": lambda min, max: tune.loguniform(math.exp(min), math.exp(max)),
    "log_uniform_values": lambda min, max: tune.loguniform(min, max),
    "q_uniform": _multiples(_integers, tune.quniform),
    "q_log_uniform_values": _multiples(_log_integers, tune.qloguniform),
}
"""Distribution of wandb → function of its keys that returns the distribution of Tune."""


def distribution(name: str, spec: Any) -> str:
    """The distribution of a parameter, which files may omit. Raises a ValueError if the parameter is not supported."""
    number = int | float
    types = {"distribution": str, "value": object, "values": list, "min": number, "max": number, "q": number}
    _check(name, spec, types)
    if name == "seed" or "/" in name:
        raise ValueError(f"{name}: a search over seeds finds lucky ones, and names with / are not supported: remove it")
    ints = isinstance(spec.get("min"), int) and isinstance(spec.get("max"), int)
    default = (
        "constant" if "value" in spec else "categorical" if "values" in spec else "int_uniform" if ints else "uniform"
    )
    kind = str(spec.get("distribution", default))
    _check_choice(f"{name}: distribution", kind, DISTRIBUTIONS)
    try:
        inspect.signature(DISTRIBUTIONS[kind]).bind(**{key: spec[key] for key in spec if key != "distribution"})
    except TypeError as error:
        raise ValueError(f"{name}: {kind}: {error}") from error
    if "min" in spec and spec["min"] >= spec["max"]:
        raise ValueError(f"{name}: min is {spec['min']} and max is {spec['max']}: expected min < max")
    return kind


def search_space(sweep: Sweep, count: int | None = None) -> Any:
    """The parameters for Tune. A grid is the list of its points (the first ``count``), for Tune's grid search."""
    kinds = {name: distribution(str(name), spec) for name, spec in sweep.parameters.items()}
    if sweep.method == "grid":
        lists = []
        for name, spec in sweep.parameters.items():
            _check_choice(f"{name}: distribution in a grid", kinds[name], ("constant", "categorical", "int_uniform"))
            lists.append(
                range(spec["min"], spec["max"] + 1) if "min" in spec else spec.get("values", [spec.get("value")])
            )
        return tune.grid_search([dict(zip(kinds, point, strict=True)) for point in islice(product(*lists), count)])
    if set(kinds.values()) <= {"constant"}:
        raise ValueError("parameters: every one is constant: nothing to search")
    space = {}
    for name, spec in sweep.parameters.items():
        if sweep.method == "bayes":
            _check_choice(
                f"{name}: distribution with bayes", kinds[name], set(DISTRIBUTIONS) - {"q_log_uniform_values"}
            )
        try:
            space[name] = DISTRIBUTIONS[kinds[name]](**{key: spec[key] for key in spec if key != "distribution"})
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
    return space


def scheduler(sweep: Sweep) -> TrialScheduler:
    """Early stopping. The hyperband of wandb is asynchronous: ASHA in Tune, with the same rungs."""
    if sweep.early_terminate is None:
        return FIFOScheduler()
    types = {"type": str, "min_iter": int, "max_iter": int, "s": int, "eta": int | float}
    _check("early_terminate", sweep.early_terminate, types, ("type",))
    _check_choice("early_terminate: type", sweep.early_terminate["type"], ("hyperband",))
    given = {"eta": 3, "s": 0, "max_iter": 0} | sweep.early_terminate
    eta, rungs = given["eta"], [given["max_iter"] / given["eta"] ** k for k in range(given["s"], 0, -1)]
    if "min_iter" in given:
        rungs = [given["min_iter"] * eta**k for k in range(20)]
    rungs = [rung for rung in rungs if rung >= 1]
    if not rungs or eta <= 1:
        raise ValueError(f"early_terminate is {given}: expected min_iter, or max_iter and s, and eta > 1")
    # A little more than the last rung, because ASHA computes the number of rungs with logarithms.
    return ASHAScheduler(grace_period=rungs[0], max_t=rungs[-1] * 1.001, reduction_factor=eta, stop_last_trials=False)


# One configuration


def last_result(output: str) -> dict[str, Any]:
    """The JSON of the last ``result {…}`` line in the output of a program, or nothing."""
    for line in reversed(output.splitlines()):
        if line.startswith("result {"):
            with suppress(ValueError):
                return dict(json.loads(line.removeprefix("result ")))
    return {}


def mean_curve(curves: Sequence[Mapping[int, float]]) -> dict[int, float]:
    """Mean over curves {step: value}, at the steps that all of them have."""
    steps = sorted(set[int].intersection(*map(set, curves))) if curves else []
    return {step: statistics.fmean(curve[step] for curve in curves) for step in steps}


def _die_with_parent(parent: int) -> Callable[[], None]:
    """A function for the child process: the child is killed when the parent ends, in whatever way."""
    prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None

    def prepare() -> None:
        if prctl is not None:
            prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)

    return prepare


class SeedRun:
    """The program with one seed, as a child process. It is not started if it has ended before."""

    def __init__(self, command: Sequence[str], seed: int, folder: Path, metric: str, cwd: str) -> None:
        self.seed, self.folder, self.metric = seed, folder, metric
        self.process: subprocess.Popen[bytes] | None = None
        self.reader: EventAccumulator | None = None
        if (folder / RESULT).is_file():
            return
        folder.mkdir(parents=True, exist_ok=True)
        resume = ["--resume"] if (folder / CHECKPOINT).exists() else []
        with open(folder / OUTPUT, "ab") as output:
            self.process = subprocess.Popen(
                [*command, f"--seed={seed}", f"--run-dir={folder}", *resume],
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, cwd=cwd, start_new_session=True,
                env=os.environ | {"PYTHONUNBUFFERED": "1"}, preexec_fn=_die_with_parent(os.getpid()),
            )  # fmt: skip

    def curve(self) -> dict[int, float]:
        """{step: value} of the metric in TensorBoard so far."""
        if self.reader is None and any(self.folder.glob("events.out.tfevents.*")):
            self.reader = EventAccumulator(str(self.folder), size_guidance={"scalars": 0})
        if self.reader is None or self.metric not in self.reader.Reload().Tags()["scalars"]:
            return {}
        return {event.step: event.value for event in self.reader.Scalars(self.metric) if math.isfinite(event.value)}

    def score(self) -> float | None:
        """The score, or None while the program runs. Raises a RuntimeError if the program failed or has no score."""
        if (self.folder / RESULT).is_file():
            return float(json.loads((self.folder / RESULT).read_text())[self.metric])
        code = self.process.poll() if self.process is not None else None
        if code is None:
            return None
        where = self.folder / OUTPUT
        output = where.read_text(encoding="utf-8", errors="replace")
        if code != 0:
            last = output.strip().splitlines()[-1:] or ["no output"]
            raise RuntimeError(f"seed {self.seed}: exit code {code}: {last[0][:300]} ({where})")
        # Numbers in the result line come from the final evaluation. Otherwise the last logged value counts.
        score = last_result(output).get(self.metric)
        if not isinstance(score, int | float) or not math.isfinite(score):
            score = next(reversed(self.curve().values()), None)
        if score is None:
            raise RuntimeError(f"seed {self.seed}: no {self.metric!r} in TensorBoard or in the result line ({where})")
        write_atomically(self.folder / RESULT, json.dumps({self.metric: score}))
        return float(score)

    def stop(self) -> None:
        """End the program and its own children."""
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            try:
                self.process.wait(_GRACE_S)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)


class Configuration(tune.Trainable):  # type: ignore[misc]
    """A trial of Tune: one configuration with all its seeds at the same time. Reports the mean over the seeds.

    A program that fails does not raise here. So Tune starts trials again only if their process or host is lost.
    """

    def setup(self, config: dict[str, Any], sweep: Sweep, seeds: int, folder: str, cwd: str) -> None:
        command, where, name = (
            sweep.command_line(config["parameters"]),
            Path(folder) / self.trial_id,
            sweep.metric["name"],
        )
        self.runs = [SeedRun(command, seed, where / f"seed-{seed}", name, cwd) for seed in range(1, seeds + 1)]
        self.points: deque[dict[str, Any]] = deque()
        self.reported = -1

    def step(self) -> dict[str, Any]:
        """Wait for the next point of the curve that all seeds have, or for the end."""
        while not self.points:
            try:
                scores = [run.score() for run in self.runs]
            except RuntimeError as error:
                return {"state": "failed", "error": str(error), "done": True}
            curves = [run.curve() for run in self.runs]
            new = [step for step in mean_curve(curves) if step > self.reported]
            self.points += [_point([curve[step] for curve in curves], "stopped early") for step in new]
            self.reported = max(new, default=self.reported)
            ended = [score for score in scores if score is not None]
            if len(ended) == len(scores) and not self.points:
                return _point(ended, "finished") | {"done": True}
            if not self.points:
                time.sleep(_POLL_S)
        return self.points.popleft()

    def cleanup(self) -> None:
        for run in self.runs:
            run.stop()


def _point(scores: list[float], state: str) -> dict[str, Any]:
    """What a trial reports. The state is that of the configuration if this is its last report."""
    return {"score": statistics.fmean(scores), "scores": scores, "state": state}


# The sweep


@dataclass(frozen=True)
class Outcome:
    """What became of one configuration. Without scores, it has failed or not begun."""

    parameters: dict[str, Any]
    state: str
    scores: list[float]
    note: str


def ranked(outcomes: Sequence[Outcome], mode: str) -> list[Outcome]:
    """Best mean over the seeds first. Configurations without scores are last."""
    sign = -1 if mode == "max" else 1
    return sorted(outcomes, key=lambda o: sign * statistics.fmean(o.scores) if o.scores else math.inf)


def run_sweep(
    sweep: Sweep,
    folder: Path,
    *,
    seeds: int = 3,
    count: int | None = None,
    resume: bool = False,
    concurrent: int | None = None,
    cpus: float | None = None,
    gpus: float = 0,
    address: str | None = None,
    search_seed: int = 0,
) -> list[Outcome]:
    """Run a sweep with Ray Tune, or resume one. ``clustergym sweep run --help`` explains the arguments."""
    folder, record = folder.resolve(), folder.resolve() / "sweep.json"
    limit = min((n for n in (count, sweep.run_cap) if n is not None), default=None)
    if min(seeds, 1 if limit is None else limit, 1 if concurrent is None else concurrent) < 1:
        raise ValueError(f"seeds {seeds}, count {limit}, concurrent {concurrent}: expected at least 1")
    if limit is None and sweep.method != "grid":
        raise ValueError(f"a {sweep.method} search has no end: give --count, or run_cap in the file")
    settings = json.dumps({"sweep": asdict(sweep), "seeds": seeds, "limit": limit, "search_seed": search_seed})
    if resume != record.exists():
        raise ValueError(
            f"{folder} has no sweep to resume: give its --folder"
            if resume
            else f"{folder} has a sweep: give --resume to continue it, or another --folder"
        )
    if resume and record.read_text() != settings:
        raise ValueError(f"{folder} has a sweep of another file, --seeds, --count or --search-seed: give the same")
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(record, settings)
    # Save Tune's state every second, accept trials that failed without a score, and write no logs that nobody reads.
    os.environ["TUNE_GLOBAL_CHECKPOINT_S"] = "1"
    os.environ["TUNE_DISABLE_STRICT_METRIC_CHECKING"] = "1"
    os.environ["TUNE_DISABLE_AUTO_CALLBACK_LOGGERS"] = "1"
    _connect(address)
    nodes = ray.nodes()
    most = max(node["Resources"].get("CPU", 0) for node in nodes if node["Alive"])
    trainable = tune.with_resources(
        tune.with_parameters(Configuration, sweep=sweep, seeds=seeds, folder=str(folder), cwd=os.getcwd()),
        {"cpu": min(seeds, most) if cpus is None else cpus, "gpu": gpus},
    )
    if resume and tune.Tuner.can_restore(str(folder / "tune")):
        return [_outcome(result) for result in tune.Tuner.restore(str(folder / "tune"), trainable).fit()]
    bayes = OptunaSearch(metric="score", mode=sweep.mode, seed=search_seed) if sweep.method == "bayes" else None
    tuner = tune.Tuner(
        trainable,
        param_space={"parameters": search_space(sweep, limit)},
        tune_config=tune.TuneConfig(
            metric="score",
            mode=sweep.mode,
            num_samples=1 if sweep.method == "grid" else limit or 1,
            search_alg=bayes or BasicVariantGenerator(max_concurrent=concurrent or 0, random_state=search_seed),
            scheduler=scheduler(sweep),
            max_concurrent_trials=concurrent if bayes else None,  # the other generator limits itself
        ),
        run_config=tune.RunConfig(
            name="tune",
            storage_path=str(folder),
            verbose=1,
            callbacks=[JsonLoggerCallback()],
            checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
            failure_config=tune.FailureConfig(max_failures=_RETRIES),
        ),
    )
    return [_outcome(result) for result in tuner.fit()]


def _connect(address: str | None) -> None:
    """Connect to a Ray cluster. Without an address, Ray is started on this machine."""
    if not ray.is_initialized():
        # Workers must find this checkout if clustergym is not installed.
        environment = {"env_vars": {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}}
        ray.init(address=address, runtime_env=environment, log_to_driver=False, logging_level="warning")


def _outcome(result: Any) -> Outcome:
    last = result.metrics or {}
    error = last.get("error") or (str(result.error).splitlines()[-1] if result.error else "")
    state = "failed" if error else last.get("state", "not begun")
    return Outcome(result.config["parameters"], state, last.get("scores", []), error)
