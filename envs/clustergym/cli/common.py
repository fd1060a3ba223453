"""Helpers of several commands."""

from __future__ import annotations

import tempfile
from pathlib import Path

from clustergym.common.extras import require
from clustergym.traces.arrays import check_trace_name

PLOT_SUFFIXES = (".png", ".svg", ".pdf")


def prepare_files(*paths: Path | None) -> None:
    """Create the folders of output files. Raise a ValueError if a file cannot be written, before the work is done."""
    for path in paths:
        if path is not None:
            if path.is_dir():
                raise ValueError(f"cannot write {path}: it is a folder")
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                with tempfile.TemporaryFile(dir=path.parent):  # permissions alone do not tell
                    pass
            except OSError as error:
                raise ValueError(f"cannot write {path}: {error.strerror}") from error


def prepare_outputs(json: Path | None, plot: Path | None) -> None:
    """Check ``--json`` and ``--plot`` before the work is done."""
    if plot is not None:
        if plot.suffix not in PLOT_SUFFIXES:
            raise ValueError(f"--plot {plot}: expected a file that ends in {', '.join(PLOT_SUFFIXES)}")
        require("matplotlib", "render")
    prepare_files(json, plot)


def check_trace_output(path: Path) -> None:
    """Check ``--output`` of commands that write a trace before the work is done."""
    check_trace_name(path)
    if not path.parent.is_dir():
        raise ValueError(f"cannot write {path}: its folder does not exist")
    prepare_files(path)
