"""Settings for all tests."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# One thread per process, also in subprocesses: with more, small tensor operations on a busy machine are slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Benchmarks and the scripts that make traces are outside the package. Tests run short versions of some.
sys.path += [str(Path(__file__).resolve().parents[1] / folder) for folder in ("benchmarks", "traces")]


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


@pytest.fixture(scope="module")
def corridors() -> Iterator[None]:
    """The environments of ``corridor.py`` are registered."""
    from corridor import registered_corridors

    with registered_corridors():
        yield


@pytest.fixture(scope="module")
def scripted() -> Iterator[None]:
    """The environments of ``update_cases`` are registered."""
    from update_cases import scripted_environments

    with scripted_environments():
        yield
