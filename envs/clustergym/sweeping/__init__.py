"""Sweeps on this machine: an unmodified wandb sweep file, runs proposed, started, scored and remembered."""

from clustergym.sweeping.config import Sweep, load_sweep
from clustergym.sweeping.runner import Runner
from clustergym.sweeping.store import Run, Store

__all__ = ["Run", "Runner", "Store", "Sweep", "load_sweep"]
