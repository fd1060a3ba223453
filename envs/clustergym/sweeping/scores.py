"""How a run did: scalars of its TensorBoard events, and the ``result {json}`` line at the end of its output."""

from __future__ import annotations

import json
import math
from importlib import import_module
from pathlib import Path
from typing import Any


class Scores:
    """The metric of one run, read as it grows."""

    def __init__(self, folder: Path, metric: str | None) -> None:
        self.folder, self.metric = folder, metric
        self._readers: dict[Path, Any] = {}

    def history(self) -> list[float]:
        """Values of the metric so far, in order of their steps.

        Read from the run's own folder. Where a trainer logs only into folders below (one an agent), it is the mean over those that
        log the metric, at steps that all of them have reached.
        """
        if self.metric is None or not self.folder.is_dir():
            return []
        found = {}
        for folder in sorted({file.parent for file in self.folder.rglob("events.out.tfevents.*")}):
            values = self._scalars(folder)
            if values:
                found[folder] = values
        curves = [found[self.folder]] if self.folder in found else list(found.values())
        steps = sorted(set.intersection(*(set(curve) for curve in curves))) if curves else []
        return [sum(curve[step] for curve in curves) / len(curves) for step in steps]

    def _scalars(self, folder: Path) -> dict[int, float]:
        """{step: value}; what a resumed run logs again takes the place of what it had logged before."""
        if folder not in self._readers:
            events = import_module("tensorboard.backend.event_processing.event_accumulator")
            self._readers[folder] = events.EventAccumulator(str(folder), size_guidance={"scalars": 0})
        reader = self._readers[folder]
        reader.Reload()
        if self.metric not in reader.Tags()["scalars"]:
            return {}
        return {event.step: event.value for event in reader.Scalars(self.metric) if math.isfinite(event.value)}


def last_result(output: Path) -> dict[str, Any] | None:
    """The JSON of the last ``result {…}`` line of a run's output; None where the run did not come that far."""
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
    """The run's score: what its result says by that name, else the last value it logged."""
    if metric is None:
        return None
    said = (result or {}).get(metric)
    if isinstance(said, (int, float)) and not isinstance(said, bool) and math.isfinite(said):
        return float(said)
    return history[-1] if history else None
