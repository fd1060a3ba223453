"""The CUDA launcher plays what the CPU launcher plays, and its kernels compile for a real device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cuda_episode import played

TOOLKITS = [Path(root) for root in (os.environ.get("CUDA_HOME"), "/usr/local/cuda", "/usr/local/cuda-13.0") if root]


def run(program: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | environment,
    )  # fmt: skip


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
    with np.load(file) as theirs:
        assert set(theirs) == set(mine)
        for name, array in mine.items():
            if array.dtype.kind in "iu":
                np.testing.assert_array_equal(theirs[name], array, err_msg=name)
            else:
                # float32 observations and their sums may differ in the last bit: numpy rounds between operations,
                # compiled code does not.
                tolerance = 1e-12 if array.dtype == np.float64 else 1e-6
                np.testing.assert_allclose(theirs[name], array, rtol=tolerance, atol=tolerance, err_msg=name)
    # The episode did something: operations of several kinds, rewards, a second episode.
    kinds = {int(k) for name, array in mine.items() if name.endswith("episode/last_operation") for k in array[:, 0]}
    assert len(kinds & {2, 3, 4, 5}) >= 2
    assert any((array != 0).any() for name, array in mine.items() if name.endswith("reward"))
    assert (mine["lookahead"] != 0).any()


COMPILE = """
from types import SimpleNamespace
import numba.cuda.cuda_paths as cuda_paths
import numba.cuda.dispatcher as dispatcher
import numpy as np
from numba import cuda, typeof
from numba.cuda.cudadrv import nvrtc

# Compiling needs no driver, but numba-cuda asks one which device it compiles for, and NVRTC which devices exist.
dispatcher.get_current_device = lambda: SimpleNamespace(compute_capability=(9, 0))
nvrtc.get_supported_ccs = lambda: ((9, 0),)
cuda_paths._get_nvrtc_path = lambda: cuda_paths._env_path_tuple("none", None)

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
for name, arguments in kernels.items():
    signature = tuple(typeof(argument) for argument in arguments)
    ptx, _ = cuda.compile(getattr(launcher, name).py_func, signature, device=False, cc=(9, 0), abi="numba", opt=False)
    assert ".target sm_90" in ptx and ".entry" in ptx and name in ptx, name
    print(name, len(ptx), flush=True)
"""


@pytest.mark.slow
def test_kernels_compile_for_a_device() -> None:
    """PTX for compute capability 9.0: all that can be checked of the real compiler without a GPU."""
    homes = [
        root for root in TOOLKITS if list(root.glob("lib*/libnvvm.so*")) + list(root.glob("nvvm/lib*/libnvvm.so*"))
    ]
    if not homes:
        pytest.skip(f"no libnvvm under {', '.join(map(str, TOOLKITS))}: install the CUDA toolkit or set CUDA_HOME")
    found = run(COMPILE, CUDA_HOME=str(homes[0]))
    assert found.returncode == 0, found.stderr[-4000:]
    names = [line.split()[0] for line in found.stdout.splitlines()]
    assert names == ["_step", "_reset", "_look_ahead"]
