"""The allocation agent in a closed loop with the simulator, over HTTP: rewards, and QoS compared with full grants.

Each node is one long stream of pods of six owners. For each pod, the simulator asks the agent (POST /allocate), applies
the grant and reports the outcome (POST /feedback). The agent reads the load of the GPU from a libnvidia-ml stub, which
reads what the simulator wrote. The rails are on. All arms use the same streams:

    cold      an untrained agent that learns
    warm      the policy that comes with clustergym, which continues to learn
    offline   the same policy without learning (--explore off)
    rules     grant, vpa, vpa-fraction, and the oracle

After every 32 pods that the agent can learn from, the benchmark waits for the update: on a busy machine the learner,
which has a low priority, would get no time.

QoS of latency-sensitive pods is compared with that under ``grant`` in every window of 200 pods, and in every window of
200 latency-sensitive pods. If an agent with rails is more than one point below ``grant`` in any window, or makes no
update, the benchmark fails.

    python benchmarks/agent/online_learning.py
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
from typing import Any, Literal

import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from agent_client import Connection, Server, StubGpu, agent_server
from clustergym.agent.settings import ServerSettings
from clustergym.agent.traffic import SimulatedNode
from clustergym.common.plotting import require_matplotlib
from clustergym.common.statistics import ci95
from clustergym.gpu_allocation import state
from clustergym.gpu_allocation.rules import RULES

RULE_NAMES = ("grant", "vpa", "vpa-fraction", "oracle")
QOS_WINDOW = 200
LARGEST_LOSS = 1.0
"""Points of QoS that latency-sensitive pods may lose against ``grant`` in a window."""
BATCH_SIZE = ServerSettings.batch_size
UPDATE_S = 120.0
"""Longest wait for an update. The learner process needs many seconds to start."""


@dataclass
class Args:
    checkpoint: Path = Path("pretrained")
    """Checkpoint of ppo_gpu_alloc.py on GPUAllocationHistory-v0 for the arms warm and offline."""
    nodes: int = 4
    """Number of nodes. Each has its own owners and stream."""
    first_node: int = 2**48
    """Seed of the first node. The trainers use other seeds. 2**41 … and 2**43 … were used to choose the rails, 2**44 …
    and 2**47 for earlier policies."""
    arms: tuple[Literal["cold", "offline", "warm"], ...] = ("cold", "offline", "warm")
    """Agents to run. The rules always run."""
    decisions: int = 1_500
    """Number of pods per node."""
    window: int = 500
    """Number of decisions per point of the curve."""
    rails: bool = True
    """Whether the agents have their rails."""
    output: Path = Path("runs/online_learning")
    """Path of the .json and .png files, without the suffix."""


@dataclass
class Played:
    """What happened to the pods of a stream."""

    rewards: np.ndarray
    met: np.ndarray
    """Whether each pod met its objective."""
    sensitive: np.ndarray
    share: np.ndarray
    """Granted / requested cores."""
    updates: int = 0


def play_rule(name: str, seed: int, decisions: int) -> Played:
    node = SimulatedNode(seed, decisions)
    rule, rows = RULES[name](node.batch), []
    for _ in range(decisions):
        sensitive = node.sensitive
        node.batch.step(rule.act(), autoreset=False)
        rule.learn()
        out = node.batch.outcome[0].tolist()
        share = out[state.OUTCOME_CORES] / out[state.OUTCOME_REQUEST]
        rows.append((out[state.OUTCOME_REWARD], out[state.OUTCOME_MET] > 0.5, sensitive, share))
    return Played(*(np.array(column) for column in zip(*rows, strict=True)))


def wait_for_update(server: Server, version: int) -> None:
    """Wait until the agent uses a newer version than this one."""
    until = time.monotonic() + UPDATE_S
    while json.loads(server.get("/readyz"))["policy_version"] <= version:
        if time.monotonic() > until:
            raise RuntimeError(f"no update after version {version} within {UPDATE_S:g} s")
        time.sleep(0.02)


async def play_agent(server: Server, gpu: StubGpu, seed: int, decisions: int, learning: bool) -> Played:
    """The agent's rewards are compared with those of the simulator."""
    node, rows = SimulatedNode(seed, decisions), []
    version, waiting = 0, 0
    async with Connection(server.port) as connection:
        for _ in range(decisions):
            util, used_mb, pods = node.gpu_load
            gpu.set(util, used_mb, mps=pods)
            request, sensitive = node.request(), node.sensitive
            status, granted = await connection.post("/allocate", request)
            if status != 200:
                raise RuntimeError(f"/allocate {status} {granted}")
            if granted["policy_version"] > version:
                version, waiting = granted["policy_version"], 0
            outcome, reward = node.apply(granted["cores"], granted["memory"])
            status, found = await connection.post("/feedback", outcome | {"allocation_id": granted["allocation_id"]})
            if status != 200 or abs(found["reward"] - reward) > 1e-4:
                raise RuntimeError(f"/feedback {status} {found}, expected the reward {reward}")
            rows.append((reward, outcome["qos_met"], sensitive, granted["cores"] / request["cores"]))
            # Only best-effort pods are explored.
            waiting += learning and not sensitive
            if waiting >= BATCH_SIZE:
                wait_for_update(server, version)
    return Played(*(np.array(column) for column in zip(*rows, strict=True)), version)


def worst_windows(arm: Played, grant: Played) -> tuple[float, float]:
    """Largest loss of QoS of latency-sensitive pods against ``grant``, in points: per 200 pods, per 200 of them."""
    lost = np.where(arm.sensitive, grant.met.astype(float) - arm.met, 0.0)
    ones = np.ones(QOS_WINDOW)
    count = np.convolve(arm.sensitive.astype(float), ones, "valid")
    per_pods = np.convolve(lost, ones, "valid") / np.maximum(count, 1.0)
    own = lost[arm.sensitive]
    size = min(QOS_WINDOW, len(own))
    per_sensitive = np.convolve(own, np.ones(size) / size, "valid")
    return 100 * float(per_pods.max()), 100 * float(per_sensitive.max())


def run_arm(arm: str, index: int, args: Args) -> Played:
    """One arm on one node."""
    if arm in RULE_NAMES:
        return play_rule(arm, args.first_node + index, args.decisions)
    flags: list[object] = ["--telemetry-s", 0, "--seed", index, "--update-interval-s", 0.05]
    flags += [] if arm == "cold" else ["--init-checkpoint", args.checkpoint]
    flags += ["--explore", "off"] if arm == "offline" else []
    flags += [] if args.rails else ["--no-rails"]
    with tempfile.TemporaryDirectory() as folder:
        gpu = StubGpu(Path(folder))
        with agent_server(Path(folder) / "store", *flags, **gpu.environment) as server:
            return asyncio.run(
                play_agent(server, gpu, args.first_node + index, args.decisions, learning=arm != "offline")
            )


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
    console, begin = Console(width=150), time.perf_counter()
    args.output.parent.mkdir(parents=True, exist_ok=True)
    arms = [*RULE_NAMES, *args.arms]
    found: dict[str, list[Played]] = {arm: [] for arm in arms}
    worst: dict[str, list[tuple[float, float]]] = {arm: [] for arm in arms}
    for index in range(args.nodes):
        for arm in arms:
            played = run_arm(arm, index, args)
            found[arm].append(played)
            worst[arm].append(worst_windows(played, found["grant"][index]))
            console.print(
                f"node {index} {arm:12s} reward {played.rewards.mean():.3f} share {played.share.mean():.2f} "
                f"worst windows {worst[arm][-1][0]:.2f} {worst[arm][-1][1]:.2f} points, {played.updates} updates"
            )
    table = Table(title=f"{args.nodes} nodes ± 95 %, {args.decisions} pods each; first and last {args.window}")
    columns = (
        "",
        "first",
        "last",
        "LS share",
        "BE share",
        "LS QoS",
        "BE QoS",
        "worst of 200 pods",
        "worst of 200 LS",
        "updates",
    )
    for column in columns:
        table.add_column(column, justify="right" if column else "left")

    def shown(values: list[float]) -> str:
        return f"{np.mean(values):.3f} ± {ci95(values):.3f}"

    figures: dict[str, Any] = {}
    for arm, each in found.items():
        one = {
            "first": [float(p.rewards[: args.window].mean()) for p in each],
            "last": [float(p.rewards[-args.window :].mean()) for p in each],
            "share_sensitive": [float(p.share[p.sensitive].mean()) for p in each],
            "share_best_effort": [float(p.share[~p.sensitive].mean()) for p in each],
            "qos_sensitive": [float(p.met[p.sensitive].mean()) for p in each],
            "qos_best_effort": [float(p.met[~p.sensitive].mean()) for p in each],
        }
        pods, own = (max(column) for column in zip(*worst[arm], strict=True))
        updates = float(np.mean([p.updates for p in each]))
        table.add_row(arm, *map(shown, one.values()), f"{pods:.2f}", f"{own:.2f}", f"{updates:.0f}")
        figures[arm] = one | {"worst_of_200_pods": pods, "worst_of_200_sensitive": own, "updates": updates}
    console.print(table)
    seconds = time.perf_counter() - begin
    document = {"command": shlex.join(sys.argv), "seconds": seconds, "arms": figures}
    args.output.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n")
    curves = {arm: np.stack([p.rewards for p in each]) for arm, each in found.items()}
    plot(curves, args.window, args.output.with_suffix(".png"))
    console.print(f"results: {args.output.with_suffix('.json')}, plot: {args.output.with_suffix('.png')}")
    for arm in args.arms:
        if args.rails and figures[arm]["worst_of_200_pods"] > LARGEST_LOSS:
            raise SystemExit(f"{arm}: {figures[arm]['worst_of_200_pods']:.2f} points below grant in a window")
        if arm != "offline" and not figures[arm]["updates"]:
            raise SystemExit(f"{arm}: no update")


if __name__ == "__main__":
    main()
