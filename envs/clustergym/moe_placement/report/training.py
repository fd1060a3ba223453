"""What a training run of a policy shows at its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from clustergym.moe_placement.evaluation import Result
from clustergym.moe_placement.report.plots import plot_results, plot_training
from clustergym.moe_placement.report.tables import results_table


def report_training(results: Mapping[str, Result], title: str, curve: Sequence[Sequence[float]], folder: Path) -> None:
    """Print the comparison of planners. Draw it as planners.png, and together with the training as summary.png."""
    console, found = Console(width=130), list(results.values())
    if found:
        console.print(results_table(found, title))
        plot_results(found, title, folder / "planners.png")
    if found or curve:
        plot_training(found, curve, title, folder / "summary.png")
        console.print(f"picture: {folder / 'summary.png'}", markup=False, highlight=False, soft_wrap=True)
