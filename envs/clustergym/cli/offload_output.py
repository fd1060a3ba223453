"""What the offloading commands show, and the networks that they are given."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from clustergym.common.extras import require
from clustergym.moe_offload.evaluation import Player, Row
from clustergym.moe_offload.evaluation import Progress as Tell


def players_of(names: Sequence[str]) -> dict[str, Player]:
    """Networks by name: run folders, and networks without training."""
    if not names:
        return {}
    require("torch", "train")
    from clustergym.training.policies import Policy, random_networks

    players = {}
    for name in names:
        if name == "random-networks":
            players[name] = Player("random", random_networks)
        elif Path(name).exists():
            players[name] = Player.of(Policy(name))
        else:
            known = "rules, control, bounds, the name of a rule, random-networks, or a run folder"
            raise ValueError(f"--policy {name}: expected {known}")
    return players


def bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description:28s}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        TextColumn("left"), TimeRemainingColumn(), TextColumn("{task.fields[note]}"), console=console, transient=True,
    )  # fmt: skip


@contextmanager
def steps_of(console: Console, total: int) -> Iterator[Tell]:
    """A bar that goes on when the name of the step changes."""
    with bar(console) as progress:
        task, last = progress.add_task("", total=total, note=""), ""

        def tell(step: str, note: str) -> None:
            nonlocal last
            progress.update(task, description=step[:28], note=note, advance=int(step != last and last != ""))
            last = step

        yield tell


def results_table(rows: list[Row], cells: int, megabytes: float) -> Table:
    """Rows of one memory size, the least stall last."""
    slots = rows[0].slots
    held = round(slots * cells)
    table = Table(
        "policy", "kind", "stall ms/token", "95 %", "tokens/s", "hit rate", "prefetches", "vs Belady", "vs best rule",
        title=f"{held} of {cells} experts ({slots:.1%}, {held * megabytes / 1e3:.1f} GB)", title_justify="left",
        box=None,
    )  # fmt: skip
    for column in table.columns:
        column.no_wrap = True
    for row in sorted(rows, key=lambda row: -row.stall_ms_per_token):
        against = ""
        if row.against_best_rule is not None and row.against_best_rule_ci95 is not None:
            low, high = row.against_best_rule_ci95
            against = f"{row.against_best_rule:+.1%} ± {(high - low) / 2:.1%}"
        table.add_row(
            escape(Path(row.policy).name), row.kind, f"{row.stall_ms_per_token:.3f}",
            "{:.3f} … {:.3f}".format(*row.ci95), f"{row.tokens_per_s:.0f}", f"{row.hit_rate:.1%}",
            f"{row.prefetches_per_token:.1f}", f"{row.belady_regret_ms:+.2f} ms", against,
        )  # fmt: skip
    return table
