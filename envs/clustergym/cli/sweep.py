"""``clustergym sweep``: run a wandb sweep file with Ray Tune."""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from clustergym.common.extras import require

if TYPE_CHECKING:
    from clustergym.sweeping import Outcome


@dataclass
class Command:
    """Run a sweep file: search with Ray Tune, train each configuration with several seeds, rank them by the mean.

    The same file works with ``wandb sweep``.

    Example: clustergym sweep run sweeps/ppo.yaml --count 8 --seeds 3
    """

    action: Annotated[tyro.conf.Positional[Literal["run"]], tyro.conf.arg(metavar="run")]
    """Run the file, or resume it."""
    file: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="FILE")]
    """A wandb sweep file (.yaml)."""
    count: int | None = None
    """Largest number of configurations; by default run_cap of the file, or the whole grid."""
    seeds: int = 3
    """Number of seeds per configuration: 1, 2, …. They are trained at the same time."""
    folder: Path | None = None
    """Folder for the runs and Ray's files; by default runs/sweep-FILE. On a cluster, all hosts must share it."""
    resume: bool = False
    """Continue the sweep in the folder. Interrupted runs continue from their checkpoints."""
    concurrent: int | None = None
    """Number of configurations at the same time; by default as many as there are CPUs for."""
    cpus: float | None = None
    """CPUs per configuration; by default one per seed, but not more than a host has."""
    gpus: float = 0
    """GPUs per configuration. Its seeds share them."""
    search_seed: int = 0
    """Seed of the random or Bayesian search."""
    address: str | None = None
    """Address of a Ray cluster; by default Ray is started on this machine."""


def ranking(outcomes: Sequence[Outcome], metric: str, title: str) -> Table:
    """A table of ranked configurations, with the parameters that differ between them."""
    names = list(outcomes[0].parameters) if outcomes else []
    varied = [name for name in names if len({repr(o.parameters[name]) for o in outcomes}) > 1] or names
    table = Table("", escape(metric), "± sd", *varied, "state", title=escape(title))
    for place, outcome in enumerate(outcomes, 1):
        scores = outcome.scores
        values = (outcome.parameters[name] for name in varied)
        table.add_row(
            str(place) if scores else "–",
            f"{statistics.fmean(scores):.5g}" if scores else "",
            f"{statistics.stdev(scores):.2g}" if len(scores) > 1 else "",
            *(escape(f"{value:.4g}" if isinstance(value, float) else str(value)) for value in values),
            outcome.state,
            style="bold green" if place == 1 and scores else "red" if outcome.state == "failed" else None,
        )
    return table


def run(args: Command, console: Console, line: str) -> None:
    for module in ("ray.tune", "optuna", "tensorboard"):
        require(module, "sweep")
    from clustergym.sweeping import ranked, read_sweep, run_sweep

    sweep = read_sweep(args.file)
    if not Path(sweep.program).is_file():
        raise ValueError(f"{args.file}: no program at {sweep.program}: start from the folder that this path is in")
    folder = args.folder or Path("runs") / f"sweep-{args.file.stem}"
    flags = {key: value for key, value in vars(args).items() if key not in ("action", "file", "folder")}
    outcomes = ranked(run_sweep(sweep, folder, **flags), sweep.mode)
    console.print(ranking(outcomes, sweep.metric["name"], f"{args.file.name}: {args.seeds} seeds each"))
    for outcome in outcomes:
        if outcome.note:
            console.print(escape(f"failed: {outcome.note}"), style="red", highlight=False, soft_wrap=True)
    if outcomes and outcomes[0].scores:
        command = shlex.join(sweep.command_line(outcomes[0].parameters))
        console.print(escape(f"best: {command}"), highlight=False, soft_wrap=True)
