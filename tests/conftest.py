"""Benchmarks are scripts beside the package; tests run short versions of some."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
