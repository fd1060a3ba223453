"""A short episode of the placement environments with a launcher, in this process or in CUDA's simulator."""

from __future__ import annotations

import numpy as np


def played(launcher: str, dispatch: str, transport: str) -> dict[str, np.ndarray]:
    """All arrays of three environments: reset, steps over the end of an interval and an episode, look-ahead."""
    from clustergym import synthetic_trace
    from clustergym.moe_placement import (
        ClusterSpec,
        EngineProfile,
        ModelSpec,
        PlacementBatch,
        PlacementConfig,
    )
    from clustergym.moe_placement.launchers import cpu, cuda

    trace = synthetic_trace(n_tokens=240, n_layers=2, n_experts=6, top_k=2, n_domains=2, mean_seq_len=12.0, seed=3)
    model = ModelSpec("tiny", 2, 6, 2, 64, 64, kernel_start_us=4, kernel_expert_us=1, kernel_pair_us=0.2)
    # More than 16 GPUs would not fit into the bits of an int16, which plain Python must not be caught by.
    cluster = ClusterSpec("tiny", 3, 6, 2, intra_gb_s=0.4, inter_gb_s=0.1)
    config = PlacementConfig(
        trace, split="all", cluster=cluster, model=model, intervals=2, tokens_per_rank=2, sampled_passes=1,
        ops_per_layer=2, schedule="drift", start="eplb",
        profile=EngineProfile("made", "sglang", "decode", dispatch, transport, (), "made by a test"),
    )  # fmt: skip
    batch = PlacementBatch(config, 3)
    batch.launcher = {"cpu": cpu, "cuda": cuda}[launcher]
    batch.seed(np.array([5, 6, 7]))
    batch.reset()
    rng = np.random.default_rng(0)
    arrays: dict[str, np.ndarray] = {}

    def note(when: str) -> None:
        parts = {"sim": batch.sim, "episode": batch.episode, "stream": batch.stream, "obs": batch.obs}
        for part, named in parts.items():
            arrays.update({f"{when}/{part}/{name}": array.copy() for name, array in named.items()})
        arrays[f"{when}/reward"] = batch.reward.copy()

    note("reset")
    for step in range(9):
        mask = batch.obs["action_mask"]
        choice = np.array([rng.choice(np.argwhere(m)) if rng.random() < 0.9 else [-1, 99] for m in mask])
        batch.step(*choice.T)
        note(f"step{step}")
        if batch.done.any():
            # Only some begin anew: the others must stay as they are.
            batch.reset(np.array([True, False, True]))
            note(f"reset{step}")
    arrays["lookahead"] = batch.lookahead(np.array([[0, 2], [3, 1], [5, 0]])).copy()
    for name, shape, dtype in (
        ("operations", (4, 2), np.int64), ("mask", (4,), np.int8), ("score", (4 + 36,), np.float64),
        ("compact", (3 * 11 + 18 * 6 + 6,), np.float32),
    ):  # fmt: skip
        arrays[f"candidates/{name}"] = np.zeros((3, *shape), dtype)
    batch.launcher.propose(*(array for name, array in arrays.items() if name.startswith("candidates/")), batch._state)
    del arrays["candidates/score"]  # scratch, from float32 observations
    note("end")
    return arrays
