"""The default plan of ``clustergym plan --engine sglang`` under the judge of tests/support/independent_judge.py.

    python benchmarks/placement/judge.py                                    # one minute of one core
    python benchmarks/placement/judge.py --null                             # uniformly random routing
    python benchmarks/placement/judge.py --phase prefill --steps 3000000

Plans are made on one half of the sequences and judged on the other half, on a few layers. The baseline is EPLB as
SGLang runs it: hierarchical where the expert groups divide by the nodes. Times are judged at the start of the engine
and after a rebalancing, whose replica choices differ. "as served" has the passes of both phases as often as the tokens
need them. The null traces have uniformly random routing: what a plan gains or loses there is the error of our model.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import tyro

from clustergym import TokenTrace
from clustergym.common.statistics import ci95
from clustergym.moe_placement import ModelSpec, Simulator, Traffic, get_cluster
from clustergym.moe_placement.profiles import phases_of
from clustergym.moe_placement.specs import get_model
from clustergym.planners.heldout import evenly_spaced
from clustergym.plans.planning import DECODE_SHARE, Sizes, make_plan, serve_both_phases
from clustergym.traces import SyntheticConfig, synthetic_trace

sys.path.append(str(Path(__file__).resolve().parents[1]))
from public_data import data_files

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "support"))
import independent_judge as judge  # noqa: E402


class Cell(NamedTuple):
    """A model on a cluster. The kernels take so many µs per active expert and per token-expert pair."""

    nodes: int
    per_node: int
    slots: int
    expert_us: float
    pair_us: float


CELLS = {
    "deepseek-v2-lite": Cell(4, 4, 5, 5.0, 0.05),
    "gpt-oss-20b": Cell(4, 4, 3, 5.0, 0.05),
    "deepseek-v3": Cell(8, 8, 5, 12.0, 0.1),
}
STATES = ("start", "rebalanced")


@dataclass
class Args:
    cells: tuple[str, ...] = tuple(CELLS)
    planners: tuple[str, ...] = ("anneal",)
    phase: Literal["mixed", "prefill", "decode"] = "mixed"
    """What the plan is made for."""
    splits: tuple[int, ...] = (0, 1, 2)
    layers: int = 4
    steps: int = 1_000_000
    """Of the search on the estimate, per layer. The default of 30 s makes about as many on two cores for 26 layers."""
    exact_steps: int = 20_000
    """Of the search on the exact time, per layer; a plan for both phases needs none."""
    null: bool = False
    """Judge on traces with uniformly random routing instead."""
    output: Path | None = None
    """Append each result to this file of JSON lines."""


def model_of(cell: str, layers: int) -> ModelSpec:
    return replace(get_model(cell), n_layers=layers, n_dense=0, layers=(), n_hidden_layers=0, n_mtp=0)


def trace_of(cell: str, args: Args, split: int) -> TokenTrace:
    """Recordings; a synthetic trace for DeepSeek-V3; or random experts."""
    model = get_model(cell)
    if args.null:
        rng, n_tokens = np.random.default_rng([split, model.n_experts]), 60_000
        scores = rng.random((n_tokens, args.layers, model.n_experts), np.float32)
        experts = np.argpartition(scores, model.top_k, axis=2)[:, :, : model.top_k].astype(np.int16)
        return TokenTrace(experts, n_experts=model.n_experts, seq_lens=np.full(300, 200))
    if cell == "deepseek-v3":
        sizes = {"n_experts": model.n_experts, "top_k": model.top_k, "n_groups": 8, "group_limit": 4}
        return synthetic_trace(SyntheticConfig(n_tokens=65_536, n_layers=args.layers, **sizes), seed=split)
    files = data_files(f"moe/{cell.replace('-', '_')}_*.npz")
    trace = TokenTrace.concat([TokenTrace.load(file) for file in files])
    return trace.select(layers=evenly_spaced(trace.n_layers, args.layers))


def measure(cell: str, args: Args, planner: str, split: int) -> dict[str, Any]:
    """Of EPLB's time, per state: prefill, decode, as served. And what ``plan`` says itself."""
    place = CELLS[cell]
    judge.NODES, judge.PER_NODE, judge.SLOTS = place.nodes, place.per_node, place.slots
    judge.GPUS, judge.HIDDEN = place.nodes * place.per_node, get_model(cell).hidden
    judge.KERNELS["weights and tokens"] = (place.expert_us, place.pair_us)
    seen, unseen = trace_of(cell, args, split).split(0.5, seed=split)
    model, cluster = (
        model_of(cell, args.layers),
        get_cluster(f"h800-{place.nodes}x{place.per_node}", slots_per_gpu=place.slots),
    )
    if args.phase == "mixed":
        simulator, traffic, others = serve_both_phases("sglang", model, cluster, DECODE_SHARE)
    else:
        profile = next(one for one in phases_of("sglang") if one.phase == args.phase)
        simulator, traffic, others = Simulator(model, cluster, profile), Traffic(args.phase), []
    plan = make_plan(
        seen, simulator, planner, traffic=traffic, other_phases=others, iterations=args.exact_steps,
        sizes=Sizes(seed=split), options={"estimate_steps": args.steps} if planner == "anneal" else None,
        force=args.null,
    )  # fmt: skip
    claimed, half = plan.versus("eplb")
    found: dict[str, Any] = {
        "cell": cell, "planner": planner, "phase": args.phase, "null": args.null, "split": split,
        "written": plan.chosen, "claimed": claimed, "half": half, "eplb": plan.baseline,
    }  # fmt: skip
    per_pass = {"prefill": 1.0, "decode": DECODE_SHARE / (1 - DECODE_SHARE) * 128 / 32}
    for state in STATES:
        us = {
            (kind, phase): judge.judge(placement.astype(np.int64), unseen, phase, state=state)
            for phase in per_pass
            for kind, placement in (("own", plan.best.placement), ("eplb", plan.outcomes["eplb"].placement))
        }
        total = {kind: sum(n * us[kind, phase] for phase, n in per_pass.items()) for kind in ("own", "eplb")}
        shares = {phase: us["own", phase] / us["eplb", phase] for phase in per_pass}
        found[state] = shares | {"as served": total["own"] / total["eplb"]}
    return found


def main(args: Args) -> None:
    keys = ("prefill", "decode", "as served")
    print("| model | planner | state | prefill | decode | as served | by split | `plan` says |")
    print("| --- | --- | --- | ---: | ---: | ---: | --- | ---: |")
    for cell in args.cells:
        for planner in args.planners:
            results = [measure(cell, args, planner, split) for split in args.splits]
            for state in STATES:
                mean = {key: np.mean([one[state][key] for one in results]) for key in keys}
                wide = ci95([one[state]["as served"] for one in results])
                splits = ", ".join(f"{one[state]['as served']:.3f}" for one in results)
                says = np.mean([1 + one["claimed"] for one in results])
                print(f"| {cell} | {planner} | {state} | {mean['prefill']:.3f} | {mean['decode']:.3f} | "
                      f"{mean['as served']:.3f} ± {wide:.3f} | {splits} | {says:.3f} |", flush=True)  # fmt: skip
            if args.output is not None:
                with args.output.open("a") as file:
                    file.writelines(json.dumps({"steps": args.steps} | one) + "\n" for one in results)


if __name__ == "__main__":
    main(tyro.cli(Args))
