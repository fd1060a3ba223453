"""The command line. Each command is a module with a ``Command`` (its flags) and a ``run``.

Only the module of the given command is imported, so ``clustergym webhook`` needs neither torch nor numba.
"""

from __future__ import annotations

import os
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
    "offload": ("offload", "which experts to keep on a GPU: fit a predictor, compare cache policies, export"),
    "trace": ("trace", "inspect token traces, generate synthetic ones, import recordings of engines"),
    "plan": ("plan", "choose a placement, measure it on held-out traffic, and write it for an engine"),
    "verify": ("verify", "check a plan file against the rules of its engine, the model and the cluster"),
    "diff": ("diff", "what it takes to change from one plan to another: moves, bytes, seconds"),
    "demo": ("demo", "write one HTML page: a trace, all planners, time per layer, placement before and after"),
    "models": ("models", "list the models, or explain one: a preset, a config.json or a YAML file"),
    "clusters": ("clusters", "list GPU types and clusters with their figures, or explain one"),
    "bench": ("bench", "run planners and agents on frozen suites, compare them, make the leaderboard"),
    "sweep": ("sweep", "run a wandb sweep file with Ray Tune, several seeds per configuration"),
    "agent": ("agent", "serve the allocation agent, try it on a laptop, roll back its policy"),
    "webhook": ("webhook", "admission webhooks that right-size GPU pods in Kubernetes"),
    "collector": ("collector", "report to the allocation agents what the pods of a node used"),
}
"""Command → (module, what it does)."""
REMOVED = {"export": "a trained policy is used where it acts: give its checkpoint to cleanrl_ppo/ppo_moe_marl.py"}
"""Commands of earlier versions, and what to use instead."""


def module_of(argv: list[str]) -> str:
    """The module of a command line. ``eval`` has one module per task, because their flags differ."""
    name, rest = argv[0], argv[1:]
    tasks = [value for flag, value in pairwise(rest) if flag == "--task"]
    tasks += [flag.removeprefix("--task=") for flag in rest if flag.startswith("--task=")]
    return "eval_gpu" if name == "eval" and tasks == ["gpu-allocation"] else COMMANDS[name][0]


def check_trace(argv: list[str]) -> None:
    """Raise a ValueError if the trace of ``plan`` does not exist, before imports that take seconds."""
    if argv[0] == "plan" and len(argv) > 1 and not argv[1].startswith("-"):
        from clustergym.traces.token_trace import find_trace

        find_trace(argv[1])


def check_seed(argv: list[str]) -> None:
    """Raise a ValueError for a negative ``--seed`` of any command."""
    values = [value for flag, value in pairwise(argv) if flag == "--seed"]
    values += [word.removeprefix("--seed=") for word in argv if word.startswith("--seed=")]
    for value in values:
        if value.startswith("-"):
            raise ValueError(f"--seed is {value}: expected 0 or more")


def _overview(console: Console) -> None:
    table = Table("command", "what it does", box=None, title="clustergym COMMAND --help", title_justify="left")
    for name, (_, sentence) in COMMANDS.items():
        table.add_row(f"clustergym {name}", sentence)
    console.print(table)


def main(argv: list[str] | None = None) -> int:
    """Entry point of ``clustergym``. Invalid input gives a one-line error and exit code 2, not a traceback."""
    argv = sys.argv[1:] if argv is None else argv
    # The planners have threads of their own. Threads of torch, which is imported later, would only wait actively.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Piped output has no width of its own: leave room for a whole table.
    console = Console() if sys.stdout.isatty() else Console(width=130)

    def fail(message: str) -> int:
        Console(stderr=True).print(f"[red]error:[/] {escape(message)}", highlight=False, soft_wrap=True)
        return 2

    if not argv or argv[0] in ("-h", "--help"):
        _overview(console)
        return 0 if argv else 2
    if argv[0] in REMOVED:
        return fail(f"the command {argv[0]!r} was removed: {REMOVED[argv[0]]}")
    if argv[0] not in COMMANDS:
        return fail(f"unknown command {argv[0]!r}; the commands are: {', '.join(COMMANDS)}")
    try:
        if argv[:2] == ["agent", "serve"]:
            # The trainer is a program of its own, with its own flags.
            from clustergym.agent.quickstart import find_script

            os.execv(sys.executable, [sys.executable, str(find_script()), *argv[2:]])
        check_seed(argv)
        check_trace(argv)
        module = import_module(f"clustergym.cli.{module_of(argv)}")
        args = tyro.cli(module.Command, args=argv[1:], prog=f"clustergym {argv[0]}")
        module.run(args, console, shlex.join(["clustergym", *argv]))
    except (ValueError, OSError, MissingExtra) as error:
        return fail(str(error))
    except MemoryError as error:
        return fail(f"not enough memory: {error}: give fewer tokens, passes, layers or GPUs")
    return 0
