"""How much of a GPU should a pod get? Compare the usual rules with the trained policy that comes with the package.

Run it with ``python examples/allocation.py``. It prints a table and writes allocation.png.
"""

import sys
from pathlib import Path

import matplotlib.pyplot as plt

import clustergym.agent
from clustergym.gpu_allocation import AllocationBatch, AllocationConfig
from clustergym.gpu_allocation.evaluation import play_policy, play_rules
from clustergym.gpu_allocation.policy import AllocationPolicy

# %% 128 GPUs. On each, 128 pods come one after another. Every policy sees the same pods.
batch = AllocationBatch(AllocationConfig(history=True), num_envs=128)
results = play_rules(batch, ("grant", "fair-share", "vpa", "vpa-fraction", "oracle"))
pretrained = Path(clustergym.agent.__file__).with_name("pretrained.pt")
results["PPO"] = play_policy(batch, AllocationPolicy.load(pretrained))

# %% "oracle" knows what the pod will need. It is a bound, not a rule.
for name, result in sorted(results.items(), key=lambda item: item[1]["reward"]):
    print(
        f"{name:13s} reward {result['reward']:.3f} ± {result['reward_ci95']:.3f}, "
        f"objectives met {result['qos']:.1%}, used part of the grant {result['efficiency']:.1%}"
    )

# %% Good rules are at the top right: pods meet their objectives, and little of the GPU is held and idle.
figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
for name, result in results.items():
    colour = {"PPO": "#228833", "oracle": "#BBBBBB"}.get(name, "#4477AA")
    axes.plot(100 * result["efficiency"], 100 * result["qos"], "o", ms=9, color=colour)
    offset = {"grant": (-8, 9), "fair-share": (-8, -18)}.get(name, (9, -4))
    axes.annotate(name, (100 * result["efficiency"], 100 * result["qos"]), xytext=offset, textcoords="offset points")
axes.set(xlabel="used part of what was granted, %", ylabel="pods that meet their objective, %")
axes.set_title("allocation rules on pods that nobody saw in training")
axes.margins(0.15)
figure.savefig(sys.argv[1] if len(sys.argv) > 1 else "allocation.png", dpi=110)
