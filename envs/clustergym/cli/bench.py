"""``clustergym bench``: run planners and agents on frozen suites, and make the leaderboard."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from clustergym.bench.entries import parse_entries
from clustergym.bench.leaderboard import csv_table, markdown, page, plot_pareto, rows_of, table_cells
from clustergym.bench.results import Found, collect, run_suite
from clustergym.bench.suites import PlacementTask, Suite, load_suite, suite_names
from clustergym.cli.common import prepare_files, prepare_outputs
from clustergym.common.files import write_atomically

RUNS = Path("runs/bench")
SHORTEST_SECRET = 16
Positional = Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="SUITE")]


@dataclass
class List:
    """List the suites and their tasks."""


@dataclass
class Run:
    """Run planners or agents on a suite. Repeat the command to resume: finished tasks are kept.

    A submitted planner has the arguments of DeepSeek's EPLB (weight, num_replicas, num_groups, num_nodes, num_gpus),
    or is plan(history, placement, simulator), or a subclass of Planner. It runs in a process of its own with limits on
    time and memory. The limits protect from accidents, not from malice: run code that you do not trust in a container.

    Example: clustergym bench run placement-v2 --planner eplb my_planner.py:rebalance_experts --quick
    """

    suite: Positional = "placement-v2"
    """Name of a suite, see clustergym bench list."""
    planner: list[str] = field(default_factory=list)
    """Planners or rules by name, module:function or file.py:function; 'all' (the default) means every named one."""
    agent: list[str] = field(default_factory=list)
    """Agents: module:function or file.py:function with predict(obs), or a class with that method. Offloading: also run
    folders and policy.onnx."""
    env_id: str | None = None
    """The registered form of the environment that --agent acts in. Default: MoEPlacement-v0, MoEOffload-v0."""
    predictor: Path | None = None
    """Offloading: folder made by clustergym offload fit, for the control, 'shipped', and agents that read it."""
    secret: str | None = None
    """File with the secret of the test track, or - for standard input. Without it, this is the validation track."""
    budget: bool = False
    """Placement suites: planners have as many operations on a layer as agents (16). Results are kept apart."""
    quick: bool = False
    """Fewer tasks, streams and intervals: minutes on two cores. Not for the leaderboard."""
    task: list[str] = field(default_factory=list)
    """Run only these tasks; by default all."""
    folder: Path = RUNS
    """Folder for the result files."""


@dataclass
class ShowTable:
    """Show the table of a suite: interquartile means and stratified bootstrap intervals, as in rliable.

    Example: clustergym bench table placement-v2 --quick --plot pareto.png
    """

    suite: Positional = "placement-v2"
    """Name of a suite."""
    folder: Path = RUNS
    """Folder with results."""
    secret: str | None = None
    """File with the secret of the test track, or - for standard input."""
    budget: bool = False
    """Show results of --budget."""
    quick: bool = False
    """Show results of --quick."""
    task: list[str] = field(default_factory=list)
    """Count only these tasks; by default all."""
    plot: Path | None = None
    """Write a Pareto plot of score and decision time to this file (.png, .svg or .pdf)."""
    leaderboard: Path | None = None
    """Write the leaderboard page of all suites here (docs/results/leaderboard.md), with plots and tables beside it."""


def read_secret(source: str | None) -> bytes | None:
    """The secret of the test track. Submitted code can read files and the environment, so a pipe is safest."""
    if source is None:
        return None
    secret = (sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes()).strip()
    if len(secret) < SHORTEST_SECRET:
        raise ValueError(f"--secret {source}: {len(secret)} bytes; expected at least {SHORTEST_SECRET} random ones")
    return secret


def suite_of(args: Run | ShowTable, secret: bytes | None) -> Suite:
    suite = load_suite(args.suite).on_track(secret)
    suite = suite.with_budget() if args.budget else suite
    return (suite.quick() if args.quick else suite).only(args.task)


def run_list(args: List, console: Console, line: str) -> None:
    for name in suite_names():
        suite = load_suite(name)
        table = Table(
            "task", "what", "runs", "limits", title=escape(f"{name} ({suite.sha256[:12]})"), title_justify="left"
        )
        table.caption = escape(suite.about)
        for task in suite.tasks:
            what = f"{task.env_id} {task.options or ''}" if not isinstance(task, PlacementTask) else ", ".join(
                (task.trace, task.cluster, task.profile, task.schedule, f"{task.intervals} intervals")
            )  # fmt: skip
            quick = " (quick)" if task.name in suite.quick_tasks else ""
            limits = f"{task.limits.seconds:g} s, {task.limits.memory_mb} MB per decision"
            table.add_row(task.name + quick, escape(what), str(task.streams), limits)
        console.print(table)


def run_run(args: Run, console: Console, line: str) -> None:
    secret = read_secret(args.secret)
    suite = suite_of(args, secret)
    entries = parse_entries(suite.tasks[0].kind, args.planner, args.agent, args.env_id, str(args.predictor or ""))
    with console.status("starting") as status:
        errors = run_suite(
            suite, entries, args.folder, secret, lambda task, entry: status.update(f"{task}: {escape(entry)}")
        )  # fmt: skip
    wanted = {entry.name for entry in entries}
    found = {name: results for name, results in collect(args.folder, suite, secret).items() if name in wanted}
    if found:
        print_table(found, suite, console, secret is not None)
    for what, why in errors.items():
        console.print(escape(f"{what}: {why}"), style="red", highlight=False, soft_wrap=True)
    console.print(escape(f"results: {args.folder / suite.name}"), highlight=False, soft_wrap=True)
    if not found:
        raise ValueError("no entry has a result")


def print_table(found: Found, suite: Suite, console: Console, test: bool) -> None:
    heads, cells = table_cells(rows_of(found, suite), suite.tasks[0].kind)
    track = "test track" if test else "validation track: anyone can run and tune on it, so it ranks nobody"
    table = Table(title=escape(f"{suite.name}: {len(suite.tasks)} tasks, {track}"))
    for i, head in enumerate(heads):
        table.add_column(head, justify="left" if i == 1 else "right")
    for row in cells:
        style = "dim" if not row[0] else "bold green" if row[0] == "1" else None
        table.add_row(*map(escape, row), style=style)
    console.print(table)


def run_table(args: ShowTable, console: Console, line: str) -> None:
    secret = read_secret(args.secret)
    if args.leaderboard is not None:
        if secret is None:
            raise ValueError("--leaderboard needs the --secret that the results of the test track were made with")
        write_leaderboard(args.leaderboard, args.folder, secret)
        console.print(escape(f"leaderboard: {args.leaderboard}"), highlight=False, soft_wrap=True)
        return
    suite = suite_of(args, secret)
    prepare_outputs(None, args.plot)
    found = collect(args.folder, suite, secret)
    if not found:
        raise ValueError(f"no results of {suite.name} in {args.folder}")
    print_table(found, suite, console, secret is not None)
    if args.plot is not None:
        plot_pareto(rows_of(found, suite), suite.name, suite.tasks[0].kind, args.plot)
        console.print(escape(f"plot: {args.plot}"), highlight=False, soft_wrap=True)


def write_leaderboard(path: Path, folder: Path, secret: bytes) -> None:
    prepare_files(path)
    images, data = path.parent / "images", path.parent / "data"
    images.mkdir(exist_ok=True)
    data.mkdir(exist_ok=True)
    sections = []
    suites = [load_suite(name).on_track(secret) for name in sorted(suite_names(), reverse=True)]
    suites += [suite.with_budget() for suite in suites if suite.tasks[0].kind == "placement"]
    for suite in suites:
        found = collect(folder, suite, secret)
        if found:
            rows, plot = rows_of(found, suite), images / f"leaderboard-{suite.name}.png"
            plot_pareto(rows, suite.name, suite.tasks[0].kind, plot)
            table = data / f"leaderboard-{suite.name}.csv"
            write_atomically(table, csv_table(rows, suite.tasks[0].kind))
            sections.append(markdown(rows, suite, found, f"images/{plot.name}", f"data/{table.name}"))
    if not sections:
        raise ValueError(f"no results of a suite in {folder}")
    write_atomically(path, page(sections))


RUN: dict[type, Callable[..., None]] = {List: run_list, Run: run_run, ShowTable: run_table}
"""The function of each subcommand."""


@dataclass
class Command:
    """Run planners and agents on frozen suites, compare them, and make the leaderboard."""

    command: Annotated[
        Annotated[List, tyro.conf.subcommand("list", prefix_name=False)]
        | Annotated[Run, tyro.conf.subcommand("run", prefix_name=False)]
        | Annotated[ShowTable, tyro.conf.subcommand("table", prefix_name=False)],
        tyro.conf.arg(name=""),
    ]


def run(args: Command, console: Console, line: str) -> None:
    RUN[type(args.command)](args.command, console, line)
