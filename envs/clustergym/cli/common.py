"""What several commands need."""

from __future__ import annotations

import os
from pathlib import Path

from clustergym.common.extras import require
from clustergym.traces import TokenTrace

PLOT_SUFFIXES = (".png", ".svg", ".pdf")


def load_traces(sources: list[str]) -> TokenTrace:
    """One trace, or several joined with one domain each."""
    twice = sorted({source for source in sources if sources.count(source) > 1})
    if twice:
        raise ValueError(f"trace {twice[0]!r} is given twice: what is held out of one would be planned on in the other")
    traces = [TokenTrace.load(source) for source in sources]
    if len(traces) == 1:
        return traces[0]
    names = [t.name for t in traces]
    # Files of the same name in different folders are still domains of their own.
    return TokenTrace.concat(traces, domains=names if len(set(names)) == len(names) else sources)


def prepare_outputs(json: Path | None, plot: Path | None) -> None:
    """Refuse what cannot be written before the work is done, not after."""
    if plot is not None and plot.suffix not in PLOT_SUFFIXES:
        raise ValueError(f"--plot {plot}: expected a file that ends in {', '.join(PLOT_SUFFIXES)}")
    if plot is not None:
        require("matplotlib", "render")
    for path in (json, plot):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.is_dir() or not os.access(path.parent, os.W_OK):
                raise ValueError(f"cannot write {path}: it is a folder, or its folder is not writable")
