"""The command line. Each command is a module here with a ``Command`` (its flags) and a ``run``; only the one asked for is
imported, so that ``clustergym webhook`` needs neither torch nor numba."""

from __future__ import annotations

import shlex
import sys
from importlib import import_module
from itertools import pairwise

import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from clustergym.common.extras import MissingExtra

COMMANDS = {
    "eval": ("evaluate", "compare planners, or allocation policies (--task gpu-allocation), on held-out traffic"),
    "trace": ("trace", "look at token traces, make synthetic ones, import what engines recorded"),
    "plan": ("plan", "choose a placement that an engine loads, with a report on held-out traffic"),
    "sweep": ("sweep", "run a wandb sweep file locally, resume it, show its leaderboard"),
    "webhook": ("webhook", "admission webhooks that right-size GPU pods in Kubernetes"),
}
"""Command → (module, what it does)."""


def module_of(argv: list[str]) -> str:
    """The module behind a command line. ``eval`` has one for each task, because their flags differ."""
    name, rest = argv[0], argv[1:]
    given = [after for flag, after in pairwise(rest) if flag == "--task"]
    given += [flag.removeprefix("--task=") for flag in rest if flag.startswith("--task=")]
    return "eval_gpu" if name == "eval" and given == ["gpu-allocation"] else COMMANDS[name][0]


def _overview(console: Console) -> None:
    table = Table("command", "what it does", box=None, title="clustergym COMMAND --help", title_justify="left")
    for name, (_, sentence) in COMMANDS.items():
        table.add_row(f"clustergym {name}", sentence)
    console.print(table)


def main(argv: list[str] | None = None) -> int:
    """Entry point of ``clustergym``. Wrong input ends with a sentence and status 2, not with a traceback."""
    argv = sys.argv[1:] if argv is None else argv
    # Piped output has no width of its own: leave room for the whole table.
    console = Console() if sys.stdout.isatty() else Console(width=130)
    errors = Console(stderr=True)
    if not argv or argv[0] in ("-h", "--help"):
        _overview(console)
        return 0 if argv else 2
    if argv[0] not in COMMANDS:
        errors.print(
            f"[red]error:[/] unknown command {escape(repr(argv[0]))}; the commands are: {', '.join(COMMANDS)}",
            highlight=False,
            soft_wrap=True,
        )
        return 2
    try:
        module = import_module(f"clustergym.cli.{module_of(argv)}")
        args = tyro.cli(module.Command, args=argv[1:], prog=f"clustergym {argv[0]}")
        module.run(args, console, shlex.join(["clustergym", *argv]))
    except (ValueError, OSError, MissingExtra) as error:
        errors.print(f"[red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        return 2
    return 0
