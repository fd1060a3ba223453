"""Decision time of the planners that need only loads, at the size of a large deployment, with EPLB in the same run.

    python benchmarks/planner_cost.py                    # 58 layers × 256 experts × 64 GPUs, 320 slots
    python benchmarks/planner_cost.py --repeats 5 --json out.json

Loads are synthetic: a lognormal popularity per layer and expert that changes a little from window to window, so that
planners that keep good layers have something to keep. Every planner (``static`` too) starts from the EPLB plan of the
first window and sees the same windows. The first decision compiles: not counted. ``balance`` is the mean load over
that of the busiest GPU on the window after the plan, ``moves`` the replicas that some GPU must fetch per layer and
decision.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from clustergym.moe_placement import ClusterSpec, ModelSpec, Placement, Simulator
from clustergym.moe_placement.planner_registry import make_planner, planners_on_loads
from clustergym.moe_placement.planners.eplb import EPLB
from clustergym.moe_placement.planners.flashlb import balance
from clustergym.moe_placement.planning import LoadWindow


def windows(layers: int, experts: int, n: int, skew: float, change: float, seed: int) -> list[LoadWindow]:
    """``n`` windows of 32k tokens with 8 experts each, as counts."""
    rng = np.random.default_rng(seed)
    heat = rng.normal(0, skew, (layers, experts))
    found = []
    for _ in range(n):
        heat = heat + rng.normal(0, change, heat.shape)
        share = np.exp(heat)
        found.append(LoadWindow(rng.poisson(share / share.sum(1, keepdims=True) * 8 * 32768), 32768))
    return found


def moves(plan: Placement, before: Placement, n_experts: int) -> float:
    """Replicas that some GPU must fetch, mean over layers."""
    held = np.zeros((2, *plan.shape[:2], n_experts + 1), bool)
    for i, placement in enumerate((plan, before)):
        ids = np.where(placement < 0, n_experts, placement).astype(np.int64)
        np.put_along_axis(held[i], ids, True, axis=2)
    return float((held[0] & ~held[1])[..., :-1].sum() / len(plan))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=58)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--gpus-per-node", type=int, default=8)
    parser.add_argument("--slots", type=int, default=5, help="slots per GPU")
    parser.add_argument("--skew", type=float, default=0.8, help="standard deviation of the logarithm of the loads")
    parser.add_argument("--change", type=float, default=0.1, help="the same of its change from window to window")
    parser.add_argument("--repeats", type=int, default=3, help="decisions that are measured per planner")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()

    model = ModelSpec("large", args.layers, args.experts, 8, 7168, 2048, weight_bytes=1, n_groups=8)
    sim = Simulator(model, ClusterSpec("large", args.nodes, args.gpus_per_node, args.slots))
    history = windows(args.layers, args.experts, args.repeats + 2, args.skew, args.change, args.seed)
    eplb = EPLB(sim)
    start = eplb.pack(eplb.loads(history[0]))
    rows = []
    for name in planners_on_loads():
        make_planner(name, sim).plan(history[:1], sim.static(args.layers))  # compile
        planner, placement = make_planner(name, sim), start
        seconds, balances, fetched = [], [], []
        for i in range(1, args.repeats + 1):
            began = time.perf_counter()
            plan = planner.plan(history[: i + 1], placement)
            seconds.append(time.perf_counter() - began)
            balances.append(float(balance(eplb.loads(history[i + 1]), sim.check(plan)).mean()))
            fetched.append(moves(plan, placement, args.experts))
            placement = plan
        rows.append(
            {
                "planner": name,
                "seconds": seconds,
                "median_s": float(np.median(seconds)),
                "balance": float(np.mean(balances)),
                "moves": float(np.mean(fetched)),
            }
        )

    size = f"{args.layers} layers × {args.experts} experts × {sim.n_gpus} GPUs, {sim.n_gpus * sim.n_slots} slots"
    table = Table(title=f"Decision time for all layers ({args.repeats} decisions)\n{size}")
    for column in ("planner", "median ms", "least ms", "most ms", "balance", "moves per layer"):
        table.add_column(column, justify="left" if column == "planner" else "right")
    for row in rows:
        ms = 1e3 * np.array(row["seconds"])
        table.add_row(
            str(row["planner"]), f"{np.median(ms):.1f}", f"{ms.min():.1f}", f"{ms.max():.1f}",
            f"{row['balance']:.3f}", f"{row['moves']:.1f}",
        )  # fmt: skip
    Console().print(table)
    if args.json:
        args.json.write_text(json.dumps({"size": size, "planners": rows}, indent=1))


if __name__ == "__main__":
    main()
