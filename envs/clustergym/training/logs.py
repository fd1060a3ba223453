"""Logs of a run: TensorBoard, Weights & Biases and the progress bar."""

from __future__ import annotations

import importlib
import math
import os
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress
from torch.utils.tensorboard import SummaryWriter

from clustergym.common.files import write_atomically


def open_tensorboard(folder: Path, config: Mapping[str, Any], start_step: int) -> SummaryWriter:
    """A writer that logs the hyperparameters. Older entries of the folder after ``start_step`` are hidden."""
    # TensorBoard orders event files by the second of their creation, so a resumed run must begin in another second.
    while any(file.name.split(".")[3] == str(int(time.time())) for file in folder.glob("events.out.tfevents.*")):
        time.sleep(0.01)
    writer = SummaryWriter(str(folder), purge_step=start_step + 1 if start_step else 0)
    if not start_step:
        rows = "\n".join(f"|{key}|{value}|" for key, value in config.items())
        writer.add_text("hyperparameters", f"|param|value|\n|-|-|\n{rows}")
    return writer


def open_wandb(folder: Path, config: Mapping[str, Any], resume: bool) -> Any:
    """A run in Weights & Biases. Its random id is stored in the run folder, and only a resumed run uses it again.

    Without an account, or with ``WANDB_MODE=offline``, the run is recorded in the folder for ``wandb sync``.
    """
    wandb = importlib.import_module("wandb")
    settings: dict[str, Any] = {"name": folder.name, "dir": str(folder), "config": dict(config), "save_code": True}
    if not os.environ.get("WANDB_SWEEP_ID"):  # a sweep chooses project and id itself
        file = folder / "wandb_id.txt"
        known = resume and file.exists()
        if not known:
            write_atomically(file, secrets.token_hex(8) + "\n")
        settings["project"] = os.environ.get("WANDB_PROJECT", "clustergym")
        settings |= {"id": file.read_text().strip(), "resume": "allow" if known else "never"}
    try:
        return wandb.init(**settings)
    except wandb.errors.UsageError as reason:
        Console(stderr=True).print(f"wandb: {reason}; recording offline in {folder}", markup=False, highlight=False)
        return wandb.init(**settings | {"resume": None}, mode="offline")


class Progress:
    """Progress bar on a terminal; otherwise one line every 30 s. Written to standard error."""

    def __init__(self, total_steps: int, start_step: int) -> None:
        self.total_steps, self._start_step = total_steps, start_step
        self._start_s = self._last_line_s = time.perf_counter()
        self._console = Console(stderr=True)
        self._bar: RichProgress | None = None
        if self._console.is_terminal:
            columns = BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn()
            self._bar = RichProgress(*columns, console=self._console)
            self._task: TaskID = self._bar.add_task("", total=total_steps, completed=start_step)
            self._bar.start()

    def steps_per_s(self, step: int) -> float:
        """Steps per second of this process. Steps before a resume do not count."""
        return (step - self._start_step) / max(time.perf_counter() - self._start_s, 1e-9)

    def update(self, step: int, shown: Mapping[str, float]) -> None:
        """Show the step, the speed, the time left, and values that are not NaN."""
        rate = self.steps_per_s(step)
        values = "  ".join(f"{key} {value:.4g}" for key, value in shown.items() if not math.isnan(value))
        if self._bar is not None:
            self._bar.update(self._task, completed=step, description=f"{rate:,.0f} steps/s  {values}")
        elif time.perf_counter() - self._last_line_s >= 30 or step >= self.total_steps:
            self._last_line_s = time.perf_counter()
            left = f"{(self.total_steps - step) / max(rate, 1e-9):.0f} s left"
            line = f"{step:,}/{self.total_steps:,} steps  {rate:,.0f} steps/s  {left}  {values}"
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()


def read_scalars(folder: Path, tag: str) -> tuple[list[int], list[float]]:
    """Read one TensorBoard tag of a run as (steps, values)."""
    reader = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    events = reader.EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    tags = events.Tags()["scalars"]
    if tag not in tags:
        raise KeyError(f"{folder} has no scalar {tag!r}: it has {', '.join(sorted(tags)) or 'none'}")
    found = events.Scalars(tag)
    return [event.step for event in found], [event.value for event in found]
