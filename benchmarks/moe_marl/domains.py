"""Train on one domain of the first model and evaluate on another, with no sequence and no topic in common.

python benchmarks/moe_marl/domains.py --seeds 1 2
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from clustergym import TokenTrace
from clustergym.traces.splits import split_trace
from common import (
    CONSOLE,
    Args,
    baselines,
    comparison_table,
    evenly_spaced,
    measure_all,
    run,
    sources,
    stage_planners,
    train_one,
)


@dataclass
class DomainArgs(Args):
    timesteps: int = 204_800
    """Operations per training."""


def main(args: DomainArgs) -> None:
    model, cluster = args.models[0], args.clusters[0]
    files = sources(args, model)
    if len(files) < 2:
        raise SystemExit(f"{model}: expected the traces of two domains in {args.data}, found {len(files)}")
    train = evenly_spaced(split_trace(TokenTrace.load(files[0]), "train"), args.layers)
    test = evenly_spaced(TokenTrace.load(files[1]), args.layers)
    simulator = args.simulator(model, cluster)
    folder = args.output / "domains"
    planners = baselines(args, simulator, train, folder)
    for seed in args.seeds:
        run = train_one(args, folder / f"seed-{seed}", seed, args.timesteps, traces=files[:1])
        planners |= stage_planners(simulator, run, seed)
    found = measure_all(folder, planners, test, args.protocol())
    title = f"trained on {Path(files[0]).stem}, evaluated on {Path(files[1]).stem}, {cluster}, {args.streams} streams"
    CONSOLE.print(comparison_table(found, title))


if __name__ == "__main__":
    run(main, DomainArgs, __doc__)
