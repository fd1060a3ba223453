"""Decision time of the policy planner as a share of annealing's, in the 12 cells of ``learned_traffic.py``.

    python benchmarks/policy_time.py        # two minutes on two idle cores

Both plan the same interval from EPLB's plan, the policy with past traffic, at their default numbers of steps. Best of
three, by CPU time of all threads and by the clock.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch
import tyro

from clustergym.moe_placement import Simulator
from clustergym.moe_placement.simulator import Placement
from clustergym.moe_placement.streams import Interval, IntervalStream
from clustergym.planners.base import Planner
from clustergym.planners.registry import make_planner
from learned_traffic import Args as LearnedArgs
from placement import Args as PlacementArgs
from placement import Cell, protocol_of, traces


@dataclass
class Args:
    layers: int = 24
    repeats: int = 3
    seed: int = 1


def decision_ms(planner: Planner, interval: Interval, placement: Placement, repeats: int) -> tuple[float, float]:
    """Milliseconds per layer: CPU time, and by the clock."""
    planner.plan([interval], placement)  # compile
    found = []
    for _ in range(repeats):
        began, began_cpu = time.perf_counter(), time.process_time()
        planner.plan([interval], placement)
        found.append((time.process_time() - began_cpu, time.perf_counter() - began))
    cpu, wall = (1e3 * min(times) / len(placement) for times in zip(*found, strict=True))
    return cpu, wall


def main(args: Args) -> None:
    torch.set_num_threads(1)
    shares = []
    print("| profile | model | cluster | anneal: CPU ms, ms | policy: CPU ms, ms | share of CPU time | by the clock |")
    print("| --- | --- | --- | ---: | ---: | ---: | ---: |")
    for cluster in LearnedArgs.clusters:
        for profile in LearnedArgs.profiles:
            for model, trace in traces(PlacementArgs(layers=args.layers)).items():
                sim = Simulator(model, cluster, profile)
                past, served = trace.split(0.5, seed=args.seed)
                sizes = PlacementArgs(streams=3, intervals=4, seed=args.seed)
                protocol = protocol_of(sizes, Cell(profile, model, cluster, "drift"), served, sim.n_gpus)
                first, second = IntervalStream(served, sim.n_gpus, protocol.traffic, args.seed).take(2)
                start = make_planner("eplb", sim).plan([first], sim.static(trace.n_layers))
                policy = make_planner("policy", sim)
                policy.learn(past)
                planners = (make_planner("anneal", sim), policy)
                anneal_ms, policy_ms = (decision_ms(planner, second, start, args.repeats) for planner in planners)
                shares.append(np.divide(policy_ms, anneal_ms))
                times = " | ".join(f"{cpu:.1f}, {wall:.1f}" for cpu, wall in (anneal_ms, policy_ms))
                print(f"| {profile} | {model} | {cluster} | {times} | {shares[-1][0]:.2f} | {shares[-1][1]:.2f} |")
    for name, share in zip(("CPU time", "by the clock"), np.transpose(shares), strict=True):
        mean = np.exp(np.log(share).mean())
        print(f"{name}: geometric mean {mean:.2f}, median {np.median(share):.2f}, {min(share):.2f} … {max(share):.2f}")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
