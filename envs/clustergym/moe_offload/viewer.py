"""Picture of expert offloading: the slots of all layers, what is on its way, and a timeline of links and stall.

Each cell is an expert: rows are layers, columns are experts. A resident is the brighter the more it was used lately;
with several GPUs, each has a colour. The timeline shows the last milliseconds: loads on each link above, waiting and
computing below. Needs the extra ``[render]``.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from clustergym.common.canvas import (
    BACKGROUND,
    BLUE,
    CARD,
    CELL,
    FAINT,
    MUTED,
    ORANGE,
    TEXT,
    TRACK,
    WHITE,
    Canvas,
    Colour,
    Window,
    pygame,
    to_array,
)
from clustergym.moe_offload.batch import OffloadBatch
from clustergym.moe_offload.kernels import state as names
from clustergym.moe_offload.kernels.rows import MIDDLE

WIDTH, HEIGHT = 1100, 640
WINDOW_MS = 6.0
"""The timeline shows this much."""
GREEN: Colour = (110, 200, 140)
PURPLE: Colour = (205, 140, 220)
GPUS: tuple[Colour, ...] = ((120, 170, 240), (110, 200, 140), (225, 200, 110), (205, 140, 220), (90, 200, 210))
DEMAND, PREFETCH, MOVE, STALL, COMPUTE = "demand load", "prefetch", "move", "stall", "compute"
KINDS: dict[str, Colour] = {DEMAND: ORANGE, PREFETCH: BLUE, MOVE: PURPLE, STALL: (225, 85, 85), COMPUTE: GREEN}


class Span(NamedTuple):
    """Something that takes time, on a line: a GPU's link, or −1 for the layers."""

    line: int
    kind: str
    begin: float
    end: float


class Frame(NamedTuple):
    """What a picture shows of one environment."""

    where: npt.NDArray[np.int8]
    """(L, E)"""
    use: npt.NDArray[np.float64]
    """(L, E) decayed counts"""
    needed: npt.NDArray[np.bool_]
    """(L, E) used by this visit"""
    fetched: npt.NDArray[np.bool_]
    flying: npt.NDArray[np.bool_]
    token: int
    layer: int
    mode: int
    held: int
    slots: int
    gpus: int
    now: float
    spans: list[Span]
    stall_ms: float
    tokens_per_s: float
    hit_rate: float
    expert: int
    """Flat id of the last decision's expert, or −1."""


class Recorder:
    """Notes the transfers of environment 0: call ``record`` after a reset and after each step."""

    def __init__(self, batch: OffloadBatch) -> None:
        self.batch = batch
        self.spans: deque[Span] = deque(maxlen=400)
        self._arrives = np.zeros(batch.state.arrives.shape[1:])
        self._prefetches = self._moves = 0
        self._next = self._stall = 0.0

    def record(self) -> None:
        """Note what is new since the last call."""
        s, task = self.batch.state, self.batch.task
        acted = int(s.outcome[0, names.OUT_EXPERT])
        chosen = divmod(acted, self.batch.n_experts) if acted >= 0 else None
        prefetched = s.stats[0, names.PREFETCHES] > self._prefetches
        moved = s.stats[0, names.MOVES] > self._moves
        for l, e in np.argwhere(s.arrives[0] != self._arrives).tolist():
            end, kind, duration = float(s.arrives[0, l, e]), DEMAND, task.load_ms
            if (l, e) == chosen and prefetched:
                kind = PREFETCH
            elif (l, e) == chosen and moved:
                kind, duration = MOVE, task.peer_ms
            self.spans.append(Span(max(int(s.where[0, l, e]), 0), kind, end - duration, end))
        self._arrives = s.arrives[0].copy()
        self._prefetches, self._moves = int(s.stats[0, names.PREFETCHES]), int(s.stats[0, names.MOVES])
        now, ready, following = s.time[0, [names.NOW, names.READY, names.NEXT]].tolist()
        stall = float(s.time[0, names.STALL])
        if now > self._next:
            # Visits without a decision: their sums are known, not their order.
            waited = max(stall - self._stall - (ready - now), 0.0)
            self.spans.append(Span(-1, STALL, self._next, self._next + waited))
            self.spans.append(Span(-1, COMPUTE, self._next + waited, now))
        self._stall = stall
        if following > self._next:
            self.spans.append(Span(-1, STALL, now, ready))
            self.spans.append(Span(-1, COMPUTE, ready, following))
            self._next = following

    def frame(self) -> Frame:
        """What the picture shows now."""
        s, task, totals = self.batch.state, self.batch.task, self.batch.totals()
        token, layer = int(s.clock[0, names.TOKEN]), int(s.clock[0, names.LAYER])
        age = np.minimum(token - np.maximum(s.last[0], -1), names.MAX_AGE - 1)
        needed = np.zeros(s.where.shape[1:], bool)
        needed[layer] = s.last[0, layer] == token
        return Frame(
            where=s.where[0].copy(),
            use=s.counts[0, :, :, MIDDLE] * task.decay[MIDDLE][np.maximum(age, 0)].astype(np.float64),
            needed=needed,
            fetched=s.fetched[0].copy(),
            flying=(s.where[0] >= 0) & (s.arrives[0] > s.time[0, names.READY]),
            token=token,
            layer=layer,
            mode=int(s.clock[0, names.MODE]),
            held=int(s.held[0].sum()),
            slots=task.slots * task.pools * task.gpus,
            gpus=task.gpus,
            now=float(s.time[0, names.NEXT]),
            spans=list(self.spans),
            stall_ms=float(totals["stall_ms"][0]),
            tokens_per_s=float(totals["tokens_per_s"][0]),
            hit_rate=float(totals["hit_rate"][0]),
            expert=-1 if s.outcome[0, names.OUT_NO_OP] else int(s.outcome[0, names.OUT_EXPERT]),
        )


def _blend(low: Colour, high: Colour, part: float) -> Colour:
    return tuple(round(a + (b - a) * part) for a, b in zip(low, high, strict=True))  # type: ignore[return-value]


def paint(frame: Frame, width: int = WIDTH, height: int = HEIGHT) -> pygame.Surface:
    """The picture as a surface."""
    surface = pygame.Surface((width, height), 0, 32)
    surface.fill(BACKGROUND)
    canvas = Canvas(surface)
    lines = frame.gpus + 1
    timeline = pygame.Rect(96, height - 74 - 26 * lines, width - 96 - 32, 26 * lines)
    grid = pygame.Rect(96, 96, width - 96 - 32, timeline.y - 96 - 62)
    _heading(canvas, frame, width)
    canvas.box(grid.inflate(14, 14), CARD)
    _experts(canvas, frame, grid)
    canvas.box(timeline.inflate(14, 14), CARD)
    _timeline(canvas, frame, timeline)
    _legend(canvas, frame, timeline.x, grid.bottom + 26, height - 26)
    return surface


def _heading(canvas: Canvas, frame: Frame, width: int) -> None:
    canvas.text("Expert offloading", 24, 28, 22, TEXT, bold=True)
    doing = {names.MODE_EVICT: "evict", names.MODE_LOAD: "prefetch or go on", names.MODE_OVER: "the text is complete"}
    place = f"token {frame.token}, layer {frame.layer}: {doing[frame.mode]}"
    canvas.text(place, 24, 60, 14, ORANGE if frame.mode == names.MODE_EVICT else TEXT)
    per_token = frame.stall_ms / max(frame.token, 1)
    stall, hits = f"stall {per_token:.2f} ms per token", f"hits {100 * frame.hit_rate:.0f} %"
    speed = f"{stall}    {frame.tokens_per_s:.0f} tokens/s    {hits}"
    canvas.text(speed, width - 32, 28, 14, MUTED, align=1)
    full = frame.held > frame.slots
    canvas.text(f"{frame.held} of {frame.slots} slots used", width - 32, 60, 14, ORANGE if full else MUTED, align=1)


def _experts(canvas: Canvas, frame: Frame, grid: pygame.Rect) -> None:
    layers, experts = frame.where.shape
    for l in range(layers):
        y, below = (grid.y + grid.h * i // layers for i in (l, l + 1))
        here = l == frame.layer
        if layers <= 32 or l % 4 == 0 or here:
            label = f"layer {l}" if here or l == 0 else f"{l}"
            canvas.text(label, grid.x - 16, (y + below) // 2, 11, TEXT if here else MUTED, bold=here, align=1)
        for e in range(experts):
            x, right = (grid.x + grid.w * i // experts for i in (e, e + 1))
            cell = pygame.Rect(x, y, max(right - x - 2, 1), max(below - y - 2, 1))
            gpu = int(frame.where[l, e])
            fill = CELL
            if gpu >= 0:
                colour = GPUS[gpu % len(GPUS)]
                fill = _blend(_blend(BACKGROUND, colour, 0.3), colour, min(1.6 * float(frame.use[l, e]), 1.0))
            pygame.draw.rect(canvas.surface, fill, cell, border_radius=2)
            if frame.flying[l, e]:
                pygame.draw.rect(canvas.surface, BLUE, cell, 2, border_radius=2)
            elif frame.fetched[l, e]:
                pygame.draw.rect(canvas.surface, BLUE, cell, 1, border_radius=2)
            if frame.needed[l, e]:
                pygame.draw.circle(canvas.surface, WHITE if gpu >= 0 else ORANGE, cell.center, max(2, cell.h // 5))
            if frame.expert == l * experts + e:
                pygame.draw.rect(canvas.surface, ORANGE if gpu < 0 else WHITE, cell.inflate(4, 4), 2, border_radius=3)


def _timeline(canvas: Canvas, frame: Frame, area: pygame.Rect) -> None:
    latest = max([span.end for span in frame.spans] + [frame.now, WINDOW_MS])
    first = latest - WINDOW_MS
    row = area.h // (frame.gpus + 1)

    def at(time: float) -> int:
        return area.x + round(area.w * (min(max(time, first), latest) - first) / WINDOW_MS)

    for g in range(frame.gpus + 1):
        y = area.y + row * g
        name = "layers" if g == frame.gpus else "link" if frame.gpus == 1 else f"link {g}"
        canvas.text(name, area.x - 16, y + row // 2, 11, MUTED, align=1)
        pygame.draw.rect(canvas.surface, TRACK, (area.x, y + row // 2 - 1, area.w, 2))
    for span in frame.spans:
        if span.end <= first or span.end <= span.begin:
            continue
        line = frame.gpus if span.line < 0 else span.line
        x, right = at(span.begin), at(span.end)
        thin = 6 if span.kind == MOVE else 3
        bar = pygame.Rect(x, area.y + row * line + thin, max(right - x - 1, 1), row - 2 * thin)
        pygame.draw.rect(canvas.surface, KINDS[span.kind], bar, border_radius=2)
    for ms in range(int(WINDOW_MS)):
        time = np.ceil(first) + ms
        if time <= latest:
            pygame.draw.line(canvas.surface, FAINT, (at(time), area.bottom), (at(time), area.bottom + 5))
            canvas.text(f"{time:.0f} ms", at(time), area.bottom + 16, 11, MUTED, align=0.5)


def _legend(canvas: Canvas, frame: Frame, x: int, upper: int, lower: int) -> None:
    """Cells above the timeline, bars below it."""
    left = x
    on_gpu = _blend(BACKGROUND, GPUS[0], 0.3)
    cells: list[tuple[str, Colour, Colour | None]] = [
        ("in host memory", CELL, None),
        ("on the GPU" if frame.gpus == 1 else "on GPU 0, 1, …", on_gpu, None),
        ("used often", GPUS[0], None),
        ("prefetched, not used yet (thick: on its way)", on_gpu, BLUE),
    ]
    for words, fill, outline in cells:
        box = pygame.Rect(x, upper - 6, 14, 12)
        pygame.draw.rect(canvas.surface, fill, box, border_radius=2)
        if outline is not None:
            pygame.draw.rect(canvas.surface, outline, box, 1, border_radius=2)
        x += 20 + canvas.text(words, x + 20, upper, 12, MUTED) + 16
    pygame.draw.circle(canvas.surface, WHITE, (x + 7, upper), 4)
    x += 20 + canvas.text("this layer needs it", x + 20, upper, 12, MUTED) + 16
    pygame.draw.rect(canvas.surface, WHITE, (x, upper - 6, 14, 12), 2, border_radius=2)
    canvas.text("last decision", x + 20, upper, 12, MUTED)
    x = left
    for kind, colour in KINDS.items():
        if kind == MOVE and frame.gpus == 1:
            continue
        pygame.draw.rect(canvas.surface, colour, (x, lower - 6, 14, 12), border_radius=2)
        x += 20 + canvas.text(kind, x + 20, lower, 12, MUTED) + 16


def draw(frame: Frame, width: int = WIDTH, height: int = HEIGHT) -> npt.NDArray[np.uint8]:
    """The picture as (height, width, 3) RGB. Equal frames give equal pictures."""
    return to_array(paint(frame, width, height))


def open_window(fps: float = 0.0) -> Window:
    """A window whose ``show`` takes a frame."""
    return Window(WIDTH, HEIGHT, paint, fps)
