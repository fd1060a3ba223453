"""Write a planner of your own and compare it with the ones that engines use, while the traffic drifts.

Run it with ``python examples/custom_planner.py``. It prints a table and writes planners.png.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console

from clustergym import TokenTrace
from clustergym.moe_placement import Interval, Placement, Simulator, Traffic
from clustergym.planners.base import Planner
from clustergym.planners.evaluation import Protocol, compare
from clustergym.planners.registry import PLANNERS, Entry
from clustergym.plans.report.plots import plot_results
from clustergym.plans.report.tables import results_table


# %% A planner returns the experts of every GPU and layer. This one deals the experts, hottest first, back and forth
# over the GPUs, and gives the spare slots of each GPU to the hottest experts that it does not hold.
@dataclass(eq=False)
class Snake(Planner):
    """Deal experts in the order of their loads: 0 … G−1, G−1 … 0, and so on."""

    needs_tokens = False  # loads are enough

    def plan(self, history: Sequence[Interval], placement: Placement) -> Placement:
        gpus, slots = self.simulator.n_gpus, self.simulator.n_slots
        plan = np.full_like(placement, -1)  # −1 is an empty slot
        for layer, loads in enumerate(self.loads(history[-1])):
            order = np.argsort(-loads)
            for rank, expert in enumerate(order):
                turn, gpu = divmod(rank, gpus)
                plan[layer, gpu if turn % 2 == 0 else gpus - 1 - gpu, turn] = expert
            for gpu in range(gpus):
                spare = [slot for slot in range(slots) if plan[layer, gpu, slot] < 0]
                others = [expert for expert in order if expert not in plan[layer, gpu]]
                plan[layer, gpu, spare] = others[: len(spare)]
        return plan


# %% Register it. From here on it has a name, like the others.
PLANNERS["snake"] = Entry(Snake)
simulator = Simulator("tiny-moe", "h800-4x4", "sglang-prefill")
protocol = Protocol(Traffic("prefill", 64, schedule="drift"), intervals=5, streams=3)
names = ["static", "eplb", "flashlb", "snake", "anneal"]
results = compare(TokenTrace.load("tiny_moe"), simulator, names, protocol)

# %% Times include moving the weights of experts to their new GPUs.
title = "tiny_moe on h800-4x4, drift"
Console(width=130).print(results_table(results, title))
plot_results(results, title, Path(sys.argv[1] if len(sys.argv) > 1 else "planners.png"))
