"""``clustergym eval --task gpu-allocation``: compare rules and trained policies on held-out streams of pods."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from clustergym.cli.common import prepare_outputs
from clustergym.common.extras import require
from clustergym.common.files import write_atomically
from clustergym.common.plotting import require_matplotlib
from clustergym.gpu_allocation import AllocationBatch, AllocationConfig
from clustergym.gpu_allocation.evaluation import HELD_OUT_SEED, gap_closed, play_policy, play_rules
from clustergym.gpu_allocation.rules import RULES

if TYPE_CHECKING:
    from clustergym.gpu_allocation.policy import AllocationPolicy

ENV_IDS = {"GPUAllocation-v0": False, "GPUAllocationHistory-v0": True}
"""Environment id → whether the observation has the history of the owner."""


@dataclass
class Command:
    """Compare allocation policies on held-out streams of pods: reward, QoS, efficiency, OOM kills, monopolies, wait.

    Example: clustergym eval --task gpu-allocation --env-id GPUAllocationHistory-v0 --checkpoint runs/x/checkpoint.pt
    """

    task: Literal["moe-placement", "gpu-allocation"] = "gpu-allocation"
    """The task."""
    env_id: str = "GPUAllocationHistory-v0"
    """GPUAllocationHistory-v0 (with the history of owners) or GPUAllocation-v0 (five numbers)."""
    policy: list[str] = field(default_factory=lambda: ["all"])
    """Rules to compare by name, or 'all'."""
    checkpoint: list[Path] = field(default_factory=list)
    """Checkpoints of ppo_gpu_alloc.py or ppo_gpu_alloc_lstm.py to compare with the rules."""
    streams: int = 256
    """Number of streams of pods, one episode each."""
    seed: int = 0
    """Seed that selects the held-out streams. Training never uses them."""
    workload: Path | None = None
    """CSV file in the format of openb with requests and lives of pods. Default: a synthetic workload."""
    json: Path | None = None
    """Write the results to this JSON file."""
    plot: Path | None = None
    """Write a plot to this file (.png, .svg, .pdf)."""


def make_batch(args: Command) -> AllocationBatch:
    if args.env_id not in ENV_IDS:
        raise ValueError(f"unknown --env-id {args.env_id!r}; expected {' or '.join(ENV_IDS)}")
    if args.streams < 1:
        raise ValueError(f"--streams is {args.streams}: expected at least 1")
    return AllocationBatch(AllocationConfig(history=ENV_IDS[args.env_id], workload=args.workload), args.streams)


def load_policies(paths: list[Path]) -> dict[str, AllocationPolicy]:
    """Trained policies by path. Only they need torch."""
    if not paths:
        return {}
    torch = require("torch", "train")
    from clustergym.gpu_allocation.policy import AllocationPolicy

    torch.set_num_threads(1)
    return {str(path): AllocationPolicy.load(path) for path in paths}


def results_table(rows: list[dict[str, Any]], title: str) -> Table:
    """Table with the best policy in bold. The oracle is dim, because it uses data that no real policy has."""
    table = Table(
        title=escape(title),
        caption="means over decisions; ± 95 % over streams; gap: from the best rule (0) to the oracle (100 %)",
    )
    for column in ("policy", "reward", "gap", "QoS met", "efficiency", "OOM kills", "monopolies", "wait s"):
        table.add_column(column, justify="left" if column == "policy" else "right")
    fair = [r["reward"] for r in rows if r["policy"] != "oracle"]
    for r in sorted(rows, key=lambda r: r["reward"]):
        gap = "" if r.get("gap_closed") is None else f"{100 * r['gap_closed']:.0f} %"
        table.add_row(
            escape(r["policy"]), f"{r['reward']:.4f} ± {r['reward_ci95']:.4f}", gap, f"{r['qos']:.4f}",
            f"{r['efficiency']:.3f}", f"{r['oom']:.4f}", f"{r['monopoly']:.3f}", f"{r['wait_s']:.0f}",
            style="bold green" if fair and r["reward"] == max(fair) else ("dim" if r["policy"] == "oracle" else None),
        )  # fmt: skip
    return table


def plot_results(rows: list[dict[str, Any]], title: str, path: Path) -> None:
    """Plot the reward of each policy with its confidence interval, and QoS over efficiency."""
    plt = require_matplotlib()

    ordered = sorted(rows, key=lambda r: r["reward"])
    names = [r["policy"] for r in ordered]
    figure, (bars, dots) = plt.subplots(1, 2, figsize=(12, 0.4 * len(names) + 2.4), layout="constrained")
    bars.barh(names, [r["reward"] for r in ordered], xerr=[r["reward_ci95"] for r in ordered], color="#4477AA")
    bars.set(xlabel="mean reward per decision", title=title)
    for r in ordered:
        dots.scatter(r["efficiency"], r["qos"], color="#EE6677")
        dots.annotate(r["policy"], (r["efficiency"], r["qos"]), xytext=(4, 4), textcoords="offset points", fontsize=8)
    dots.set(xlabel="efficiency: used / allocated cores", ylabel="share of pods that met their objective")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def run(args: Command, console: Console, line: str) -> None:
    batch = make_batch(args)
    policies = load_policies(args.checkpoint)
    for path, policy in policies.items():
        if policy.n_features != batch.n_features:
            raise ValueError(
                f"{path} was trained on {policy.n_features} observations, but {args.env_id} has {batch.n_features}: "
                "give the --env-id that it was trained on"
            )
    prepare_outputs(args.json, args.plot)
    seed = HELD_OUT_SEED + args.seed * 2**20
    rules = play_rules(batch, RULES if args.policy == ["all"] else args.policy, seed)
    rows = [{"policy": name} | result for name, result in rules.items()]
    for path, policy in policies.items():
        rows.append({"policy": path} | play_policy(batch, policy, seed))
    if rules.keys() == RULES.keys():
        for row in rows:
            row["gap_closed"] = gap_closed(row["reward"], rules)
    title = f"{args.env_id}, {args.streams} held-out streams of {batch.config.arrivals} pods"
    console.print(results_table(rows, title))
    if args.plot is not None:
        plot_results(rows, title, args.plot)
        console.print(escape(f"plot: {args.plot}"))
    if args.json is not None:
        document = {
            "policies": rows,
            "env_id": args.env_id,
            "streams": args.streams,
            "arrivals": batch.config.arrivals,
            "workload": batch.workload.name,
            "seed": args.seed,
            "command": line,
        }
        write_atomically(args.json, json.dumps(document, indent=2) + "\n")
        console.print(escape(f"results: {args.json}"))
