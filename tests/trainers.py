"""Import trainers as modules. They are scripts in a folder that is not a package."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).resolve().parents[1] / "cleanrl_ppo"


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
