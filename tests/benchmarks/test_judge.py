"""The default plan under an independent judge, which shares nothing with the simulator (independent_judge.py).

``python benchmarks/placement/judge.py`` has recorded traces.
"""

from __future__ import annotations

import numpy as np
import pytest

from clustergym.moe_placement import ModelSpec, Simulator, Traffic, get_cluster
from clustergym.moe_placement.streams import sample_passes
from clustergym.planners.registry import make_planner
from clustergym.traces import SyntheticConfig, synthetic_trace
from independent_judge import GPUS, HIDDEN, INTERMEDIATE, SLOTS, judge, serving_gpus


def test_static_rule_of_a_small_instance() -> None:
    slots = np.full((GPUS, SLOTS), -1)
    slots[[1, 6, 9], 0] = 0
    chosen = serving_gpus(slots, 1)[:, 0]
    # Nodes 0, 1 and 2 have a copy. The ranks of node 3 are dealt over the three.
    assert chosen.tolist() == [1, 1, 1, 1, 6, 6, 6, 6, 9, 9, 9, 9, 1, 6, 9, 1]
    slots = np.full((GPUS, SLOTS), -1)
    slots[[4, 5], 0] = 0  # on one node: all other ranks are dealt
    dealt = serving_gpus(slots, 1, "rebalanced")[:, 0]
    assert dealt.tolist() == [4, 5, 4, 5, 4, 5, 4, 5] + [4, 5] * 4
    drawn = serving_gpus(slots, 1, "start", np.random.default_rng(0))[:, 0]
    assert drawn[[4, 5]].tolist() == [4, 5]
    assert set(drawn.tolist()) == {4, 5}


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_default_planner_beats_eplb(phase: str) -> None:
    """With a number of steps instead of seconds, so that the result does not depend on the machine."""
    config = SyntheticConfig(n_tokens=64_000, n_layers=2, first_layer=0, model="judged", popularity_skew=0.3)
    seen, unseen = synthetic_trace(config, seed=5).split(0.5, seed=0)
    model = ModelSpec("judged", 2, 64, 6, HIDDEN, INTERMEDIATE)
    simulator = Simulator(model, get_cluster("h800-4x4", slots_per_gpu=SLOTS), f"sglang-{phase}")
    passes = sample_passes(seen, simulator.n_gpus, Traffic(phase), 16)
    eplb = make_planner("eplb", simulator).plan([passes], simulator.static(2))
    planner = make_planner("anneal", simulator.spread_migration(10**12), iterations=20_000)
    ratio = judge(planner.plan([passes], eplb), unseen, phase) / judge(eplb, unseen, phase)
    print(f"{phase}: {ratio:.3f}")
    assert ratio < 0.97
