"""Decode plans under the judge of tests/support/independent_judge.py: the default plan and direct searches.

    python benchmarks/placement/judge_bound.py                 # DeepSeek-V2-Lite, 4 layers; six minutes of one core
    python benchmarks/placement/judge_bound.py --layers 8 --seen-passes 96 --planners greedy anneal

A direct search has the judge's own formula and starts from EPLB's plan. On the very passes that the judge measures on,
it knows what no planner can know: this is the bound. On passes of the sequences that planners may see, it shows what a
planner with the right formula could reach. The planner has as much time as in ``benchmarks/placement/judge.py``.

With per-expert transport, the formula depends only on the tokens per pass, rank and expert. The judge has six passes;
the last column has more passes of the same unseen sequences, so that chance counts less.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import tyro
from numba import config, njit

from clustergym import TokenTrace
from clustergym.moe_placement import Simulator, Traffic, get_cluster
from clustergym.planners.evaluation import compile_on
from clustergym.planners.heldout import PASSES_OF_A_PERMANENT_PLAN, Observed
from clustergym.planners.registry import make_planner
from clustergym.plans.planning import fill_empty

sys.path.append(str(Path(__file__).resolve().parents[1]))
from public_data import data_files

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "support"))
import independent_judge as judge  # noqa: E402

GPUS, PER_NODE = judge.GPUS, judge.PER_NODE
INTRA, INTER = judge.INTRA_GB_S, judge.INTER_GB_S
US_PER_COPY = judge.HIDDEN * (1 + 2) / 1e3
EXPERT_US, PAIR_US = judge.KERNELS["weights and tokens"]
HEAT_US = 0.3, 0.003
JUDGE_SEED, SEEN_SEED, MORE_SEED = 1, 2, 3
Counts = npt.NDArray[np.int64]
Sums = npt.NDArray[np.float64]
WORK, ACTIVE, SENT_INTER, RECEIVED_INTER, SENT_INTRA, RECEIVED_INTRA = range(6)


@dataclass
class Args:
    layers: tuple[int, ...] = (0, 8, 17, 25)
    seen_passes: tuple[int, ...] = (6, 0, 24, 96)
    """Passes of the seen half to search on. 0: each token once."""
    more_passes: int = 96
    """Unseen passes of the last column"""
    steps: int = 1_000_000
    """Of a direct search, per layer"""
    planners: tuple[str, ...] = ("anneal",)
    """Planners that take seconds; the default of ``plan``"""
    seconds: float = 2.25
    """Of one core per layer, for these planners"""
    split: int = 0
    """Seed that deals the sequences into halves"""


@njit
def choose(holds: npt.NDArray[np.bool_], serving: Counts) -> None:
    """``serving_gpus`` of the judge for one expert, whose copies are on the GPUs in ``holds``."""
    copies, left = np.flatnonzero(holds), 0
    for rank in range(GPUS):
        first = rank // PER_NODE * PER_NODE
        near = np.flatnonzero(holds[first : first + PER_NODE])
        if holds[rank]:
            serving[rank] = rank
        elif len(near):
            serving[rank] = first + near[0]
        else:
            serving[rank] = copies[left % len(copies)]
            left += 1


@njit
def count(tokens: Counts, serving: Counts, sign: int, sums: Sums) -> None:
    """Add one expert's share to ``sums`` (6, passes, GPUs). ``tokens`` is (passes, ranks)."""
    for w in range(len(tokens)):
        active = 0
        for rank in range(GPUS):
            n, gpu = sign * tokens[w, rank], serving[rank]
            if n:
                active |= 1 << gpu
                sums[WORK, w, gpu] += n
                if gpu // PER_NODE != rank // PER_NODE:
                    sums[SENT_INTER, w, rank] += n
                    sums[RECEIVED_INTER, w, gpu] += n
                elif gpu != rank:
                    sums[SENT_INTRA, w, rank] += n
                    sums[RECEIVED_INTRA, w, gpu] += n
        for g in range(GPUS):
            sums[ACTIVE, w, g] += sign * (active >> g & 1)


@njit
def mean_us(sums: Sums) -> float:
    """Mean time of a pass. The sums are whole numbers, so adding and taking away leaves no error."""
    total = 0.0
    for w in range(sums.shape[1]):
        kernel, busiest = 0.0, 0.0
        for g in range(GPUS):
            kernel = max(kernel, EXPERT_US * sums[ACTIVE, w, g] + PAIR_US * sums[WORK, w, g])
            inter = max(sums[SENT_INTER, w, g], sums[RECEIVED_INTER, w, g]) / INTER
            busiest = max(busiest, inter + max(sums[SENT_INTRA, w, g], sums[RECEIVED_INTRA, w, g]) / INTRA)
        total += kernel + busiest * US_PER_COPY
    return total / sums.shape[1]


@njit
def totals(tokens: Counts, slots: Counts) -> tuple[npt.NDArray[np.bool_], Counts, Sums]:
    """Which GPUs hold and serve each expert, and the sums of all experts."""
    n_experts = len(tokens)
    holds, serving = np.zeros((n_experts, GPUS), np.bool_), np.zeros((n_experts, GPUS), np.int64)
    sums = np.zeros((6, tokens.shape[1], GPUS))
    for g in range(GPUS):
        for e in slots[g]:
            holds[e, g] = True
    for e in range(n_experts):
        choose(holds[e], serving[e])
        count(tokens[e], serving[e], 1, sums)
    return holds, serving, sums


@njit
def plan_us(tokens: Counts, slots: Counts) -> float:
    """Mean time of a pass. ``tokens`` is (experts, passes, ranks), ``slots`` (GPUs, slots)."""
    return mean_us(totals(tokens, slots)[2])


@njit
def search(
    tokens: Counts, slots: Counts, steps: int, heat: tuple[float, float], rng: np.random.Generator
) -> tuple[float, Counts]:
    """(best time, its slots) by annealing: swaps of two slots, and other experts in place of spare copies.

    No GPU may hold an expert twice.
    """
    n_experts, n_slots, slots = len(tokens), slots.shape[1], slots.copy()
    holds, serving, sums = totals(tokens, slots)
    if holds.sum() != slots.size:
        raise ValueError("a GPU holds an expert twice")
    now = mean_us(sums)
    best, best_slots = now, slots.copy()
    for i in range(steps):
        g, s = rng.integers(0, GPUS), rng.integers(0, n_slots)
        g2, s2 = rng.integers(0, GPUS), rng.integers(0, n_slots)
        a, b = slots[g, s], slots[g2, s2]
        swap = rng.random() < 0.7 or holds[a].sum() == 1
        if not swap:
            b = rng.integers(0, n_experts)
        if a == b or holds[b, g] or (swap and holds[a, g2]):
            continue
        for undo in range(2):
            for e in (a, b):
                count(tokens[e], serving[e], -1, sums)
            holds[a, g], holds[b, g] = holds[b, g], holds[a, g]
            if swap:
                holds[a, g2], holds[b, g2] = holds[b, g2], holds[a, g2]
            for e in (a, b):
                choose(holds[e], serving[e])
                count(tokens[e], serving[e], 1, sums)
            if undo:
                break
            after = mean_us(sums)
            degrees = heat[0] * (heat[1] / heat[0]) ** (i / steps)
            if after <= now or rng.random() < np.exp((now - after) / degrees):
                now, slots[g, s] = after, b
                if swap:
                    slots[g2, s2] = a
                if now < best:
                    best, best_slots = now, slots.copy()
                break
    return best, best_slots


def tokens_of(trace: TokenTrace, layer: int, passes: list[Counts]) -> Counts:
    """(experts, passes, ranks) tokens of each rank that use an expert."""
    found = np.zeros((trace.n_experts, len(passes), GPUS), np.int64)
    for w, rows in enumerate(passes):
        experts = trace.experts[rows, layer].astype(int)
        ranks = np.arange(len(rows)) // (len(rows) // GPUS)
        np.add.at(found, (experts, w, ranks[:, None]), 1)
    return found


def draw(trace: TokenTrace, n: int, seed: int) -> list[Counts]:
    """``n`` passes as the judge draws them. 0: as many as there are without a token in two of them."""
    rng, size = np.random.default_rng(seed), GPUS * judge.TOKENS_PER_RANK["decode"]
    if n == 0:
        return list(rng.permutation(trace.n_tokens)[: trace.n_tokens // size * size].reshape(-1, size))
    return [rng.choice(trace.n_tokens, size, replace=False) for _ in range(n)]


def made_by(name: str, simulator: Simulator, observed: Observed, part: TokenTrace, eplb: Counts, s: float) -> Counts:
    """The plan of a planner with ``s`` seconds of one core per layer, on what it observed of a part of the trace."""
    make_planner(name, simulator, iterations=1).plan([compile_on(part, simulator)], observed.static)
    planner = make_planner(name, simulator, seconds=s * len(eplb) / min(config.NUMBA_NUM_THREADS, len(eplb)))
    plan = planner.plan([observed.interval(planner)], eplb.astype(observed.static.dtype))
    return fill_empty(simulator, observed, plan).astype(np.int64)


def main(args: Args) -> None:
    files = data_files("moe/deepseek_v2_lite_*.npz")
    seen, unseen = TokenTrace.concat([TokenTrace.load(file) for file in files]).split(0.5, seed=args.split)
    seen, unseen = seen.select(layers=args.layers), unseen.select(layers=args.layers)
    before = seen.split(0.75, seed=0)[0]
    simulator = Simulator("deepseek-v2-lite", get_cluster("h800-4x4", slots_per_gpu=judge.SLOTS), "sglang-decode")
    simulator = simulator.spread_migration(PASSES_OF_A_PERMANENT_PLAN)
    observed = Observed(before, simulator, Traffic("decode", schedule="stationary"))
    planner = make_planner("eplb", simulator)
    eplb = planner.plan([observed.interval(planner)], observed.static).astype(np.int64)
    judged = judge.draw_passes(unseen, "decode", np.random.default_rng(JUDGE_SEED))
    more = draw(unseen, args.more_passes, MORE_SEED)
    reference = [judge.judge(eplb[[l]], unseen.select(layers=[l]), "decode") for l in range(len(eplb))]
    print(f"EPLB: {np.mean(reference):.1f} µs; layers {args.layers}; split {args.split}\n")

    def shares(plan: Counts, trace: TokenTrace, passes: list[Counts]) -> Sums:
        """Time of each layer divided by that of EPLB's plan."""
        tokens = [tokens_of(trace, l, passes) for l in range(len(plan))]
        return np.array(
            [plan_us(t, mine) / plan_us(t, other) for t, mine, other in zip(tokens, plan, eplb, strict=True)]
        )

    def show(name: str, n: str, plan: Counts, own: str) -> None:
        known = shares(plan, unseen, judged)
        times = [judge.judge(plan[[l]], unseen.select(layers=[l]), "decode") for l in range(len(plan))]
        assert np.allclose(known, np.divide(times, reference))  # the formula here is the judge's
        cells = [name, n, own, f"{known.mean():.3f}", ", ".join(f"{share:.3f}" for share in known)]
        print("| " + " | ".join([*cells, f"{shares(plan, unseen, more).mean():.3f}"]) + " |", flush=True)

    print(f"| plan | passes | on its own passes | on the judge's | by layer | on {len(more)} unseen passes |")
    print("| --- | ---: | ---: | ---: | --- | ---: |")
    for name in args.planners:
        plan = made_by(name, simulator, observed, before, eplb, args.seconds)
        show(f"`{name}`", "", plan, "")
    sources = [("the seen half", seen, draw(seen, n, SEEN_SEED)) for n in args.seen_passes]
    for source, trace, passes in [*sources, ("the judge's passes", unseen, judged)]:
        plan = np.empty_like(eplb)
        for l, slots in enumerate(eplb):
            tokens = tokens_of(trace, l, passes)
            found, plan[l] = search(tokens, slots, args.steps, HEAT_US, np.random.default_rng(0))
            assert np.isclose(found, plan_us(tokens, plan[l]))  # what the search kept up to date is right
        show(f"direct search on {source}", str(len(passes)), plan, f"{shares(plan, trace, passes).mean():.3f}")


if __name__ == "__main__":
    main(tyro.cli(Args))
