"""What the offloading commands show, and the networks that they are given."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from clustergym.common.extras import require
from clustergym.common.files import atomic_file
from clustergym.moe_offload.evaluation import Player, Row, make_environment
from clustergym.moe_offload.evaluation import Progress as Tell
from clustergym.moe_offload.specs import OffloadConfig

if TYPE_CHECKING:
    from clustergym.moe_offload.improvement import ImprovedPolicy
    from clustergym.moe_offload.predictor import Predictor

SHIPPED = "shipped"
"""The policy that ``clustergym offload fit`` writes beside the predictor."""


def players_of(names: Sequence[str], predictor: Path | None = None) -> dict[str, Player]:
    """Networks by name: run folders, the shipped policy of a predictor's folder, and networks without training."""
    if not names:
        return {}
    require("torch", "train")
    from clustergym.training.policies import FILE_NAME, Policy, random_networks

    players = {}
    for name in names:
        if name == "random-networks":
            players[name] = Player("random", random_networks)
        elif name == SHIPPED:
            if predictor is None or not (predictor / FILE_NAME).is_file():
                where = "with --predictor DIR" if predictor is None else f"and {predictor / FILE_NAME} is missing"
                raise ValueError(f"--policy {SHIPPED} is the policy of clustergym offload fit, {where}")
            players[name] = Player.of(Policy(predictor))
        elif Path(name).exists():
            players[name] = Player.of(Policy(name))
        else:
            known = "rules, control, bounds, shipped, the name of a rule, random-networks, or a run folder"
            raise ValueError(f"--policy {name}: expected {known}")
    return players


def save_policy(policy: ImprovedPolicy, config: OffloadConfig, predictor: Predictor, folder: Path) -> None:
    """Write ``policy.safetensors`` and ``policy.onnx``, which takes tables of any size.

    Args:
        policy: of ``config``.
        config: what the policy was trained on.
        predictor: that it reads.
        folder: exists.
    """
    import torch

    from clustergym.moe_offload.improvement import TABLE
    from clustergym.training.policies import FILE_NAME, export_policy

    weights = {name: value.detach().contiguous() for name, value in policy.state_dict().items()}
    with atomic_file(folder / "policy.safetensors") as file:
        file.write(require("safetensors.torch", "train").save(weights))
    # What is served is said by whoever plays the policy.
    options = {"predictor": True, **TABLE}
    own = config.__dict__ | options | {"predictor": predictor}
    env = make_environment("MoEOffload-v0", 2, **own)
    obs, _ = env.reset(seed=0)
    env.close()
    about = {"env_id": "MoEOffload-v0", "env_args": options, "slots": config.slots, "link": config.link}
    tensors = {name: torch.from_numpy(value) for name, value in obs.items()}
    export_policy(folder / FILE_NAME, policy.eval(), tensors, about, any_rows=True)


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
        "policy", "kind", "ms/token", "95 %", "tokens/s", "hit rate", "prefetches", "vs Belady", "vs best rule",
        "vs control",
        title=f"stall with {held} of {cells} experts ({slots:.1%}, {held * megabytes / 1e3:.1f} GB)",
        title_justify="left", box=None,
    )  # fmt: skip
    for column in table.columns:
        column.no_wrap = True
    for row in sorted(rows, key=lambda row: -row.stall_ms_per_token):
        table.add_row(
            escape(Path(row.policy).name), row.kind, f"{row.stall_ms_per_token:.3f}",
            "{:.3f} … {:.3f}".format(*row.ci95), f"{row.tokens_per_s:.0f}", f"{row.hit_rate:.1%}",
            f"{row.prefetches_per_token:.1f}", f"{row.belady_regret_ms:+.2f} ms",
            _change(row.against_best_rule, row.against_best_rule_ci95),
            _change(row.against_control, row.against_control_ci95),
        )  # fmt: skip
    return table


def _change(value: float | None, ci95: tuple[float, float] | None) -> str:
    return "" if value is None or ci95 is None else f"{value:+.1%} ± {(ci95[1] - ci95[0]) / 2:.1%}"
