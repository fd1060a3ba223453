"""Make the policy that ships with the package, in about 7 minutes on one core.

    python benchmarks/moe_marl/pretrained.py

Five synthetic traces with random skew, topics and drift (32, 64 and 128 experts) and the bundled trace of a small
language model, on two clusters, under three engine profiles: 24 tasks. No trace of a real model is used, so all of them
are held out. PPO does not improve this policy (docs/results/placement.md), so only the supervised phase is run.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro

from clustergym.traces import synthetic_trace
from common import TRAINER

MODELS = (
    ("gpt-oss-20b", 32, 4),
    ("gpt-oss-20b", 32, 4),
    ("deepseek-v2-lite", 64, 6),
    ("deepseek-v2-lite", 64, 6),
    ("qwen3-30b-a3b", 128, 8),
)


@dataclass
class Args:
    output: Path = Path("runs/pretrained")
    """Folder of the traces and of the training."""
    states: int = 65_536
    """States of the supervised phase."""
    timesteps: int = 0
    """Operations of PPO after it."""
    seed: int = 1


def make_traces(folder: Path) -> list[str]:
    rng, paths = np.random.default_rng(27), []
    for i, (model, n_experts, top_k) in enumerate(MODELS):
        made = synthetic_trace(
            n_tokens=60_000,
            n_layers=6,
            n_experts=n_experts,
            top_k=top_k,
            model=model,
            n_domains=int(rng.integers(6, 13)),
            popularity_skew=float(rng.uniform(0.1, 0.4)),
            n_topics=int(rng.integers(4, 16)),
            topic_strength=float(rng.uniform(0.6, 0.95)),
            domain_drift=float(rng.uniform(0.1, 0.3)),
            sequence_drift=float(rng.uniform(0.01, 0.1)),
            seed=100 + i,
        )
        paths.append(str(made.save(folder / f"synthetic-{i}.npz")))
    return paths


def main(args: Args) -> None:
    args.output.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable, str(TRAINER), "--trace", "tiny_moe_domains", *make_traces(args.output),
        "--cluster", "h800-4x4", "h800-4x8", "--profile", "sglang-prefill", "sglang-decode", "vllm-deepep",
        "--layers", "4", "--pretrain-states", str(args.states), "--total-timesteps", str(args.timesteps),
        "--eval-interval", "24", "--checkpoint-interval", "48", "--eval-streams", "0", "--seed", str(args.seed),
        "--run-dir", str(args.output / f"seed-{args.seed}"),
    ]  # fmt: skip
    subprocess.run(command, check=True)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
