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
        """Values of the metric so far, in order of their steps; a resumed run's later values replace what it logged before."""
        if self.metric is None or not self.folder.is_dir():
            return []
        events = import_module("tensorboard.backend.event_processing.event_accumulator")
        values: dict[int, float] = {}
        # Trainers may log into folders below (one an agent); a tag is looked for in all of them.
        for path in sorted({file.parent for file in self.folder.rglob("events.out.tfevents.*")}):
            if path not in self._readers:
                self._readers[path] = events.EventAccumulator(str(path), size_guidance={"scalars": 0})
            reader = self._readers[path]
            reader.Reload()
            if self.metric in reader.Tags()["scalars"]:
                values |= {event.step: event.value for event in reader.Scalars(self.metric)}
        return [values[step] for step in sorted(values) if math.isfinite(values[step])]


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
