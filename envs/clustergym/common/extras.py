"""Imports of optional dependencies."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType


class MissingExtra(ImportError):
    """An optional dependency that is not installed. The message says how to install it."""


def require(module: str, extra: str) -> ModuleType:
    """Import ``module``, or raise a :class:`MissingExtra` that names the extra of clustergym that installs it."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        # The module is installed, but one of its own dependencies is missing: show that error.
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise MissingExtra(f"{module} is not installed: pip install 'clustergym[{extra}]'") from error
