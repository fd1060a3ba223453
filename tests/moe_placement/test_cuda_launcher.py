"""The CUDA launcher plays what the CPU launcher plays, and its kernels compile for a real device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cuda_episode import played
from cuda_programs import assert_same_arrays, compiled, run

SIMULATE = """
import sys, warnings
warnings.simplefilter("error")
import numpy as np
from numba import config
from cuda_episode import played
assert config.ENABLE_CUDASIM
np.savez(sys.argv[1], **played("cuda", sys.argv[2], sys.argv[3]))
"""


@pytest.mark.parametrize(
    ("dispatch", "transport"),
    [("rank-nearest", "dedup"), ("token-hash", "per-expert"), ("round-robin", "allgather"), ("local-hash", "dedup")],
)
def test_cuda_simulator_plays_the_same(dispatch: str, transport: str, tmp_path: Path) -> None:
    file = tmp_path / "played.npz"
    found = run(SIMULATE, str(file), dispatch, transport, NUMBA_ENABLE_CUDASIM="1")
    assert found.returncode == 0, found.stderr
    mine: dict[str, Any] = played("cpu", dispatch, transport)
    assert_same_arrays(file, mine)
    # The episode did something: operations of several kinds, rewards, a second episode.
    kinds = {int(k) for name, array in mine.items() if name.endswith("episode/last_operation") for k in array[:, 0]}
    assert len(kinds & {2, 3, 4, 5}) >= 2
    assert any((array != 0).any() for name, array in mine.items() if name.endswith("reward"))
    assert (mine["lookahead"] != 0).any()


COMPILE = """
from clustergym import synthetic_trace
from clustergym.moe_placement import ClusterSpec, ModelSpec, PlacementBatch, PlacementConfig
from clustergym.moe_placement.launchers import cuda as launcher

trace = synthetic_trace(n_tokens=256, n_layers=2, n_experts=8, top_k=2, n_domains=2)
config = PlacementConfig(
    trace, split="all", cluster=ClusterSpec("c", 2, 2, 3), model=ModelSpec("m", 2, 8, 2, 64, 64), tokens_per_rank=4
)
batch = PlacementBatch(config, 2)
episode, sim, _, obs, trace, rules = batch._state
choice, flag, reward = np.zeros((2, 2), np.int64), np.zeros(2, bool), batch.reward
kernels = {
    "_step": (choice, reward, *batch._state),
    "_reset": (flag, *batch._state),
    "_look_ahead": (choice, 0, np.zeros((2, 2, 4, 9), np.float32), episode, sim, rules),
}
"""


@pytest.mark.slow
def test_kernels_compile_for_a_device() -> None:
    """PTX for compute capability 9.0: all that can be checked of the real compiler without a GPU."""
    assert compiled(COMPILE) == ["_step", "_reset", "_look_ahead"]
