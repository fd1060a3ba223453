"""Progress on standard error, and the result line on standard output."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress


class Progress:
    """Progress bar on a terminal; otherwise one line every ``line_every_s`` seconds. Written to standard error."""

    def __init__(self, total_steps: int, start_step: int = 0, enabled: bool = True, line_every_s: float = 30.0) -> None:
        self.total_steps = total_steps
        self._console = Console(stderr=True)
        self._enabled = enabled
        self._bar: RichProgress | None = None
        self._task = TaskID(0)
        self._start_step = start_step
        self._start_s = self._last_line_s = time.perf_counter()
        self._line_every_s = line_every_s
        if enabled and self._console.is_terminal:
            self._bar = RichProgress(
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[rate]}"),
                TimeRemainingColumn(),
                TextColumn("{task.fields[extra]}"),
                console=self._console,
            )
            self._task = self._bar.add_task("", total=total_steps, completed=start_step, rate="", extra="")

    def steps_per_s(self, step: int) -> float:
        """Steps per second of this process. Steps before a resume do not count."""
        return (step - self._start_step) / max(time.perf_counter() - self._start_s, 1e-9)

    def update(self, step: int, **fields: float) -> None:
        """Show the step and further fields. Fields that are NaN are left out."""
        if not self._enabled:
            return
        rate = self.steps_per_s(step)
        extra = "  ".join(f"{key} {value:.4g}" for key, value in fields.items() if not math.isnan(value))
        if self._bar is not None:
            self._bar.update(self._task, completed=step, rate=f"{rate:,.0f} steps/s", extra=extra)
        elif time.perf_counter() - self._last_line_s >= self._line_every_s or step >= self.total_steps:
            self._last_line_s = time.perf_counter()
            left_s = (self.total_steps - step) / max(rate, 1e-9)
            self._console.print(
                f"{step:,}/{self.total_steps:,} steps  {rate:,.0f} steps/s  {left_s:.0f} s left  {extra}",
                markup=False,
                highlight=False,
                soft_wrap=True,
            )

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()


def print_result(result: Mapping[str, Any]) -> None:
    """Print the last line of a run: ``result {json}``. NaN and infinities become null, which JSON allows."""

    def plain(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {str(key): plain(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [plain(each) for each in value]
        if isinstance(value, Path):
            return str(value)
        if isinstance(value, np.generic):
            value = value.item()
        return None if isinstance(value, float) and not math.isfinite(value) else value

    print("result " + json.dumps(plain(result)), flush=True)
