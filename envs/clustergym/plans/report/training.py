"""What a training run of a policy shows at its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from clustergym.planners.evaluation import Result
from clustergym.plans.report.plots import plot_results, plot_training
from clustergym.plans.report.tables import results_table


def report_training(
    results: Sequence[Mapping[str, Result]], titles: Sequence[str], curve: Sequence[Sequence[float]], folder: Path
) -> None:
    """Print the comparison of planners for each task.

    Draw the first one as planners.png, and together with the training as summary.png.
    """
    console, first = Console(width=130), list(results[0].values())
    for found, title in zip(results, titles, strict=True):
        if found:
            console.print(results_table(list(found.values()), title))
    if first:
        plot_results(first, titles[0], folder / "planners.png")
    if first or curve:
        plot_training(first, curve, titles[0], folder / "summary.png")
        console.print(f"picture: {folder / 'summary.png'}", markup=False, highlight=False, soft_wrap=True)
