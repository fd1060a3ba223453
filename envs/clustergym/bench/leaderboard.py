"""The leaderboard: interquartile means with bootstrap intervals, a Pareto plot over decision time, and the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from clustergym.bench.results import Result
from clustergym.bench.suites import PlacementTask, Suite
from clustergym.common.plotting import require_matplotlib
from clustergym.common.statistics import interquartile_mean, stratified_bootstrap


@dataclass(frozen=True)
class Row:
    """One entry over all tasks of a suite."""

    entry: str
    score: float
    """Interquartile mean of the scores of all tasks and runs."""
    low: float
    high: float
    """95 % interval by stratified bootstrap"""
    mean: float
    decision_ms: float
    """Mean over tasks"""
    metrics: dict[str, float | None]
    """Means over the tasks that have them all"""
    hindsight: bool
    missing: tuple[str, ...]
    """Tasks without a result. Such an entry has no place."""


def rows_of(found: dict[str, dict[str, Result]], suite: Suite) -> list[Row]:
    """One row per entry, best first. Entries that see the future or lack tasks are ranked too, but get no place."""
    rows = []
    for name, results in found.items():
        scores = [results[task.name]["scores"] for task in suite.tasks if task.name in results]
        low, high = stratified_bootstrap(scores)
        metrics: dict[str, float | None] = {}
        for key in dict.fromkeys(key for result in results.values() for key in result["metrics"]):
            values = [result["metrics"].get(key) for result in results.values()]
            metrics[key] = None if None in values else float(np.mean([v for v in values if v is not None]))
        rows.append(
            Row(
                entry=name,
                score=interquartile_mean(scores),
                low=low,
                high=high,
                mean=float(np.mean([np.mean(runs) for runs in scores])),
                decision_ms=metrics.get("decision_ms") or 0.0,
                metrics=metrics,
                hindsight=any(result["hindsight"] for result in results.values()),
                missing=tuple(task.name for task in suite.tasks if task.name not in results),
            )
        )
    return sorted(rows, key=lambda row: -row.score)


def places(rows: Sequence[Row]) -> list[int | None]:
    """Place of each row, None for those out of competition."""
    place = 0
    found: list[int | None] = []
    for row in rows:
        if row.hindsight or row.missing:
            found.append(None)
        else:
            place += 1
            found.append(place)
    return found


def pareto(rows: Sequence[Row]) -> list[Row]:
    """Entries in competition that no other one beats in both score and decision time, fastest first."""
    front: list[Row] = []
    best = -np.inf
    for row in sorted((r for r in rows if not r.hindsight and not r.missing), key=lambda r: (r.decision_ms, -r.score)):
        if row.score > best:
            front.append(row)
            best = row.score
    return front


COLUMNS: dict[str, list[tuple[str, str, str]]] = {
    "placement": [
        ("migration_us", "migration µs", "{:.2f}"),
        ("balancedness", "balance", "{:.3f}"),
        ("inter_node_mb", "MB between nodes", "{:.2f}"),
        ("moves", "moves", "{:.1f}"),
    ],
    "allocation": [
        ("reward", "reward", "{:.4f}"),
        ("qos", "QoS met", "{:.3f}"),
        ("efficiency", "efficiency", "{:.3f}"),
        ("oom", "OOM kills", "{:.4f}"),
        ("wait_s", "wait s", "{:.0f}"),
    ],
}
"""Metric, heading and format of the columns of each kind of suite."""
SCORES = {"placement": "time saved vs EPLB", "allocation": "gap closed, grant to oracle"}


def table_cells(rows: Sequence[Row], kind: str) -> tuple[list[str], list[list[str]]]:
    """Headings and cells of the table."""
    columns = COLUMNS[kind]
    heads = [
        "",
        "entry",
        f"{SCORES[kind]}, IQM [95 %]",
        "mean",
        *(head for _, head, _ in columns),
        "decision ms",
        "failed",
    ]
    cells = []
    for place, row in zip(places(rows), rows, strict=True):
        shown = [form.format(value) if (value := row.metrics.get(key)) is not None else "" for key, _, form in columns]
        note = " (sees the future)" if row.hindsight else f" ({len(row.missing)} tasks missing)" if row.missing else ""
        cells.append([
            "" if place is None else str(place), row.entry + note,
            f"{row.score:+.1%} [{row.low:+.1%}, {row.high:+.1%}]", f"{row.mean:+.1%}", *shown, f"{row.decision_ms:.3g}",
            f"{row.metrics.get('failed') or 0:.0%}",
        ])  # fmt: skip
    return heads, cells


FASTEST_MS = {"placement": 0.01, "allocation": 1e-4}
"""Decisions that take less are drawn here."""


def plot_pareto(rows: Sequence[Row], title: str, kind: str, path: Path) -> None:
    """Score with its interval over decision time. The line joins the entries that no other one beats in both."""
    plt = require_matplotlib()
    figure, axes = plt.subplots(figsize=(10, 7.5), layout="constrained")
    fastest = FASTEST_MS[kind]
    rows = [replace(row, decision_ms=max(row.decision_ms, fastest)) for row in rows]
    front = pareto(rows)
    times, scores = [r.decision_ms for r in front], [100 * r.score for r in front]
    axes.plot(times, scores, drawstyle="steps-post", color="#4477AA", zorder=1, label="Pareto front")
    for row in rows:
        colour = "#BBBBBB" if row.hindsight else "#4477AA" if row in front else "#EE6677"
        spread = [[100 * max(0.0, row.score - row.low)], [100 * max(0.0, row.high - row.score)]]
        axes.errorbar(
            row.decision_ms, 100 * row.score, yerr=spread, fmt="o", color=colour, markersize=5, elinewidth=0.8, zorder=2
        )
    axes.set_xscale("log")
    axes.set_xlim(fastest / 1.5, 4 * max(row.decision_ms for row in rows))
    axes.axhline(0, color="#888888", linewidth=0.8, linestyle=":")
    unit = "per layer and decision" if kind == "placement" else "per decision"
    axes.set(xlabel=f"decision time, ms {unit}", ylabel=f"{SCORES[kind]}, %, interquartile mean", title=title)
    axes.grid(alpha=0.25)
    axes.legend(loc="lower right")
    _label(axes, rows)
    figure.savefig(path, dpi=120)
    plt.close(figure)


OFFSETS = [(side * 7, up) for up in (3, -10, 14, -21, 25, -32, 36, -43) for side in (1, -1)]
"""Where a name may be written beside its point, nearest first, in points."""


def _label(axes: Any, rows: Sequence[Row]) -> None:
    """Write the names beside the points, where they cover no point and no other name if there is such a place."""
    from matplotlib.transforms import Bbox

    axes.figure.canvas.draw()  # the layout is final, so extents are too
    centres = [axes.transData.transform((row.decision_ms, 100 * row.score)) for row in rows]
    taken = [Bbox.from_extents(x - 5, y - 5, x + 5, y + 5) for x, y in centres]
    for row in sorted(rows, key=lambda r: -r.score):
        place = {"xy": (row.decision_ms, 100 * row.score), "textcoords": "offset points"}
        style = {"fontsize": 7.5, "color": "#777777" if row.hindsight else "#222222"}
        texts = [
            axes.annotate(row.entry, xytext=at, ha="left" if at[0] > 0 else "right", **style, **place) for at in OFFSETS
        ]
        boxes = [text.get_window_extent().padded(1) for text in texts]
        covered = [sum(box.overlaps(other) for other in taken) for box in boxes]
        best = covered.index(min(covered))
        taken.append(boxes[best])
        for text in texts[:best] + texts[best + 1 :]:
            text.remove()
        if abs(OFFSETS[best][1]) > 10:
            line = {"arrowstyle": "-", "color": "#999999", "linewidth": 0.5}
            axes.annotate("", xytext=OFFSETS[best], arrowprops=line, **place)


def markdown(rows: Sequence[Row], suite: Suite, found: dict[str, dict[str, Result]], plot: str | None) -> str:
    """The section of a suite on the leaderboard page."""
    kind = suite.tasks[0].kind
    heads, cells = table_cells(rows, kind)
    lines = [f"## {suite.name}", "", suite.about, ""]
    lines += ["| " + " | ".join(heads) + " |", "| ---: | --- |" + " ---: |" * (len(heads) - 2)]
    lines += ["| " + " | ".join(row) + " |" for row in cells]
    if plot is not None:
        lines += ["", f"![{suite.name}: score over decision time]({plot})"]
    lines += ["", f"Tasks ({len(suite.tasks)}), sha256 of the suite `{suite.sha256[:16]}`:", ""]
    lines += [f"- `{task.name}`, {task.streams} runs" for task in suite.tasks]
    lines += shared_data(suite)
    every = [result for results in found.values() for result in results.values()]
    machines = sorted({f"{r['machine']['cpu']}, {r['machine']['cores']} cores" for r in every})
    codes = sorted({r["code_sha256"][:12] for r in every})
    lines += ["", f"Decision times measured on: {'; '.join(machines)}. Code: {', '.join(f'`{c}`' for c in codes)}.", ""]
    return "\n".join(lines)


def shared_data(suite: Suite) -> list[str]:
    """Lines that say which tasks draw from the same sequences."""
    by_data: dict[str, list[str]] = {}
    for task in suite.tasks:
        if isinstance(task, PlacementTask):
            by_data.setdefault(f"{task.trace} {task.data_sha256} {task.split}", []).append(task.name)
    lines = []
    for names in by_data.values():
        if len(names) > 1:
            tasks = ", ".join(f"`{name}`" for name in names)
            lines += ["", f"The runs of a task share no sequence. But {tasks} draw from the same test sequences, so "
                      "these tasks are not independent of each other. The intervals do not count that."]  # fmt: skip
    return lines


PAGE = """# Leaderboard

Made by `clustergym bench table --leaderboard` from `benchmarks/leaderboard/`. To add an entry, run a whole suite,
`clustergym bench submit`, and open a pull request with its file. The test streams are public, and results are not
checked: [what we got wrong](what-we-got-wrong.md#a-benchmark-that-could-be-cheated).

A score is the interquartile mean over all tasks and runs of a suite, with a 95 % interval by stratified bootstrap.
Placement: the share of the time of a forward pass, migration included, that is saved compared with EPLB on the same
traffic. Entries that see the future are bounds and have no place.
`openevolve-initial` is the first program of the public EPLB evolution benchmark (abmfy/eplb-openevolve); `shinka-1` and
`shinka-2` are evolved programs (Ruiying-Ma/berkeley-cs294-196-f25-shinka). `ppo` is one seed of `ppo_gpu_alloc.py`.
Decision times were measured beside other programs: compare them with each other only.

"""


def page(sections: Sequence[str]) -> str:
    return PAGE + "\n".join(sections)
