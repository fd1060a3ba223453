"""Import trainers as modules (scripts in a folder that is not a package), and run functions in two ranks."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from clustergym.training.distributed import World

FOLDER = Path(__file__).resolve().parents[2] / "cleanrl_ppo"


def load_trainer(name: str) -> ModuleType:
    """Import ``cleanrl_ppo/<name>.py`` (once)."""
    key = f"cleanrl_ppo_{name}"
    if key not in sys.modules:
        spec = importlib.util.spec_from_file_location(key, FOLDER / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[key] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[key]
            raise
    return sys.modules[key]


def in_two_processes(work: Callable[[World, Path], Any], folder: Path) -> list[Any]:
    """Results of ``work`` in each of two forked ranks."""

    def rank(number: int) -> None:
        torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=number, world_size=2)
        torch.save(work(World(number, 2), folder), folder / f"out{number}.pt")
        torch.distributed.destroy_process_group()

    children = []
    for number in range(2):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                rank(number)
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    codes = [os.waitpid(child, 0)[1] for child in children]
    assert codes == [0, 0]
    return [torch.load(folder / f"out{number}.pt", weights_only=True) for number in range(2)]
