"""Studies of federated PPO: the effect of coupling agents, and the cost of an exchange.

    python benchmarks/federated.py cartpole    # two pairs of agents, four penalty weights, two value coefficients
    python benchmarks/federated.py edge        # different edge nodes with little data each: coupled and alone
    python benchmarks/federated.py speed       # four agents in one process, and in one process per agent
    python benchmarks/federated.py bytes       # bytes and time of an exchange by number of agents

Each study prints a table and writes JSON, and plots where there are curves, to ``--output``. Finished runs are reused,
so an interrupted study can be started again.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
import tyro
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from clustergym.common.files import write_atomically
from clustergym.common.statistics import ci95
from clustergym.training.federated.exchange import StoreExchange, StoreLocation, Traffic, message_bytes

TRAINERS = Path(__file__).resolve().parents[1] / "cleanrl_ppo"
sys.path.append(str(TRAINERS))
fed = importlib.import_module("ppo_federated")

PAIRS = ((0, 1), (1, 0), (2, 3), (3, 2))
STRANGERS = tuple((i, j) for i in range(4) for j in range(4) if i != j and (i, j) not in PAIRS)
EPISODE_DECISIONS = 128
"""Length of an episode of the allocation task."""
MEASURED_AGENTS = 8
"""Larger federations are computed, because their processes would wait for the processor."""


@dataclass
class Args:
    study: Annotated[Literal["cartpole", "edge", "speed", "bytes"], tyro.conf.Positional]
    """Which study to run."""
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)
    """cartpole, edge: one run of each configuration per seed."""
    steps: int = 65_536
    """cartpole, speed: environment steps per agent."""
    edge_steps: int = 8_192
    """edge: environment steps per agent."""
    edge_nodes: int = 8
    """edge: number of agents, each with its own mix of pods."""
    edge_weights: tuple[float, ...] = (0.03, 0.1)
    """edge: penalty coefficients of the coupled agents."""
    edge_learning_rate: float = 1e-2
    """edge: learning rate, chosen for agents alone on other seeds."""
    jobs: int = 1
    """Number of parallel runs, one core each."""
    output: Path = Path("runs/federated")
    """Folder for runs, tables and plots."""


# Runs and their logs


def run(settings: dict[str, Any]) -> Path:
    """Run one training, or resume it, unless it is finished."""
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
    """All scalars of a log as (steps, values). Cached because reading a log is slow."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    tags = events.Tags()["scalars"]
    return {tag: np.array([(event.step, event.value) for event in events.Scalars(tag)], float).T for tag in tags}


def curve(folder: Path, agent: int, tag: str, at: np.ndarray) -> np.ndarray:
    """A scalar of one agent, interpolated to the given steps."""
    steps, values = scalars(folder / f"agent_{agent}")[tag]
    known = np.isfinite(values)
    return np.interp(at, steps[known], values[known])


def mean_return(folder: Path, agents: Sequence[int], at: np.ndarray) -> np.ndarray:
    return np.mean([curve(folder, i, "charts/mean_return_100", at) for i in agents], 0)


def mean_kl(folder: Path, pairs: Sequence[tuple[int, int]], at: np.ndarray) -> np.ndarray:
    return np.mean([curve(folder, i, f"charts/kl_{i}_{j}", at) for i, j in pairs], 0)


def evaluation_returns(folder: Path, n_agents: int) -> list[float]:
    results = [json.loads((folder / f"agent_{i}" / "result.json").read_text()) for i in range(n_agents)]
    return [result["mean_return"] for result in results]


def make_table(title: str, *columns: str) -> Table:
    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def plot_band(axes: Any, at: np.ndarray, curves: np.ndarray, label: str, log_scale: bool = False) -> None:
    """Mean and 95 % confidence interval over runs (runs, points); of the logarithm with ``log_scale``."""
    data = np.log(curves) if log_scale else curves
    mean, half = data.mean(0), np.array([ci95(column.tolist()) for column in data.T])
    band = np.stack([mean, mean - half, mean + half])
    middle, low, high = np.exp(band) if log_scale else band
    (line,) = axes.plot(at, middle, label=label)
    axes.fill_between(at, low, high, color=line.get_color(), alpha=0.15, linewidth=0)


def save(rows: Any, path: Path, console: Console) -> None:
    write_atomically(path, json.dumps(rows, indent=1) + "\n")
    console.print(f"wrote {path}")


# Studies of coupling


def cartpole(args: Args, console: Console) -> None:
    """Four agents in two pairs: returns, and KL within and between pairs."""
    weights, vf_coefs = (0, 1, 10, 100), (0.5, 0.001)
    folder = args.output / "cartpole"

    def run_dir(vf_coef: float, weight: float, seed: int) -> Path:
        return folder / f"vf{vf_coef:g}_w{weight:g}_s{seed}"

    runs = [
        {
            "run_dir": run_dir(vf_coef, weight, seed),
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
    table = make_table(
        f"two pairs on CartPole-v1, {args.steps:,} steps per agent, {len(args.seeds)} seeds",
        "vf_coef", "weight", "training return", "evaluation return", "KL in a pair", "KL between pairs", "ratio",
    )  # fmt: skip
    figure = Figure(figsize=(11, 7), layout="constrained")
    panels = figure.subplots(2, 3, sharex=True)
    rows = []
    for (return_axes, pair_axes, stranger_axes), vf_coef in zip(panels, vf_coefs, strict=True):
        for weight in weights:
            found = [run_dir(vf_coef, weight, seed) for seed in args.seeds]
            returns = np.array([mean_return(each, range(4), at) for each in found])
            kl_pair = np.array([mean_kl(each, PAIRS, at) for each in found])
            kl_strangers = np.array([mean_kl(each, STRANGERS, at) for each in found])
            measured = {
                "train_return": returns[:, -1].tolist(),
                "held_out_return": [float(np.mean(evaluation_returns(each, 4))) for each in found],
                "kl_pair": kl_pair[:, -1].tolist(),
                "kl_strangers": kl_strangers[:, -1].tolist(),
                "ratio": (kl_pair[:, -1] / kl_strangers[:, -1]).tolist(),
            }
            rows.append({"vf_coef": vf_coef, "weight": weight, **measured})
            cells = [f"{np.mean(values):.3g} ± {ci95(values):.2g}" for values in measured.values()]
            table.add_row(f"{vf_coef:g}", f"{weight:g}", *cells)
            plot_band(return_axes, at, returns, f"weight {weight}")
            # KL values differ by orders of magnitude.
            plot_band(pair_axes, at, kl_pair, f"weight {weight}", log_scale=True)
            plot_band(stranger_axes, at, kl_strangers, f"weight {weight}", log_scale=True)
        return_axes.set(title=f"return, vf_coef {vf_coef:g}")
        pair_axes.set(title=f"KL in a pair, vf_coef {vf_coef:g}", yscale="log", ylim=(1e-7, 1))
        stranger_axes.set(title=f"KL between pairs, vf_coef {vf_coef:g}", yscale="log", ylim=(1e-7, 1))
    for axes in panels.flat:
        axes.grid(alpha=0.3)
    for axes in panels[1]:
        axes.set(xlabel="steps per agent")
    panels[0, 0].legend()
    console.print(table)
    figure.savefig(folder / "cartpole.png", dpi=90)
    save(rows, folder / "results.json", console)


def reward_of_granting(settings: dict[str, Any], node: int) -> float:
    """Mean reward per decision if every pod gets what it requests, on the evaluation episodes of a node."""
    envs = fed.make_envs(fed.Args(**settings), node, settings["eval_episodes"], fed.EVALUATION)
    envs.reset()
    everything = np.ones((len(envs), envs.action_size), np.float32)
    return float(np.mean([envs.step(everything).rewards.mean() for _ in range(EPISODE_DECISIONS)]))


def edge(args: Args, console: Console) -> None:
    """Edge nodes with different mixes of pods and little data each: coupled agents and agents alone."""
    nodes, seeds = args.edge_nodes, args.seeds
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

    def run_dir(arm: str, seed: int) -> Path:
        name = "".join(c if c.isalnum() or c == "." else "_" for c in arm)
        return folder / f"{nodes}x{args.edge_steps}_lr{args.edge_learning_rate:g}_{name}_s{seed}"

    run_all(
        [common | arm | {"seed": seed, "run_dir": run_dir(name, seed)} for seed in seeds for name, arm in arms.items()],
        args.jobs,
    )

    table = make_table(
        f"{nodes} edge nodes, {args.edge_steps:,} decisions per node, {len(seeds)} seeds: mean reward in evaluation",
        "agents", "mean over nodes", "worst node", "nodes, mean over seeds", "more than alone",
    )  # fmt: skip
    # Rewards per decision have shape (seeds, nodes).
    rewards = {
        "grant the request": [[reward_of_granting(common | {"seed": s}, i) for i in range(nodes)] for s in seeds]
    }
    for arm in arms:
        found = [evaluation_returns(run_dir(arm, seed), nodes) for seed in seeds]
        rewards[arm] = (np.array(found) / EPISODE_DECISIONS).tolist()
    rows = []
    for arm, values in rewards.items():
        reward = np.array(values)
        gain = (reward - np.array(rewards["alone"])).mean(1).tolist()
        rows.append({"arm": arm, "reward": values, "gain": gain})
        cells = [f"{each.mean():.4f} ± {ci95(each.tolist()):.4f}" for each in (reward.mean(1), reward.min(1))]
        by_node = " ".join(f"{each:.3f}" for each in reward.mean(0))
        table.add_row(arm, *cells, by_node, "" if arm == "alone" else f"{np.mean(gain):+.4f} ± {ci95(gain):.4f}")
    console.print(table)
    console.print("(± 95 % confidence interval over seeds; the last column is paired by seed)")

    at = np.linspace(0, args.edge_steps, 65)[1:]
    figure = Figure(figsize=(10, 4), layout="constrained")
    reward_axes, kl_axes = figure.subplots(1, 2)
    pairs = [(i, j) for i in range(nodes) for j in range(nodes) if i != j]
    for arm in arms:
        returns = np.array([mean_return(run_dir(arm, seed), range(nodes), at) for seed in seeds])
        plot_band(reward_axes, at, returns / EPISODE_DECISIONS, arm)
        kl_axes.plot(at, np.mean([mean_kl(run_dir(arm, seed), pairs, at) for seed in seeds], 0))
    reward_axes.set(title="reward per decision during training", xlabel="decisions per node")
    kl_axes.set(title="mean KL between the policies of nodes", xlabel="decisions per node", yscale="log")
    reward_axes.legend()
    for axes in (reward_axes, kl_axes):
        axes.grid(alpha=0.3)
    figure.savefig(folder / "edge.png", dpi=90)
    save(rows, folder / "results.json", console)


# Studies of cost


def speed(args: Args, console: Console) -> None:
    """Steps per second of both engines. They run alternately, so that a disturbance affects both."""
    steps, repeats = args.steps // 2, 3
    settings = fed.Args(n_agents=4, comm_matrix_config=Path("two_pairs"), total_timesteps=steps, eval_episodes=0)
    flags = ["--n-agents", "4", "--comm-matrix-config", "two_pairs", "--total-timesteps", steps, "--eval-episodes", "0"]
    engines = {
        "one process": [],
        "torchrun, one process per agent": ["-m", "torch.distributed.run", "--nproc-per-node", "4"],
    }
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in engines}
    with tempfile.TemporaryDirectory() as scratch:
        for repeat in range(repeats):
            for i, (name, launcher) in enumerate(engines.items()):
                run_dir = f"{scratch}/{i}_{repeat}"
                command = [sys.executable, *launcher, TRAINERS / "ppo_federated.py", *flags, "--run-dir", run_dir]
                done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=True)
                found[name].append(json.loads(done.stdout.splitlines()[-1].removeprefix("result ")))
    table = make_table(
        f"4 agents on CartPole-v1, {steps:,} steps per agent, {repeats} alternating runs",
        "engine", "agent-steps/s", "µs per agent-step", "exchange: wait, s", "exchange: transfer, ms per round",
    )  # fmt: skip
    for name, results in found.items():
        rates, waits, transfers = (
            [result[key] for result in results] for key in ("steps_per_s", "exchange_wait_s", "exchange_transfer_s")
        )
        table.add_row(
            name,
            f"{np.median(rates):,.0f} ({min(rates):,.0f} … {max(rates):,.0f})",
            f"{1e6 / np.median(rates):.0f}",
            f"{np.median(waits):.2f}",
            f"{1e3 * np.median(transfers) / (settings.num_rounds + 1):.2f}",
        )
    console.print(table)
    save(found, args.output / "speed.json", console)


def cartpole_policy() -> torch.Tensor:
    policy = fed.FederatedPolicy(obs_size=4, action_size=2, hidden=64, continuous=False)
    return torch.nn.utils.parameters_to_vector(policy.parameters()).detach()


def exchange_only(agent: int, port: int, matrix: np.ndarray, rounds: int) -> Traffic:
    """Exchange a CartPole policy without learning."""
    readers, peers = np.flatnonzero(matrix[:, agent]).tolist(), np.flatnonzero(matrix[agent]).tolist()
    exchange = StoreExchange(StoreLocation("127.0.0.1", port), agent, readers, {}, 60.0)
    vector = cartpole_policy()
    for round_ in range(rounds):
        exchange.publish(agent, round_, vector)
        assert len(exchange.gather(agent, round_, peers)) == len(peers)
    return exchange.traffic


def exchanged_bytes(args: Args, console: Console) -> None:
    """Bytes per round in rings and complete graphs, computed and, for few agents, measured."""
    rounds = 50
    size = message_bytes(cartpole_policy().numel())
    table = make_table(
        f"exchange of CartPole policies ({size:,} bytes each), {rounds} rounds",
        "agents", "graph", "bytes per round", "bytes per round and agent", "transfer, ms per round and agent",
    )  # fmt: skip
    rows = []
    for graph in ("ring", "all to all"):
        for n in (2, 4, 8, 16, 32, 64):
            ring = np.roll(np.eye(n), 1, 1) + np.roll(np.eye(n), -1, 1) > 0
            matrix = ring if graph == "ring" else ~np.eye(n, dtype=bool)
            expected = int(size * (n + matrix.sum()))
            transfer_ms = None
            if n <= MEASURED_AGENTS:
                store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
                with ProcessPoolExecutor(n, multiprocessing.get_context("spawn")) as pool:
                    parts = [pool.submit(exchange_only, i, store.port, matrix, rounds) for i in range(n)]
                    traffic = [part.result() for part in parts]
                measured = sum(each.sent_bytes + each.received_bytes for each in traffic) / rounds
                assert measured == expected, f"{measured} bytes measured, {expected} computed"
                transfer_ms = 1e3 * float(np.mean([each.transfer_s for each in traffic])) / rounds
                del store
            rows.append({"agents": n, "graph": graph, "bytes": expected, "transfer_ms": transfer_ms})
            shown = "computed" if transfer_ms is None else f"{transfer_ms:.2f}"
            table.add_row(str(n), graph, f"{expected:,}", f"{expected // n:,}", shown)
    console.print(table)
    save(rows, args.output / "bytes.json", console)


def main(args: Args) -> None:
    torch.set_num_threads(1)
    args.output.mkdir(parents=True, exist_ok=True)
    studies = {"cartpole": cartpole, "edge": edge, "speed": speed, "bytes": exchanged_bytes}
    studies[args.study](args, Console(width=140))


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
