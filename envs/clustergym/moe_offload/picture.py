"""How many experts to keep: tokens per second over memory. What a policy learns: stall over training steps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from clustergym.common.plotting import require_matplotlib
from clustergym.moe_offload.evaluation import Row

_COLOURS = {"rule": "#4477AA", "control": "#228833", "trained": "#AA3377", "random": "#BBBBBB", "bound": "#000000"}
_LINES = {"rule": "-", "control": "-", "trained": "-", "random": ":", "bound": "--"}
_SHOWN_RULES = ("lru", "decayed-lfu")
"""Rules that are drawn even if they are not the best one: what engines have."""
_ABOUT = {
    "next-use+backlog": ": predicts, greedily", "shipped": ": predicts and looks at the link",
    "belady": ": knows the future, no prefetching", "clairvoyant": ": knows the future",
}  # fmt: skip


_Label = tuple[float, str, str, bool]


def plot_rows(rows: Sequence[Row], all_experts_gb: float, title: str, path: Path) -> None:
    """One line per policy over the memory of its slots; for a single memory size, one bar per policy."""
    plt = require_matplotlib()
    shares = sorted({row.slots for row in rows})
    if len(shares) == 1:
        ordered = sorted(rows, key=lambda row: row.tokens_per_s)
        figure, axes = plt.subplots(figsize=(8, 0.32 * len(rows) + 1.4), layout="constrained")
        drawn = axes.barh(
            [row.policy for row in ordered], [row.tokens_per_s for row in ordered],
            color=[_COLOURS[row.kind] for row in ordered],
        )  # fmt: skip
        axes.bar_label(drawn, fmt="%.0f", padding=3, fontsize=8)
        kinds = [kind for kind in _COLOURS if any(row.kind == kind for row in rows)]
        axes.legend([plt.Rectangle((0, 0), 1, 1, color=_COLOURS[kind]) for kind in kinds], kinds, loc="lower right")
        axes.set(xlabel="tokens per second", title=f"{title}, {shares[0]:.1%} of the experts on the GPU")
        axes.set_xlim(right=1.1 * max(row.tokens_per_s for row in rows))
    else:
        figure, axes = plt.subplots(figsize=(9.5, 4.6), layout="constrained")
        names = list(dict.fromkeys(row.policy for row in rows))
        by = {name: sorted((row for row in rows if row.policy == name), key=lambda row: row.slots) for name in names}
        rules = sorted((name for name in names if by[name][0].kind == "rule"), key=lambda n: -_mean(by[n]))
        controls = sorted((name for name in names if by[name][0].kind == "control"), key=lambda n: -_mean(by[n]))
        shown = [n for n in names if n in (*rules[:1], *controls[:1], *_SHOWN_RULES) or by[n][0].kind == "trained"]
        shown += [name for name in ("belady", "clairvoyant") if name in by]
        labels = []
        for name in shown:
            own = by[name]
            gb, speed = [row.slots * all_experts_gb for row in own], [row.tokens_per_s for row in own]
            kind, weak = own[0].kind, name in _SHOWN_RULES and name != rules[0]
            colour, strong = _COLOURS[kind], kind in ("control", "trained")
            axes.plot(gb, speed, marker="o", ms=4, color=colour, ls=_LINES[kind], lw=2.2 if strong else 1.3,
                      alpha=0.5 if weak else 1.0)  # fmt: skip
            labels.append((speed[-1], f"{Path(name).name}{_ABOUT.get(name, '')}", colour, strong))
        if rules and (best := next((n for n in shown if by[n][0].kind in ("trained", "control")), None)):
            axes.fill_between(
                [row.slots * all_experts_gb for row in by[best]], [row.tokens_per_s for row in by[rules[0]]],
                [row.tokens_per_s for row in by[best]], color=_COLOURS[by[best][0].kind], alpha=0.1, lw=0,
            )  # fmt: skip
        axes.set(xlabel="GB of GPU memory for experts", ylabel="tokens per second")
        axes.set_title(title, loc="left", fontsize=11)
        top = axes.secondary_xaxis(
            "top", functions=(lambda x: 100 * x / all_experts_gb, lambda x: x * all_experts_gb / 100)
        )
        top.set_xlabel("% of the experts")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_ylim(bottom=0)
        for y, (_, text, colour, strong) in _apart(labels, 0.045 * axes.get_ylim()[1]):
            axes.annotate(text, (1, y), (6, 0), xycoords=("axes fraction", "data"), textcoords="offset points",
                          va="center", color=colour, weight="bold" if strong else None, fontsize=9)  # fmt: skip
    figure.savefig(path, dpi=130)
    plt.close(figure)


def plot_curve(
    steps: Sequence[int], stall_ms: Sequence[float], levels: Mapping[str, float], rows: Sequence[Row], title: str,
    path: Path,
) -> None:  # fmt: skip
    """Stall per token over training steps with ``levels`` as horizontal lines; beside it one bar per row."""
    plt = require_matplotlib()
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 0.3 * len(rows) + 1.8), layout="constrained")
    kinds_of = {row.policy: row.kind for row in rows}
    for name, stall in sorted(levels.items(), key=lambda level: -level[1]):
        kind = kinds_of[name]
        left.axhline(stall, color=_COLOURS[kind], ls=_LINES[kind], lw=1)
        left.annotate(f"{name}  {stall:.2f}", (1, stall), (4, 0), xycoords=("axes fraction", "data"),
                      textcoords="offset points", va="center", fontsize=8)  # fmt: skip
    left.plot(steps, stall_ms, color=_COLOURS["trained"], marker="o", ms=4, label="trained policy")
    left.set(xlabel="training steps", ylabel="stall, ms per token", title="episodes of the evaluations while training")
    left.set_ylim(0, 1.08 * max(*stall_ms, *levels.values()))
    left.legend(loc="lower left")
    ordered = sorted(rows, key=lambda row: -row.stall_ms_per_token)
    errors = [[abs(row.stall_ms_per_token - row.ci95[i]) for row in ordered] for i in (0, 1)]
    right.barh(
        [Path(row.policy).name if row.kind == "trained" else row.policy for row in ordered],
        [row.stall_ms_per_token for row in ordered], color=[_COLOURS[row.kind] for row in ordered], xerr=errors,
        error_kw={"lw": 0.8},
    )  # fmt: skip
    kinds = [kind for kind in _COLOURS if any(row.kind == kind for row in rows)]
    right.legend([plt.Rectangle((0, 0), 1, 1, color=_COLOURS[kind]) for kind in kinds], kinds, loc="upper right")
    right.set(xlabel="stall, ms per token", title="all test sequences, with 95 % intervals")
    figure.suptitle(title)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _apart(labels: list[_Label], gap: float) -> Iterator[tuple[float, _Label]]:
    """Positions of labels, the lowest first, that are at least ``gap`` apart."""
    y = -math.inf
    for label in sorted(labels):
        y = max(label[0], y + gap)
        yield y, label


def _mean(rows: Sequence[Row]) -> float:
    return sum(row.tokens_per_s for row in rows) / len(rows)
