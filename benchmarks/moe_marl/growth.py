"""Measure the time of one step (simulation, look-ahead and both actors) against the size of the task.

    python benchmarks/moe_marl/growth.py

One size varies at a time; the others are 64 experts, 4 × 4 GPUs, 2048 tokens and 64 environments.
"""

from __future__ import annotations

import time
from functools import partial

import numpy as np
import torch

from clustergym import SyntheticConfig, synthetic_trace
from clustergym.common.plotting import require_matplotlib
from clustergym.moe_placement import ClusterSpec, ModelSpec, PlacementBatch, PlacementConfig
from clustergym.moe_placement.specs import MODELS
from clustergym.planners.policy.inputs import PER_CENT, policy_inputs, same_node_weights, similar_experts
from common import CONSOLE, Args, cached, new_agent, run

BASE = {"experts": 64, "gpus": 16, "tokens": 2048, "environments": 64}
SIZES = {
    "experts": (16, 32, 64, 128, 256), "gpus": (4, 8, 16, 32, 64), "tokens": (512, 1024, 2048, 4096, 8192),
    "environments": (1, 4, 16, 64, 256),
}  # fmt: skip


def step_us(experts: int, gpus: int, tokens: int, environments: int) -> dict[str, float]:
    """Median µs of one step per environment, of the policy and of the simulator."""
    hidden = MODELS["deepseek-v2-lite"].hidden
    model = ModelSpec("grown", 2, experts, min(6, experts), hidden, 1408)
    shape = SyntheticConfig(n_tokens=65536, n_layers=2, n_experts=experts, top_k=model.top_k)
    cluster = ClusterSpec("grown", max(1, gpus // 4), min(4, gpus))
    config = PlacementConfig(
        trace=synthetic_trace(shape, seed=0), model=model, cluster=cluster, intervals=4,
        tokens_per_rank=tokens // gpus, sampled_passes=1, schedule="drift", start="eplb", memory=True,
        allow_reuse=True,
    )  # fmt: skip
    batch, rows, same_node = (
        PlacementBatch(config, environments),
        torch.arange(environments),
        same_node_weights(cluster),
    )
    obs = batch.reset()
    agent = new_agent().eval()
    spent: dict[str, list[float]] = {"policy": [], "simulator": []}
    with torch.no_grad():
        for i in range(max(12, 64 // environments) + 1):
            started = time.perf_counter()
            inputs = policy_inputs(obs, similar_experts(obs["affinity"]), same_node)
            encoded = agent.encode(inputs)
            expert = agent.expert_logits(inputs, encoded).argmax(-1)
            expert_chosen = time.perf_counter()
            parts = batch.lookahead(expert[:, None])[:, 0] * PER_CENT
            simulated = time.perf_counter()
            legal = obs["joint_mask"][rows, expert].bool()
            node = agent.node_logits(inputs, encoded, expert, parts, legal).argmax(-1)
            node_chosen = time.perf_counter()
            batch.step(expert, node)
            if i:  # the first step compiles
                spent["policy"].append(expert_chosen - started + node_chosen - simulated)
                spent["simulator"].append(simulated - expert_chosen + time.perf_counter() - node_chosen)
    return {part: 1e6 * float(np.median(seconds)) / environments for part, seconds in spent.items()}


def main(args: Args) -> None:
    plt = require_matplotlib()
    figure, axes = plt.subplots(1, 4, figsize=(14, 3.4), layout="constrained")
    for axis, (name, values) in zip(axes, SIZES.items(), strict=True):
        found = [
            cached(args.output / "growth" / f"{name}-{value}.json", partial(step_us, **(BASE | {name: value})))
            for value in values
        ]
        for part, marker in (("simulator", "o"), ("policy", "s")):
            axis.plot(values, [item[part] for item in found], marker=marker, ms=4, label=part)
        axis.set(xscale="log", yscale="log", xlabel=name, ylabel="µs per step" if name == "experts" else "")
        axis.set_xticks(values, [str(value) for value in values])
        axis.minorticks_off()
    axes[0].legend()
    figure.savefig(args.output / "growth.png", dpi=110)
    plt.close(figure)
    CONSOLE.print(f"plot: {args.output / 'growth.png'}")


if __name__ == "__main__":
    run(main, Args, __doc__)
