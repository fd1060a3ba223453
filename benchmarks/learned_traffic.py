"""What learning adds to search, with default numbers of steps and at equal time.

    python benchmarks/learned_traffic.py --budgets-ms --layers 2      # default numbers of steps; 20 minutes, two cores
    python benchmarks/learned_traffic.py --no-free --layers 6         # equal time; 45 minutes, needs an idle machine
    python benchmarks/learned_traffic.py --budgets-ms --layers 2 --trainings runs/pretrained/seed-*
    python benchmarks/learned_traffic.py --tables --layers 6          # print what has been measured with these sizes

What has been measured is not measured again: after a change to a planner, give another ``--output``.

Each trace is split in two by sequences. The traffic model learns from the first half; streams with drift are drawn from
the second, and no token is served twice. Without a budget, planners use their default numbers of steps. With one,
a plan must be made in so many milliseconds of one core per layer, reading the traffic included. The best annealer of a
cell is the one with the lowest mean there, which favours it a little.

``--trainings`` measures the policies of several trainings (``moe_marl/pretrained.py``), with both kinds of look-ahead.

``policy-guided`` is annealing that may start from the plan of the pretrained policy, with the same traffic model. If
time is short it does not ask the policy. ``policy`` learns from the first half, too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from numba import config

from clustergym import TokenTrace
from clustergym.common.plotting import require_matplotlib
from clustergym.common.statistics import ci95
from clustergym.moe_placement import Simulator
from clustergym.planners.anneal import Anneal
from clustergym.planners.base import Planner
from clustergym.planners.evaluation import Protocol, Result, compile_on, evaluate_planner
from clustergym.planners.learned import AnnealLearned
from clustergym.planners.policy.network import PolicyNetwork
from clustergym.planners.policy.planner import Policy
from clustergym.planners.registry import make_planner
from placement import Args as PlacementArgs
from placement import Cell, protocol_of, read_lines, traces

RULES = ("eplb", "eplb-hierarchical", "flashlb", "swift", "hot-everywhere", "co-occurrence", "affinity-groups")
ANNEALERS = ("anneal", "anneal-4", "anneal-max", "anneal-robust")
LEARNED = ("anneal-learned", "policy-guided")
FREE = (*RULES, *ANNEALERS, *LEARNED, "policy", "forecast", "oracle")
SIMULATED = {"estimate": False, "candidates": 8, "operations": 16}
POLICIES: dict[str, dict[str, Any]] = {
    "policy, 4 operations": {"operations": 4},
    "policy, 36 operations": {"operations": 36},
    "policy, untrained networks": {},
    "policy, no plan for past traffic": {},
    "policy, no past traffic": {},
    "policy, simulated look-ahead, 16 operations": SIMULATED,
}
"""Variants of the policy planner, with their options."""
TRAINED: dict[str, dict[str, Any]] = {"policy": {}, "policy, simulated look-ahead": SIMULATED}
"""Variants of the policy planner that are measured with every training."""
PLAN_ONLY = "anneal, plan for past traffic"
SEARCHES = ("anneal-learned, no plan for past traffic", PLAN_ONLY)
"""Searches with one of the two things that ``anneal-learned`` learns: topics, and a plan to start from."""


@dataclass
class Args:
    profiles: tuple[str, ...] = ("sglang-prefill", "sglang-decode", "vllm-deepep")
    models: tuple[str, ...] = PlacementArgs.models
    clusters: tuple[str, ...] = ("h800-4x4", "h800-4x8")
    free: bool = True
    """Measure all planners with their default numbers of steps."""
    budgets_ms: tuple[float, ...] = (3, 10, 30, 100)
    """Milliseconds of one core per layer."""
    streams: int = 20
    intervals: int = 4
    layers: int = 4
    """Number of evenly spaced layers of each trace to use."""
    seed: int = 1
    trainings: tuple[Path, ...] = ()
    """Folders of trainings whose policies are measured, too."""
    tables: bool = False
    """Print the tables of what has been measured, and stop."""
    plot: Path | None = None
    """Write a picture of time saved against decision time, one panel per profile, and stop."""
    output: Path = Path("runs/learned_traffic.jsonl")
    """File of JSON lines. What it has is not measured again."""


def learn(planner: Planner, name: str, past: TokenTrace) -> None:
    """Let the planner, or its variant, learn from past traffic."""
    if name == PLAN_ONLY:
        assert isinstance(planner, Anneal)
        taught = AnnealLearned(planner.simulator, planner.seed)
        taught.learn(past)
        planner.usual = taught.usual
    elif (planner.needs_training or planner.may_train) and not name.endswith("no past traffic"):
        planner.learn(past)
    if name.endswith("no plan for past traffic"):
        (planner.estimator if isinstance(planner, Policy) else planner).usual = None
    if name.endswith("untrained networks"):
        assert isinstance(planner, Policy)
        torch.manual_seed(planner.seed)
        planner.network = PolicyNetwork(planner.network.config).eval()


def measure(
    args: Args, cell: Cell, trace: TokenTrace, done: set[tuple[str, float | None]]
) -> Iterator[tuple[str, float | None, Protocol, Result]]:
    simulator = Simulator(cell.model, cell.cluster, cell.profile)
    past, served = trace.split(0.5, seed=args.seed)
    sizes = PlacementArgs(streams=args.streams, intervals=args.intervals, seed=args.seed)
    protocol = protocol_of(sizes, cell, served, simulator.n_gpus)
    runs: list[tuple[str, float | None]] = [(name, None) for name in (*FREE, *POLICIES, *SEARCHES) if args.free]
    runs += [(name, ms) for ms in args.budgets_ms for name in (*ANNEALERS, *LEARNED)]
    trained = {
        f"{kind}, training {folder.name}": {"checkpoint": folder, **options}
        for kind, options in TRAINED.items()
        for folder in args.trainings
    }
    runs += [(name, None) for name in trained]
    for name, ms in runs:
        if (name, ms) in done:
            continue
        options: dict[str, Any] = {"seed": args.seed}
        if ms is not None:
            options["seconds"] = ms / 1e3 * trace.n_layers / min(int(config.NUMBA_NUM_THREADS), trace.n_layers)
        options |= POLICIES.get(name, {}) | trained.get(name, {})
        planner = make_planner(name.partition(",")[0], simulator, **options)
        learn(planner, name, past)
        planner.plan([compile_on(served, simulator)], simulator.static(trace.n_layers))
        yield name, ms, protocol, evaluate_planner(planner, name, past, served, protocol)


# Tables


def percent(result: Result, reference: Result) -> str:
    mean, half = result.versus(reference)
    return f"{100 * mean:+.1f} ± {100 * half:.1f}"


Results = dict[tuple[str, float | None], Result]


def best_of(results: Results, names: Sequence[str], ms: float | None = None) -> Result:
    """The result of the planner with the lowest mean in the cell."""
    return min((results[name, ms] for name in names), key=lambda result: result.total_us)


def mean_difference(pairs: Sequence[tuple[Result, Result]]) -> str:
    """Mean over cells of the difference in per cent, ± 95 % over cells, and the range."""
    found = [100 * one.versus(other)[0] for one, other in pairs]
    if len(found) < 2:
        return ""
    return f"{np.mean(found):+.2f} ± {ci95(found):.2f} | {min(found):+.1f} … {max(found):+.1f}"


def free_tables(cells: dict[tuple[str, ...], Results]) -> list[str]:
    """Tables of the planners with their default numbers of steps."""
    text = [
        "Total time compared with EPLB in every interval, %, mean over streams ± 95 % (disjoint groups of sequences)\n",
        "| profile | model | cluster | groups | best rule | annealing | learned traffic | policy-guided | policy "
        "| next mixture known | next tokens known |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for cell, results in cells.items():
        eplb = results["eplb", None]
        chosen = [best_of(results, names) for names in (RULES, ANNEALERS)]
        shown = [f"{result.planner} {percent(result, eplb)}" for result in chosen]
        shown += [percent(results[name, None], eplb) for name in (*LEARNED, "policy", "forecast", "oracle")]
        text.append(f"| {' | '.join(cell)} | {eplb.groups} | {' | '.join(shown)} |")
    text += ["\n| comparison | difference, % | range over cells |", "| --- | ---: | ---: |"]
    for names in (ANNEALERS, ("anneal",), ("anneal-robust",), ("anneal-learned",), RULES, ("eplb",)):
        label = {ANNEALERS: "the best annealer of the cell", RULES: "the best rule of the cell"}.get(names, names[0])
        for name in (name for name in (*LEARNED, "policy") if name not in names):
            pairs = [(results[name, None], best_of(results, names)) for results in cells.values()]
            text.append(f"| `{name}` against {label} | {mean_difference(pairs)} |")
    text += [
        "\nParts of the policy and of the search against the best annealer of the cell\n",
        "| planner | difference, % | range over cells | share of the annealer's decision time |",
        "| --- | ---: | ---: | ---: |",
    ]
    for name in ("policy", *POLICIES, *SEARCHES):
        pairs = [(r[name, None], best_of(r, ANNEALERS)) for r in cells.values() if (name, None) in r]
        times = [one.decision_ms / other.decision_ms for one, other in pairs]
        if pairs:
            share = f"{np.exp(np.mean(np.log(times))):.2f} ({min(times):.2f} … {max(times):.2f})"
            text.append(f"| `{name}` | {mean_difference(pairs)} | {share} |")
    return text


def time_tables(cells: dict[tuple[str, ...], Results], budgets: Sequence[float]) -> list[str]:
    """Tables of the planners with a time budget: at equal time, and with a tenth of the annealer's time."""
    text = [
        "\nAgainst the best annealer of the cell at equal time, %\n",
        f"| profile | model | cluster | planner | {' | '.join(f'{ms:g} ms' for ms in budgets)} |",
        f"| --- | --- | --- | --- |{' ---: |' * len(budgets)}",
    ]
    for cell, results in cells.items():
        for name in LEARNED:
            shown = [
                percent(results[name, ms], best_of(results, ANNEALERS, ms)) if (name, ms) in results else ""
                for ms in budgets
            ]
            text.append(f"| {' | '.join(cell)} | {name} | {' | '.join(shown)} |")
    text += [
        "\n| planner | its time | time of the best annealer | difference, % | range over cells |",
        "| --- | --- | --- | ---: | ---: |",
    ]
    for name in LEARNED:
        for ms in budgets:
            for other in (ms, 10 * ms):
                pairs = [
                    (results[name, ms], best_of(results, ANNEALERS, other))
                    for results in cells.values()
                    if (name, ms) in results and other in budgets
                ]
                if pairs:
                    text.append(f"| `{name}` | {ms:g} ms | {other:g} ms | {mean_difference(pairs)} |")
    return text


def training_table(cells: dict[tuple[str, ...], Results]) -> list[str]:
    """What the policies of several trainings are worth: mean over cells, ± 95 % over trainings."""
    names = dict.fromkeys(name for results in cells.values() for name, _ in results if ", training " in name)
    text = ["\n| policy | trainings | against EPLB, % | against the best annealer, % |", "| --- | ---: | ---: | ---: |"]
    for kind in TRAINED:
        own = [name for name in names if name.rpartition(", training ")[0] == kind]
        shown = []
        for others in (("eplb",), ANNEALERS):
            found = [
                float(np.mean([100 * r[name, None].versus(best_of(r, others))[0] for r in cells.values()]))
                for name in own
            ]
            spread = f" ± {ci95(found):.2f} ({min(found):+.2f} … {max(found):+.2f})" if len(found) > 1 else ""
            shown.append(f"{np.mean(found):+.2f}{spread}" if found else "")
        if own:
            text.append(f"| `{kind}` | {len(own)} | {' | '.join(shown)} |")
    return text if len(text) > 2 else []


def by_cell(lines: list[dict[str, Any]]) -> dict[tuple[str, ...], Results]:
    """Results of each profile, model and cluster."""
    found: dict[tuple[str, ...], Results] = {}
    for line in lines:
        cell = (line["profile"], line["model"], line["cluster"])
        found.setdefault(cell, {})[line["planner"], line["budget_ms"]] = Result(**line["result"])
    return found


PARETO = (
    "eplb",
    "flashlb",
    "swift",
    "hot-everywhere",
    "co-occurrence",
    "affinity-groups",
    *ANNEALERS,
    *LEARNED,
    "policy",
)


def plot(lines: list[dict[str, Any]], path: Path) -> None:
    """Time saved compared with EPLB against decision time, means over models and clusters."""
    plt = require_matplotlib()
    cells = by_cell(lines)
    profiles = list(dict.fromkeys(cell[0] for cell in cells))
    figure, axes = plt.subplots(
        1, len(profiles), figsize=(4 * len(profiles) + 2, 4), squeeze=False, layout="constrained"
    )
    for axis, profile in zip(axes[0], profiles, strict=True):
        own = [results for cell, results in cells.items() if cell[0] == profile]
        points = []
        for i, name in enumerate(PARETO):
            saved = [-100 * results[name, None].versus(results["eplb", None])[0] for results in own]
            ms = np.mean([results[name, None].decision_ms for results in own])
            points.append((ms, np.mean(saved)))
            colour = "tab:green" if name in (*LEARNED, "policy") else "tab:blue"
            axis.plot(*points[-1], linestyle="", marker="oXsv^D<>Ppd8*"[i], color=colour, ms=7, label=name)
        best, front = -np.inf, []
        for ms, saved in sorted(points):
            if saved > best:
                best = saved
                front.append((ms, saved))
        axis.plot(*zip(*front, strict=True), color="grey", linewidth=0.8, zorder=0)
        axis.set(title=profile, xscale="log", xlabel="decision time, ms per layer")
        axis.set_ylim(bottom=max(axis.get_ylim()[0], -4))
        axis.grid(alpha=0.3)
    axes[0, 0].set_ylabel("time saved compared with EPLB, %")
    axes[0, -1].legend(loc="center left", bbox_to_anchor=(1.02, 0.5), fontsize=8)
    figure.savefig(path, dpi=120)


def tables(lines: list[dict[str, Any]]) -> str:
    found = by_cell(lines)
    budgets = sorted({line["budget_ms"] for line in lines if line["budget_ms"] is not None})
    free = {cell: results for cell, results in found.items() if {(name, None) for name in FREE} <= set(results)}
    needed = {(name, ms) for name in (*ANNEALERS, LEARNED[0]) for ms in budgets}
    timed = {cell: results for cell, results in found.items() if needed <= set(results)}
    text = free_tables(free) + training_table(free) if free else []
    return "\n".join(text + (time_tables(timed, budgets) if budgets else []))


def main(args: Args) -> None:
    torch.set_num_threads(1)
    lines = read_lines(args.output)
    keys = ("streams", "intervals", "layers", "seed")
    size = {key: getattr(args, key) for key in keys}
    lines = [line for line in lines if all(line[key] == size[key] for key in keys)]
    if args.plot is not None:
        plot(lines, args.plot)
        return
    if not args.tables:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        found = traces(PlacementArgs(models=args.models, layers=args.layers))
        for cluster in args.clusters:
            for profile in args.profiles:
                for model, trace in found.items():
                    cell = Cell(profile, model, cluster, "drift")
                    key = {"profile": profile, "model": model, "cluster": cluster, **size}
                    done = {
                        (line["planner"], line["budget_ms"])
                        for line in lines
                        if all(line[name] == value for name, value in key.items())
                    }
                    for name, ms, protocol, result in measure(args, cell, trace, done):
                        passes, tokens = protocol.traffic.sizes
                        line = {
                            **key, "planner": name, "budget_ms": ms, "passes": passes, "tokens_per_rank": tokens,
                            "result": result.as_dict(),
                        }  # fmt: skip
                        lines.append(line)
                        with open(args.output, "a") as file:
                            file.write(json.dumps(line) + "\n")
                    print(f"{cell} done", flush=True)
    print(tables(lines))


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
