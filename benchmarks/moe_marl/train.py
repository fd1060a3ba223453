"""Train the policies of the other studies, one per seed: about 5 minutes each on one core.

python benchmarks/moe_marl/train.py --seeds 1 2 3 4 5
"""

from __future__ import annotations

from dataclasses import dataclass

from common import Args, run, seed_folder, train_one


@dataclass
class TrainArgs(Args):
    timesteps: int = 614_400
    """Operations per training."""


def main(args: TrainArgs) -> None:
    for seed in args.seeds:
        train_one(args, seed_folder(args, seed), seed, args.timesteps)


if __name__ == "__main__":
    run(main, TrainArgs, __doc__)
