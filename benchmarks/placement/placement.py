"""Compare all planners for every engine profile, model, cluster and schedule, on held-out sequences.

    python benchmarks/placement/placement.py                    # hours on two cores; run again to resume
    python benchmarks/placement/placement.py --quick            # minutes: one cluster, few layers and streams
    python benchmarks/placement/placement.py --study trap       # balanced ranks against uneven ones
    python benchmarks/placement/placement.py --study observe    # what tokens and co-activation are worth
    python benchmarks/placement/placement.py --tables           # print the tables of what has been measured

Uses the DeepSeek-V2-Lite and gpt-oss-20b traces in CLUSTERGYM_DATA, or without them the bundled traces. Each result is
appended to a file of JSON lines as soon as it is known. Times are compared with EPLB on the same streams: the mean over
streams with its 95 % interval, which comes from disjoint groups of sequences.

With the ``drift`` schedule a stream never serves a token twice: the sizes of the passes are reduced until it fits. With
the ``stationary`` schedule plans are made on other sequences, and tokens may be served again; the tables say how many.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tyro

from clustergym import TokenTrace
from clustergym.common.plotting import require_matplotlib
from clustergym.moe_placement import Simulator
from clustergym.moe_placement.profiles import PROFILES
from clustergym.moe_placement.simulator import Placement
from clustergym.moe_placement.streams import Interval, Traffic
from clustergym.planners.base import Planner
from clustergym.planners.evaluation import Protocol, Result, compile_on, deal_streams, evaluate_planner
from clustergym.planners.heldout import PASSES_OF_A_PERMANENT_PLAN, evenly_spaced
from clustergym.planners.recorded import interval_from_statistics
from clustergym.planners.registry import PLANNERS, make_planner, planner_class

sys.path.append(str(Path(__file__).resolve().parents[1]))
from public_data import find_data

SEARCHES = ("anneal", "forecast", "oracle")
UNEVEN = 1.5
"""Spread of the ranks' shares in the study of the trap: a few GPUs send most of the tokens."""
SAMPLES = (1024, 256, 64)
OBSERVERS = ("greedy", "anneal")
"""Planners of the study of what they see."""
ON_STATISTICS = " on statistics"
"""Suffix of a planner that sees loads and co-activation instead of tokens."""


@dataclass
class Args:
    study: Literal["planners", "trap", "observe"] = "planners"
    """planners: all planners. trap: some planners on uneven and on balanced ranks. observe: what annealing sees."""
    profiles: tuple[str, ...] = tuple(PROFILES)
    models: tuple[str, ...] = ("deepseek-v2-lite", "gpt-oss-20b")
    clusters: tuple[str, ...] = ("h800-4x4", "h800-2x8", "h800-4x8")
    schedules: tuple[str, ...] = ("stationary", "drift")
    planners: tuple[str, ...] = tuple(name for name in PLANNERS if name != "exact")
    split: Literal["validation", "test", "all"] = "all"
    """Part of each trace to use."""
    streams: int = 10
    intervals: int = 4
    """Intervals per stream that are served and counted."""
    layers: int = 2
    """Number of evenly spaced layers of each trace to use."""
    iterations: int = 3000
    """Annealing steps per layer and interval; ten times as many where a plan is made once."""
    seed: int = 0
    quick: bool = False
    """One cluster, four streams, few planners and steps."""
    tables: bool = False
    """Print the tables of what has been measured, and stop."""
    output: Path = Path("runs/placement.jsonl")
    """File of JSON lines: one per planner and cell. Cells that it has are skipped."""
    plot: Path | None = None
    """Write a plot of time saved against decision time, one panel per profile, to this file."""


@dataclass(frozen=True)
class Cell:
    """One comparison."""

    profile: str
    model: str
    cluster: str
    schedule: str
    rank_imbalance: float = 0.0


def traces(args: Args) -> dict[str, TokenTrace]:
    """The traces by model, with the layers to use."""
    found = {}
    parts = find_data("moe/deepseek_v2_lite_*.npz")
    if parts and "deepseek-v2-lite" in args.models:
        found["deepseek-v2-lite"] = TokenTrace.concat(
            [TokenTrace.load(p) for p in parts], [p.stem.removeprefix("deepseek_v2_lite_") for p in parts]
        )
    decode = find_data("moe/gpt_oss_20b_decode.npz")
    if decode and "gpt-oss-20b" in args.models:
        found["gpt-oss-20b"] = TokenTrace.load(decode[0])
    if not found:
        found = {"deepseek-v2-lite": TokenTrace.load("synthetic"), "tiny-moe": TokenTrace.load("tiny_moe")}
    return {
        model: replace(trace.select(layers=evenly_spaced(trace.n_layers, args.layers)), name=model)
        for model, trace in found.items()
    }


def cells(args: Args, models: list[str]) -> Iterator[Cell]:
    """The comparisons, those that people run most first."""
    if args.study == "observe":
        wanted = [p for p in args.profiles if p in ("sglang-prefill", "sglang-decode")]
        yield from (Cell(p, m, args.clusters[0], "stationary") for p in wanted for m in models)
    elif args.study == "trap":
        wanted = [p for p in args.profiles if p in ("sglang-prefill", "sglang-decode")]
        for schedule in args.schedules:
            for uneven in (0.0, UNEVEN):
                yield from (Cell(p, m, args.clusters[0], schedule, uneven) for p in wanted for m in models)
    else:
        for cluster in args.clusters:
            for profile in sorted(args.profiles, key=lambda name: PROFILES[name].dispatch == "lp"):
                yield from (Cell(profile, m, cluster, s) for s in args.schedules for m in models)


def protocol_of(args: Args, cell: Cell, trace: TokenTrace, n_gpus: int) -> Protocol:
    """The protocol of a cell, with the largest passes that the trace can fill."""
    phase = PROFILES[cell.profile].phase
    traffic = Traffic(
        phase, schedule=cell.schedule, rank_imbalance=cell.rank_imbalance, allow_reuse=cell.schedule == "stationary"
    )
    protocol = Protocol(traffic, args.intervals, args.streams, args.seed, args.split)
    while True:
        passes, tokens = protocol.traffic.sizes
        try:
            deal_streams(protocol.parts(trace)[1], n_gpus, protocol)
            return protocol
        except ValueError:
            if passes * tokens == 1:
                raise
        smaller = (passes // 2, tokens) if passes > 1 else (1, tokens // 2)
        protocol = replace(
            protocol, traffic=replace(protocol.traffic, sampled_passes=smaller[0], tokens_per_rank=smaller[1])
        )


def options_of(args: Args, name: str, stationary: bool) -> dict[str, Any]:
    if name.removesuffix(ON_STATISTICS) not in SEARCHES:
        return {}
    steps = args.iterations * (10 if stationary and name != "oracle" else 1)
    return {"iterations": steps}


def on_statistics(kind: type[Planner]) -> type[Planner]:
    """The planner on made-up tokens with the loads and the co-activation of the observed ones."""

    class OnStatistics(kind):
        def plan(self, history: Sequence[Interval], placement: Placement) -> Placement:
            seen, n_experts = history[-1], self.simulator.n_experts
            pairs = np.stack([seen.coactivation(layer, n_experts) for layer in range(seen.n_layers)])
            made = interval_from_statistics(
                seen.loads(n_experts), pairs, seen.experts.shape[2], self.simulator.n_gpus, seen.n_tokens,
                seen.n_passes, self.seed,
            )  # fmt: skip
            return super().plan([made], placement)

    return OnStatistics


def variants(args: Args, protocol: Protocol) -> dict[str, tuple[str, Protocol]]:
    """Label of each row → (planner, protocol)."""
    if args.study == "trap":
        names = ("static", "eplb", "eplb-hierarchical", "flashlb", "greedy", "anneal", "oracle")
        return {name: (name, protocol) for name in names}
    if args.study == "observe":
        rows = {"eplb": ("eplb", protocol)}
        for name in OBSERVERS:
            rows[f"{name}, all tokens"] = (name, protocol)
            rows |= {f"{name}, {n} tokens": (name, replace(protocol, observe_tokens=n)) for n in SAMPLES}
            rows[f"{name}, loads + co-activation"] = (name + ON_STATISTICS, protocol)
        return rows
    return {name: (name, protocol) for name in args.planners}


def planner_of(name: str, simulator: Simulator, options: dict[str, Any]) -> Planner:
    if name.endswith(ON_STATISTICS):
        return on_statistics(planner_class(name.removesuffix(ON_STATISTICS)))(simulator, **options)
    return make_planner(name, simulator, **options)


def run_cell(args: Args, cell: Cell, trace: TokenTrace, done: set[str]) -> Iterator[dict[str, Any]]:
    simulator = Simulator(cell.model, cell.cluster, cell.profile)
    protocol = protocol_of(args, cell, trace, simulator.n_gpus)
    train, test = protocol.parts(trace)
    if protocol.stationary:
        simulator = simulator.spread_migration(PASSES_OF_A_PERMANENT_PLAN)
    for label, (name, own) in variants(args, protocol).items():
        if label in done:
            continue
        options = options_of(args, name, protocol.stationary)
        began = time.perf_counter()
        warm_up = planner_of(name, simulator, {"iterations": 1} if options else {})
        warm_up.plan([compile_on(test, simulator)], simulator.static(test.n_layers))
        planner = planner_of(name, simulator, {"seed": args.seed, **options})
        result = evaluate_planner(planner, label, train, test, own)
        passes, tokens = protocol.traffic.sizes
        yield {
            **key_of(args, cell), "label": label, "sampled_passes": passes, "tokens_per_rank": tokens,
            "seconds": round(time.perf_counter() - began, 2), "result": result.as_dict(),
        }  # fmt: skip


def key_of(args: Args, cell: Cell) -> dict[str, Any]:
    """What makes two measurements the same."""
    sizes = {key: getattr(args, key) for key in ("streams", "intervals", "layers", "iterations", "seed", "split")}
    return {"study": args.study, **vars(cell), **sizes}


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The measurements so far. A line that a killed run left unfinished is ignored."""
    found = []
    for line in path.read_text().splitlines() if path.is_file() else ():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return found


def same_key(line: dict[str, Any], key: dict[str, Any]) -> bool:
    return all(line.get(name) == value for name, value in key.items())


# Tables


def percent(result: Result, reference: Result) -> str:
    mean, half = result.versus(reference)
    return f"{100 * mean:+.1f} ± {100 * half:.1f}"


def tables(lines: list[dict[str, Any]]) -> str:
    """One table per study, profile and schedule: planners in rows, models and clusters in columns."""
    groups: dict[tuple[Any, ...], dict[tuple[Any, ...], dict[str, dict[str, Any]]]] = {}
    for line in lines:
        group = (line["study"], line["profile"], line["schedule"])
        cell = (line["model"], line["cluster"], line["rank_imbalance"])
        groups.setdefault(group, {}).setdefault(cell, {})[line["label"]] = line
    return "\n".join(_table(*group, found) for group, found in groups.items())


RULES = (
    "eplb", "eplb-hierarchical", "flashlb", "swift", "hot-everywhere", "co-occurrence", "affinity-groups",
    "round-robin", "static",
)  # fmt: skip
"""Planners that do not search."""


def planner_cells(lines: list[dict[str, Any]]) -> dict[Cell, dict[str, Result]]:
    """Results by planner of the cells of the study of planners that are complete."""
    found: dict[Cell, dict[str, Result]] = {}
    for line in lines:
        if line["study"] == "planners":
            cell = Cell(*(line[name] for name in ("profile", "model", "cluster", "schedule")))
            found.setdefault(cell, {})[line["label"]] = Result(**line["result"])
    return {cell: results for cell, results in found.items() if {"eplb", "oracle"} <= set(results)}


def shown_planners(results: dict[str, Result]) -> tuple[str, ...]:
    """Best rule, best annealing, and the two planners that know the future."""
    rule = min((name for name in RULES if name in results), key=lambda name: results[name].total_us)
    search = min(("greedy", "anneal"), key=lambda name: results[name].total_us)
    return rule, search, "forecast", "oracle"


def summary(lines: list[dict[str, Any]]) -> str:
    """One row per cell of the study of planners: EPLB, the best rule, annealing, and what more knowledge would give."""
    head = ("profile", "schedule", "model", "cluster", "EPLB, µs", "best rule", "annealing",
        "annealing, next mixture known", "next tokens known")  # fmt: skip
    text = [f"| {' | '.join(head)} |", "| --- | --- | --- | --- | ---: | ---: | ---: | ---: | ---: |"]
    for cell, results in planner_cells(lines).items():
        eplb, (rule, search, *known) = results["eplb"], shown_planners(results)
        shown = [f"{rule} {percent(results[rule], eplb)}" if rule != "eplb" else "eplb"]
        shown += [f"{search} {percent(results[search], eplb)}"]
        shown += [percent(results[name], eplb) for name in known]
        names = (cell.profile, cell.schedule, cell.model, cell.cluster)
        text.append(f"| {' | '.join(names)} | {eplb.total_us:.1f} | {' | '.join(shown)} |")
    return "\n".join(text)


def ranges(lines: list[dict[str, Any]]) -> str:
    """One row per profile and schedule: lowest and highest gain of :func:`summary`, and the planners by mean gain."""
    groups: dict[tuple[str, str], list[dict[str, Result]]] = {}
    for cell, results in planner_cells(lines).items():
        groups.setdefault((cell.profile, cell.schedule), []).append(results)
    head = ("profile", "schedule", "best rule, %", "annealing, %", "next mixture known, %", "next tokens known, %",
        "best on average, %")  # fmt: skip
    text = [f"| {' | '.join(head)} |", "| --- | --- | ---: | ---: | ---: | ---: | --- |"]
    for group, found in groups.items():
        gains = [[100 * r[name].versus(r["eplb"])[0] for name in shown_planners(r)] for r in found]
        shown = [f"{max(column):+.1f} … {min(column):+.1f}" for column in zip(*gains, strict=True)]
        names = [name for name in found[0] if _realisable(name) and all(name in r for r in found)]
        means = {name: float(np.mean([100 * r[name].versus(r["eplb"])[0] for r in found])) for name in names}
        best = ", ".join(f"{name} {means[name]:+.1f}" for name in sorted(means, key=lambda name: means[name])[:4])
        text.append(f"| {' | '.join((*group, *shown, best))} |")
    return "\n".join(text)


def _table(study: str, profile: str, schedule: str, found: dict[tuple[Any, ...], dict[str, dict[str, Any]]]) -> str:
    columns = [cell for cell, rows in found.items() if "eplb" in rows]
    results = {
        cell: {label: Result(**line["result"]) for label, line in found[cell].items()} for cell in columns
    }  # fmt: skip
    labels = list(dict.fromkeys(label for cell in columns for label in results[cell]))
    text = [
        f"\n**{study}: {profile}, {schedule}**. Time compared with EPLB, %, mean ± 95 %. Bold: the lowest of the "
        "planners that do not see the future.\n"
    ]
    head = [f"{m}, {c}{f', ranks uneven by {u}' if u else ''}" for m, c, u in columns]
    text += [f"| planner | {' | '.join(head)} |", f"| --- |{' ---: |' * len(columns)}"]
    for label in labels:
        row = []
        for cell in columns:
            mine = results[cell]
            if label not in mine:
                row.append("")
                continue
            shown = percent(mine[label], mine["eplb"]) if label != "eplb" else f"{mine['eplb'].total_us:.1f} µs"
            row.append(f"**{shown}**" if label == _best(mine) else shown)
        text.append(f"| {label} | {' | '.join(row)} |")
    notes = []
    for cell in columns:
        line, eplb = found[cell]["eplb"], results[cell]["eplb"]
        notes.append(
            f"{line['sampled_passes']} × {line['tokens_per_rank']} tokens per rank, "
            f"{len(eplb.stream_totals_us)} streams on {eplb.groups} groups, {100 * eplb.reused:.0f} % reused"
        )
    text.append(f"| *passes, streams, tokens served again* | {' | '.join(notes)} |")
    return "\n".join(text)


def _best(results: dict[str, Result]) -> str:
    return min((label for label in results if _realisable(label)), key=lambda label: results[label].total_us)


def _realisable(label: str) -> bool:
    """Whether a planner knows only what an engine can know."""
    kind = planner_class(label) if label in PLANNERS else None
    return kind is None or not (kind.needs_future or kind.needs_mixture)


def plot(lines: list[dict[str, Any]], path: Path) -> None:
    """Time saved against decision time: one panel per profile, means over models, clusters and schedules."""
    plt = require_matplotlib()
    points: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for cell, results in planner_cells(lines).items():
        for label, result in results.items():
            if label != "static":
                saved = -100 * result.versus(results["eplb"])[0]
                points.setdefault(cell.profile, {}).setdefault(label, []).append((result.decision_ms, saved))
    columns = 3
    rows = -(-len(points) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(5 * columns, 3.4 * rows), squeeze=False)
    for axis in axes.ravel()[len(points) :]:
        axis.set_axis_off()
    for axis, (profile, planners) in zip(axes.ravel(), points.items(), strict=False):
        means = {label: np.mean(values, 0) for label, values in planners.items()}
        known = {label: point for label, point in means.items() if _realisable(label)}
        top = max(saved for _, saved in means.values())
        best, front, shown = -0.1 * top, [], []
        for label, point in sorted(known.items(), key=lambda item: item[1][0]):
            if point[1] > best:
                # Of points that are close to each other only the last has its name, because names would overlap.
                if shown and point[1] < shown[-1][1][1] + 0.08 * top:
                    shown.pop()
                shown.append((label, point))
                best = point[1]
                front.append(point)
        for label, (ms, saved) in means.items():
            axis.plot(ms, saved, "o", color="#4477AA" if label in known else "#BBBBBB", markersize=4)
        axis.step([ms for ms, _ in front], [saved for _, saved in front], where="post", color="#4477AA", linewidth=1)
        for label, (ms, saved) in [*shown, *((label, means[label]) for label in means if label not in known)]:
            left = label in known
            axis.annotate(
                label, (ms, saved), textcoords="offset points", xytext=(-4 if left else 5, 4), fontsize=7,
                ha="right" if left else "left",
            )  # fmt: skip
        axis.set(xlim=(0.1, 3e4), ylim=(-0.3 * top, 1.15 * top))
        axis.set(title=profile, xscale="log", xlabel="decision, ms per layer", ylabel="time saved vs EPLB, %")
        axis.axhline(0, color="grey", linewidth=0.6)
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def main(args: Args) -> None:
    if args.quick:
        args = replace(
            args, clusters=args.clusters[:1], streams=4, intervals=2, iterations=300, layers=1,
            planners=("static", "eplb", "eplb-hierarchical", "flashlb", "hot-everywhere", "anneal"),
        )  # fmt: skip
    lines = read_lines(args.output)
    if not args.tables:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        found = traces(args)
        with open(args.output, "a") as file:
            for cell in cells(args, list(found)):
                key = key_of(args, cell)
                done = {line["label"] for line in lines if same_key(line, key)}
                began = time.perf_counter()
                for line in run_cell(args, cell, found[cell.model], done):
                    file.write(json.dumps(line) + "\n")
                    file.flush()
                    lines.append(line)
                print(f"{cell}: {time.perf_counter() - began:.0f} s", flush=True)
        lines = [line for line in lines if any(same_key(line, key_of(args, c)) for c in cells(args, list(found)))]
    print(ranges(lines))
    print(summary(lines))
    print(tables(lines))
    if args.plot is not None:
        plot(lines, args.plot)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
