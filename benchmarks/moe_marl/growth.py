"""Measure the time of one step (simulation, look-ahead and both actors) against the size of the task.

    python benchmarks/moe_marl/growth.py

One size varies at a time; the others are 64 experts, 4 × 4 GPUs, 2048 tokens and 64 environments.
"""

from __future__ import annotations

import time

import matplotlib
import numpy as np
import torch
from common import CONSOLE, Args, cached, new_agent, run

from clustergym import SyntheticConfig, synthetic_trace
from clustergym.moe_placement import ClusterSpec, ModelSpec, PlacementBatch, PlacementConfig
from clustergym.moe_placement.policy.view import PolicyView
from clustergym.moe_placement.specs import MODELS

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def main(args: Args) -> None:
    """Median µs of one step (simulation, look-ahead, both actors) against each size, the others held at 64 experts, 4×4, 2048, 64."""
    import matplotlib

    matplotlib.use("Agg")

    base = {"experts": 64, "gpus": 16, "tokens": 2048, "environments": 64}
    sizes = {
        "experts": (16, 32, 64, 128, 256), "gpus": (4, 8, 16, 32, 64), "tokens": (512, 1024, 2048, 4096, 8192),
        "environments": (1, 4, 16, 64, 256),
    }  # fmt: skip

    def measure(setting: dict[str, int]) -> dict[str, float]:
        model = ModelSpec(
            "grown", 2, setting["experts"], min(6, setting["experts"]), *(MODELS["deepseek-v2-lite"].hidden, 1408)
        )
        trace = synthetic_trace(
            SyntheticConfig(n_tokens=16384, n_layers=2, n_experts=setting["experts"], top_k=model.top_k), seed=0
        )

        cluster = ClusterSpec("grown", max(1, setting["gpus"] // 4), min(4, setting["gpus"]))
        config = PlacementConfig(
            trace=trace,
            model=model,
            cluster=cluster,
            windows=4,
            window_tokens=setting["tokens"],
            schedule="drift",
            start="eplb",
        )
        view = PolicyView(PlacementBatch(config, setting["environments"]))
        view.reset()
        network, spent = new_agent().eval(), {"policy": list[float](), "simulator": list[float]()}
        repeats = max(12, 64 // setting["environments"])
        with torch.no_grad():
            for i in range(repeats + 1):
                began = time.perf_counter()
                inputs = view.inputs()
                encoded = network.encode(inputs, view.same_node)
                expert = network.expert_logits(inputs, encoded).argmax(-1)
                chosen = time.perf_counter()
                parts = view.look(expert)
                looked = time.perf_counter()
                node = network.node_logits(inputs, encoded, view.same_node, expert, parts, view.legal(expert)).argmax(
                    -1
                )
                decided = time.perf_counter()
                view.step(expert, node)
                if i:  # the first round compiles
                    spent["policy"].append(chosen - began + decided - looked)
                    spent["simulator"].append(looked - chosen + time.perf_counter() - decided)
        return {key: 1e6 * float(np.median(each)) / setting["environments"] for key, each in spent.items()}

    figure, axes = plt.subplots(1, 4, figsize=(14, 3.4), layout="constrained")
    for axis, (name, values) in zip(axes, sizes.items(), strict=True):
        found = [
            cached(args.output / "growth" / f"{name}-{v}.json", lambda v=v, name=name: measure(base | {name: v}))
            for v in values
        ]
        for part, marker in (("simulator", "o"), ("policy", "s")):
            axis.plot(values, [each[part] for each in found], marker=marker, ms=4, label=part)
        axis.set(xscale="log", yscale="log", xlabel=name, ylabel="µs a step" if name == "experts" else "")
        axis.set_xticks(values, [str(v) for v in values])
        axis.minorticks_off()
    axes[0].legend()
    figure.savefig(args.output / "growth.png", dpi=110)
    plt.close(figure)
    CONSOLE.print(f"plot: {args.output / 'growth.png'}")


if __name__ == "__main__":
    run(main, Args, __doc__)
