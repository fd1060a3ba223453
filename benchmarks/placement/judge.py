"""Plans of ``clustergym plan`` under the judge of tests/support/independent_judge.py.

    python benchmarks/placement/judge.py                                    # three minutes of one core
    python benchmarks/placement/judge.py --engine vllm-ascend --null        # uniformly random routing
    python benchmarks/placement/judge.py --profile sglang-prefill --steps 235000 --exact-steps 5000   # as in 7 s

Plans are made on one half of the sequences and judged on the other half, on a few layers. The baseline is the engine's
own EPLB, or a live plan. SGLang's default plan is judged at the start of the engine and after a rebalancing, whose
replica choices differ. "as served" has the passes of both phases as often as the tokens need them. The null traces have
uniformly random routing: what ``plan`` promises there beyond what the judge finds is the error of our model.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tyro

from clustergym import TokenTrace
from clustergym.common.statistics import ci95
from clustergym.moe_placement import ModelSpec, Simulator, Traffic, get_cluster
from clustergym.moe_placement.profiles import EngineProfile
from clustergym.moe_placement.simulator import Placement
from clustergym.moe_placement.specs import get_model
from clustergym.planners.heldout import evenly_spaced
from clustergym.plans.planning import DECODE_SHARE, Plan, Sizes, default_planner, make_plan, serve_both_phases
from clustergym.plans.transition import Limit
from clustergym.traces import SyntheticConfig, synthetic_trace

sys.path.append(str(Path(__file__).resolve().parents[1]))
from public_data import data_files

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "support"))
import independent_judge as judge  # noqa: E402


class Cell(NamedTuple):
    """A model on a cluster. The kernels take so many µs per active expert and per token-expert pair."""

    model: str
    nodes: int
    per_node: int
    slots: int
    expert_us: float
    pair_us: float


CELLS = {
    "deepseek-v2-lite": Cell("deepseek-v2-lite", 4, 4, 5, 5.0, 0.05),
    "gpt-oss-20b": Cell("gpt-oss-20b", 4, 4, 3, 5.0, 0.05),
    "deepseek-v3": Cell("deepseek-v3", 8, 8, 5, 12.0, 0.1),
    "deepseek-v2-lite-2x8": Cell("deepseek-v2-lite", 2, 8, 5, 5.0, 0.05),
    "gpt-oss-20b-2x8": Cell("gpt-oss-20b", 2, 8, 3, 5.0, 0.05),
}
SGLANG_STATES = {"-start": ("start", "rebalanced"), "-0.5.16": ("rebalanced",)}
"""By the end of a profile's name, how the judge lets SGLang choose replicas; ``older`` for the other profiles."""


@dataclass
class Args:
    cells: tuple[str, ...] = ("deepseek-v2-lite", "gpt-oss-20b", "deepseek-v3")
    planner: str | None = None
    """By default that of the profile."""
    engine: str = "sglang"
    """Plan for both phases of this engine."""
    profile: str | None = None
    """Plan and judge for this profile alone."""
    splits: tuple[int, ...] = (0, 1, 2)
    layers: int = 4
    steps: int = 1_000_000
    """Of the search on the estimate, per layer. The default of 30 s makes about as many on two cores for 26 layers."""
    exact_steps: int = 20_000
    """Of the search on the exact time, per layer; a plan for both phases needs none."""
    null: bool = False
    """Judge on traces with uniformly random routing instead."""
    live: str | None = None
    """Change a live plan, which this planner has made on half of the traffic to plan on, and compare with it."""
    max_moves: int | None = None
    """Experts per layer that may move from the live plan."""
    output: Path | None = None
    """Append each result to this file of JSON lines."""


def model_of(name: str, layers: int) -> ModelSpec:
    return replace(get_model(name), n_layers=layers, n_dense=0, layers=(), n_hidden_layers=0, n_mtp=0)


def trace_of(name: str, args: Args, split: int) -> TokenTrace:
    """Recordings; a synthetic trace for DeepSeek-V3; or random experts."""
    model = get_model(name)
    if args.null:
        rng, n_tokens = np.random.default_rng([split, model.n_experts]), 60_000
        scores = rng.random((n_tokens, args.layers, model.n_experts), np.float32)
        experts = np.argpartition(scores, model.top_k, axis=2)[:, :, : model.top_k].astype(np.int16)
        return TokenTrace(experts, n_experts=model.n_experts, seq_lens=np.full(300, 200))
    if name == "deepseek-v3":
        sizes = {"n_experts": model.n_experts, "top_k": model.top_k, "n_groups": 8, "group_limit": 4}
        return synthetic_trace(SyntheticConfig(n_tokens=65_536, n_layers=args.layers, **sizes), seed=split)
    files = data_files(f"moe/{name.replace('-', '_')}_*.npz")
    trace = TokenTrace.concat([TokenTrace.load(file) for file in files])
    return trace.select(layers=evenly_spaced(trace.n_layers, args.layers))


def judged(profile: EngineProfile, placement: Placement, unseen: TokenTrace, state: str) -> float:
    """µs of a pass and layer."""
    return judge.judge(placement.astype(np.int64), unseen, profile.phase, state=state, transport=profile.transport)


def measure(cell: str, args: Args, split: int) -> dict[str, Any]:
    """Of the baseline's time, per state: each phase, as served. And what ``plan`` says itself."""
    place = CELLS[cell]
    judge.NODES, judge.PER_NODE, judge.SLOTS = place.nodes, place.per_node, place.slots
    judge.GPUS, judge.HIDDEN = place.nodes * place.per_node, get_model(place.model).hidden
    judge.KERNELS["weights and tokens"] = (place.expert_us, place.pair_us)
    seen, unseen = trace_of(place.model, args, split).split(0.5, seed=split)
    model = model_of(place.model, args.layers)
    cluster = get_cluster(f"h800-{place.nodes}x{place.per_node}", slots_per_gpu=place.slots)
    if args.profile is None:
        simulator, traffic, others = serve_both_phases(args.engine, model, cluster, DECODE_SHARE)
    else:
        simulator, others = Simulator(model, cluster, args.profile), []
        traffic = Traffic(simulator.profile.phase)
    profiles = [simulator.profile, *(other.simulator.profile for other in others)]
    shares = [1.0, *(other.passes for other in others)]

    def plan(planner: str, part: TokenTrace, live: Placement | None = None, limit: Limit | None = None) -> Plan:
        options = {"estimate_steps": args.steps} if planner == "anneal" else None
        return make_plan(
            part, simulator, planner, traffic=traffic, other_phases=others, iterations=args.exact_steps, live=live,
            limit=limit, sizes=Sizes(seed=split), options=options, force=True, compare_profiles=False,
        )  # fmt: skip

    live, limit = None, None
    if args.live is not None:
        before, seen = seen.split(0.5, seed=split)
        live = plan(args.live, before).best.placement
        limit = None if args.max_moves is None else Limit(args.max_moves * args.layers)
    made = plan(args.planner or default_planner(simulator.profile, seen), seen, live, limit)
    baseline = made.outcomes[made.fallback].placement
    claimed, half = made.versus(made.fallback)
    found: dict[str, Any] = {
        "cell": cell, "served": args.profile or args.engine, "planner": made.planner, "null": args.null,
        "baseline": made.baseline if live is None else f"live {args.live}", "max_moves": args.max_moves,
        "moved": float((made.best.placement != baseline).mean()), "split": split, "claimed": claimed, "half": half,
        "states": {},
    }  # fmt: skip
    states: tuple[str, ...] = (simulator.profile.dispatch,)
    if simulator.profile.engine == "sglang":
        ends = [end for end in SGLANG_STATES if simulator.profile.name.endswith(end)]
        states = SGLANG_STATES[ends[0]] if ends else ("older",)
    for state in states:
        own, theirs = (
            [judged(profile, placement, unseen, state) for profile in profiles]
            for placement in (made.best.placement, baseline)
        )
        of_phase = {profile.phase: a / b for profile, a, b in zip(profiles, own, theirs, strict=True)}
        found["states"][state] = of_phase | {"as served": float(np.dot(shares, own) / np.dot(shares, theirs))}
    return found


def main(args: Args) -> None:
    print("| model | served | state | prefill | decode | as served | by split | `plan` says |")
    print("| --- | --- | --- | ---: | ---: | ---: | --- | ---: |")
    for cell in args.cells:
        results = []
        for split in args.splits:
            results.append(measure(cell, args, split))
            if args.output is not None:
                with args.output.open("a") as file:
                    file.write(json.dumps({"steps": args.steps, "layers": args.layers} | results[-1]) + "\n")
        for state in results[0]["states"]:
            ratios = [one["states"][state] for one in results]
            phases = [f"{np.mean([r[k] for r in ratios]):.3f}" if k in ratios[0] else "" for k in ("prefill", "decode")]
            served = [ratio["as served"] for ratio in ratios]
            says = ", ".join(f"{1 + one['claimed']:.3f}" for one in results)
            by_split = ", ".join(f"{one:.3f}" for one in served)
            print(f"| {cell} | {results[0]['served']} | {state} | {' | '.join(phases)} | {np.mean(served):.3f} ± "
                  f"{ci95(served):.3f} | {by_split} | {says} |", flush=True)  # fmt: skip


if __name__ == "__main__":
    main(tyro.cli(Args))
