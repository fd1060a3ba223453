"""Programs that run CUDA launchers without a GPU: in numba's simulator, and through the compiler to PTX."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

TOOLKITS = [Path(root) for root in (os.environ.get("CUDA_HOME"), "/usr/local/cuda", "/usr/local/cuda-13.0") if root]


def run(program: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | environment,
    )  # fmt: skip


def assert_same_arrays(file: Path, mine: Mapping[str, np.ndarray]) -> None:
    """The arrays of a file are those of a run on the CPU."""
    with np.load(file) as theirs:
        assert set(theirs) == set(mine)
        for name, array in mine.items():
            if array.dtype.kind in "iub":
                np.testing.assert_array_equal(theirs[name], array, err_msg=name)
            else:
                # float32 observations and their sums may differ in the last bit: numpy rounds between operations,
                # compiled code does not.
                tolerance = 1e-12 if array.dtype == np.float64 else 1e-6
                np.testing.assert_allclose(theirs[name], array, rtol=tolerance, atol=tolerance, err_msg=name)


_BEFORE = """
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

"""
_AFTER = """
for name, arguments in kernels.items():
    signature = tuple(typeof(argument) for argument in arguments)
    ptx, _ = cuda.compile(getattr(launcher, name).py_func, signature, device=False, cc=(9, 0), abi="numba", opt=False)
    assert ".target sm_90" in ptx and ".entry" in ptx and name in ptx, name
    print(name, len(ptx), flush=True)
"""


def compiled(program: str) -> list[str]:
    """Compile ``kernels``, a dictionary of arguments by name, of ``launcher``. The program makes both.

    PTX for compute capability 9.0 is all that can be checked of the real compiler without a GPU.
    """
    homes = [
        root for root in TOOLKITS if list(root.glob("lib*/libnvvm.so*")) + list(root.glob("nvvm/lib*/libnvvm.so*"))
    ]
    if not homes:
        pytest.skip(f"no libnvvm under {', '.join(map(str, TOOLKITS))}: install the CUDA toolkit or set CUDA_HOME")
    found = run(_BEFORE + program + _AFTER, CUDA_HOME=str(homes[0]))
    assert found.returncode == 0, found.stderr[-4000:]
    return [line.split()[0] for line in found.stdout.splitlines()]
