"""How many more pods fit if the scheduler counts grants instead of requests: openb's pods on openb's nodes.

Needs the CSV files of Alibaba's openb trace (kubernetes-scheduler-simulator) in the folder ``gpu/openb`` of
CLUSTERGYM_DATA: pods with a part of a GPU, with whole GPUs, and nodes. The trace has requests, but not what pods used.
So every part-of-a-GPU pod gets the grant and the outcome of a simulated pod of the same class and request: the
simulator plays each policy on openb's requests with many waiting pods, so that GPUs are about as full as the grants
allow, and pods slow each other down accordingly.

A policy that grants less misses more objectives. To compare at equal quality, every policy is played with growing
margins on its grants, and the smallest margin is taken at which its objectives are met as often as with full requests,
within ``--tolerance``.

Two questions, with first fit and best fit, and with and without the CPU and memory of the nodes as limits:
GPUs that hold all pods of the trace (every node exists twice, so that all fit), and pods that the cluster holds of a
stream that requests twice its GPUs.

    python benchmarks/allocation/packing.py
    python benchmarks/allocation/packing.py --checkpoint runs/x/checkpoint.pt
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import tyro
from rich.console import Console
from rich.table import Table

from clustergym.agent.owners import GuardSettings, OwnerState
from clustergym.agent.rails import Amounts, RailSettings, apply_rails
from clustergym.agent.service import vpa_amounts
from clustergym.common.files import write_atomically
from clustergym.common.statistics import ci95
from clustergym.gpu_allocation import AllocationBatch, AllocationConfig, state
from clustergym.gpu_allocation.history import LAST
from clustergym.gpu_allocation.policy import AllocationPolicy
from clustergym.gpu_allocation.rules import RULES, AmountRule
from clustergym.gpu_allocation.space import action_for, grant
from clustergym.gpu_allocation.workload import LATENCY_SENSITIVE

sys.path.append(str(Path(__file__).resolve().parents[1]))
from public_data import data_file

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Fit = Literal["first fit", "best fit"]
FITS: tuple[Fit, ...] = ("first fit", "best fit")
WHOLE = 1000
"""Thousandths of a GPU, the unit of openb."""


@dataclass
class Args:
    pods: tuple[str, ...] = ("openb_pod_list_default.csv", "openb_pod_list_gpushare100.csv")
    """Lists of pods: the trace, and its variant in which all GPU pods use a part of a GPU."""
    nodes: str = "openb_node_list_gpu_node.csv"
    """List of nodes."""
    checkpoint: Path | None = None
    """Policy of ppo_gpu_alloc.py with history, to be compared too: alone, and within the rails of the agent."""
    seeds: int = 5
    """Repetitions: simulated streams, order of the pods."""
    streams: int = 64
    """Simulated GPUs per repetition."""
    arrivals: int = 512
    """Decisions per simulated GPU. The first half, while owners are still unknown, is not used."""
    load: float = 10.0
    """Mean number of pods that would run on a simulated GPU if there were room: high, so that it is always full."""
    pod_spread: float = AllocationConfig.pod_spread
    """How much the pods of one owner differ in what they need, in the simulator."""
    tolerance: float = 0.002
    """Objectives may be met this much less often than with full requests (0.002: one pod of 500)."""
    output: Path = Path("runs/packing")
    """Folder for results."""


class Pods(NamedTuple):
    """GPU pods of a list."""

    gpus: Ints
    milli: Ints
    """Requested thousandths of each GPU."""
    sensitive: npt.NDArray[np.bool_]
    cpu_milli: Ints
    memory_mib: Ints

    def take(self, rows: Ints) -> Pods:
        return Pods(*(column[rows] for column in self))

    @property
    def shared(self) -> npt.NDArray[np.bool_]:
        return (self.gpus == 1) & (self.milli < WHOLE)


class Nodes(NamedTuple):
    gpus: Ints
    cpu_milli: Ints
    memory_mib: Ints


def read_pods(path: Path) -> Pods:
    with path.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if int(row["num_gpu"]) > 0]
    columns = [[int(row[name]) for row in rows] for name in ("num_gpu", "gpu_milli", "cpu_milli", "memory_mib")]
    gpus, milli, cpu, memory = (np.array(column) for column in columns)
    return Pods(gpus, milli, np.array([LATENCY_SENSITIVE[row["qos"]] for row in rows]), cpu, memory)


def read_nodes(path: Path) -> Nodes:
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return Nodes(*(np.array([int(row[name]) for row in rows]) for name in ("gpu", "cpu_milli", "memory_mib")))


class Packing:
    """A cluster that is filled pod by pod. Pods do not leave."""

    def __init__(self, nodes: Nodes, fit: Fit, with_cpu: bool) -> None:
        self.fit, self.with_cpu = fit, with_cpu
        self.node = np.repeat(np.arange(len(nodes.gpus)), nodes.gpus)
        self.free = np.full(len(self.node), WHOLE)
        """(GPUs,) free thousandths."""
        self.cpu, self.memory = nodes.cpu_milli.copy(), nodes.memory_mib.copy()

    def place(self, gpus: int, milli: int, cpu_milli: int, memory_mib: int) -> bool:
        """Place a pod, if there is room."""
        open_nodes = (
            (self.cpu >= cpu_milli) & (self.memory >= memory_mib) if self.with_cpu else np.ones(len(self.cpu), bool)
        )
        if gpus == 1:
            chosen = self._one(milli, open_nodes)
        else:
            chosen = self._several(gpus, open_nodes)
        if chosen is None:
            return False
        self.free[chosen] -= milli
        self.cpu[self.node[chosen[0]]] -= cpu_milli
        self.memory[self.node[chosen[0]]] -= memory_mib
        return True

    def _one(self, milli: int, open_nodes: npt.NDArray[np.bool_]) -> Ints | None:
        fits = (self.free >= milli) & open_nodes[self.node]
        if not fits.any():
            return None
        if self.fit == "first fit":
            return np.array([fits.argmax()])
        return np.array([np.where(fits, self.free, WHOLE + 1).argmin()])

    def _several(self, gpus: int, open_nodes: npt.NDArray[np.bool_]) -> Ints | None:
        empty = self.free == WHOLE
        count = np.bincount(self.node, empty, len(self.cpu))
        fits = (count >= gpus) & open_nodes
        if not fits.any():
            return None
        node = fits.argmax() if self.fit == "first fit" else np.where(fits, count, np.inf).argmin()
        return np.flatnonzero(empty & (self.node == node))[:gpus]

    @property
    def gpus_used(self) -> int:
        return int((self.free < WHOLE).sum())


def pack(pods: Pods, milli: Ints, nodes: Nodes, fit: Fit, with_cpu: bool) -> tuple[int, int]:
    """Pods that were placed, and GPUs that they use. ``milli`` is what the scheduler counts of each GPU of a pod."""
    packing = Packing(nodes, fit, with_cpu)
    rows = zip(pods.gpus.tolist(), milli.tolist(), pods.cpu_milli.tolist(), pods.memory_mib.tolist(), strict=True)
    placed = sum(packing.place(*row) for row in rows)
    return placed, packing.gpus_used


# Grants


class Decisions(NamedTuple):
    """Simulated decisions: request and grant in % of the GPU, class, and whether the objective was met."""

    request: Floats
    grant: Floats
    sensitive: npt.NDArray[np.bool_]
    met: npt.NDArray[np.bool_]


class PolicyRule(AmountRule):
    """A trained policy as a rule."""

    def __init__(self, batch: AllocationBatch, policy: AllocationPolicy) -> None:
        super().__init__(batch)
        self.policy = policy
        policy.reset()

    def decide(self) -> tuple[Floats, Floats]:
        raise NotImplementedError

    def act(self) -> Floats:
        return self.policy.act(self.batch.obs)


class AgentRule(AmountRule):
    """The rails of the agent: with the VPA rule, as by default, or with a policy. Without exploration."""

    def __init__(self, batch: AllocationBatch, policy: AllocationPolicy | None = None) -> None:
        super().__init__(batch)
        self.policy = policy
        self.owners = [[OwnerState() for _ in range(batch.config.owners)] for _ in self.rows]
        self.rails, self.guard = RailSettings(), GuardSettings()

    def decide(self) -> tuple[Floats, Floats]:
        cores, memory = self.requests()
        owners, granted = self.waiting_group(), np.stack([cores, memory], 1)
        means = None if self.policy is None else self.policy.act(self.batch.obs).astype(float)
        self.sensitive = self.batch.state.ask[:, state.ASK_SENSITIVE] > 0.5
        for i, request in enumerate(map(Amounts, cores.tolist(), memory.tolist())):
            owner = self.owners[i][owners[i]]
            if owner.reduced:
                proposal = vpa_amounts(owner, request) if means is None else Amounts(*grant(means[i], *request))
                granted[i] = apply_rails(proposal, request, bool(self.sensitive[i]), owner, self.rails).amounts
        return granted[:, 0], granted[:, 1]

    def learn(self) -> None:
        history = self.batch.state.history
        for i, out in enumerate(self.batch.outcome.astype(float).tolist()):
            number, request, request_mb = (
                int(out[state.OUTCOME_OWNER]), out[state.OUTCOME_REQUEST], out[state.OUTCOME_REQUEST_MB],
            )  # fmt: skip
            owner = self.owners[i][number]
            oom, met, used_mb = out[state.OUTCOME_OOM] > 0.5, out[state.OUTCOME_MET] > 0.5, out[state.OUTCOME_USED_MB]
            needed = 0.0 if oom else float(history[i, number, LAST])
            needed_mb = max(1.2 * used_mb, used_mb + 100.0) if oom else used_mb
            usage, share = out[state.OUTCOME_USAGE] / request, needed_mb / request_mb
            owner.measure(out[state.OUTCOME_TIME], 1.0, needed, usage, needed_mb, share, oom)
            owner.judge(bool(self.sensitive[i]), met, 1.0, self.guard)


def play(batch: AllocationBatch, make_rule: Callable[[AllocationBatch], Any], margin: float, seed: int) -> Decisions:
    """Play a policy whose grants are multiplied by a margin. Grants never exceed the request."""
    batch.seed(seed + np.arange(batch.num_envs))
    batch.reset()
    rule = make_rule(batch)
    zero = np.array(action_for(0.0, 0.0))
    rows: list[tuple[Floats, ...]] = []
    for i in range(batch.config.arrivals):
        sensitive = batch.state.ask[:, state.ASK_SENSITIVE].copy()
        # Actions are linear in amounts, and zero amounts have the action `zero`.
        action = (rule.act() - zero) * margin + zero
        batch.step(np.clip(action, 0.0, 1.0))
        rule.learn()
        if i >= batch.config.arrivals // 2:
            out = batch.outcome
            columns = (state.OUTCOME_REQUEST, state.OUTCOME_CORES, state.OUTCOME_MET)
            request, grant, met = (out[:, column].astype(float) for column in columns)
            rows.append((request, grant, sensitive, met))
    request, grant, sensitive, met = (np.concatenate(column) for column in zip(*rows, strict=True))
    return Decisions(request, np.minimum(grant, request), sensitive > 0.5, met > 0.5)


MARGINS = (1.0, 1.05, 1.1, 1.15, 1.2, 1.3, 1.4, 1.5, 1.75, 2.0, 2.5, 3.0, 5.0, 1e6)


def at_equal_quality(
    batch: AllocationBatch, make_rule: Callable[[AllocationBatch], Any], seed: int, wanted: float
) -> tuple[float, Decisions]:
    """The smallest margin at which objectives are met often enough. The last margin grants every request."""
    for margin in MARGINS:
        decisions = play(batch, make_rule, margin, seed)
        if decisions.met.mean() >= wanted:
            break
    return margin, decisions


def grants_for(pods: Pods, decisions: Decisions, rng: np.random.Generator) -> tuple[Ints, npt.NDArray[np.bool_]]:
    """What the scheduler counts of each pod, and whether shared pods meet their objectives.

    Every shared pod gets a simulated pod of its class with the nearest request.
    """
    milli, met = pods.milli.copy(), np.ones(len(pods.milli), bool)
    for sensitive in (False, True):
        wanted = np.flatnonzero(pods.shared & (pods.sensitive == sensitive))
        drawn = np.flatnonzero(decisions.sensitive == sensitive)
        drawn = drawn[rng.permutation(len(drawn))]
        drawn = drawn[np.argsort(decisions.request[drawn], kind="stable")]
        requests = decisions.request[drawn]
        percent = np.maximum(pods.milli[wanted] / 10.0, 10.0)
        low = np.searchsorted(requests, percent - 1e-6, "left").clip(0, len(drawn) - 1)
        low = np.searchsorted(requests, requests[low], "left")
        high = np.searchsorted(requests, requests[low], "right")
        chosen = drawn[low + (rng.random(len(wanted)) * (high - low)).astype(int)]
        share = decisions.grant[chosen] / decisions.request[chosen]
        milli[wanted] = np.minimum(np.ceil(share * pods.milli[wanted] - 1e-9), pods.milli[wanted]).astype(int)
        met[wanted] = decisions.met[chosen]
    return milli, met


def stream(pods: Pods, nodes: Nodes, rng: np.random.Generator) -> Ints:
    """Rows of pods, drawn with replacement, that together request twice the GPUs of the cluster."""
    demand = np.cumsum((pods.gpus * pods.milli)[rows := rng.integers(0, len(pods.gpus), 100_000)])
    return rows[: int(np.searchsorted(demand, 2 * WHOLE * nodes.gpus.sum()))]


def study(args: Args, console: Console) -> list[dict[str, Any]]:
    nodes = read_nodes(data_file(f"gpu/openb/{args.nodes}"))
    rules: dict[str, Callable[[AllocationBatch], Any]] = {
        name: RULES[name] for name in ("grant", "cut-0.9", "cut-0.8", "vpa", "vpa-fraction", "oracle")
    }
    rules["vpa in rails"] = AgentRule
    if args.checkpoint is not None:
        policy = AllocationPolicy.load(args.checkpoint)
        rules["ppo"] = lambda batch: PolicyRule(batch, policy)
        rules["policy in rails"] = lambda batch: AgentRule(batch, policy)
    results = []
    for listed in args.pods:
        path = data_file(f"gpu/openb/{listed}")
        pods = read_pods(path)
        config = AllocationConfig(
            history=True, arrivals=args.arrivals, load=args.load, workload=path,
            pod_spread=args.pod_spread,
        )  # fmt: skip
        for seed in range(args.seeds):
            batch = AllocationBatch(config, args.streams)
            first = seed * 10_000
            full = play(batch, RULES["grant"], 1.0, first)
            for name, make_rule in rules.items():
                margin, decisions = at_equal_quality(batch, make_rule, first, full.met.mean() - args.tolerance)
                rng = np.random.default_rng([seed, 1])
                order = rng.permutation(len(pods.gpus))
                offered = stream(pods, nodes, rng)
                for what, rows in (("all", order), ("stream", offered)):
                    chosen = pods.take(rows)
                    # The same random numbers for every policy.
                    milli, met = grants_for(chosen, decisions, np.random.default_rng([seed, 2]))
                    for with_cpu in (True, False):
                        for fit in FITS:
                            room = Nodes(*(np.tile(column, 2) for column in nodes)) if what == "all" else nodes
                            placed, used = pack(chosen, milli, room, fit, with_cpu)
                            results.append(
                                {
                                    "pods": listed, "seed": seed, "policy": name, "margin": margin, "what": what,
                                    "with_cpu": with_cpu, "fit": fit, "offered": len(rows), "placed": placed,
                                    "gpus_used": used, "qos_simulated": float(decisions.met.mean()),
                                    "qos": float(met[chosen.shared].mean()),
                                    "granted": float(milli[chosen.shared].sum() / chosen.milli[chosen.shared].sum()),
                                    "shared": int(chosen.shared.sum()),
                                }
                            )  # fmt: skip
                console.print(f"{listed}, seed {seed}: {name} with margin {margin:g}", highlight=False)
    return results


def summary(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Means over seeds, and differences to full requests with their 95 % confidence intervals over seeds."""
    rows = []
    keys = ("pods", "what", "with_cpu", "fit", "policy")
    for group in dict.fromkeys(tuple(one[key] for key in keys) for one in results):
        mine = [one for one in results if tuple(one[key] for key in keys) == group]
        full = [
            one for one in results if tuple(one[key] for key in keys) == (*group[:-1], "grant")
        ]  # the same seeds in the same order
        row = dict(zip(keys, group, strict=True))
        for key in ("margin", "qos_simulated", "qos", "granted", "placed", "gpus_used", "offered", "shared"):
            row[key] = float(np.mean([one[key] for one in mine]))
        saved = [b["gpus_used"] - a["gpus_used"] for a, b in zip(mine, full, strict=True)]
        more = [a["placed"] - b["placed"] for a, b in zip(mine, full, strict=True)]
        row |= {
            "gpus_saved": float(np.mean(saved)), "gpus_saved_ci95": ci95(saved),
            "more_pods": float(np.mean(more)), "more_pods_ci95": ci95(more),
        }  # fmt: skip
        rows.append(row)
    return rows


def show(rows: list[dict[str, Any]], console: Console) -> None:
    for listed in dict.fromkeys(row["pods"] for row in rows):
        for what, title in (("all", "GPUs for all pods"), ("stream", "pods that fit, of twice the requests")):
            table = Table(title=f"{listed}: {title}; ± 95 % over seeds")
            for column in ("CPU counts", "fit", "policy", "margin", "QoS", "granted", "placed", "GPUs", "difference"):
                table.add_column(column, justify="right" if column not in ("fit", "policy") else "left")
            for row in (row for row in rows if row["pods"] == listed and row["what"] == what):
                key = "gpus_saved" if what == "all" else "more_pods"
                table.add_row(
                    "yes" if row["with_cpu"] else "no", row["fit"], row["policy"], f"{row['margin']:.2f}",
                    f"{row['qos']:.4f}", f"{row['granted']:.3f}", f"{row['placed']:.0f}", f"{row['gpus_used']:.0f}",
                    f"{row[key]:+.0f} ± {row[f'{key}_ci95']:.0f}",
                )  # fmt: skip
            console.print(table)


def main(args: Args) -> None:
    torch.set_num_threads(1)
    console = Console(width=150)
    results = study(args, console)
    rows = summary(results)
    show(rows, console)
    args.output.mkdir(parents=True, exist_ok=True)
    document = {
        "rows": rows,
        "tolerance": args.tolerance,
        "seeds": args.seeds,
        "load": args.load,
        "pod_spread": args.pod_spread,
    }
    write_atomically(args.output / "packing.json", json.dumps(document, indent=2) + "\n")
    console.print(f"results: {args.output / 'packing.json'}")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
