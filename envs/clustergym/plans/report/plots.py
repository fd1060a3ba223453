"""Plots of comparisons. They need matplotlib (extra ``render``)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from clustergym.common.plotting import require_matplotlib
from clustergym.planners.evaluation import Result
from clustergym.planners.registry import PLANNERS, planner_class

_LINES = {
    "static": ("#BBBBBB", "o"),
    "eplb": ("#EE6677", "s"),
    "eplb-threshold": ("#CCBB44", "v"),
    "bottleneck-8": ("#66CCEE", "^"),
    "anneal": ("#228833", "D"),
    "policy": ("#AA3377", "P"),
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


def plot_training(results: Sequence[Result], curve: Sequence[Sequence[float]], title: str, path: Path) -> None:
    """A training in one picture: time saved on the validation streams, and all planners on the test streams.

    Args:
        results: planners at the end of the training, EPLB among them.
        curve: rows of (step, % saved compared with static, % saved compared with EPLB). The supervised phase ends at
            step 0.
    """
    plt = require_matplotlib()
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(12, max(4.0, 0.26 * len(results) + 1.6)), width_ratios=(2, 3), layout="constrained"
    )
    figure.suptitle(title)
    if curve:
        steps, static, eplb = zip(*curve, strict=True)
        left.plot(steps, static, "o-", ms=3, color="#4477AA", label="compared with static")
        left.plot(steps, eplb, "s-", ms=3, color="#228833", label="compared with EPLB in every interval")
        if steps[0] < 0:
            left.axvspan(steps[0], 0, color="#DDDDDD", lw=0, label="supervised phase")
        left.legend(fontsize=8)
    left.axhline(0, color="#BBBBBB", lw=1)
    left.set(xlabel="operations (below 0: states of the supervised phase)", ylabel="time saved, %")
    left.set_title("the agents alone during training, validation streams", fontsize=10)
    baseline = next((result for result in results if result.planner == "eplb"), None)
    if baseline is not None:
        ordered = sorted(results, key=lambda result: -result.total_us)
        saved = [(-100 * relative, 100 * half) for relative, half in (r.versus(baseline) for r in ordered)]
        colours = [_bar_colour(r.planner) for r in ordered]
        right.barh(
            [r.planner for r in ordered], [mean for mean, _ in saved], xerr=[half for _, half in saved], color=colours,
            error_kw={"elinewidth": 1, "capsize": 2, "ecolor": "#555555"},
        )  # fmt: skip
        right.axvline(0, color="#888888", lw=1)
        right.tick_params(axis="y", labelsize=8)
        right.set(xlabel="time saved compared with EPLB, %, with 95 % interval (grey: sees the future)")
        right.set_title("after training, test streams", fontsize=10)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _bar_colour(planner: str) -> str:
    if planner == "policy":
        return "#228833"
    kind = planner_class(planner) if planner in PLANNERS else None
    return "#BBBBBB" if kind is not None and (kind.needs_future or kind.needs_mixture) else "#4477AA"
