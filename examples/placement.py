"""Plan a placement of experts on one half of a trace and measure it on the other half.

Run it with ``python examples/placement.py``. It prints the time per layer of three placements and writes placement.png.
"""

import sys

import matplotlib.pyplot as plt
import numpy as np

from clustergym import TokenTrace
from clustergym.moe_placement import Simulator, Traffic
from clustergym.moe_placement.streams import sample_passes
from clustergym.planners.registry import make_planner

# %% A trace says which experts each token used. No sequence is in both halves.
trace = TokenTrace.load("tiny_moe")
plan_on, serve = trace.split(0.5, seed=0)
simulator = Simulator("tiny-moe", "h800-4x4", "sglang-prefill")
traffic = Traffic("prefill", tokens_per_rank=128)
observed = sample_passes(plan_on, simulator.n_gpus, traffic, 16)
unseen = sample_passes(serve, simulator.n_gpus, traffic, 16)

# %% A planner sees forward passes of the first half and returns the experts of each GPU: (layers, GPUs, slots).
static = simulator.static(trace.n_layers)
served = {}
for name in ("static", "eplb", "anneal"):
    placement = make_planner(name, simulator).plan([observed], static)
    served[name] = simulator.evaluate(unseen, placement)
    print(f"{name:7s} {served[name].time_us.mean():6.1f} µs per layer and pass")

# %% Left: what a pass takes. Right: the busiest GPU sets the compute time.
figure, (times, loads) = plt.subplots(1, 2, figsize=(11, 3.6), layout="constrained")
parts = np.array([result.pass_us.mean((0, 1)) for result in served.values()])
left = np.zeros(len(served))
for part, colour, column in zip(
    ("dispatch", "compute", "combine"), ("#66CCEE", "#4477AA", "#BBCCEE"), parts.T, strict=True
):
    times.barh(list(served), column, left=left, color=colour, label=part)
    left += column
times.set(xlabel="µs per layer and forward pass", title="time of a pass on unseen traffic")
times.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=3, frameon=False)
for name, marker in zip(served, "os^", strict=True):
    pairs = np.sort(served[name].pairs[0].mean(0))[::-1]
    loads.plot(pairs / pairs.mean(), marker=marker, ms=4, label=name)
loads.axhline(1, color="#888888", lw=0.8, ls=":")
loads.set(xlabel="GPU, busiest first", ylabel="load / mean load", title="load of the GPUs in the first layer")
loads.legend(fontsize=8)
figure.savefig(sys.argv[1] if len(sys.argv) > 1 else "placement.png", dpi=110)
