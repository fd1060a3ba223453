"""The allocation agent in a closed loop with the simulator, over HTTP: rewards, and QoS compared with full grants.

Each node is one long stream of pods of six owners. For each pod, the simulator asks the agent (POST /allocate), applies
the grant and reports the outcome (POST /feedback). The agent reads the load of the GPU from a libnvidia-ml stub, which
reads what the simulator wrote. The rails are on. All arms use the same streams:

    cold      an agent whose policy is untrained and learns
    warm      the policy that comes with clustergym, which continues to learn
    offline   the same policy without learning (--explore off)
    rules     grant, vpa, vpa-fraction, and the oracle, without rails; the VPA rule and the shipped policy within the
              rails, in this process

By default the agent lets the VPA rule decide until its policy has won a trial. For every pod it computes what rule and
policy, both within the rails, would have been rewarded: the columns "rule" and "policy" compare them on the same pods.

After every 32 pods that the agent can learn from, the benchmark waits for the update: on a busy machine the learner,
which has a low priority, would get no time.

QoS of latency-sensitive pods is compared with that under ``grant`` in every window of 200 pods, and in every window of
200 latency-sensitive pods. If an agent with rails is more than one point below ``grant`` in any window, or makes no
update, the benchmark fails.

    python benchmarks/agent/online_learning.py
"""

from __future__ import annotations

import asyncio
import csv
import json
import shlex
import sqlite3
import sys
import tempfile
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from agent_client import Connection, Server, StubGpu, agent_server
from clustergym import agent
from clustergym.agent.settings import ServerSettings
from clustergym.agent.traffic import SimulatedNode
from clustergym.common.plotting import require_matplotlib
from clustergym.common.statistics import ci95
from clustergym.gpu_allocation import AllocationBatch, state
from clustergym.gpu_allocation.policy import AllocationPolicy
from clustergym.gpu_allocation.rules import RULES, Rule
from packing import AgentRule

RULE_NAMES = ("grant", "vpa", "vpa-fraction", "rule in rails", "policy in rails", "oracle")
PRETRAINED = Path(agent.__file__).with_name("pretrained.pt")
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
    rule: float = float("nan")
    """Mean reward of the VPA rule within the rails, as the agent computes it."""
    policy: float = float("nan")
    """The same for the policy."""
    by_policy: float = 0.0
    """Part of the pods about which the policy has decided."""


def make_rule(name: str, batch: AllocationBatch) -> Rule:
    """A rule of the simulator, or what the agent grants without exploration."""
    if name in RULES:
        return RULES[name](batch)
    return AgentRule(batch, AllocationPolicy.load(PRETRAINED) if name == "policy in rails" else None)


def play_rule(name: str, seed: int, decisions: int) -> Played:
    node = SimulatedNode(seed, decisions)
    rule, rows = make_rule(name, node.batch), []
    for _ in range(decisions):
        sensitive = node.sensitive
        node.batch.step(rule.act())
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


async def play_agent(server: Server, gpu: StubGpu, store: Path, seed: int, decisions: int, learning: bool) -> Played:
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
            # While the rule decides, every pod is learned from; then, only best-effort pods are explored.
            waiting += learning and (not sensitive or granted["decided_by"] != "policy")
            if waiting >= BATCH_SIZE:
                wait_for_update(server, version)
    with closing(sqlite3.connect(store / "store.db")) as database:
        means = database.execute(
            "SELECT avg(json_extract(outcome, '$.rule_reward')), avg(json_extract(outcome, '$.policy_reward')), "
            "avg(json_extract(decision, '$.decided_by') = 'policy') "
            "FROM feedback JOIN allocations a ON allocation = a.seq"
        ).fetchone()
    return Played(*(np.array(column) for column in zip(*rows, strict=True)), version, *means)


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
                play_agent(
                    server, gpu, Path(folder) / "store", args.first_node + index, args.decisions, arm != "offline"
                )
            )


def plot(curves: dict[str, np.ndarray], window: int, path: Path) -> None:
    """Plot the mean over nodes with its 95 % interval per window of decisions. Rules are horizontal lines."""
    plt = require_matplotlib()
    figure, axes = plt.subplots(figsize=(9, 5), layout="constrained")
    styles = {
        "grant": ("#BBBBBB", ":"),
        "vpa": ("#EE6677", "--"),
        "vpa-fraction": ("#CCBB44", "--"),
        "rule in rails": ("#4477AA", "--"),
        "policy in rails": ("#228833", "--"),
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
        "reward",
        "first",
        "last",
        "LS share",
        "BE share",
        "LS QoS",
        "BE QoS",
        "worst of 200 pods",
        "worst of 200 LS",
        "updates",
        "rule",
        "policy",
        "by policy",
    )
    for column in columns:
        table.add_column(column, justify="right" if column else "left")

    def shown(values: list[float]) -> str:
        return f"{np.mean(values):.3f} ± {ci95(values):.3f}"

    figures: dict[str, Any] = {}
    for arm, each in found.items():
        one = {
            "reward": [float(p.rewards.mean()) for p in each],
            "first": [float(p.rewards[: args.window].mean()) for p in each],
            "last": [float(p.rewards[-args.window :].mean()) for p in each],
            "share_sensitive": [float(p.share[p.sensitive].mean()) for p in each],
            "share_best_effort": [float(p.share[~p.sensitive].mean()) for p in each],
            "qos_sensitive": [float(p.met[p.sensitive].mean()) for p in each],
            "qos_best_effort": [float(p.met[~p.sensitive].mean()) for p in each],
        }
        pods, own = (max(column) for column in zip(*worst[arm], strict=True))
        updates = float(np.mean([p.updates for p in each]))
        both = {name: [getattr(p, name) for p in each] for name in ("rule", "policy", "by_policy")}
        columns_of_both = map(shown, both.values()) if arm in args.arms else ("", "", "")
        table.add_row(
            arm, *map(shown, one.values()), f"{pods:.2f}", f"{own:.2f}", f"{updates:.0f}", *columns_of_both
        )  # fmt: skip
        figures[arm] = one | both | {"worst_of_200_pods": pods, "worst_of_200_sensitive": own, "updates": updates}
    console.print(table)
    seconds = time.perf_counter() - begin
    document = {"command": shlex.join(sys.argv), "seconds": seconds, "arms": figures}
    args.output.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n")
    curves = {arm: np.stack([p.rewards for p in each]) for arm, each in found.items()}
    plot(curves, args.window, args.output.with_suffix(".png"))
    with args.output.with_suffix(".csv").open("w", newline="") as file:
        lines = csv.writer(file)
        names = ("reward", "first", "last", "share_sensitive", "share_best_effort", "qos_sensitive", "qos_best_effort")
        lines.writerow(
            ["arm", *(f"{name}{half}" for name in names for half in ("", "_half")), "worst_of_200_sensitive"]
        )
        for arm, one in figures.items():
            values = [f"{x:.4f}" for name in names for x in (np.mean(one[name]), ci95(one[name]))]
            lines.writerow([arm, *values, f"{one['worst_of_200_sensitive']:.2f}"])
    differences = np.subtract(figures["rule in rails"]["reward"], figures["policy in rails"]["reward"])
    console.print(f"rule − policy, both in rails, node by node: {shown(differences.tolist())}")
    console.print(f"results: {args.output.with_suffix('.json')}, plot: {args.output.with_suffix('.png')}")
    for arm in args.arms:
        if args.rails and figures[arm]["worst_of_200_pods"] > LARGEST_LOSS:
            raise SystemExit(f"{arm}: {figures[arm]['worst_of_200_pods']:.2f} points below grant in a window")
        if arm != "offline" and not figures[arm]["updates"]:
            raise SystemExit(f"{arm}: no update")


if __name__ == "__main__":
    main()
