"""``clustergym bench``: run planners and agents on frozen suites, and make the leaderboard."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from clustergym.bench.entries import parse_entries
from clustergym.bench.leaderboard import markdown, page, plot_pareto, rows_of, table_cells
from clustergym.bench.results import bundle, collect
from clustergym.bench.running import Unit, run_suite, suite_of, tasks_of
from clustergym.bench.suites import Suite, load_suite, suite_names
from clustergym.cli.common import prepare_files, prepare_outputs
from clustergym.common.executors import make_executor
from clustergym.common.files import write_atomically

RUNS = Path("runs/bench")
Positional = Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="SUITE")]


@dataclass
class List:
    """List the suites and their tasks."""


@dataclass
class Run:
    """Run planners or agents on a suite. Repeat the command to resume: finished tasks are kept.

    A submitted function has the arguments of DeepSeek's EPLB (weight, num_replicas, num_groups, num_nodes, num_gpus),
    or is plan(history, placement, simulator), or a subclass of Planner. It runs in a process of its own with limits on
    time and memory. The limits protect from accidents, not from malice: run code that you do not trust in a container.

    Example: clustergym bench run placement-v1 --planner eplb my_planner.py:rebalance_experts --quick
    """

    suite: Positional = "placement-v1"
    """Name of a suite, see clustergym bench list."""
    planner: list[str] = field(default_factory=list)
    """Planners or rules by name, module:function or file.py:function; 'all' (the default) means every named one."""
    agent: list[str] = field(default_factory=list)
    """Agents: module:function or file.py:function with predict(obs), or a class with that method."""
    checkpoint: list[Path] = field(default_factory=list)
    """Checkpoints: policy.pt of ppo_moe_marl.py, or checkpoint.pt of ppo_gpu_alloc.py or ppo_lstm.py. Of a folder of
    allocation policies, each task gets the one that takes its observation."""
    label: str | None = None
    """Name of the entry in tables, if there is only one."""
    quick: bool = False
    """Fewer tasks, streams and intervals: minutes on two cores. Not for the leaderboard."""
    task: list[str] = field(default_factory=list)
    """Run only these tasks; by default all."""
    folder: Path = RUNS
    """Folder for the result files."""
    executor: Literal["local", "ray"] = "local"
    """local: this machine. ray: a Ray cluster (extra: ray), which starts lost tasks again."""
    address: str | None = None
    """Address of a Ray cluster; by default Ray is started on this machine."""
    jobs: int = 1
    """Number of processes of the local executor. Decision times are best measured with one."""


@dataclass
class ShowTable:
    """Show the table of a suite: interquartile means and stratified bootstrap intervals, as in rliable.

    Example: clustergym bench table placement-v1 --quick --plot pareto.png
    """

    suite: Positional = "placement-v1"
    """Name of a suite."""
    folder: list[Path] = field(default_factory=lambda: [RUNS])
    """Folders with results or submissions."""
    quick: bool = False
    """Show results of --quick."""
    task: list[str] = field(default_factory=list)
    """Count only these tasks; by default all."""
    plot: Path | None = None
    """Write a Pareto plot of score and decision time to this file (.png, .svg or .pdf)."""
    leaderboard: Path | None = None
    """Write the leaderboard page of all suites to this file (docs/results/leaderboard.md), with plots beside it."""


@dataclass
class Submit:
    """Check that an entry has finished a suite, and write one file for the leaderboard. Nothing is sent anywhere.

    Example: clustergym bench submit placement-v1 --entry my_planner.py:rebalance_experts -o mine.json
    """

    output: Annotated[Path, tyro.conf.arg(aliases=["-o"])]
    """The .json file to write. Add it to benchmarks/leaderboard/ in a pull request."""
    entry: str
    """Name of the entry."""
    suite: Positional = "placement-v1"
    """Name of a suite."""
    folder: Path = RUNS
    """Folder with the results."""


def run_list(args: List, console: Console, line: str) -> None:
    for name in suite_names():
        suite = load_suite(name)
        table = Table(
            "task", "what", "runs", "limits", title=escape(f"{name} ({suite.sha256[:12]})"), title_justify="left"
        )
        table.caption = escape(suite.about)
        for task in suite.tasks:
            if task.kind == "placement":
                what = f"{task.trace}, {task.cluster}, {task.profile}, {task.schedule}, {task.intervals} intervals"  # type: ignore[union-attr]
            else:
                what = f"{task.env_id} {task.options or ''}"  # type: ignore[union-attr]
            quick = " (quick)" if task.name in suite.quick_tasks else ""
            limits = f"{task.limits.seconds:g} s, {task.limits.memory_mb} MB per decision"
            table.add_row(task.name + quick, escape(what), str(task.streams), limits)
        console.print(table)


def run_run(args: Run, console: Console, line: str) -> None:
    suite = suite_of(args.suite, args.quick)
    entries = parse_entries(suite.tasks[0].kind, args.planner, args.agent, args.checkpoint, args.label)
    executor = make_executor(args.executor, args.jobs, args.address)
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description:40s}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        n_tasks = len(args.task) or len(suite.tasks)
        progress = bar.add_task("starting", total=len(entries) * n_tasks)

        def finished(unit: Unit, error: str | None) -> None:
            bar.update(progress, advance=1, description=f"{unit.task}: {unit.entry.name}")

        errors = run_suite(args.suite, args.quick, entries, args.folder, executor, args.task, finished)
    wanted = {entry.name for entry in entries}
    found = {name: results for name, results in collect([args.folder], suite).items() if name in wanted}
    if found:
        print_table(found, suite, console)
    for what, why in errors.items():
        console.print(escape(f"{what}: {why}"), style="red", highlight=False, soft_wrap=True)
    console.print(escape(f"results: {args.folder / suite.name}"), highlight=False, soft_wrap=True)
    if not found:
        raise ValueError("no entry has a result")


def print_table(found: dict[str, dict[str, dict[str, object]]], suite: Suite, console: Console) -> None:
    heads, cells = table_cells(rows_of(found, suite), suite.tasks[0].kind)
    table = Table(title=escape(f"{suite.name}: {len(suite.tasks)} tasks"))
    for i, head in enumerate(heads):
        table.add_column(head, justify="left" if i == 1 else "right")
    for row in cells:
        style = "dim" if not row[0] else "bold green" if row[0] == "1" else None
        table.add_row(*map(escape, row), style=style)
    console.print(table)


def run_table(args: ShowTable, console: Console, line: str) -> None:
    for folder in args.folder:
        if not folder.is_dir():
            raise ValueError(f"no folder {folder}")
    if args.leaderboard is not None:
        write_leaderboard(args, console)
        return
    suite = suite_of(args.suite, args.quick)
    if args.task:
        suite = replace(suite, tasks=tuple(tasks_of(suite, args.task).values()))
    prepare_outputs(None, args.plot)
    found = collect(args.folder, suite)
    if not found:
        raise ValueError(f"no results of {suite.name} in {', '.join(map(str, args.folder))}")
    print_table(found, suite, console)
    if args.plot is not None:
        plot_pareto(rows_of(found, suite), suite.name, suite.tasks[0].kind, args.plot)
        console.print(escape(f"plot: {args.plot}"), highlight=False, soft_wrap=True)


def write_leaderboard(args: ShowTable, console: Console) -> None:
    assert args.leaderboard is not None
    prepare_files(args.leaderboard)
    images = args.leaderboard.parent / "images"
    images.mkdir(exist_ok=True)
    sections = []
    for name in sorted(suite_names(), reverse=True):
        suite = load_suite(name)
        found = collect(args.folder, suite)
        if found:
            rows, plot = rows_of(found, suite), images / f"leaderboard-{name}.png"
            plot_pareto(rows, name, suite.tasks[0].kind, plot)
            sections.append(markdown(rows, suite, found, f"images/{plot.name}"))
    if not sections:
        raise ValueError(f"no results of a suite in {', '.join(map(str, args.folder))}")
    write_atomically(args.leaderboard, page(sections))
    console.print(escape(f"leaderboard: {args.leaderboard}"), highlight=False, soft_wrap=True)


def run_submit(args: Submit, console: Console, line: str) -> None:
    suite = load_suite(args.suite)
    prepare_files(args.output)
    found = collect([args.folder], suite)
    if args.entry not in found:
        raise ValueError(f"no results of {args.entry!r} in {args.folder}; there are: {', '.join(found) or 'none'}")
    document = bundle(found[args.entry], suite)
    write_atomically(args.output, json.dumps(document, indent=1) + "\n")
    print_table({args.entry: found[args.entry]}, suite, console)
    console.print(
        escape(f"wrote {args.output}: add it to benchmarks/leaderboard/ in a pull request"),
        highlight=False,
        soft_wrap=True,
    )


RUN: dict[type, Callable[..., None]] = {List: run_list, Run: run_run, ShowTable: run_table, Submit: run_submit}
"""The function of each subcommand."""


@dataclass
class Command:
    """Run planners and agents on frozen suites, compare them, and make the leaderboard."""

    command: Annotated[
        Annotated[List, tyro.conf.subcommand("list", prefix_name=False)]
        | Annotated[Run, tyro.conf.subcommand("run", prefix_name=False)]
        | Annotated[ShowTable, tyro.conf.subcommand("table", prefix_name=False)]
        | Annotated[Submit, tyro.conf.subcommand("submit", prefix_name=False)],
        tyro.conf.arg(name=""),
    ]


def run(args: Command, console: Console, line: str) -> None:
    RUN[type(args.command)](args.command, console, line)
