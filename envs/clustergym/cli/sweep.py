"""``clustergym sweep``: run a wandb sweep file on this machine."""

from __future__ import annotations

import shlex
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Annotated, Literal

import tyro
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

from clustergym.sweeping import Run, Runner, Store, load_sweep
from clustergym.sweeping.launchers import make_launcher
from clustergym.sweeping.store import ranked


@dataclass
class RunSweep:
    """Run a sweep file: propose parameters, start the program, read its scores, rank the runs.

    The same file works unmodified with ``wandb sweep``. To resume an interrupted sweep (even after SIGKILL), repeat the
    command: finished runs are kept, and interrupted runs continue under their own number.

    Example: clustergym sweep run sweeps/ppo.yaml --count 8 --jobs 2
    """

    file: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="FILE")]
    """A wandb sweep file (.yaml)."""
    count: int | None = None
    """Total number of runs; by default until run_cap of the file or the end of the grid."""
    jobs: int = 1
    """Number of runs at the same time."""
    folder: Path | None = None
    """Folder for the database and the runs; by default runs/sweep-FILE."""
    proposer: str = "sweeps"
    """Search algorithm: sweeps (that of wandb) or optuna."""
    seed: int = 0
    """Seed of the search algorithm."""
    run_dir_flag: str = "--run-dir"
    """Flag of the program that sets its run folder, or 'none' if it has no such flag."""
    executor: Literal["local", "ray"] = "local"
    """local: processes on this machine. ray: tasks of a Ray cluster (extra: ray), which starts lost runs again. Then
    --folder must be on a file system that all hosts share."""
    address: str | None = None
    """Address of a Ray cluster; by default Ray is started on this machine."""


@dataclass
class Show:
    """Show the leaderboard of a sweep, while it runs or afterwards."""

    folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="FOLDER")]
    """Folder of a sweep, by default runs/sweep-FILE."""


def leaderboard(runs: Sequence[Run], metric: str | None, maximise: bool, title: str) -> Table:
    """The runs, best first, with the parameters that differ between them."""
    names = list(dict.fromkeys(key for run in runs for key in run.parameters))
    varied = [n for n in names if len({repr(run.parameters.get(n)) for run in runs}) > 1] or names
    table = Table("", "run", metric or "metric", *varied, "state", "s", title=escape(title))
    for place, run in enumerate(ranked(list(runs), maximise), 1):
        seconds = "" if run.started is None or run.ended is None else f"{run.ended - run.started:.0f}"
        again = f" ({run.starts} starts)" if run.starts > 1 else ""
        table.add_row(
            str(place) if run.metric is not None else "–",
            str(run.id),
            "" if run.metric is None else f"{run.metric:.5g}",
            *(_shown(run.parameters.get(name)) for name in varied),
            run.state + again,
            seconds,
            style="bold green" if place == 1 and run.metric is not None else "red" if run.state == "failed" else None,
        )
    return table


def _shown(value: object) -> str:
    return escape(f"{value:.4g}" if isinstance(value, float) else str(value))


def run_sweep(args: RunSweep, console: Console, line: str) -> None:
    sweep = load_sweep(args.file)
    if args.count is not None and args.count < 1:
        raise ValueError(f"count is {args.count}: expected at least 1")
    if args.count is None and sweep.run_cap is None and sweep.method != "grid":
        raise ValueError(f"{args.file}: a {sweep.method} search has no end: give --count, or run_cap in the file")
    if sweep.uses_program and not Path(sweep.program).is_file():
        raise ValueError(
            f"{args.file}: no program at {sweep.program}: run the command from the folder that this path starts from"
        )
    launcher = make_launcher(args.executor, args.address)
    folder = (args.folder or Path("runs") / f"sweep-{args.file.stem}").resolve()

    def show(runs: Sequence[Run]) -> Table:
        done = sum(run.done for run in runs)
        return leaderboard(runs, sweep.metric, sweep.maximise, f"{args.file.name}: {done} of {len(runs)} runs ended")

    with Live(console=console, refresh_per_second=2, transient=True) as live, _terminable():
        flag = None if args.run_dir_flag == "none" else args.run_dir_flag

        def watch(runs: Sequence[Run]) -> None:
            if console.is_terminal:
                live.update(show(runs))

        try:
            runner = Runner(sweep, folder, args.jobs, args.proposer, args.seed, flag, watch=watch, launcher=launcher)
            runs = runner.run(args.count)
        except KeyboardInterrupt:
            console.print("interrupted: repeat the command to resume", highlight=False)
            raise SystemExit(130) from None
    console.print(show(runs))
    for run in runs:
        if run.state == "failed":
            console.print(escape(f"run {run.id} failed: {run.note}"), style="red", highlight=False, soft_wrap=True)
    best = ranked(runs, sweep.maximise)[:1]
    if best and best[0].metric is not None:
        console.print(escape(f"best: run {best[0].id} in {best[0].folder}"), highlight=False, soft_wrap=True)
        console.print(escape(shlex.join(best[0].command or [])), highlight=False, soft_wrap=True)
    console.print(escape(f"results: {folder / 'sweep.db'}"), highlight=False, soft_wrap=True)


class _terminable:
    """While active, SIGTERM ends the sweep as Ctrl-C does: its runs are stopped too, and can be resumed."""

    def __enter__(self) -> None:
        def stop(number: int, frame: FrameType | None) -> None:
            raise KeyboardInterrupt

        self.before = signal.signal(signal.SIGTERM, stop)

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGTERM, self.before)


def run_show(args: Show, console: Console, line: str) -> None:
    path = args.folder / "sweep.db"
    if not path.is_file():
        raise ValueError(f"no sweep in {args.folder}: expected a file sweep.db there")
    store = Store(path)
    found, runs = store.config(), store.runs()
    store.close()
    if found is None:
        raise ValueError(f"{path}: no sweep was started in this folder")
    metric = found[1].get("metric", {})
    console.print(leaderboard(runs, metric.get("name"), metric.get("goal") == "maximize", found[0]))


@dataclass
class Command:
    """Run a wandb sweep file on this machine, or show its results."""

    command: Annotated[
        Annotated[RunSweep, tyro.conf.subcommand("run", prefix_name=False)]
        | Annotated[Show, tyro.conf.subcommand("show", prefix_name=False)],
        tyro.conf.arg(name=""),
    ]


def run(args: Command, console: Console, line: str) -> None:
    chosen = args.command
    if isinstance(chosen, RunSweep):
        run_sweep(chosen, console, line)
    else:
        run_show(chosen, console, line)
