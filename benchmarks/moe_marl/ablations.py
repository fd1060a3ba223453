"""Train and evaluate variants of the policy. Passes per interval of the evaluation are the variant's.

python benchmarks/moe_marl/ablations.py --seeds 1 2
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from common import CONSOLE, EPLBS, Args, halves, interval, measure_all, run, stage_planners, train_one
from rich.table import Table

from clustergym.moe_placement.planner_registry import make_planner

VARIANTS: dict[str, list[str]] = {
    "as it is": [],
    "MLP encoder": ["--encoder", "mlp"],
    "two rounds of messages": ["--graph-layers", "2"],
    "simultaneous choice": ["--simultaneous"],
    "decentralised critics": ["--no-centralised"],
    "no look-ahead": ["--no-lookahead"],
    "true time in look-ahead": ["--lookahead-norm", "0"],
    "16-norm in look-ahead": ["--lookahead-norm", "16"],
    "16-norm in look-ahead and reward": ["--lookahead-norm", "16", "--reward-norm", "16"],
    "no supervised phase": ["--pretrain-states", "0"],
    "stream credit": ["--credit", "stream"],
    "horizon 1": ["--horizon", "1"],
    "one sampled pass": ["--sampled-passes", "1"],
    "32 operations": ["--ops-per-layer", "32"],
    "100 passes per interval": ["--passes-per-interval", "100"],
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
        simulator = args.simulator(model, cluster, int(given.get("--passes-per-interval", 1000)))
        protocol = args.protocol()
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
