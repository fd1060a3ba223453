"""Benchmarks are scripts beside the package; tests run short versions of some."""

import os
import sys
from pathlib import Path

# One thread a process, here and in those that tests start: small tensors on a busy machine wait for each other otherwise.
os.environ.setdefault("OMP_NUM_THREADS", "1")

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
