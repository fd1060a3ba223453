"""Logging of scalars, text and images to TensorBoard and Weights & Biases."""

from __future__ import annotations

import importlib
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from rich.console import Console


class RunLogger:
    """Writes to TensorBoard, and with ``track`` also to Weights & Biases.

    ``WANDB_MODE=offline`` is respected. Without an account, the run is recorded offline for a later ``wandb sync``.
    In a wandb sweep (``WANDB_SWEEP_ID``), a run is always tracked.

    Args:
        folder: Run folder.
        config: Hyperparameters, logged as a table.
        track: Also log to Weights & Biases.
        project: Project in Weights & Biases.
        entity: Team in Weights & Biases.
        start_step: Step of the checkpoint that the run resumes from. Later entries of the interrupted run are hidden.
        enabled: False on all ranks except 0; nothing is logged then.
        name: Name of the run in Weights & Biases, needed if one process logs several runs. Default: the folder's name.
    """

    def __init__(
        self,
        folder: Path,
        config: Mapping[str, Any],
        track: bool = False,
        project: str = "clustergym",
        start_step: int = 0,
        enabled: bool = True,
        name: str | None = None,
        entity: str | None = None,
    ) -> None:
        self._writer: Any = None
        self._wandb: Any = None
        if not enabled:
            return
        from torch.utils.tensorboard import SummaryWriter

        _wait_for_new_timestamp(folder)
        self._writer = SummaryWriter(str(folder), purge_step=start_step + 1 if start_step else None)
        if not start_step:
            rows = "\n".join(f"|{key}|{value}|" for key, value in config.items())
            self._writer.add_text("hyperparameters", f"|param|value|\n|-|-|\n{rows}")
        if track or os.environ.get("WANDB_SWEEP_ID"):
            self._wandb = _init_wandb(folder, config, project, name, entity)

    def scalar(self, tag: str, value: float, step: int) -> None:
        self.scalars({tag: value}, step)

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        if self._writer is None:
            return
        for tag, value in values.items():
            self._writer.add_scalar(tag, value, step)
        if self._wandb is not None:
            self._wandb.log(dict(values), step=step)

    def text(self, tag: str, text: str, step: int) -> None:
        if self._writer is not None:
            self._writer.add_text(tag, text, step)

    def image(self, tag: str, pixels: np.ndarray, step: int) -> None:
        """Log an image of shape (height, width, 3) and dtype uint8."""
        if self._writer is not None:
            self._writer.add_image(tag, pixels, step, dataformats="HWC")
        if self._wandb is not None:
            wandb = importlib.import_module("wandb")
            self._wandb.log({tag: wandb.Image(pixels)}, step=step)

    def flush(self) -> None:
        """Write all entries to disk. Call this before saving a checkpoint, so that the logs are never behind it."""
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        if self._wandb is not None:
            self._wandb.finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _wait_for_new_timestamp(folder: Path) -> None:
    """Wait until no event file in the folder was created in the current second.

    TensorBoard reads event files in the order of their names: creation second, then host and process id. The file of a
    run that resumes within the same second could be read first, and the entries to hide would stay visible.
    """
    stamps = {file.name.split(".")[3] for file in folder.glob("events.out.tfevents.*")}
    while str(int(time.time())) in stamps:
        time.sleep(0.01)


def _init_wandb(folder: Path, config: Mapping[str, Any], project: str, name: str | None, entity: str | None) -> Any:
    import wandb

    settings: dict[str, Any] = {
        "name": name or folder.name,
        "dir": str(folder),
        "config": dict(config),
    }
    if not os.environ.get("WANDB_SWEEP_ID"):
        # A sweep sets these itself. The id is derived from the folder, so a resumed run appends to the same wandb run.
        identifier = re.sub(r"[^\w-]", "-", name or folder.resolve().name)
        settings |= {"project": project, "entity": entity, "id": identifier, "resume": "allow"}
    if name is not None:
        settings["reinit"] = "create_new"
    try:
        return wandb.init(**settings)
    except wandb.errors.UsageError as reason:
        Console(stderr=True).print(f"wandb: {reason}; recording offline in {folder}", markup=False, highlight=False)
        return wandb.init(**settings, mode="offline")


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
