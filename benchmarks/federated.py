"""Studies of federated PPO: what coupling does to returns and to distances between policies, and what an exchange costs.

    python benchmarks/federated.py cartpole    # the pairs experiment: weights 0, 1, 10, 100, two weights of the value loss, 5 seeds
    python benchmarks/federated.py edge        # heterogeneous edge nodes with little data each: coupled against alone
    python benchmarks/federated.py speed       # four agents in one process against a process each, on this machine
    python benchmarks/federated.py bytes       # bytes and seconds of an exchange as the federation grows

Each prints a table and writes JSON and, where there are curves, a plot below ``--output``. Runs that are finished are kept, so a
study that was interrupted goes on.
"""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal

import numpy as np
import torch
import tyro
from rich.console import Console
from rich.table import Table
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.nn.utils import parameters_to_vector

from clustergym.common.files import write_atomically
from clustergym.common.statistics import ci95

ROOT = Path(__file__).resolve().parents[1]
TRAINER = ROOT / "cleanrl_ppo" / "ppo_federated.py"
PAIRS = ((0, 1), (1, 0), (2, 3), (3, 2))
HEADER_BYTES = 16
STRANGERS = tuple((i, j) for i in range(4) for j in range(4) if i != j and (i, j) not in PAIRS)


@dataclass
class Args:
    study: Annotated[Literal["cartpole", "edge", "speed", "bytes"], tyro.conf.Positional]
    """Which one."""
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)
    """cartpole, edge: runs of each configuration."""
    steps: int = 65_536
    """cartpole, speed: environment steps of each agent."""
    edge_steps: int = 8_192
    """edge: environment steps of each agent; little data is the point."""
    edge_nodes: int = 8
    """edge: agents, each with its own mix of pods."""
    edge_weights: tuple[float, ...] = (0.03, 0.1)
    """edge: penalty coefficients that coupled agents are tried with."""
    edge_learning_rate: float = 1e-2
    """edge: Adam's step size, the same for all; chosen for lone agents on other seeds."""
    jobs: int = 1
    """Runs at a time, one core each."""
    output: Path = Path("runs/federated")
    """Folder for runs, tables and plots."""


def trainer() -> ModuleType:
    """The trainer as a module; it is a script, not part of the package."""
    if "ppo_federated" not in sys.modules:
        spec = importlib.util.spec_from_file_location("ppo_federated", TRAINER)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules["ppo_federated"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules["ppo_federated"]


def run(settings: dict[str, Any]) -> Path:
    """One training run, unless its folder says that it is finished; goes on from checkpoints where there are any."""
    fed = trainer()
    args = fed.Args(**settings, resume=True)
    if not all((args.run_dir / f"agent_{i}" / "result.json").exists() for i in range(args.n_agents)):
        fed.train(args)
    return args.run_dir


def run_all(runs: list[dict[str, Any]], jobs: int) -> None:
    with ProcessPoolExecutor(jobs) as pool:
        for done, folder in enumerate(pool.map(run, runs), 1):
            print(f"{done}/{len(runs)} {folder}", file=sys.stderr, flush=True)


@lru_cache(maxsize=512)
def scalars(folder: Path) -> dict[str, np.ndarray]:
    """Every scalar of a run as (steps, values); reading a log once is what takes time."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    tags = events.Tags()["scalars"]
    return {tag: np.array([(event.step, event.value) for event in events.Scalars(tag)], float).T for tag in tags}


def curve(folder: Path, agent: int, tag: str, at: np.ndarray) -> np.ndarray:
    """A scalar of one agent at the given steps, interpolated; before its first value it is that value."""
    steps, values = scalars(folder / f"agent_{agent}")[tag]
    known = np.isfinite(values)
    return np.interp(at, steps[known], values[known])


def spread(values: list[float]) -> str:
    return f"{np.mean(values):.3g} ± {ci95(values):.2g}"


# The pairs experiment


def cartpole(args: Args, console: Console) -> None:
    weights, vf_coefs = (0, 1, 10, 100), (0.5, 0.001)
    folder = args.output / "cartpole"

    def place(vf_coef: float, weight: float, seed: int) -> Path:
        return folder / f"vf{vf_coef:g}_w{weight:g}_s{seed}"

    runs = [
        {
            "run_dir": place(vf_coef, weight, seed),
            "n_agents": 4,
            "comm_matrix_config": Path("two_pairs"),
            "penalty_coeff": float(weight),
            "use_comm_penalty": weight > 0,
            "vf_coef": vf_coef,
            "log_all_kl": True,
            "total_timesteps": args.steps,
            "seed": seed,
        }
        for seed in args.seeds
        for vf_coef in vf_coefs
        for weight in weights
    ]
    run_all(runs, args.jobs)

    at = np.linspace(0, args.steps, 97)[1:]
    rows, curves = [], {}
    table = Table(title=f"two pairs on CartPole-v1, {args.steps:,} steps each, {len(args.seeds)} seeds")
    for column in (
        "vf_coef",
        "weight",
        "training return",
        "held-out return",
        "KL in a pair",
        "KL between pairs",
        "ratio",
    ):
        table.add_column(column, justify="right")
    for vf_coef in vf_coefs:
        for weight in weights:
            found = [place(vf_coef, weight, seed) for seed in args.seeds]
            returns = [np.mean([curve(f, i, "charts/mean_return_100", at) for i in range(4)], 0) for f in found]
            held_out = [
                np.mean([json.loads((f / f"agent_{i}" / "result.json").read_text())["mean_return"] for i in range(4)])
                for f in found
            ]
            inside = [np.mean([curve(f, i, f"charts/kl_{i}_{j}", at) for i, j in PAIRS], 0) for f in found]
            outside = [np.mean([curve(f, i, f"charts/kl_{i}_{j}", at) for i, j in STRANGERS], 0) for f in found]
            curves[vf_coef, weight] = [np.array(each) for each in (returns, inside, outside)]
            final = [float(each[-1]) for each in returns]
            row = {
                "vf_coef": vf_coef,
                "weight": weight,
                "train_return": final,
                "held_out_return": [float(each) for each in held_out],
                "kl_pair": [float(each[-1]) for each in inside],
                "kl_strangers": [float(each[-1]) for each in outside],
                "ratio": [float(a[-1] / b[-1]) for a, b in zip(inside, outside, strict=True)],
            }
            rows.append(row)
            table.add_row(f"{vf_coef:g}", f"{weight:g}", *(spread(row[key]) for key in list(row)[2:]))
    console.print(table)
    write_atomically(folder / "results.json", json.dumps(rows, indent=1) + "\n")

    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7), layout="constrained")
    panels = figure.subplots(2, 3, sharex=True)
    titles = ("return", "KL in a pair", "KL between pairs")
    for row_of, vf_coef in zip(panels, vf_coefs, strict=True):
        for k, (axes, title) in enumerate(zip(row_of, titles, strict=True)):
            for weight in weights:
                # Divergences differ by orders of magnitude: their mean and interval are those of the logarithm.
                data = curves[vf_coef, weight][k] if k == 0 else np.log(curves[vf_coef, weight][k])
                mean, half = data.mean(0), np.array([ci95(column.tolist()) for column in data.T])
                shown = [mean, mean - half, mean + half] if k == 0 else np.exp([mean, mean - half, mean + half])
                (line,) = axes.plot(at, shown[0], label=f"weight {weight}")
                axes.fill_between(at, shown[1], shown[2], color=line.get_color(), alpha=0.15, linewidth=0)
            axes.set(title=f"{title}, vf_coef {vf_coef:g}")
            axes.grid(alpha=0.3)
            if k:
                axes.set(yscale="log", ylim=(1e-7, 1))
    panels[0, 0].legend()
    for axes in panels[1]:
        axes.set(xlabel="steps of each agent")
    figure.savefig(folder / "cartpole.png", dpi=90)
    console.print(f"wrote {folder}/results.json and cartpole.png")


# Heterogeneous edge nodes


def granting(settings: dict[str, Any], node: int) -> float:
    """Mean reward a decision of giving every pod what it asks for, on the episodes that the node's agent is judged by."""
    fed = trainer()
    envs = fed.Environments(fed.Args(**settings), node, settings["eval_episodes"], fed.EVALUATION)
    envs.reset()
    everything = np.ones((len(envs), envs.action_size), np.float32)
    return float(np.mean([envs.step(everything)[1].mean() for _ in range(128)]))


def edge(args: Args, console: Console) -> None:
    nodes = args.edge_nodes
    folder = args.output / "edge"
    arms: dict[str, dict[str, Any]] = {"alone": {"use_comm_penalty": False}}
    arms |= {f"KL, coefficient {w:g}": {"penalty_coeff": w, "normalise_rows": True} for w in args.edge_weights}
    averaged = {"average_weights": True, "common_init": True, "normalise_rows": True, "use_comm_penalty": False}
    arms["averaged weights"] = averaged
    common = {
        "env_id": "gpu_allocation_v0",
        "env_options": '{"history": true}',
        "n_agents": nodes,
        "total_timesteps": args.edge_steps,
        "num_steps": 32,
        "local_updates": 2,
        "init_logstd": -1.0,
        "learning_rate": args.edge_learning_rate,
        "gamma": 0.0,
        "ent_coef": 0.0,
        "eval_episodes": 32,
        "log_all_kl": True,
    }

    def place(arm: str, seed: int) -> Path:
        name = "".join(c if c.isalnum() or c == "." else "_" for c in arm)
        return folder / f"{nodes}x{args.edge_steps}_lr{args.edge_learning_rate:g}_{name}_s{seed}"

    seeds = args.seeds
    run_all(
        [common | arm | {"seed": seed, "run_dir": place(name, seed)} for seed in seeds for name, arm in arms.items()],
        args.jobs,
    )

    def reward(arm: str, seed: int) -> list[float]:
        """Mean reward a decision of each node on its held-out episodes of 128 decisions."""
        found = [place(arm, seed) / f"agent_{i}" / "result.json" for i in range(nodes)]
        return [json.loads(each.read_text())["mean_return"] / 128 for each in found]

    table = Table(
        title=f"{nodes} edge nodes, {args.edge_steps:,} decisions each, {len(args.seeds)} seeds: mean reward a decision, held-out"
    )
    for column in ("agents", "mean over nodes", "worst node", "nodes, mean over seeds", "more than alone"):
        table.add_column(column, justify="right")
    rows: list[dict[str, Any]] = []
    granted = np.array([[granting(common | {"seed": seed}, i) for i in range(nodes)] for seed in seeds])
    alone = np.array([reward("alone", seed) for seed in seeds])
    for arm in ("grant the request", *arms):
        found = np.array([reward(arm, seed) for seed in seeds]) if arm in arms else granted
        gain = (found - alone).mean(1).tolist()
        rows.append({"arm": arm, "reward": found.tolist(), "gain": gain})
        cells = [f"{each.mean():.4f} ± {ci95(each.tolist()):.4f}" for each in (found.mean(1), found.min(1))]
        by_node = " ".join(f"{each:.3f}" for each in found.mean(0))
        table.add_row(arm, *cells, by_node, "" if arm == "alone" else f"{np.mean(gain):+.4f} ± {ci95(gain):.4f}")
    console.print(table)
    console.print("(± 95 % interval over seeds; the last column is paired by seed)")
    write_atomically(folder / "results.json", json.dumps(rows, indent=1) + "\n")

    from matplotlib.figure import Figure

    at = np.linspace(0, args.edge_steps, 65)[1:]
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for arm in arms:
        curves = [
            np.mean([curve(place(arm, s), i, "charts/mean_return_100", at) / 128 for i in range(nodes)], 0)
            for s in seeds
        ]
        mean, half = np.mean(curves, 0), np.array([ci95(list(column)) for column in np.transpose(curves)])
        (line,) = left.plot(at, mean, label=arm)
        left.fill_between(at, mean - half, mean + half, color=line.get_color(), alpha=0.15, linewidth=0)
        pairs = [(i, j) for i in range(nodes) for j in range(nodes) if i != j]
        right.plot(
            at, np.mean([[curve(place(arm, s), i, f"charts/kl_{i}_{j}", at) for i, j in pairs] for s in seeds], (0, 1))
        )
    left.set(title="reward a decision while learning", xlabel="decisions of each node")
    right.set(title="mean KL between nodes' policies", xlabel="decisions of each node", yscale="log")
    left.legend()
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.savefig(folder / "edge.png", dpi=90)
    console.print(f"wrote {folder}/results.json and edge.png")


# What it costs


def speed(args: Args, console: Console) -> None:
    """In turns, so that a disturbance hits both engines alike."""
    flags = [
        "--n-agents",
        "4",
        "--comm-matrix-config",
        "two_pairs",
        "--total-timesteps",
        str(args.steps // 2),
        "--eval-episodes",
        "0",
    ]
    engines = {
        "one process": [sys.executable],
        "torchrun, a process an agent": [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4"],
    }
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in engines}
    with tempfile.TemporaryDirectory() as scratch:
        for k in range(3):
            for i, (name, command) in enumerate(engines.items()):
                run_dir = ["--run-dir", f"{scratch}/{i}_{k}"]
                done = subprocess.run(
                    [*command, str(TRAINER), *flags, *run_dir], capture_output=True, text=True, check=True
                )
                found[name].append(json.loads(done.stdout.splitlines()[-1].removeprefix("result ")))
    table = Table(title=f"4 agents on CartPole-v1, {args.steps // 2:,} steps each, 3 runs in turns")
    for column in (
        "engine",
        "agent-steps/s",
        "µs an agent-step",
        "exchange: wait, s",
        "exchange: transfer, ms a round",
    ):
        table.add_column(column, justify="right")
    rounds = -(-(args.steps // 2 // 512) // 16) + 1
    for name, results in found.items():
        rates = [result["steps_per_s"] for result in results]
        table.add_row(
            name,
            f"{np.median(rates):,.0f} ({min(rates):,.0f} … {max(rates):,.0f})",
            f"{1e6 / np.median(rates):.0f}",
            f"{np.median([result['exchange_wait_s'] for result in results]):.2f}",
            f"{1e3 * np.median([result['exchange_transfer_s'] for result in results]) / rounds:.2f}",
        )
    console.print(table)
    write_atomically(args.output / "speed.json", json.dumps(found, indent=1) + "\n")


def take_part(agent: int, port: int, matrix: np.ndarray, rounds: int) -> tuple[int, int, float]:
    """Exchange a policy of CartPole's size without learning: (bytes sent, received, seconds of transfer)."""
    fed = trainer()
    readers = [int(j) for j in np.flatnonzero(matrix[:, agent])]
    peers = [int(j) for j in np.flatnonzero(matrix[agent])]
    exchange = fed.StoreExchange(("127.0.0.1", port), False, agent, readers, "{}", 60.0)
    vector = parameters_to_vector(fed.FederatedPolicy(4, 2, False, 64).parameters()).detach()
    for round_ in range(rounds):
        exchange.publish(agent, round_, vector)
        assert len(exchange.gather(agent, round_, peers)) == len(peers)
    return exchange.sent_bytes, exchange.received_bytes, exchange.transfer_s


def exchanged_bytes(args: Args, console: Console) -> None:
    rounds = 50
    trainer()
    size = HEADER_BYTES + 4 * sum(p.numel() for p in trainer().FederatedPolicy(4, 2, False, 64).parameters())
    table = Table(title=f"an exchange of CartPole policies ({size:,} bytes each), {rounds} rounds")
    for column in (
        "agents",
        "graph",
        "bytes a round, all agents",
        "bytes a round, an agent",
        "transfer, ms an agent and round",
    ):
        table.add_column(column, justify="right")
    rows = []
    for graph in ("ring", "all to all"):
        for n in (2, 4, 8, 16, 32, 64):
            ring = np.roll(np.eye(n), 1, 1) + np.roll(np.eye(n), -1, 1) > 0
            matrix = ring if graph == "ring" else ~np.eye(n, dtype=bool)
            expected = int(size * (n + matrix.sum()))
            row: dict[str, Any] = {"agents": n, "graph": graph, "bytes": expected, "transfer_ms": None}
            if n <= 8:
                store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
                context = multiprocessing.get_context("spawn")
                with ProcessPoolExecutor(n, context) as pool:
                    parts = [pool.submit(take_part, i, store.port, matrix, rounds) for i in range(n)]
                    results = [part.result() for part in parts]
                measured = sum(sent + received for sent, received, _ in results) / rounds
                assert measured == expected, f"{measured} bytes measured, {expected} computed"
                row["transfer_ms"] = 1e3 * float(np.mean([seconds for *_, seconds in results])) / rounds
                del store
            rows.append(row)
            shown = f"{row['transfer_ms']:.2f}" if row["transfer_ms"] is not None else "computed"
            table.add_row(str(n), graph, f"{expected:,}", f"{expected // n:,}", shown)
    console.print(table)
    write_atomically(args.output / "bytes.json", json.dumps(rows, indent=1) + "\n")


def main(args: Args) -> None:
    torch.set_num_threads(1)
    args.output.mkdir(parents=True, exist_ok=True)
    studies = {"cartpole": cartpole, "edge": edge, "speed": speed, "bytes": exchanged_bytes}
    studies[args.study](args, Console(width=140))


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
