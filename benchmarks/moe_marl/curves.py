"""Plot the learning curves of the trainings of train.py.

python benchmarks/moe_marl/curves.py
"""

from __future__ import annotations

import numpy as np

from clustergym.common.plotting import require_matplotlib
from clustergym.training import read_scalars
from common import CONSOLE, Args, run, seed_folder

COLOURS = ("#4477AA", "#EE6677", "#228833", "#CCBB44", "#AA3377")


def main(args: Args) -> None:
    plt = require_matplotlib()
    figure, (episodes, validation) = plt.subplots(1, 2, figsize=(11, 3.8), layout="constrained")
    for axis, tag, title in (
        (episodes, "charts/episodic_return", "training episodes: share of the static time saved, %"),
        (validation, "validation/saved_vs_eplb", "validation streams: gain over the supervised phase, points"),
    ):
        found = [read_scalars(seed_folder(args, seed), tag) for seed in args.seeds]
        steps = np.array(found[0][0])
        values = np.array([curve for _, curve in found])
        values = 100 * values if axis is episodes else values - values[:, :1]
        # Single rollouts and evaluations are noisy: plot the mean of the last ten.
        smooth = np.array([[row[max(0, i - 9) : i + 1].mean() for i in range(len(row))] for row in values])
        for row, colour, seed in zip(smooth, COLOURS, args.seeds, strict=False):
            axis.plot(steps / 1000, row, lw=1, color=colour, label=f"seed {seed}")
        axis.plot(steps / 1000, smooth.mean(0), lw=2.2, color="black", label="mean")
        axis.set(xlabel="thousand operations", title=title)
        axis.title.set_fontsize(10)
    validation.axhline(0, color="#BBBBBB", lw=1)
    episodes.legend(fontsize=8)
    figure.savefig(args.output / "curves.png", dpi=110)
    plt.close(figure)
    CONSOLE.print(f"plot: {args.output / 'curves.png'}")


if __name__ == "__main__":
    run(main, Args, __doc__)
