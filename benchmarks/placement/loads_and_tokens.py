"""What few recorded tokens are worth when the loads of much traffic are known: ``clustergym plan --loads --tokens``.

    python benchmarks/placement/loads_and_tokens.py
    python benchmarks/placement/loads_and_tokens.py --traces $CLUSTERGYM_DATA/moe/gpt_oss_20b_decode.npz --model gpt-oss-20b

Loads are those of the whole planning part. The few tokens are whole sequences of it, drawn at random. All plans are
measured on the same held-out sequences and compared with EPLB, which plans on the loads. The number of steps is fixed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import tyro

from clustergym.common.statistics import ci95
from clustergym.moe_placement.simulator import Simulator
from clustergym.moe_placement.specs import get_cluster, model_for
from clustergym.moe_placement.streams import Traffic
from clustergym.planners.heldout import PASSES_OF_A_PERMANENT_PLAN, HeldOutPasses, Observed
from clustergym.planners.registry import make_planner
from clustergym.plans.planning import fill_empty
from clustergym.traces import LoadTrace, TokenTrace
from clustergym.traces.match_loads import match_loads


@dataclass
class Args:
    traces: tuple[str, ...] = ("tiny_moe",)
    """Token traces."""
    model: str | None = None
    """Model of the traces, if they do not name it."""
    profile: str = "sglang-prefill"
    cluster: str = "h800-4x4"
    tokens: tuple[int, ...] = (256, 1024, 4096)
    """Numbers of recorded tokens."""
    seeds: tuple[int, ...] = (0, 1, 2, 3)
    """A seed sets the split, the tokens that are kept, and the search."""
    iterations: int = 2_000
    """Annealing steps per layer."""


def some_sequences(trace: TokenTrace, n_tokens: int, seed: int) -> TokenTrace:
    """Whole sequences at random, until they have ``n_tokens`` tokens."""
    order = np.random.default_rng(seed).permutation(trace.n_sequences)
    count = int(np.searchsorted(np.cumsum(trace.seq_lens[order]), n_tokens)) + 1
    return trace.select(sequences=np.sort(order[:count]).tolist())


@dataclass
class Bench:
    """Plans on a part of a trace, and serves held-out passes."""

    simulator: Simulator
    traffic: Traffic
    held_out: HeldOutPasses
    iterations: int
    seed: int

    def time_of(self, part: TokenTrace, planner: str) -> float:
        observed = Observed(part, self.simulator, self.traffic, seed=self.seed)
        options = {"iterations": self.iterations, "seconds": None} if planner == "anneal" else {}
        made = make_planner(planner, self.simulator, seed=self.seed, **options)
        placement = made.plan([observed.interval(made)], observed.static)
        return self.held_out.samples(fill_empty(self.simulator, observed, placement)).mean_us


def main(args: Args) -> None:
    print("| trace | recorded tokens | tokens alone, % | loads and tokens, % |")
    print("| --- | ---: | ---: | ---: |")
    for name in args.traces:
        trace = TokenTrace.load(name)
        simulator = Simulator(
            model_for(trace, args.model), get_cluster(args.cluster), args.profile, PASSES_OF_A_PERMANENT_PLAN
        )
        traffic = Traffic(simulator.profile.phase)
        rows: dict[str, list[tuple[float, float]]] = {}
        for seed in args.seeds:
            before, after = trace.split(0.75, seed=seed)
            held_out = HeldOutPasses(after, simulator, traffic, 20, seed)
            bench = Bench(simulator, traffic, held_out, args.iterations, seed)
            loads = LoadTrace(before.loads(), before.layer_ids, model=before.model, name="loads")
            eplb = bench.time_of(before, "eplb")
            for n in args.tokens:
                few = some_sequences(before, n, seed)
                both = match_loads(few, loads, seed=seed)
                rows.setdefault(f"{n:,}", []).append(
                    (bench.time_of(few, "anneal") / eplb - 1, bench.time_of(both, "anneal") / eplb - 1)
                )
            whole = bench.time_of(before, "anneal") / eplb - 1
            rows.setdefault("all", []).append((whole, whole))
        for label, values in rows.items():
            alone, both_ = 100 * np.array(values).T
            print(
                f"| {trace.name} | {label} | {alone.mean():+.1f} ± {ci95(alone):.1f} | {both_.mean():+.1f} ± "
                f"{ci95(both_):.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main(tyro.cli(Args))
