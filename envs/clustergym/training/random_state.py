"""Seeds, and the state of random number generators in checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def derive_seed(*key: int) -> int:
    """A 31-bit seed for a key such as (seed, iteration, rank). Similar keys give unrelated seeds."""
    return int(np.random.SeedSequence(key).generate_state(1)[0] >> 1)


def capture_rng_state(*generators: np.random.Generator) -> dict[str, Any]:
    """State of torch's global generators (CPU and GPUs) and of the given NumPy generators, for a checkpoint."""
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": [generator.bit_generator.state for generator in generators],
    }


def restore_rng_state(state: Mapping[str, Any], *generators: np.random.Generator) -> None:
    """Restore a state from :func:`capture_rng_state`. Pass the NumPy generators in the same order."""
    torch.set_rng_state(state["torch"].cpu())
    if state["cuda"] and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([each.cpu() for each in state["cuda"]])
    for generator, each in zip(generators, state["numpy"], strict=True):
        generator.bit_generator.state = each
