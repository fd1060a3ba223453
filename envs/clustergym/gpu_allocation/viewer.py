"""Picture of a shared GPU over time: the share of each pod, the used part of it, and missed objectives.

Time runs to the right. Between two decisions the running pods are stacked from 0 to 100 % of the GPU. Each owner has a
colour: bright for the used part of a share, dark for the idle part. A pod that missed its objective has an orange
outline, and a cross at its start. Needs the extra ``[render]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from clustergym.common.canvas import (
    BACKGROUND,
    CARD,
    FAINT,
    MUTED,
    ORANGE,
    TEXT,
    TRACK,
    Canvas,
    Colour,
    Window,
    pygame,
    to_array,
)
from clustergym.gpu_allocation import state

WIDTH, HEIGHT = 1100, 560
SHOWN = 48
"""Number of decisions in a picture. Older ones are dropped on the left."""
# Twelve hues that are easy to tell apart on a dark background. None is near orange, the colour of a miss.
OWNERS: tuple[Colour, ...] = (
    (120, 170, 240), (110, 200, 140), (205, 140, 220), (90, 200, 210), (225, 200, 110), (150, 150, 240),
    (160, 210, 100), (230, 140, 170), (130, 180, 180), (180, 170, 140), (110, 140, 200), (200, 200, 200),
)  # fmt: skip


class PodShare(NamedTuple):
    """The share of one pod, in % of the GPU."""

    owner: int
    cores: float
    usage: float
    met: bool
    started_s: float


@dataclass(frozen=True)
class Snapshot:
    """The GPU directly after a decision."""

    time_s: float
    pods: list[PodShare]
    """Running pods; the newest is last."""
    reward: float
    qos: float
    """Share of the decisions so far whose pod met its objective."""


class Recorder:
    """Collects snapshots of environment 0 of a batch in one episode: call ``before`` and ``after`` around each step."""

    def __init__(self) -> None:
        self.snapshots: list[Snapshot] = []
        self._started_s: dict[tuple[float, float], float] = {}
        self._running: list[PodShare] = []
        self._met: list[bool] = []

    def before(self, s: state.State) -> None:
        """Note the running pods. Some of them may end before the step returns."""
        self._running = [
            PodShare(int(owner), cores, usage, met > 0.5, self._started_s.get((owner, end), 0.0))
            for owner, end, cores, usage, met in _pods(s)
        ]

    def after(self, s: state.State) -> None:
        """Add the state that the decision led to: the pods from before, and the new one."""
        out = s.outcome[0].tolist()
        now, met = out[state.OUTCOME_TIME], out[state.OUTCOME_MET] > 0.5
        self._met.append(met)
        new = PodShare(int(out[state.OUTCOME_OWNER]), out[state.OUTCOME_CORES], out[state.OUTCOME_USAGE], met, now)
        for owner, end, *_ in _pods(s):
            self._started_s.setdefault((owner, end), now)
        qos = sum(self._met) / len(self._met)
        self.snapshots.append(Snapshot(now, [*self._running, new], out[state.OUTCOME_REWARD], qos))
        del self.snapshots[:-SHOWN]


def _pods(s: state.State) -> list[list[float]]:
    """Owner, end, cores, usage and whether the objective is met, of each running pod. The first two identify a pod."""
    columns = [state.POD_OWNER, state.POD_END, state.POD_CORES, state.POD_USAGE, state.POD_MET]
    rows: list[list[float]] = s.pods[0, : s.counters[0, state.COUNT_PODS], columns].T.tolist()
    return rows


def dark(colour: Colour) -> Colour:
    """The colour of the idle part of a share."""
    return (colour[0] * 2 // 5, colour[1] * 2 // 5, colour[2] * 2 // 5)


def chart_area(width: int = WIDTH, height: int = HEIGHT) -> pygame.Rect:
    """Position of the chart of shares over time."""
    return pygame.Rect(64, 92, width - 64 - 24, height - 92 - 108)


def columns(snapshots: Sequence[Snapshot], area: pygame.Rect) -> list[pygame.Rect]:
    """The column of each snapshot: from its decision to the next one. The last column has the mean width."""
    times = [shot.time_s for shot in snapshots]
    span = max(times[-1] - times[0], 1.0)
    end = times[-1] + span / max(len(times) - 1, 1)
    edges = [area.x + round(area.w * (t - times[0]) / (end - times[0])) for t in [*times, end]]
    return [pygame.Rect(a, area.y, max(b - a, 1), area.h) for a, b in pairwise(edges)]


def paint(snapshots: Sequence[Snapshot], width: int = WIDTH, height: int = HEIGHT) -> pygame.Surface:
    """The picture as a surface."""
    surface = pygame.Surface((width, height), 0, 32)
    surface.fill(BACKGROUND)
    canvas = Canvas(surface)
    area = chart_area(width, height)
    canvas.box(area.inflate(12, 12), CARD)
    canvas.text("GPU allocation", 24, 28, 22, TEXT, bold=True)
    if snapshots:
        _heading(canvas, snapshots[-1], width)
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


def _heading(canvas: Canvas, shot: Snapshot, width: int) -> None:
    new = shot.pods[-1]
    objective = "met" if new.met else "missed"
    last = f"last: owner {new.owner} got {new.cores:.0f} %, used {new.usage:.0f} %, objective {objective}"
    canvas.text(last, 24, 58, 14, TEXT if new.met else ORANGE)
    held, used = sum(pod.cores for pod in shot.pods), sum(pod.usage for pod in shot.pods)
    totals = f"reward {shot.reward:+.2f}    QoS so far {100 * shot.qos:.1f} %    held {held:.0f} %, used {used:.0f} %"
    canvas.text(totals, width - 24, 28, 14, MUTED, align=1)


def _stack(canvas: Canvas, shot: Snapshot, column: pygame.Rect) -> None:
    """The pods of one column on top of each other, in the order of the simulator."""
    bottom = 0.0
    for pod in shot.pods:
        colour = OWNERS[pod.owner % len(OWNERS)]
        low = column.bottom - round(column.h * bottom / 100)
        high = column.bottom - round(column.h * (bottom + pod.cores) / 100)
        share = pygame.Rect(column.x, high, column.w, max(low - high, 1))
        used = round(share.h * min(pod.usage / max(pod.cores, 1e-6), 1.0))
        pygame.draw.rect(canvas.surface, dark(colour), share)
        pygame.draw.rect(canvas.surface, colour, (share.x, share.bottom - used, share.w, used))
        if not pod.met:
            pygame.draw.rect(canvas.surface, ORANGE, share, 2)
            if pod.started_s >= shot.time_s:
                _cross(canvas.surface, share.x + 7, share.centery)
        else:
            pygame.draw.line(canvas.surface, BACKGROUND, share.topleft, (share.right - 1, share.top))
        bottom += pod.cores


def _cross(surface: pygame.Surface, x: int, y: int) -> None:
    for dx, dy in ((5, 5), (5, -5)):
        pygame.draw.line(surface, ORANGE, (x - dx, y - dy), (x + dx, y + dy), 3)


def _time_axis(canvas: Canvas, snapshots: Sequence[Snapshot], area: pygame.Rect) -> None:
    every = max(1, len(snapshots) // 8)
    last_x = -100
    for shot, column in list(zip(snapshots, columns(snapshots, area), strict=True))[::every]:
        if column.x - last_x > 60:
            pygame.draw.line(canvas.surface, FAINT, (column.x, area.bottom), (column.x, area.bottom + 5))
            canvas.text(f"{shot.time_s / 60:.0f} min", column.x, area.bottom + 16, 11, MUTED, align=0.5)
            last_x = column.x


def _legend(canvas: Canvas, area: pygame.Rect, snapshots: Sequence[Snapshot]) -> None:
    y, x = area.bottom + 52, area.x
    owners = sorted({pod.owner for shot in snapshots for pod in shot.pods})
    for owner in owners[: len(OWNERS)]:
        pygame.draw.rect(canvas.surface, OWNERS[owner % len(OWNERS)], (x, y - 6, 14, 12))
        x += 20 + canvas.text(f"owner {owner}", x + 20, y, 12, MUTED) + 16
    y, x = y + 26, area.x
    for words, fill, outline in (
        ("used", OWNERS[0], None),
        ("held, idle", dark(OWNERS[0]), None),
        ("objective missed", CARD, ORANGE),
    ):
        pygame.draw.rect(canvas.surface, fill, (x, y - 6, 14, 12))
        if outline is not None:
            pygame.draw.rect(canvas.surface, outline, (x, y - 6, 14, 12), 2)
        x += 20 + canvas.text(words, x + 20, y, 12, MUTED) + 16
    _cross(canvas.surface, x + 7, y)
    canvas.text("where it began", x + 20, y, 12, MUTED)


def draw(snapshots: Sequence[Snapshot], width: int = WIDTH, height: int = HEIGHT) -> npt.NDArray[np.uint8]:
    """The picture as (height, width, 3) RGB. Equal snapshots give equal pictures."""
    return to_array(paint(snapshots, width, height))


def open_window(fps: float = 0.0) -> Window:
    """A window whose ``show`` takes a list of snapshots."""
    return Window(WIDTH, HEIGHT, paint, fps)
