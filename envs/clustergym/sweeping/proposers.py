"""Proposers of parameters: the search algorithms of wandb and of Optuna."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from clustergym.common.extras import require
from clustergym.sweeping.config import Sweep, flat, sweeps_package
from clustergym.sweeping.store import Run


class Proposer(Protocol):
    """Proposes the parameters of the next run.

    It has no state: a proposal depends only on the sweep, the seed and the runs so far. So a resumed sweep continues as
    if it had not been interrupted.
    """

    def propose(self, runs: Sequence[Run]) -> dict[str, Any] | None:
        """Parameters of the next run, or None if the search space is exhausted."""


def make_proposer(name: str, sweep: Sweep, seed: int) -> Proposer:
    if name not in PROPOSERS:
        raise ValueError(f"unknown proposer {name!r}; expected one of: {', '.join(PROPOSERS)}")
    proposer: Proposer = PROPOSERS[name](sweep, seed)
    return proposer


def as_sweep_runs(runs: Sequence[Run], metric: str | None) -> list[Any]:
    """The runs as objects of the ``sweeps`` package."""
    sweeps = sweeps_package()
    states = {
        "pending": "pending",
        "running": "running",
        "finished": "finished",
        "stopped": "finished",
        "failed": "failed",
    }
    return [
        sweeps.SweepRun(
            name=str(run.id),
            state=states[run.state],
            config=dict(_named(run.parameters)),
            stopped=run.state == "stopped",
            # Aliases, because newer versions of pydantic silently ignore the field names.
            summaryMetrics={} if run.metric is None or metric is None else {metric: run.metric},
            sampledHistory=[] if metric is None else [{metric: value} for value in run.history],
        )
        for run in runs
    ]


def _named(parameters: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Each value under its name. Nested values are also given under the joined name that the package looks up."""
    delimiter = sweeps_package().params.HyperParameterSet.NESTING_DELIMITER
    for key, value in parameters.items():
        yield prefix + key, {"value": value}
        if isinstance(value, dict):
            yield from _named(value, prefix + key + delimiter)


class SweepsProposer:
    """Grid, random and Bayesian search of the ``sweeps`` package of wandb."""

    def __init__(self, sweep: Sweep, seed: int) -> None:
        self.sweep, self.seed = sweep, seed

    def propose(self, runs: Sequence[Run]) -> dict[str, Any] | None:
        # The package uses the global random number generators.
        kept = random.getstate(), np.random.get_state()  # noqa: NPY002
        random.seed(self.seed * 1_000_003 + len(runs))
        np.random.seed((self.seed * 1_000_003 + len(runs)) % 2**32)  # noqa: NPY002
        try:
            proposed = sweeps_package().next_run(
                self.sweep.config, as_sweep_runs(runs, self.sweep.metric), validate=False
            )
        finally:
            random.setstate(kept[0])
            np.random.set_state(kept[1])  # noqa: NPY002
        return None if proposed is None else flat(proposed.config)


class OptunaProposer:
    """Bayesian (TPE), random and grid search with Optuna over the same parameters."""

    def __init__(self, sweep: Sweep, seed: int) -> None:
        optuna = require("optuna", "sweep")
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.optuna, self.sweep, self.seed = optuna, sweep, seed
        if sweep.metric is None:
            raise ValueError(f"{sweep.path}: Optuna needs a metric to optimise")
        self.constants: dict[str, Any] = {}
        self.space: dict[str, Any] = {}
        for name, spec in sweep.config["parameters"].items():
            if "value" in spec:
                self.constants[name] = spec["value"]
            else:
                self.space[name] = self._distribution(name, spec)
        if not self.space:
            raise ValueError(f"{sweep.path}: every parameter is a constant: nothing to search")

    def _distribution(self, name: str, spec: dict[str, Any]) -> Any:
        d, kind = self.optuna.distributions, spec.get("distribution")
        if "values" in spec:
            return d.CategoricalDistribution(spec["values"])
        low, high = spec.get("min"), spec.get("max")
        if kind is None:
            kind = "int_uniform" if isinstance(low, int) and isinstance(high, int) else "uniform"
        if kind == "int_uniform":
            return d.IntDistribution(low, high)
        if kind == "uniform":
            return d.FloatDistribution(low, high)
        if kind == "log_uniform_values":
            return d.FloatDistribution(low, high, log=True)
        if kind == "q_uniform":
            return d.FloatDistribution(low, high, step=spec.get("q", 1.0))
        raise ValueError(
            f"{self.sweep.path}: parameter {name!r} is {kind}, which is not supported with Optuna: use uniform, "
            "int_uniform, log_uniform_values, q_uniform or values, or the proposer 'sweeps'"
        )

    def propose(self, runs: Sequence[Run]) -> dict[str, Any] | None:
        o = self.optuna
        grid = self.sweep.method == "grid"
        if grid:
            sizes = [len(d.choices) if hasattr(d, "choices") else 0 for d in self.space.values()]
            if 0 in sizes:
                raise ValueError(f"{self.sweep.path}: a grid for Optuna needs lists of values")
            if len(runs) >= int(np.prod(sizes)):
                return None
            place, chosen = len(runs), {}
            for name, distribution in reversed(self.space.items()):  # the last parameter changes fastest
                place, digit = divmod(place, len(distribution.choices))
                chosen[name] = distribution.choices[digit]
            return self.constants | dict(reversed(chosen.items()))
        seed = self.seed * 1_000_003 + len(runs)
        if self.sweep.method == "random":
            sampler = o.samplers.RandomSampler(seed=seed)
        else:
            # constant_liar: unfinished runs count as bad, so that parallel runs do not all try the same parameters.
            sampler = o.samplers.TPESampler(seed=seed, constant_liar=True)
        study = o.create_study(direction="maximize" if self.sweep.maximise else "minimize", sampler=sampler)
        for run in runs:
            study.add_trial(self._trial(run))
        trial = study.ask(self.space)
        return self.constants | dict(trial.params)

    def _trial(self, run: Run) -> Any:
        states = self.optuna.trial.TrialState
        parameters = {k: v for k, v in run.parameters.items() if k in self.space}
        if run.done and run.metric is not None:
            return self.optuna.trial.create_trial(params=parameters, distributions=self.space, value=run.metric)
        state = states.FAIL if run.done else states.RUNNING
        return self.optuna.trial.create_trial(params=parameters, distributions=self.space, state=state)


PROPOSERS: dict[str, Any] = {"sweeps": SweepsProposer, "optuna": OptunaProposer}
