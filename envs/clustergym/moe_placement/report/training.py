"""What a training run of a policy shows at its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from clustergym.moe_placement.evaluation import Result
from clustergym.moe_placement.report.plots import plot_results, plot_validation
from clustergym.moe_placement.report.tables import results_table


def report_training(results: Mapping[str, Result], title: str, curve: Sequence[Sequence[float]], folder: Path) -> None:
    """Print the comparison of planners. Save it as planners.png, and the validation curve as validation.png."""
    if results:
        Console(width=130).print(results_table(list(results.values()), title))
        plot_results(list(results.values()), title, folder / "planners.png")
    if curve:
        plot_validation(curve, folder / "validation.png")
