"""Plots of a federation: the communication graph, and the returns of all agents. They need the [render] extra."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from clustergym.common.extras import require
from clustergym.training.federated.matrices import Matrix

MAX_LABELLED_AGENTS = 10
"""Labels of larger graphs would overlap."""
MAX_LEGEND_AGENTS = 8


def plot_graph(matrix: Matrix, path: Path) -> None:
    """Draw the agents on a circle. An arrow from i to j shows the weight of j's policy in the loss of i."""
    figures, patches = require("matplotlib.figure", "render"), require("matplotlib.patches", "render")
    n_agents = len(matrix)
    angles = np.pi / 2 - 2 * np.pi * np.arange(n_agents) / n_agents
    positions = np.stack([np.cos(angles), np.sin(angles)], 1) * (0 if n_agents == 1 else 1)
    figure = figures.Figure(figsize=(5, 5), layout="constrained")
    axes = figure.add_subplot()
    largest = matrix.max() or 1.0
    for i, j in zip(*np.nonzero(matrix), strict=True):
        if i == j:
            continue
        start, end = positions[i], positions[j]
        width = 0.8 + 2.2 * matrix[i, j] / largest
        arrow = patches.FancyArrowPatch(
            tuple(start), tuple(end), arrowstyle="-|>", mutation_scale=14, linewidth=width,
            connectionstyle="arc3,rad=0.14", shrinkA=17, shrinkB=17, color="#4477aa",
        )  # fmt: skip
        axes.add_patch(arrow)
        if n_agents <= MAX_LABELLED_AGENTS:
            # One third of the way along the arc, so that the label is clear of the opposite arrow.
            along = end - start
            label = start + 0.36 * along + 0.065 * np.array([along[1], -along[0]])
            box = {"facecolor": "white", "edgecolor": "none", "pad": 1}
            axes.text(*label, f"{matrix[i, j]:g}", ha="center", va="center", fontsize=9, bbox=box)
    axes.scatter(*positions.T, s=700, color="white", edgecolors="black", zorder=3)
    for i, position in enumerate(positions):
        axes.text(*position, str(i), ha="center", va="center", zorder=4)
    axes.set(xlim=(-1.3, 1.3), ylim=(-1.3, 1.3), aspect="equal", title="i → j: agent i stays close to the policy of j")
    axes.axis("off")
    figure.savefig(path, dpi=110)


def plot_returns(curves: Mapping[int, NDArray[np.float64]], path: Path, title: str) -> Path | None:
    """Plot the returns of all agents and their mean. Returns ``path``, or None if there is nothing to plot.

    A curve has shape (2, points): steps and returns. Returns are NaN until the first episode has ended.
    """
    shown = {agent: curve[:, np.isfinite(curve).all(0)] for agent, curve in curves.items()}
    shown = {agent: curve for agent, curve in shown.items() if curve.size}
    if not shown:
        return None
    figure = require("matplotlib.figure", "render").Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    for agent, (steps, returns) in shown.items():
        label = f"agent {agent}" if len(shown) <= MAX_LEGEND_AGENTS else None
        axes.plot(steps, returns, linewidth=1, alpha=0.7, label=label)
    if len(shown) > 1:
        # The mean covers the steps for which every agent has a value.
        first = max(steps[0] for steps, _ in shown.values())
        last = min(steps[-1] for steps, _ in shown.values())
        common = np.unique(np.concatenate([steps for steps, _ in shown.values()]))
        common = common[(common >= first) & (common <= last)]
        mean = np.mean([np.interp(common, steps, returns) for steps, returns in shown.values()], 0)
        axes.plot(common, mean, "k", linewidth=2, label="mean")
    axes.set(xlabel="steps per agent", ylabel="return, mean of the last 100 episodes", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=110)
    return path
