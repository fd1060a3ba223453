"""Short episodes of the offloading environments on a device: in this process or in CUDA's simulator."""

from __future__ import annotations

import numpy as np


def played(device: str, gpus: int, batch: int) -> dict[str, np.ndarray]:
    """All that three environments have shown: resets of some, legal and illegal pairs, events, and the last state."""
    from clustergym import synthetic_trace
    from clustergym.moe_offload.tables import Tables
    from clustergym.moe_offload.vector import MoEOffloadVectorEnv

    trace = synthetic_trace(n_tokens=300, n_layers=3, n_experts=8, top_k=2, n_domains=2, mean_seq_len=9.0, seed=1)
    env = MoEOffloadVectorEnv(
        3, device=device, trace=trace, split="all", fit_on=Tables.count(trace), slots=0.4, gpus=gpus, batch=batch,
        link=120.0, low_rows=3, load_rows=6, context_rows=2, max_tokens=4, autoreset_mode="SameStep",
    )  # fmt: skip
    obs, info = env.reset(seed=3)
    rng = np.random.default_rng(0)
    arrays: dict[str, np.ndarray] = {}
    kinds: list[int] = []
    ended: list[bool] = []

    def note(when: str, values: dict[str, np.ndarray]) -> None:
        # What is kept of ended episodes is a list of Python objects.
        arrays.update({f"{when}/{name}": x.copy() for name, x in values.items() if getattr(x, "dtype", "O") != "O"})

    note("reset", obs | info)
    for step in range(60):
        pairs = [rng.choice(np.argwhere(mask)) if rng.random() < 0.95 else [-1, 99] for mask in obs["action_mask"]]
        obs, rewards, over, _, info = env.step(np.array(pairs))
        note(f"step{step}", obs | info | info["events"] | {"rewards": rewards, "over": over})
        kinds += info["events"]["kind"].tolist()
        ended += over.tolist()
    arrays |= {"kinds": np.array(kinds), "ended": np.array(ended)}
    note("end", env.get_state())
    if device != "cpu":
        for name, tensor in env.batch.tensors.items():
            assert np.array_equal(tensor.numpy(), obs[name])
    return arrays
