"""The leaderboard: interquartile means with bootstrap intervals, a Pareto plot over decision time, and the page."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from textwrap import fill

import numpy as np

from clustergym.bench.results import Found
from clustergym.bench.suites import AllocationTask, Suite
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


def rows_of(found: Found, suite: Suite) -> list[Row]:
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
    "offload": [
        ("stall_ms_per_token", "stall, ms per token", "{:.3f}"),
        ("tokens_per_s", "tokens/s", "{:.0f}"),
        ("hit_rate", "hit rate", "{:.3f}"),
        ("prefetches_per_token", "prefetches per token", "{:.1f}"),
    ],
}
"""Metric, heading and format of the columns of each kind of suite."""
SCORES = {
    "placement": "time saved vs EPLB",
    "allocation": "gap closed, grant to oracle",
    "offload": "stall saved vs LRU",
}


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


FASTEST_MS = {"placement": 0.01, "allocation": 1e-4, "offload": 1e-5}
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
        axes.annotate(row.entry, (row.decision_ms, 100 * row.score), (5, 3), textcoords="offset points", fontsize=7.5)
    axes.set_xscale("log")
    axes.set_xlim(fastest / 1.5, 4 * max(row.decision_ms for row in rows))
    axes.axhline(0, color="#888888", linewidth=0.8, linestyle=":")
    unit = {"placement": "per layer and decision", "offload": "per token and layer"}.get(kind, "per decision")
    axes.set(xlabel=f"decision time, ms {unit}", ylabel=f"{SCORES[kind]}, %, interquartile mean", title=title)
    axes.grid(alpha=0.25)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def csv_table(rows: Sequence[Row], kind: str) -> str:
    """All columns of the table."""
    heads, cells = table_cells(rows, kind)
    text = StringIO()
    csv.writer(text, lineterminator="\n").writerows([["place", *heads[1:]], *cells])
    return text.getvalue()


def markdown(rows: Sequence[Row], suite: Suite, found: Found, plot: str, data: str) -> str:
    """The section of a suite on the leaderboard page: the first columns and the decision time. ``data`` has all."""
    all_heads, all_cells = table_cells(rows, suite.tasks[0].kind)
    heads, *cells = ([*line[:3], line[-2]] for line in (all_heads, *all_cells))
    lines = [f"## {suite.name}", "", fill(suite.about, 120), ""]
    lines += ["| " + " | ".join(heads) + " |", "| ---: | --- |" + " ---: |" * (len(heads) - 2)]
    lines += ["| " + " | ".join(row) + " |" for row in cells]
    tasks = ", ".join(f"`{task.name}` ({task.streams})" for task in suite.tasks)
    every = [result for results in found.values() for result in results.values()]
    machines = sorted({f"{r['machine']['cpu']}, {r['machine']['cores']} cores" for r in every})
    codes = sorted({r["code_sha256"][:12] for r in every})
    lines += ["", f"[All columns]({data}).", "", f"![{suite.name}: score over decision time]({plot})", ""]
    lines += [fill(" ".join([f"Tasks and their runs: {tasks}.", *shared_data(suite)]), 120)]
    lines += ["", f"Decision times measured on: {'; '.join(machines)}. Code: {', '.join(f'`{c}`' for c in codes)}.", ""]
    return "\n".join(lines)


def shared_data(suite: Suite) -> list[str]:
    """Lines that say which tasks draw from the same sequences."""
    by_trace: dict[str, list[str]] = {}
    for task in suite.tasks:
        if not isinstance(task, AllocationTask) and task.trace != "synthetic":
            by_trace.setdefault(task.trace, []).append(f"`{task.name}`")
    return [
        f"{', '.join(names)} draw from the same sequences, so they are not independent of each other, which the "
        "intervals do not count."
        for names in by_trace.values()
        if len(names) > 1
    ]


PAGE = """# Leaderboard

Made by a maintainer with `clustergym bench table --leaderboard`: every result is computed from the code of the entry,
on streams that follow from a secret ([submit yours](../guides/benchmark.md)). A score is the interquartile mean (IQM)
over all tasks and runs of a suite, with a 95 % interval by stratified bootstrap. Entries that see the future are bounds
and have no place. Decision times were measured beside other programs: compare them with each other only.

"""


def page(sections: Sequence[str]) -> str:
    return PAGE + "\n".join(sections)
