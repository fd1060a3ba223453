"""Settings for all tests."""

import os
import sys
from pathlib import Path

# One thread per process, also in subprocesses: with more, small tensor operations on a busy machine are slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Benchmarks are scripts outside the package. Tests run short versions of some.
sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
