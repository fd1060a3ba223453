"""Train and evaluate variants of the policy, and of the search.

    python benchmarks/moe_marl/ablations.py --timesteps 32768 --layers 2 --trainer-flags="--layers 2"

The agents act alone: the look-ahead of one expert per operation, the one that the expert actor chooses. The rows of
"8 candidates" show what simulating the eight most likely experts adds. The rows of annealing show its estimate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from rich.table import Table

from clustergym.planners.base import Planner
from clustergym.planners.registry import make_planner
from common import CONSOLE, Args, halves, interval, measure_all, run, stage_planners, train_one

VARIANTS: dict[str, list[str]] = {
    "as it is": [],
    "MLP encoder": ["--ablate", "mlp-encoder"],
    "simultaneous choice": ["--ablate", "simultaneous"],
    "no look-ahead": ["--ablate", "no-lookahead"],
    "decentralised critics": ["--ablate", "two-critics"],
    "no supervised phase": ["--pretrain-states", "0"],
    "32 operations": ["--ops-per-layer", "32"],
}
"""Flags of each variant. Names are folder names, so results are found again only under the same name."""


@dataclass
class AblationArgs(Args):
    seeds: tuple[int, ...] = (1, 2, 3)
    """Training seeds."""
    streams: int = 6
    """Held-out streams."""
    timesteps: int = 65_536
    """Operations per training."""


def main(args: AblationArgs) -> None:
    model, cluster = args.models[0], args.clusters[0]
    table = Table("variant", "seeds", "before PPO", "after PPO", title=f"total ÷ EPLB's, {model}, {cluster}")
    _, test = halves(args, model, args.layers)
    simulator, protocol = args.simulator(model, cluster), args.protocol()
    planners: dict[str, Callable[[], Planner]] = {
        "eplb": partial(make_planner, "eplb", simulator),
        "annealing": partial(make_planner, "anneal", simulator),
        "annealing, exact steps only": partial(make_planner, "anneal", simulator, estimate_steps=0, iterations=20000),
    }
    names: dict[str, list[list[str]]] = {}
    for variant, flags in VARIANTS.items():
        for seed in args.seeds:
            folder = args.output / "ablations" / variant.replace(" ", "-") / f"seed-{seed}"
            train_one(args, folder, seed, args.timesteps, flags)
            for candidates in (1, 8) if variant == "as it is" else (1,):
                label = variant if candidates == 1 else f"{variant}, {candidates} candidates"
                made = stage_planners(simulator, folder, seed, ("supervised", "policy"), candidates)
                planners |= {f"{label} {name}": planner for name, planner in made.items()}
                names.setdefault(label, []).append([f"{label} {name}" for name in made])
    found = measure_all(args.output / "ablations", planners, test, protocol)
    eplb = np.array(found["eplb"]["streams"])
    for label, by_seed in names.items():
        ratios = [
            [float(np.mean(found[name]["streams"] / eplb)) for name in stage] for stage in zip(*by_seed, strict=True)
        ]
        if "--pretrain-states" in VARIANTS.get(label, ()):
            ratios[0] = []
        table.add_row(label, str(len(args.seeds)), *(interval(each) if each else "" for each in ratios))
    for label in ("annealing", "annealing, exact steps only"):
        table.add_row(
            label, "", f"{np.mean(found[label]['streams'] / eplb):.3f}", f"{found[label]['decision_ms']:.0f} ms"
        )
    CONSOLE.print(table)


if __name__ == "__main__":
    run(main, AblationArgs, __doc__)
