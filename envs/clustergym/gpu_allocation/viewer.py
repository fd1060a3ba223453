"""Picture of a shared GPU: who held which share of it over time, how much of that was used, and who missed an objective.

Time runs to the right; between two decisions the pods that ran are stacked from 0 to 100 % of the GPU, one colour an owner:
full where the share was used, dim where it was idle. A pod that missed its objective is outlined in orange and marked with
a cross where it began.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from clustergym.gpu_allocation import dynamics
from clustergym.gpu_allocation.batch import AllocationBatch
from clustergym.moe_placement.viewer import (
    BACKGROUND,
    CARD,
    FAINT,
    MUTED,
    ORANGE,
    TEXT,
    TRACK,
    Colour,
    Window,
    _Canvas,
    pygame,
)

WIDTH, HEIGHT = 1100, 560
SHOWN = 48
"""Decisions in a picture; older ones leave it on the left."""
# Twelve hues that stay apart from each other on a dark ground; none is the orange of a miss.
OWNERS: tuple[Colour, ...] = (
    (120, 170, 240), (110, 200, 140), (205, 140, 220), (90, 200, 210), (225, 200, 110), (150, 150, 240), (160, 210, 100),
    (230, 140, 170), (130, 180, 180), (180, 170, 140), (110, 140, 200), (200, 200, 200),
)  # fmt: skip


@dataclass(frozen=True)
class Snapshot:
    """The GPU just after a decision."""

    time_s: float
    pods: npt.NDArray[np.float32]
    """(n, 5): owner, cores, usage, whether the objective is met, when it began (s); the newest last"""
    reward: float
    qos: float
    """Share of decisions so far whose pod met its objective."""


class Recorder:
    """Keeps what a picture shows of environment 0 of a batch: call :meth:`note` after each step, :meth:`clear` at a reset."""

    def __init__(self, batch: AllocationBatch) -> None:
        self.batch = batch
        self.snapshots: list[Snapshot] = []
        self._begun: dict[tuple[float, float], float] = {}
        self._met = 0
        self._decisions = 0

    def clear(self) -> None:
        self.snapshots, self._begun, self._met, self._decisions = [], {}, 0, 0

    def before(self) -> npt.NDArray[np.float32]:
        """The pods that run while a decision is taken: call it before the step, whose end may see some of them gone."""
        n = int(self.batch.state["counters"][0, 1])
        return self.batch.state["pods"][0, :n].numpy().copy()

    def note(self, before: npt.NDArray[np.float32]) -> None:
        """Add the GPU as the last decision left it: the pods of before, and the new one."""
        out = self.batch.outcome[0].numpy()
        now = float(out[dynamics.O_TIME])
        self._decisions += 1
        self._met += int(out[dynamics.O_MET] > 0.5)
        rows = []
        for pod in before:
            key = (float(pod[dynamics.OWNER]), float(pod[dynamics.END]))
            rows.append(
                [
                    pod[dynamics.OWNER],
                    pod[dynamics.CORES],
                    pod[dynamics.USAGE],
                    pod[dynamics.MET],
                    self._begun.get(key, 0.0),
                ]
            )
        new = [out[dynamics.O_OWNER], out[dynamics.O_CORES], out[dynamics.O_USAGE], out[dynamics.O_MET], now]
        rows.append(new)
        running = self.batch.state["pods"][0, : int(self.batch.state["counters"][0, 1])].numpy()
        for pod in running:
            self._begun.setdefault((float(pod[dynamics.OWNER]), float(pod[dynamics.END])), now)
        pods = np.array(rows, np.float32)
        self.snapshots.append(Snapshot(now, pods, float(out[dynamics.O_REWARD]), self._met / self._decisions))
        del self.snapshots[:-SHOWN]


def dim(colour: Colour) -> Colour:
    """The colour of a share that its owner holds and does not use."""
    return (colour[0] * 2 // 5, colour[1] * 2 // 5, colour[2] * 2 // 5)


def chart_area(width: int = WIDTH, height: int = HEIGHT) -> pygame.Rect:
    """Where shares over time are drawn."""
    return pygame.Rect(64, 92, width - 64 - 24, height - 92 - 108)


def columns(snapshots: Sequence[Snapshot], area: pygame.Rect) -> list[pygame.Rect]:
    """The full-height column of each snapshot: from its decision to the next; the last as wide as the mean."""
    times = [shot.time_s for shot in snapshots]
    span = max(times[-1] - times[0], 1.0)
    end = times[-1] + span / max(len(times) - 1, 1)
    edges = [area.x + round(area.w * (t - times[0]) / (end - times[0])) for t in [*times, end]]
    return [pygame.Rect(a, area.y, max(b - a, 1), area.h) for a, b in pairwise(edges)]


def paint(snapshots: Sequence[Snapshot], width: int = WIDTH, height: int = HEIGHT) -> pygame.Surface:
    """The picture as a surface."""
    surface = pygame.Surface((width, height), 0, 32)
    surface.fill(BACKGROUND)
    canvas = _Canvas(surface, 1.0)
    area = chart_area(width, height)
    canvas.box(area.inflate(12, 12), CARD)
    canvas.text("GPU allocation", 24, 28, 22, TEXT, bold=True)
    if snapshots:
        _heading(canvas, snapshots, width)
        for shot, column in zip(snapshots, columns(snapshots, area), strict=True):
            _stack(canvas, shot, column)
    for percent in (0, 25, 50, 75, 100):
        y = area.bottom - round(area.h * percent / 100)
        pygame.draw.line(surface, TRACK, (area.x, y), (area.right, y))
        canvas.text(f"{percent} %", area.x - 12, y, 11, MUTED, align=1)
    if snapshots:
        _time_axis(canvas, snapshots, area)
    _legend(canvas, area, snapshots)
    return surface


def _heading(canvas: _Canvas, snapshots: Sequence[Snapshot], width: int) -> None:
    shot = snapshots[-1]
    owner, cores, usage, met, _ = shot.pods[-1]
    told = (
        f"last: owner {int(owner)} got {cores:.0f} %, used {usage:.0f} %, objective {'met' if met > 0.5 else 'missed'}"
    )
    canvas.text(told, 24, 58, 14, TEXT if met > 0.5 else ORANGE)
    held, used = float(shot.pods[:, 1].sum()), float(shot.pods[:, 2].sum())
    facts = f"reward {shot.reward:+.2f}    QoS so far {100 * shot.qos:.1f} %    held {held:.0f} %, used {used:.0f} %"
    canvas.text(facts, width - 24, 28, 14, MUTED, align=1)


def _stack(canvas: _Canvas, shot: Snapshot, column: pygame.Rect) -> None:
    """The pods of one span of time on top of each other, the longest-running at the bottom."""
    bottom = 0.0
    for owner, cores, usage, met, began in shot.pods:
        colour = OWNERS[int(owner) % len(OWNERS)]
        low = column.bottom - round(column.h * bottom / 100)
        high = column.bottom - round(column.h * (bottom + cores) / 100)
        share = pygame.Rect(column.x, high, column.w, max(low - high, 1))
        used = round(share.h * min(usage / max(cores, 1e-6), 1.0))
        pygame.draw.rect(canvas.surface, dim(colour), share)
        pygame.draw.rect(canvas.surface, colour, (share.x, share.bottom - used, share.w, used))
        if met < 0.5:
            pygame.draw.rect(canvas.surface, ORANGE, share, 2)
            if began >= shot.time_s:
                _cross(canvas.surface, share.x + 7, share.centery)
        else:
            pygame.draw.line(canvas.surface, BACKGROUND, share.topleft, (share.right - 1, share.top))
        bottom += float(cores)


def _cross(surface: pygame.Surface, x: int, y: int) -> None:
    for a, b in (((-5, -5), (5, 5)), ((-5, 5), (5, -5))):
        pygame.draw.line(surface, ORANGE, (x + a[0], y + a[1]), (x + b[0], y + b[1]), 3)


def _time_axis(canvas: _Canvas, snapshots: Sequence[Snapshot], area: pygame.Rect) -> None:
    lanes = columns(snapshots, area)
    every = max(1, len(snapshots) // 8)
    taken = -100
    for shot, lane in list(zip(snapshots, lanes, strict=True))[::every]:
        if lane.x - taken > 60:
            pygame.draw.line(canvas.surface, FAINT, (lane.x, area.bottom), (lane.x, area.bottom + 5))
            canvas.text(f"{shot.time_s / 60:.0f} min", lane.x, area.bottom + 16, 11, MUTED, align=0.5)
            taken = lane.x


def _legend(canvas: _Canvas, area: pygame.Rect, snapshots: Sequence[Snapshot]) -> None:
    y, x = area.bottom + 52, area.x
    owners = sorted({int(owner) for shot in snapshots for owner in shot.pods[:, 0]})
    for owner in owners[: len(OWNERS)]:
        pygame.draw.rect(canvas.surface, OWNERS[owner % len(OWNERS)], (x, y - 6, 14, 12))
        x += 20 + canvas.text(f"owner {owner}", x + 20, y, 12, MUTED) + 16
    y, x = y + 26, area.x
    for word, fill, edge in (
        ("used", OWNERS[0], None),
        ("held, idle", dim(OWNERS[0]), None),
        ("objective missed", CARD, ORANGE),
    ):
        pygame.draw.rect(canvas.surface, fill, (x, y - 6, 14, 12))
        if edge is not None:
            pygame.draw.rect(canvas.surface, edge, (x, y - 6, 14, 12), 2)
        x += 20 + canvas.text(word, x + 20, y, 12, MUTED) + 16
    _cross(canvas.surface, x + 7, y)
    canvas.text("where it began", x + 20, y, 12, MUTED)


def draw(snapshots: Sequence[Snapshot], width: int = WIDTH, height: int = HEIGHT) -> npt.NDArray[np.uint8]:
    """The picture as (height, width, 3) RGB; the same snapshots always give the same picture."""
    pixels = np.empty((height, width, 3), np.uint8)
    pygame.image.frombuffer(pixels.data, (width, height), "RGB").blit(paint(snapshots, width, height), (0, 0))
    return pixels


def open_window(fps: float = 0.0) -> Window:
    """A window whose ``show`` takes snapshots."""
    return Window(WIDTH, HEIGHT, fps, paint)
