"""Studies of federated PPO: what the coupling of agents does, and the cost of an exchange.

    python benchmarks/trainers/federated.py cartpole    # two pairs of agents, four penalty weights, two coefficients
    python benchmarks/trainers/federated.py edge        # different edge nodes with little data each: coupled and alone
    python benchmarks/trainers/federated.py speed       # four agents in one process, and in one process per agent

Each study prints a table and writes JSON to ``--output``. Finished runs are reused, so an interrupted study can be
started again.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
import tyro
from rich.console import Console
from rich.table import Table

from clustergym.common.files import write_atomically
from clustergym.common.statistics import ci95
from clustergym.training.envs import evaluate
from clustergym.training.logs import read_scalars

TRAINERS = Path(__file__).resolve().parents[2] / "cleanrl_ppo"
sys.path.append(str(TRAINERS))
fed = importlib.import_module("ppo_federated")

PAIRS = ((0, 1), (1, 0), (2, 3), (3, 2))
STRANGERS = tuple((i, j) for i in range(4) for j in range(4) if i != j and (i, j) not in PAIRS)
EPISODE_DECISIONS = 128
"""Length of an episode of the allocation task."""


@dataclass
class Args:
    study: Annotated[Literal["cartpole", "edge", "speed"], tyro.conf.Positional]
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
    """edge: penalty coefficients of the coupled agents, summed over their neighbours."""
    jobs: int = 1
    """Number of parallel runs, one core each."""
    output: Path = Path("runs/federated")
    """Folder for runs and tables."""


def train(settings: dict[str, Any]) -> dict[str, Any]:
    """Train, or resume an interrupted run. Returns the content of the result line."""
    kept = settings["run_dir"] / "result.json"
    if not kept.exists():
        result = fed.train(fed.Args(**settings, resume=True))
        write_atomically(kept, json.dumps(result) + "\n")
    return json.loads(kept.read_text())


def train_all(runs: Sequence[dict[str, Any]], jobs: int) -> list[dict[str, Any]]:
    with ProcessPoolExecutor(jobs) as pool:
        return list(pool.map(train, runs))


def last(run_dir: str, agent: int, tag: str) -> float:
    return read_scalars(Path(run_dir) / f"agent_{agent}", tag)[1][-1]


def mean_kl(run_dir: str, pairs: Sequence[tuple[int, int]]) -> float:
    """Mean KL at the last exchange."""
    return float(np.mean([last(run_dir, i, f"charts/kl_{i}_{j}") for i, j in pairs]))


def show(title: str, rows: list[dict[str, Any]], file: Path) -> None:
    """Print numbers, and lists of numbers as mean ± 95 % interval. Write both to a JSON file."""
    table = Table(title=title)
    for column in rows[0]:
        table.add_column(column, justify="right")
    for row in rows:
        cells = [f"{np.mean(x):.4g} ± {ci95(x):.2g}" if isinstance(x, list) else str(x) for x in row.values()]
        table.add_row(*cells)
    console = Console(width=140)
    console.print(table)
    write_atomically(file, json.dumps(rows, indent=1) + "\n")
    console.print(f"wrote {file}")


def cartpole(args: Args) -> None:
    """Four agents in two pairs: returns, and KL within and between pairs."""
    rows = []
    for vf_coef in (0.5, 0.001):
        for weight in (0, 1, 10, 100):
            common = {"n_agents": 4, "comm_matrix_config": Path("two_pairs"), "total_timesteps": args.steps}
            common |= {"penalty_coeff": float(weight), "use_comm_penalty": weight > 0, "vf_coef": vf_coef}
            folder = args.output / "cartpole" / f"vf{vf_coef:g}_w{weight}"
            runs = [common | {"seed": seed, "run_dir": Path(f"{folder}_s{seed}")} for seed in args.seeds]
            found = train_all(runs, args.jobs)
            pair, strangers = ([mean_kl(each["run_dir"], who) for each in found] for who in (PAIRS, STRANGERS))
            rows.append({
                "vf_coef": vf_coef,
                "weight": weight,
                "training return": [each["train_return_100"] for each in found],
                "held-out return": [each["mean_return"] for each in found],
                "KL in a pair": pair,
                "KL between pairs": strangers,
                "ratio": [a / b for a, b in zip(pair, strangers, strict=True)],
            })  # fmt: skip
    title = f"two pairs on CartPole-v1, {args.steps:,} steps per agent, {len(args.seeds)} seeds"
    show(title, rows, args.output / "cartpole.json")


def edge(args: Args) -> None:
    """Edge nodes with different mixes of pods and little data each: coupled agents and agents alone."""
    nodes = args.edge_nodes
    arms: dict[str, dict[str, Any]] = {"alone": {"use_comm_penalty": False}}
    # Each agent has nodes − 1 neighbours.
    arms |= {f"KL, coefficient {weight:g}": {"penalty_coeff": weight / (nodes - 1)} for weight in args.edge_weights}
    arms["averaged weights"] = {"average_weights": True, "use_comm_penalty": False}
    common = {
        "env_id": "gpu_allocation_v0", "n_agents": nodes, "total_timesteps": args.edge_steps, "num_steps": 32,
        "local_updates": 2, "learning_rate": 1e-2, "gamma": 0.0, "ent_coef": 0.0, "eval_episodes": 32,
    }  # fmt: skip

    def grant(obs: np.ndarray, infos: dict[str, Any]) -> np.ndarray:
        return np.ones((len(obs), 2), np.float32)

    envs = [partial(fed.make_envs, "gpu_allocation_v0", node) for node in range(nodes)]
    granted = [[float(np.mean(evaluate(make, grant, 32, seed))) for make in envs] for seed in args.seeds]
    returns = {"grant the request": np.array(granted)}  # (seeds, nodes)
    for name, arm in arms.items():
        folder = args.output / "edge" / name.replace(" ", "_").replace(",", "")
        runs = [common | arm | {"seed": seed, "run_dir": Path(f"{folder}_s{seed}")} for seed in args.seeds]
        found = train_all(runs, args.jobs)
        returns[name] = np.array([[each["mean_returns"][str(i)] for i in range(nodes)] for each in found])
    rows = [
        {
            "agents": name,
            "reward per decision": (found.mean(1) / EPISODE_DECISIONS).tolist(),
            "worst node": (found.min(1) / EPISODE_DECISIONS).tolist(),
            "more than alone, paired by seed": ((found - returns["alone"]).mean(1) / EPISODE_DECISIONS).tolist(),
        }
        for name, found in returns.items()
    ]
    title = f"{nodes} edge nodes, {args.edge_steps:,} decisions per node, {len(args.seeds)} seeds"
    show(title, rows, args.output / "edge.json")


def speed(args: Args) -> None:
    """Steps per second in one process and in one per agent. They run alternately: a disturbance affects both."""
    flags = f"--n-agents 4 --comm-matrix-config two_pairs --total-timesteps {args.steps} --eval-episodes 0".split()
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    launchers: dict[str, list[str]] = {"one process": [], "torchrun, one process per agent": torchrun}
    found: dict[str, list[float]] = {name: [] for name in launchers}
    with tempfile.TemporaryDirectory() as scratch:
        for repeat in range(3):
            for i, (name, launcher) in enumerate(launchers.items()):
                run_dir = f"{scratch}/{i}_{repeat}"
                command = [sys.executable, *launcher, str(TRAINERS / "ppo_federated.py"), *flags, "--run-dir", run_dir]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                found[name].append(json.loads(done.stdout.splitlines()[-1].removeprefix("result "))["steps_per_s"])
    rows = [{"engine": name, "agent-steps/s": rates} for name, rates in found.items()]
    show(
        f"4 agents on CartPole-v1, {args.steps:,} steps per agent, 3 alternating runs", rows, args.output / "speed.json"
    )


STUDIES: dict[str, Callable[[Args], None]] = {"cartpole": cartpole, "edge": edge, "speed": speed}


def main(args: Args) -> None:
    torch.set_num_threads(1)
    args.output.mkdir(parents=True, exist_ok=True)
    STUDIES[args.study](args)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
