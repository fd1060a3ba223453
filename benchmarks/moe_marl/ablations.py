"""Train and evaluate variants of the policy. Window size and passes per window of the evaluation are the variant's.

python benchmarks/moe_marl/ablations.py --seeds 1 2
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from common import CONSOLE, EPLBS, Args, halves, interval, measure_all, model_of, run, stage_planners, train_one
from rich.table import Table

from clustergym.moe_placement import Simulator
from clustergym.moe_placement.planner_registry import make_planner

VARIANTS: dict[str, list[str]] = {
    "as it is": [],
    "MLP encoder": ["--encoder", "mlp"],
    "two rounds of messages": ["--graph-layers", "2"],
    "simultaneous choice": ["--simultaneous"],
    "reward on the observed window": ["--reward-window", "observed"],
    "decentralised critics": ["--no-centralised"],
    "no look-ahead": ["--no-lookahead"],
    "true time in look-ahead": ["--lookahead-norm", "0"],
    "16-norm in look-ahead": ["--lookahead-norm", "16"],
    "16-norm in look-ahead and reward": ["--lookahead-norm", "16", "--reward-norm", "16"],
    "homes as served": ["--homes", "served"],
    "no supervised phase": ["--pretrain-states", "0"],
    "stream credit": ["--credit", "stream"],
    "horizon 1": ["--horizon", "1"],
    "windows of 512": ["--window-tokens", "512"],
    "windows of 8192": ["--window-tokens", "8192"],
    "1000 passes a window": ["--passes-per-window", "1000"],
}
"""Flags of each variant. Names are folder names, so results are found again only under the same name."""


@dataclass
class AblationArgs(Args):
    seeds: tuple[int, ...] = (1, 2)
    """Training seeds."""
    streams: int = 5
    """Held-out streams."""
    timesteps: int = 65_536
    """Operations per training."""


def main(args: AblationArgs) -> None:
    model, cluster = args.models[0], args.clusters[0]
    stages = ("policy", "supervised")
    columns = [f"{stage} ÷ best EPLB" for stage in stages]
    table = Table("variant", "seeds", *columns, title=f"ablations, {model}, {cluster}")
    _, test = halves(args, model, args.layers)
    for name, flags in VARIANTS.items():
        folder = args.output / "ablations" / name.replace(" ", "-")
        given = dict(zip(flags[::2], flags[1::2], strict=False))
        passes = int(given.get("--passes-per-window", 100))
        simulator = Simulator(model_of(args, model), cluster, passes_per_window=passes)
        protocol = args.protocol(window_tokens=int(given.get("--window-tokens", 2048)))
        eplbs = {eplb: partial(make_planner, eplb, simulator) for eplb in (*EPLBS, "eplb-threshold")}
        best_us = min(item["total_us"] for item in measure_all(folder, eplbs, test, protocol).values())
        planners = {}
        for seed in args.seeds:
            run = train_one(args, folder / f"seed-{seed}", seed, args.timesteps, flags)
            planners |= stage_planners(simulator, run, seed, stages)
        found = measure_all(folder, planners, test, protocol)
        ratios = [[found[f"{stage} {seed}"]["total_us"] / best_us for seed in args.seeds] for stage in stages]
        table.add_row(name, str(len(args.seeds)), *map(interval, ratios))
    CONSOLE.print(table)


if __name__ == "__main__":
    run(main, AblationArgs, __doc__)
