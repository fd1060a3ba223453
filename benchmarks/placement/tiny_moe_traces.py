"""Statistics of the recorded routing of the small language model, and how PPO changed it.

    python benchmarks/placement/tiny_moe_traces.py

Prints the statistics of both bundled traces, the mutual information of adjacent layers with a shuffled control, and how
much PPO changed the loads of each domain compared with the difference between domains. Writes a JSON file and a plot.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import matplotlib
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from clustergym.moe_placement import Simulator, Traffic
from clustergym.moe_placement.streams import sample_passes
from clustergym.planners.registry import make_planner
from clustergym.traces import TokenTrace
from clustergym.traces.statistics import one_hot

NAMES = ("tiny_moe", "tiny_moe_ppo")


@dataclass
class Args:
    n_gpus: int = 16
    """GPUs for the statistics on GPUs per token and on grouping."""
    output: Path = Path("runs/tiny_moe_traces")
    """Prefix of the .json and .png files."""


def layer_information(trace: TokenTrace) -> tuple[float, float]:
    """(mutual information in bits between the experts of adjacent layers, the same with shuffled tokens).

    The mutual information between a random expert of a token in layer l and a random expert of the same token in layer
    l + 1, a mean over adjacent layers. Shuffling the tokens of the next layer keeps the loads of both layers and
    removes the dependence: what is left is the bias of a finite sample. (0, 0) for a single layer.
    """
    rng = np.random.default_rng(0)
    found, shuffled = [], []
    for here, after in pairwise(one_hot(trace, l) for l in range(trace.n_layers)):
        found.append(mutual_bits(here, after))
        shuffled.append(mutual_bits(here, after[rng.permutation(len(after))]))
    return (float(np.mean(found)), float(np.mean(shuffled))) if found else (0.0, 0.0)


def mutual_bits(here: np.ndarray, after: np.ndarray) -> float:
    """Mutual information between random experts of the same row of two multi-hot tables (T, E). Empty rows count 0."""
    counts = [np.maximum(table.sum(1, keepdims=True), 1) for table in (here, after)]
    joint = np.asarray((here / counts[0]).T @ (after / counts[1]), dtype=np.float64)
    if not joint.any():
        return 0.0
    joint /= joint.sum()
    apart = joint.sum(1, keepdims=True) * joint.sum(0, keepdims=True)
    seen = joint > 0
    return float((joint[seen] * np.log2(joint[seen] / apart[seen])).sum())


def shares(trace: TokenTrace) -> np.ndarray:
    """(L, E) share of each expert in the load of its layer."""
    loads = trace.loads().astype(float)
    return loads / loads.sum(1, keepdims=True)


def divergence(a: np.ndarray, b: np.ndarray) -> float:
    """Jensen–Shannon divergence in bits, a mean over layers."""
    middle = (a + b) / 2
    parts = [np.where(p > 0, p * np.log2(np.where(p > 0, p, 1) / np.where(middle > 0, middle, 1)), 0.0) for p in (a, b)]
    return float((parts[0] + parts[1]).sum(1).mean() / 2)


def changed(before: TokenTrace, after: TokenTrace) -> float:
    """Share of the experts of a token that changed. Both traces must have the same tokens."""
    same = (before.experts[:, :, :, None] == after.experts[:, :, None, :]).any(3)
    return float(1 - same.mean())


def compare(before: TokenTrace, after: TokenTrace) -> dict[str, dict[str, float]]:
    """For each domain: load imbalance, how much PPO changed the loads, and how much they differ from other domains."""
    table = {}
    for domain in dict.fromkeys(before.domains.tolist()):
        a, b = before.select(domains=domain), after.select(domains=domain)
        others = [shares(before.select(domains=other)) for other in before.domain_names if other != domain]
        row = {
            "tokens": float(a.n_tokens),
            "max_mean_load_before": float((shares(a).max(1) * a.n_experts).mean()),
            "max_mean_load_after": float((shares(b).max(1) * b.n_experts).mean()),
            "moved_by_ppo_bits": divergence(shares(a), shares(b)),
            "from_other_domains_bits": float(np.mean([divergence(shares(a), other) for other in others])),
        }
        # The generated text differs between the traces, so it cannot be compared token by token.
        if domain != "generated":
            row["experts_changed"] = changed(a, b)
        table[domain] = row
    return table


def served_after_ppo(before: TokenTrace, after: TokenTrace) -> dict[str, float]:
    """µs per layer on held-out text after PPO (h800-4x4), for EPLB plans on the routing before and after PPO."""
    simulator = Simulator("tiny-moe", "h800-4x4")
    text = [domain for domain in before.domain_names if domain != "generated"]
    # Both traces have the same sequences, so the split holds out the same text.
    (plan_before, _), (plan_after, serve) = (t.select(domains=text).split(0.5) for t in (before, after))
    traffic = Traffic(simulator.profile.phase)
    unseen = sample_passes(serve, simulator.n_gpus, traffic, 16)
    static = simulator.static(before.n_layers)
    found = {"static": float(simulator.evaluate(unseen, static).time_us.mean())}
    for name, trace in (("planned before PPO", plan_before), ("planned after PPO", plan_after)):
        observed = sample_passes(trace, simulator.n_gpus, traffic, 16)
        placement = make_planner("eplb", simulator).plan([observed], static)
        found[name] = float(simulator.evaluate(unseen, placement).time_us.mean())
    return found


def plot(before: TokenTrace, after: TokenTrace, path: Path) -> None:
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    domains = list(dict.fromkeys(before.domains.tolist()))
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    order = np.argsort(-shares(before)[-1])
    loads = np.array([shares(before.select(domains=d))[-1][order] * before.n_experts for d in domains])
    image = axes[0].imshow(loads, aspect="auto", cmap="viridis", vmax=np.quantile(loads, 0.99))
    axes[0].set(yticks=range(len(domains)), yticklabels=domains, xlabel="expert of the last layer, busiest first")
    axes[0].set_title("load over the mean, before PPO")
    figure.colorbar(image, ax=axes[0])
    rows = compare(before, after)
    at = np.arange(len(domains))
    axes[1].barh(
        at - 0.2, [rows[d]["from_other_domains_bits"] for d in domains], 0.4, label="to the other domains (mean)"
    )
    axes[1].barh(at + 0.2, [rows[d]["moved_by_ppo_bits"] for d in domains], 0.4, label="to the same domain after PPO")
    axes[1].set(yticks=at, yticklabels=domains, xlabel="Jensen–Shannon divergence of the loads, bits")
    axes[1].invert_yaxis()
    axes[1].legend()
    axes[1].grid(axis="x", alpha=0.3)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(args: Args) -> None:
    console = Console(width=120)
    traces = {name: TokenTrace.load(name) for name in NAMES}
    stats = {name: trace.statistics(args.n_gpus) for name, trace in traces.items()}
    for name, trace in traces.items():
        found, shuffled = layer_information(trace)
        stats[name] |= {"layer_information_bits": found, "layer_information_shuffled_bits": shuffled}
    table = Table("statistic", *NAMES, title=f"{args.n_gpus} GPUs")
    for key in stats[NAMES[0]]:
        table.add_row(key, *(f"{stats[name][key]:.3f}" for name in NAMES))
    console.print(table)
    rows = compare(*traces.values())
    table = Table(
        "domain", "tokens", "busiest / mean", "after PPO", "moved, bits", "other domains, bits", "experts changed"
    )
    for domain, row in rows.items():
        share = f"{row['experts_changed']:.1%}" if "experts_changed" in row else ""
        table.add_row(
            domain, f"{row['tokens']:.0f}", f"{row['max_mean_load_before']:.2f}", f"{row['max_mean_load_after']:.2f}",
            f"{row['moved_by_ppo_bits']:.4f}", f"{row['from_other_domains_bits']:.4f}", share,
        )  # fmt: skip
    console.print(table)
    served = served_after_ppo(*traces.values())
    console.print("served after PPO, µs per layer: " + ", ".join(f"{name} {time:.1f}" for name, time in served.items()))
    args.output.parent.mkdir(parents=True, exist_ok=True)
    plot(*traces.values(), args.output.with_suffix(".png"))
    text = json.dumps(
        {"n_gpus": args.n_gpus, "statistics": stats, "domains": rows, "served_after_ppo_us": served}, indent=2
    )
    args.output.with_suffix(".json").write_text(text + "\n")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
