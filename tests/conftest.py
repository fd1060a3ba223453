"""Settings for all tests."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# One thread per process, also in subprocesses: with more, small tensor operations on a busy machine are slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# What tests share, and the benchmarks and scripts that tests run in short versions.
ROOT = Path(__file__).resolve().parents[1]
sys.path += [str(ROOT / folder) for folder in ("tests/support", "benchmarks", "traces")]
sys.path += [str(ROOT / "benchmarks" / folder) for folder in ("agent", "allocation", "calibration", "placement")]


@pytest.fixture
def reproducible() -> None:
    """One thread and a fixed seed: torch computes the same numbers in every run."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture
def new_wandb_session(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """wandb reads its environment variables once per session: neither from nor for other tests in this process."""
    import wandb

    wandb.teardown()
    monkeypatch.setenv("WANDB_MODE", "offline")
    yield
    wandb.teardown()
