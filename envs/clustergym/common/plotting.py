"""Plots are optional: matplotlib comes with the extra ``render``."""

from __future__ import annotations

from typing import Any

from clustergym.common.extras import require


def require_matplotlib() -> Any:
    """``matplotlib.pyplot``, set up to draw into files without a display."""
    require("matplotlib", "render").use("Agg")
    return require("matplotlib.pyplot", "render")
