"""Plots of comparisons. They need matplotlib (extra ``render``)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from clustergym.common.plotting import require_matplotlib
from clustergym.planners.evaluation import Result

_LINES = {
    "static": ("#BBBBBB", "o"),
    "eplb": ("#EE6677", "s"),
    "flashlb": ("#CCBB44", "v"),
    "greedy": ("#66CCEE", "^"),
    "anneal": ("#228833", "D"),
    "oracle": ("#000000", "X"),
}
"""Colour and marker of the planners that are also shown interval by interval."""


def plot_results(results: list[Result], title: str, path: Path) -> None:
    """Served and migration time of each planner as bars, and the total of each interval as lines."""
    plt = require_matplotlib()
    ordered = sorted(results, key=lambda r: -r.total_us)
    names, served = [r.planner for r in ordered], [r.served_us for r in ordered]
    errors = [r.total_ci95_us for r in ordered]
    figure, (bars, lines) = plt.subplots(
        1, 2, figsize=(13, 0.36 * len(names) + 2.2), width_ratios=(3, 2), layout="constrained"
    )
    drawn = bars.barh(names, served, color="#4477AA", label="served")
    bars.barh(
        names, [r.migration_us for r in ordered], left=served, color="#EE6677", label="migration",
        xerr=errors if any(errors) else None, error_kw={"elinewidth": 1, "capsize": 2},
    )  # fmt: skip
    low, high = 0.8 * min(served), max(r.total_us + r.total_ci95_us for r in ordered)
    for bar, r in zip(drawn, ordered, strict=True):
        x = r.total_us + r.total_ci95_us + 0.01 * (high - low)
        bars.text(x, bar.get_y() + bar.get_height() / 2, f"{r.total_us:.1f}", va="center", fontsize=8)
    bars.set(xlabel=f"µs per layer and pass (axis starts at {low:.0f})", title=title)
    bars.set_xlim(left=low, right=high + 0.1 * (high - low))
    _draw_break(bars)
    bars.legend(loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=2, frameon=False)
    shown = ordered if len(ordered) <= len(_LINES) else [r for r in ordered if r.planner in _LINES] or ordered[:6]
    unused = iter([style for name, style in _LINES.items() if name not in names])
    for r in shown:
        colour, marker = _LINES[r.planner] if r.planner in _LINES else next(unused)
        intervals = range(1, len(r.interval_totals_us) + 1)
        lines.plot(intervals, r.interval_totals_us, color=colour, marker=marker, ms=4, label=r.planner)
    lines.set(xlabel="interval", ylabel="total µs", title="interval by interval")
    lines.xaxis.get_major_locator().set_params(integer=True)
    lines.legend(fontsize=8)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _draw_break(axes: Any) -> None:
    """Cut all bars with two slanted lines near the left edge, because the axis does not start at zero."""
    for x in (0.02, 0.03):
        slanted = ([x - 0.006, x + 0.006], [-0.02, 1.02])
        axes.plot(*slanted, transform=axes.transAxes, color="black", lw=1, clip_on=False, zorder=5)
    axes.fill_betweenx(
        [-0.02, 1.02], [0.014, 0.026], [0.024, 0.036], transform=axes.transAxes, color="white", clip_on=False, zorder=4
    )  # fmt: skip
