"""The folder for files that are made on demand and kept."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """``$CLUSTERGYM_CACHE``, otherwise ``clustergym`` in ``$XDG_CACHE_HOME`` or ``~/.cache``. It may not exist yet."""
    if given := os.environ.get("CLUSTERGYM_CACHE"):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "clustergym"
