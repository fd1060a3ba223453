"""``clustergym agent``: serve the allocation agent, try it on a laptop, and roll back its policy."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from clustergym.common.extras import require


@dataclass
class Quickstart:
    """Run an agent, simulated pods that ask it, and its status page, until Ctrl-C. No GPU and no cluster is needed."""

    port: int = 8080
    """Port of the agent and of the page. 0: any free port."""
    store: Path = Path("runs/agent_quickstart")
    """Folder for the agent's store."""
    pods: int = 0
    """Stop after this many pods. 0: run until Ctrl-C."""
    pods_per_s: float = 20.0
    """Pods per second."""
    shadow: bool = False
    """Start in shadow mode, as an installation in Kubernetes does."""


@dataclass
class Rollback:
    """Go back to an earlier version of the policy. A running agent does it within a second, without a restart."""

    store: Path
    """Folder of the agent's store."""
    to: int
    """Version to go back to."""


@dataclass
class Versions:
    """List the versions of the policy that can be rolled back to."""

    store: Path
    """Folder of the agent's store."""
    export: Path | None = None
    """Write the newest one to this file (model.pt) for clustergym eval --task gpu-allocation --checkpoint."""


def run_quickstart(args: Quickstart, console: Console, line: str) -> None:
    for module in ("fastapi", "httpx", "prometheus_client", "uvicorn"):
        require(module, "agent")
    from clustergym.agent.quickstart import run

    run(args.store, args.port, args.pods, args.pods_per_s, args.shadow, console)


def run_rollback(args: Rollback, console: Console, line: str) -> None:
    from clustergym.agent.versions import open_store, roll_back

    with open_store(args.store) as connection:
        new = roll_back(connection, args.to)
    console.print(escape(f"version {new} has the weights of version {args.to}"))


def run_versions(args: Versions, console: Console, line: str) -> None:
    from clustergym.agent.versions import kept_versions, load_newest, open_store
    from clustergym.common.checkpoints import save_checkpoint

    with open_store(args.store) as connection:
        table = Table("version", "since", "what", "reward of its experiences")
        for one in kept_versions(connection):
            since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(one.created_s))
            reward = one.metrics.get("reward")
            table.add_row(str(one.version), since, one.note, "" if reward is None else f"{reward:.3f}")
        console.print(table)
        if args.export is not None:
            state = load_newest(connection)
            content = {"agent": state["agent"], "statistics": state["statistics"], "args": {"norm_obs": True}}
            save_checkpoint(args.export, "ppo_gpu_alloc-model", content)


RUN: dict[type, Callable[..., None]] = {Quickstart: run_quickstart, Rollback: run_rollback, Versions: run_versions}
"""The function of each subcommand."""


@dataclass
class Command:
    """Try the allocation agent on a laptop, and roll back its policy. ``clustergym agent serve`` runs it: its flags are
    those of ppo_gpu_alloc_online.py."""

    command: Annotated[
        Annotated[Quickstart, tyro.conf.subcommand("quickstart", prefix_name=False)]
        | Annotated[Rollback, tyro.conf.subcommand("rollback", prefix_name=False)]
        | Annotated[Versions, tyro.conf.subcommand("versions", prefix_name=False)],
        tyro.conf.arg(name=""),
    ]


def run(args: Command, console: Console, line: str) -> None:
    RUN[type(args.command)](args.command, console, line)
