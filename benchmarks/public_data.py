"""Public recordings and measurements, which are not part of the project.

They are in the folder that the environment variable CLUSTERGYM_DATA names. CONTRIBUTING.md says what is expected in it.
"""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "CLUSTERGYM_DATA"


def find_data(pattern: str) -> list[Path]:
    """Files that match a pattern such as ``moe/deepseek_v2_lite_*.npz``, sorted. Empty if there are none."""
    folder = os.environ.get(VARIABLE)
    return sorted(Path(folder).glob(pattern)) if folder else []


def data_files(pattern: str) -> list[Path]:
    """The same, for a program that cannot do without: ends it with a message if there are none."""
    found = find_data(pattern)
    if not found:
        given = os.environ.get(VARIABLE, "not set")
        raise SystemExit(f"error: {VARIABLE} is {given}: expected a folder with {pattern} (see CONTRIBUTING.md)")
    return found


def data_file(name: str) -> Path:
    """One file, such as ``moe/gpt_oss_20b_decode.npz``."""
    return data_files(name)[0]
