"""Run wandb sweep files on this machine: propose parameters, start runs, read their scores, store everything."""

from clustergym.sweeping.config import Sweep, load_sweep
from clustergym.sweeping.runner import Runner
from clustergym.sweeping.store import Run, Store

__all__ = ["Run", "Runner", "Store", "Sweep", "load_sweep"]
