"""Scores of a run: scalars in its TensorBoard events, and the ``result {json}`` line in its output."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from clustergym.common.extras import require


class Scores:
    """The metric of one run. Can be read while the run is active."""

    def __init__(self, folder: Path, metric: str | None) -> None:
        self.folder, self.metric = folder, metric
        self._readers: dict[Path, Any] = {}

    def history(self) -> list[float]:
        """Values of the metric so far, in order of their steps. See :meth:`curve`."""
        return list(self.curve().values())

    def curve(self, folders: int = 1) -> dict[int, float]:
        """{step: value} of the metric so far.

        They come from the events in the run folder. If a trainer logs only to subfolders (one per agent or seed), they
        are the mean over the subfolders with the metric, at steps that all of them have. Empty while fewer than
        ``folders`` subfolders have it.
        """
        if self.metric is None or not self.folder.is_dir():
            return {}
        found = {}
        for folder in sorted({file.parent for file in self.folder.rglob("events.out.tfevents.*")}):
            values = self._scalars(folder)
            if values:
                found[folder] = values
        curves = [found[self.folder]] if self.folder in found else list(found.values())
        if len(curves) < folders or not curves:
            return {}
        steps = sorted(set.intersection(*(set(curve) for curve in curves)))
        return {step: sum(curve[step] for curve in curves) / len(curves) for step in steps}

    def _scalars(self, folder: Path) -> dict[int, float]:
        """{step: value}. Values that a resumed run logs again replace the earlier ones."""
        if folder not in self._readers:
            events = require("tensorboard.backend.event_processing.event_accumulator", "train")
            self._readers[folder] = events.EventAccumulator(str(folder), size_guidance={"scalars": 0})
        reader = self._readers[folder]
        reader.Reload()
        if self.metric not in reader.Tags()["scalars"]:
            return {}
        return {event.step: event.value for event in reader.Scalars(self.metric) if math.isfinite(event.value)}


def tags_of(folder: Path) -> set[str]:
    """Names of the scalars in the events of a folder and its subfolders."""
    events, found = require("tensorboard.backend.event_processing.event_accumulator", "train"), set[str]()
    for each in {file.parent for file in folder.rglob("events.out.tfevents.*")}:
        reader = events.EventAccumulator(str(each), size_guidance={"scalars": 0})
        reader.Reload()
        found |= set(reader.Tags()["scalars"])
    return found


def last_result(output: Path) -> dict[str, Any] | None:
    """The JSON of the last ``result {…}`` line in the output of a run, or None."""
    if not output.is_file():
        return None
    with open(output, "rb") as file:
        file.seek(0, 2)
        file.seek(max(0, file.tell() - (1 << 20)))
        lines = file.read().decode("utf-8", "replace").splitlines()
    for line in reversed(lines):
        if line.startswith("result {"):
            try:
                result = json.loads(line.removeprefix("result "))
            except ValueError:
                return None
            return result if isinstance(result, dict) else None
    return None


def score(metric: str | None, result: dict[str, Any] | None, history: list[float]) -> float | None:
    """Score of a run: the metric in its result line, otherwise the last value that it logged."""
    if metric is None:
        return None
    value = (result or {}).get(metric)
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    return history[-1] if history else None
