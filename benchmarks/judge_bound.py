"""The least time of a decode plan under the formula of the independent judge (tests/test_judge.py), by direct search.

    python benchmarks/judge_bound.py                 # DeepSeek-V2-Lite, 4 layers; a minute
    python benchmarks/judge_bound.py --layers 8

The search knows what no planner can know: the judge's own formula, and the very passes that the judge measures on. It
starts from EPLB's plan. With per-expert transport, the formula depends only on the tokens per pass, rank and expert.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import tyro
from numba import njit

from clustergym import TokenTrace
from clustergym.moe_placement import Simulator, Traffic, get_cluster
from clustergym.moe_placement.planner_registry import make_planner
from clustergym.moe_placement.planning import Observed, Sizes

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
import test_judge as judge  # noqa: E402

GPUS, PER_NODE = judge.GPUS, judge.PER_NODE
INTRA, INTER = judge.INTRA_GB_S, judge.INTER_GB_S
US_PER_COPY = judge.HIDDEN * (1 + 2) / 1e3
EXPERT_US, PAIR_US = judge.KERNELS["weights and tokens"]
HEAT_US = 0.3, 0.003
Counts = npt.NDArray[np.int64]
Sums = npt.NDArray[np.float64]
WORK, ACTIVE, SENT_INTER, RECEIVED_INTER, SENT_INTRA, RECEIVED_INTRA = range(6)


@dataclass
class Args:
    data: Path = ROOT.parent / "shared" / "data" / "moe"
    """Folder with deepseek_v2_lite_*.npz."""
    layers: tuple[int, ...] = (0, 8, 17, 25)
    steps: int = 1_000_000


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
        active = np.zeros(GPUS, np.bool_)
        for rank in range(GPUS):
            n, gpu = tokens[w, rank], serving[rank]
            if n:
                active[gpu] = True
                sums[WORK, w, gpu] += sign * n
                if gpu // PER_NODE != rank // PER_NODE:
                    sums[SENT_INTER, w, rank] += sign * n
                    sums[RECEIVED_INTER, w, gpu] += sign * n
                elif gpu != rank:
                    sums[SENT_INTRA, w, rank] += sign * n
                    sums[RECEIVED_INTRA, w, gpu] += sign * n
        sums[ACTIVE, w] += sign * active


@njit
def mean_us(sums: Sums) -> float:
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
def search(
    tokens: Counts, slots: Counts, steps: int, heat: tuple[float, float], rng: np.random.Generator
) -> tuple[float, Counts]:
    """(best time, its slots) by annealing: swaps of two slots, and other experts in place of spare copies."""
    n_experts, n_slots, slots = len(tokens), slots.shape[1], slots.copy()
    holds, serving = np.zeros((n_experts, GPUS), np.bool_), np.zeros((n_experts, GPUS), np.int64)
    sums = np.zeros((6, tokens.shape[1], GPUS))
    for g in range(GPUS):
        for e in slots[g]:
            holds[e, g] = True
    for e in range(n_experts):
        choose(holds[e], serving[e])
        count(tokens[e], serving[e], 1, sums)
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


def main(args: Args) -> None:
    files = sorted(args.data.glob("deepseek_v2_lite_*.npz"))
    seen, unseen = TokenTrace.concat([TokenTrace.load(file) for file in files]).split(0.5, seed=0)
    seen, unseen = seen.select(layers=args.layers), unseen.select(layers=args.layers)
    simulator = Simulator("deepseek-v2-lite", get_cluster("h800-4x4", slots_per_gpu=judge.SLOTS), "sglang-decode")
    observed = Observed(seen.split(0.75, seed=0)[0], simulator, Traffic("decode", schedule="stationary"), Sizes())
    planner = make_planner("eplb", simulator)
    eplb = planner.plan([observed.interval(planner)], observed.static).astype(np.int64)
    reference = [judge.judge(eplb[[l]], unseen.select(layers=[l]), "decode") for l in range(len(eplb))]
    print(f"EPLB: {np.mean(reference):.1f} µs; layers {args.layers}")
    passes, shares = judge.draw_passes(unseen, "decode", np.random.default_rng(1)), []
    for l, us in enumerate(reference):
        rng = np.random.default_rng(0)
        found, slots = search(tokens_of(unseen, l, passes), eplb[l], args.steps, HEAT_US, rng)
        shares.append(judge.judge(slots[None], unseen.select(layers=[l]), "decode") / us)
        assert np.isclose(found / us, shares[-1])  # the search has the judge's formula
        print(f"layer {args.layers[l]}: {shares[-1]:.3f} of EPLB's time", flush=True)
    print(f"mean: {np.mean(shares):.3f}")


if __name__ == "__main__":
    main(tyro.cli(Args))
