"""``clustergym agent``: try the allocation agent on a laptop, and roll back its policy."""

from __future__ import annotations

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
    to: int | None = None
    """Version to go back to. Default: the last one that passed the test against its predecessor."""


@dataclass
class Versions:
    """List the versions of the policy that can be rolled back to."""

    store: Path
    """Folder of the agent's store."""


def run_quickstart(args: Quickstart, console: Console, line: str) -> None:
    for module in ("fastapi", "httpx", "prometheus_client", "uvicorn"):
        require(module, "agent")
    from clustergym.agent.quickstart import run

    run(args.store, args.port, args.pods, args.pods_per_s, args.shadow, console)


def run_rollback(args: Rollback, console: Console, line: str) -> None:
    from clustergym.agent.versions import operator_rollback

    console.print(escape(operator_rollback(args.store, args.to)))


def run_versions(args: Versions, console: Console, line: str) -> None:
    from clustergym.agent.versions import CHECKPOINT_KIND, kept_versions, read_champion, version_path
    from clustergym.common.checkpoints import CHECKPOINT_NAME, load_checkpoint

    current = load_checkpoint(args.store / CHECKPOINT_NAME, CHECKPOINT_KIND)["version"]
    good = read_champion(args.store)
    table = Table("version", "experiences", "rolled back to", "")
    for version in kept_versions(args.store):
        state = load_checkpoint(version_path(args.store, version), CHECKPOINT_KIND)
        notes = [text for text, is_it in (("in use", version == current), ("last good", version == good)) if is_it]
        table.add_row(str(version), str(state["experiences"]), str(state.get("rolled_back_to", "")), ", ".join(notes))
    console.print(table)


RUN: dict[type, Callable[..., None]] = {Quickstart: run_quickstart, Rollback: run_rollback, Versions: run_versions}
"""The function of each subcommand."""


@dataclass
class Command:
    """Try the allocation agent on a laptop, and roll back its policy."""

    command: Annotated[
        Annotated[Quickstart, tyro.conf.subcommand("quickstart", prefix_name=False)]
        | Annotated[Rollback, tyro.conf.subcommand("rollback", prefix_name=False)]
        | Annotated[Versions, tyro.conf.subcommand("versions", prefix_name=False)],
        tyro.conf.arg(name=""),
    ]


def run(args: Command, console: Console, line: str) -> None:
    RUN[type(args.command)](args.command, console, line)
