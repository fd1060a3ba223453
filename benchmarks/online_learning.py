"""Online learning of the allocation agent over HTTP: its reward, compared with VPA and the offline-trained policy.

Each node is one long stream of pods of six owners. For each pod, the simulator asks the agent (POST /allocate), applies
the grant and reports the outcome (POST /feedback). The agent reads the load of the GPU from a libnvidia-ml stub, which
reads what the simulator wrote. All arms use the same streams:

    cold      an untrained agent that learns
    warm      the policy of ppo_gpu_alloc.py, which continues to learn
    offline   the same policy without learning (--explore off)
    rules     grant, vpa, vpa-fraction, and the oracle

    python benchmarks/online_learning.py --checkpoint runs/ppo_gpu_alloc__GPUAllocationHistory-v0__1/checkpoint.pt
"""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from agent_client import Connection, StubGpu, agent_server
from clustergym.agent.traffic import pressure_of
from clustergym.common.plotting import require_matplotlib
from clustergym.common.statistics import ci95
from clustergym.gpu_allocation import state
from clustergym.gpu_allocation.baselines import RULES
from clustergym.gpu_allocation.batch import AllocationBatch, AllocationConfig
from clustergym.gpu_allocation.space import MAX_MEMORY_MB, MAX_PODS, inverse_transform

RULE_NAMES = ("grant", "vpa", "vpa-fraction", "oracle")
FIRST_NODE = 2**41
"""Seed of the first stream. The offline trainer and its evaluation use other seeds."""


@dataclass
class Args:
    checkpoint: Path | None = None
    """Checkpoint of ppo_gpu_alloc.py on GPUAllocationHistory-v0. Without it, there are no arms warm and offline."""
    nodes: int = 5
    """Number of nodes. Each has its own owners and stream."""
    decisions: int = 20_000
    """Number of pods per node."""
    frozen_decisions: int = 5_000
    """Number of pods per node for the offline arm, which does not change."""
    window: int = 1000
    """Number of decisions per point of the curve."""
    output: Path = Path("runs/online_learning")
    """Path of the .json and .png files, without the suffix."""


def make_node(index: int, decisions: int) -> AllocationBatch:
    """The simulator of one node."""
    batch = AllocationBatch(AllocationConfig(history=True, arrivals=decisions + 1), 1)
    batch.seed([FIRST_NODE + index])
    batch.reset()
    return batch


def play_rule(name: str, index: int, decisions: int) -> np.ndarray:
    """Rewards (decisions,) of a rule."""
    batch = make_node(index, decisions)
    rule, rewards = RULES[name](batch), np.zeros(decisions)
    for i in range(decisions):
        batch.step(rule.act(), autoreset=False)
        rule.learn()
        rewards[i] = float(batch.reward[0])
    return rewards


async def play_agent(port: int, gpu: StubGpu, index: int, decisions: int) -> tuple[np.ndarray, int]:
    """Rewards (decisions,) of the agent, compared with those of the simulator, and the last policy version."""
    batch, rewards, version = make_node(index, decisions), np.zeros(decisions), 0
    async with Connection(port) as connection:
        for i in range(decisions):
            ask = batch.state["ask"][0].tolist()
            _, _, gpu_util, mem_util, pods, *_ = batch.obs[0].tolist()
            gpu.set(round(100 * gpu_util), round(MAX_MEMORY_MB * mem_util), mps=round(MAX_PODS * pods))
            body = {
                "owner": f"node-{index}/owner-{ask[state.ASK_OWNER]:g}", "cores": ask[state.ASK_CORES],
                "memory": ask[state.ASK_MEMORY],
                "qos_class": "latency-sensitive" if ask[state.ASK_SENSITIVE] > 0.5 else "best-effort",
            }  # fmt: skip
            status, granted = await connection.post("/allocate", body)
            if status != 200:
                raise RuntimeError(f"/allocate {status} {granted}")
            version = granted["policy_version"]
            batch.step([inverse_transform(granted["cores"], granted["memory"])], autoreset=False)
            out = batch.outcome[0].tolist()
            if granted["cores"] != out[state.OUTCOME_CORES]:
                raise RuntimeError(f"the agent granted {granted}, the simulator {out[state.OUTCOME_CORES]}")
            body = {
                "allocation_id": granted["allocation_id"], "actual_usage": out[state.OUTCOME_USAGE],
                "qos_met": out[state.OUTCOME_MET] > 0.5, "pods": int(out[state.OUTCOME_PODS]),
                "pressure": min(pressure_of(ask, out), 1000.0), "memory_used": out[state.OUTCOME_USED_MB],
                "oom": out[state.OUTCOME_OOM] > 0.5,
            }  # fmt: skip
            status, found = await connection.post("/feedback", body)
            if status != 200 or abs(found["reward"] - out[state.OUTCOME_REWARD]) > 1e-4:
                raise RuntimeError(f"/feedback {status} {found}, expected the reward {out[state.OUTCOME_REWARD]}")
            rewards[i] = found["reward"]
    return rewards, version


def run_arm(arm: str, index: int, args: Args) -> dict[str, Any]:
    """Rewards and number of updates of one arm on one node."""
    decisions = args.frozen_decisions if arm == "offline" else args.decisions
    start = time.perf_counter()
    if arm in RULE_NAMES:
        return {"rewards": play_rule(arm, index, decisions), "updates": 0}
    flags: list[object] = ["--telemetry-s", 0, "--seed", index, "--update-interval-s", 0.05]
    flags += [] if arm == "cold" else ["--init-checkpoint", args.checkpoint]
    flags += ["--explore", "off"] if arm == "offline" else []
    with tempfile.TemporaryDirectory() as folder:
        gpu = StubGpu(Path(folder))
        with agent_server(Path(folder) / "store", *flags, **gpu.environment) as server:
            rewards, updates = asyncio.run(play_agent(server.port, gpu, index, decisions))
    return {"rewards": rewards, "updates": updates, "seconds": time.perf_counter() - start}


def plot(curves: dict[str, np.ndarray], window: int, path: Path) -> None:
    """Plot the mean over nodes with its 95 % interval per window of decisions. Rules are horizontal lines."""
    plt = require_matplotlib()
    figure, axes = plt.subplots(figsize=(9, 5), layout="constrained")
    styles = {
        "grant": ("#BBBBBB", ":"),
        "vpa": ("#EE6677", "--"),
        "vpa-fraction": ("#CCBB44", "--"),
        "oracle": ("#AA3377", ":"),
    }
    longest = max(values.shape[1] for values in curves.values())
    for name, values in curves.items():
        if name in styles or name == "offline":
            colour, line = styles.get(name, ("#66CCEE", "-."))
            axes.hlines(values.mean(), 0, longest, colour, line, label=f"{name} {values.mean():.3f}")
            continue
        points = values[:, : values.shape[1] // window * window].reshape(len(values), -1, window).mean(2)
        x = (np.arange(points.shape[1]) + 0.5) * window
        spread = [ci95(column.tolist()) for column in points.T]
        colour = {"cold": "#4477AA", "warm": "#228833"}[name]
        axes.plot(
            x,
            points.mean(0),
            color=colour,
            marker="o",
            ms=3,
            label=f"{name}, learning: {points[:, -1].mean():.3f} at the end",
        )
        axes.fill_between(x, points.mean(0) - spread, points.mean(0) + spread, color=colour, alpha=0.2, lw=0)
    count = len(next(iter(curves.values())))
    axes.set(
        xlabel="decisions on a node", ylabel="mean reward", title=f"Online learning over HTTP, {count} nodes, ±95 %"
    )
    axes.legend(fontsize=8, loc="lower right")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    args = tyro.cli(Args, description=__doc__)
    console = Console(width=130)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    arms = [*RULE_NAMES, "cold", *(["offline", "warm"] if args.checkpoint is not None else [])]
    found: dict[str, list[dict[str, Any]]] = {arm: [] for arm in arms}
    for index in range(args.nodes):
        for arm in arms:
            found[arm].append(run_arm(arm, index, args))
            rewards = found[arm][-1]["rewards"]
            console.print(
                f"node {index} {arm:12s} first {rewards[: args.window].mean():.3f} "
                f"last {rewards[-args.window :].mean():.3f} updates {found[arm][-1]['updates']}"
            )
    table = Table(title=f"mean reward, {args.nodes} nodes ± 95 %; first and last {args.window} decisions")
    for column in ("", "first", "last", "all", "last − vpa", "updates"):
        table.add_column(column, justify="right" if column else "left")
    curves = {arm: np.stack([one["rewards"] for one in each]) for arm, each in found.items()}

    def shown(values: np.ndarray) -> str:
        return f"{values.mean():.3f} ± {ci95(values.tolist()):.3f}"

    figures: dict[str, Any] = {}
    ends = {arm: values[:, -args.window :].mean(1) for arm, values in curves.items()}
    for arm, values in curves.items():
        first = values[:, : args.window].mean(1)
        updates = np.mean([one["updates"] for one in found[arm]])
        gain = ends[arm] - ends["vpa"]
        table.add_row(arm, shown(first), shown(ends[arm]), shown(values.mean(1)), shown(gain), f"{updates:.0f}")
        figures[arm] = {
            "first": first.tolist(), "last": ends[arm].tolist(), "mean": values.mean(1).tolist(), "updates": updates,
            "curve": values[:, : values.shape[1] // args.window * args.window]
            .reshape(len(values), -1, args.window).mean(2).tolist(),
        }  # fmt: skip
    console.print(table)
    document = {"command": shlex.join(sys.argv), "nodes": args.nodes, "decisions": args.decisions, "arms": figures}
    args.output.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n")
    plot(curves, args.window, args.output.with_suffix(".png"))
    console.print(f"results: {args.output.with_suffix('.json')}, plot: {args.output.with_suffix('.png')}")


if __name__ == "__main__":
    main()
