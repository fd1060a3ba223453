"""The CUDA launcher of the offloading task plays what the CPU launcher plays, and its kernels compile for a device."""

from __future__ import annotations

from pathlib import Path

import pytest

from cuda_programs import assert_same_arrays, compiled, run
from offload_episode import played

SIMULATE = """
import sys, warnings
warnings.simplefilter("error")
# The generator of random numbers overflows on purpose; numpy warns of it, compiled code does not.
warnings.filterwarnings("ignore", "overflow encountered in scalar")
import numpy as np
from numba import config
from offload_episode import played
assert config.ENABLE_CUDASIM
np.savez(sys.argv[1], **played("cuda", int(sys.argv[2]), int(sys.argv[3])))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("gpus", "batch"), [(1, 1), (2, 2)])
def test_cuda_simulator_plays_the_same(gpus: int, batch: int, tmp_path: Path) -> None:
    file = tmp_path / "played.npz"
    found = run(SIMULATE, str(file), str(gpus), str(batch), NUMBA_ENABLE_CUDASIM="1")
    assert found.returncode == 0, found.stderr
    mine = played("cpu", gpus, batch)
    assert_same_arrays(file, mine)
    # Every kind of event, and a second episode.
    assert set(mine["kinds"].tolist()) == {0, 1, 2}
    assert mine["ended"].any()


COMPILE = """
import numpy as np
from clustergym.moe_offload.batch import OffloadBatch
from clustergym.moe_offload.kernels.observation import Observation
from clustergym.moe_offload.launchers import cuda as launcher
from clustergym.moe_offload.specs import OffloadConfig

batch = OffloadBatch(OffloadConfig(gpus=2, context_rows=2), 2)
batch.reset()
flags, chosen = np.zeros(2, bool), np.zeros(2, np.int64)
arrays, seen = (batch.task, batch.state), Observation(**batch.observe())
kernels = {"_run": (True, *arrays, seen, chosen, chosen, flags, True), "_draw": (*arrays, flags)}
"""


@pytest.mark.slow
def test_kernels_compile_for_a_device() -> None:
    assert compiled(COMPILE) == ["_run", "_draw"]
