"""Picture of a placement: who holds which expert, who is busy, what travels, and what the agents just did.

`draw(frame)` gives an RGB array and needs no display; `Window` shows the same picture on a screen. `layout` says where
each part of the picture is and `load_colours` which colour an expert has, so that a test can check the picture.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

# Importing pygame greets on stdout and, under X11, sets SDL_VIDEO_X11_WMCLASS: a library should do neither.
_environ = dict(os.environ)
with contextlib.redirect_stdout(None):
    import pygame
    import pygame.freetype
for _name in set(os.environ) - set(_environ):
    del os.environ[_name]

Colour = tuple[int, int, int]

KINDS = ("place", "swap", "add", "delete", "nothing", "illegal")
MIN_WIDTH, MIN_HEIGHT = 800, 475

BACKGROUND: Colour = (15, 18, 23)
CARD: Colour = (23, 28, 35)
CELL: Colour = (33, 39, 48)
TRACK: Colour = (48, 56, 67)
FAINT: Colour = (92, 102, 116)
MUTED: Colour = (151, 161, 174)
TEXT: Colour = (226, 231, 237)
# Blue against orange stays apart under every common colour blindness; both are hues viridis does not pass through.
BLUE: Colour = (120, 200, 255)
ORANGE: Colour = (255, 140, 80)
WHITE: Colour = (255, 255, 255)
INK: Colour = (0, 0, 0)

VIRIDIS = (
    "440154 48186a 472d7b 424086 3b528b 33638d 2c728e 26828e 21918c "
    "1fa088 28ae80 3fbc73 5ec962 84d44b addc30 d8e219 fde725"
)
# Bytes get a scale of one hue, so that nobody reads the traffic map with the scale of the experts.
ICE = "1d242d 24405a 2d6390 5a9bd0 a9d3f5 f2f9ff"


@dataclass(frozen=True)
class Operation:
    """What the agents did last. Experts and GPUs are indices from 0; -1 means none."""

    kind: str  # one of KINDS
    expert: int
    gpu: int  # the GPU chosen, 0 to G - 1, whatever the kind
    source: int = -1  # GPU the moved replica came from (place, swap)
    victim: int = -1  # expert sent back to source by a swap

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"operation kind is {self.kind!r}, expected one of {', '.join(KINDS)}")


@dataclass(frozen=True)
class Frame:
    """Everything one picture shows: one layer of one window of one environment."""

    slots: npt.NDArray[np.int16]  # (G, S) expert in each slot, -1 empty
    expert_load: npt.NDArray[np.float64]  # (E,) tokens of the observed window routed to each expert, this layer
    gpu_pairs: npt.NDArray[np.float64]  # (G,) token-expert pairs that each GPU computes
    gpu_compute_us: npt.NDArray[np.float64]  # (G,)
    traffic_bytes: npt.NDArray[np.float64]  # (G, G) dispatch bytes from row to column
    gpus_per_node: int
    layer: int  # position in the walk over the layers, from 0
    n_layers: int
    layer_id: int  # the layer's number in the model
    window: int  # from 0
    n_windows: int
    op: int  # operations done in this layer, 0 to ops_per_layer
    ops_per_layer: int
    layer_time_us: float  # observed window, this layer, now
    start_time_us: float  # the same before this window's operations
    static_time_us: float  # the same under the static placement
    migrated: npt.NDArray[np.bool_]  # (G, S) slot filled in this window (weights must be fetched)
    last_op: Operation | None
    saved: list[float]  # relative time saved in each window served so far (may be negative)

    def __post_init__(self) -> None:
        if self.slots.ndim != 2 or 0 in self.slots.shape:
            raise ValueError(f"slots has shape {self.slots.shape}, expected (GPUs, slots) with at least one of each")
        gpus, slots = self.slots.shape
        if self.expert_load.ndim != 1 or not self.expert_load.size:
            raise ValueError(f"expert_load has shape {self.expert_load.shape}, expected (experts,) with at least one")
        shapes = {
            "gpu_pairs": (gpus,),
            "gpu_compute_us": (gpus,),
            "traffic_bytes": (gpus, gpus),
            "migrated": (gpus, slots),
        }
        for name, shape in shapes.items():
            found = getattr(self, name).shape
            if found != shape:
                raise ValueError(f"{name} has shape {found}, but slots has shape {(gpus, slots)}: expected {shape}")
        for name in ("expert_load", "gpu_pairs", "gpu_compute_us", "traffic_bytes"):
            values = getattr(self, name)
            if not (np.isfinite(values).all() and values.min() >= 0):
                raise ValueError(f"{name} holds {values.min()} to {values.max()}, expected finite values from 0")
        for name in ("layer_time_us", "start_time_us", "static_time_us"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}, expected a finite time from 0")
        if self.gpus_per_node < 1 or gpus % self.gpus_per_node:
            raise ValueError(f"gpus_per_node is {self.gpus_per_node}, which does not divide the {gpus} GPUs of slots")
        experts = self.expert_load.size
        if self.slots.min() < -1 or self.slots.max() >= experts:
            found = f"{self.slots.min()} to {self.slots.max()}"
            raise ValueError(f"slots holds experts {found}, expected -1 to {experts - 1} (expert_load has {experts})")
        if op := self.last_op:
            ranges = {"gpu": (0, gpus), "source": (-1, gpus), "expert": (0, experts), "victim": (-1, experts)}
            for name, (low, end) in ranges.items():
                if not low <= getattr(op, name) < end:
                    raise ValueError(f"last_op.{name} is {getattr(op, name)}, expected {low} to {end - 1}")
        if not all(map(math.isfinite, self.saved)):
            raise ValueError(f"saved holds {self.saved}, expected finite numbers")


def sentence(op: Operation) -> str:
    """The operation in words: 'swap: E17 GPU 3 → GPU 9, E4 back'."""
    origin = f"GPU {op.source} " if op.source >= 0 else ""
    back = f", E{op.victim} back" if op.victim >= 0 else ""
    return {
        "place": f"place: E{op.expert} {origin}→ GPU {op.gpu}",
        "swap": f"swap: E{op.expert} {origin}→ GPU {op.gpu}{back}",
        "add": f"add: E{op.expert} replica on GPU {op.gpu}",
        "delete": f"delete: E{op.expert} replica from GPU {op.gpu}",
        "nothing": f"nothing: E{op.expert} stays on GPU {op.gpu}",
        "illegal": f"illegal: E{op.expert}, GPU {op.gpu} (nothing changed)",
    }[op.kind]


@lru_cache(maxsize=2)
def _ramp(anchors: str) -> npt.NDArray[np.uint8]:
    """(256, 3) colours through evenly spaced anchors."""
    stops = np.array([list(bytes.fromhex(a)) for a in anchors.split()], dtype=float)
    at = np.linspace(0, len(stops) - 1, 256)
    return np.stack([np.interp(at, np.arange(len(stops)), stops[:, c]) for c in range(3)], 1).round().astype(np.uint8)


def load_colours(expert_load: npt.NDArray[np.float64]) -> npt.NDArray[np.uint8]:
    """(E, 3) colour of each expert's tile: viridis over the square root of its load, the most loaded expert at the top.

    Loads are skewed, a few experts many times the mean: on a linear scale all the others would share one dark colour.
    """
    top = max(float(expert_load.max()), 1e-12)
    return _ramp(VIRIDIS)[np.rint(255 * np.sqrt(expert_load / top)).astype(int)]


@dataclass(frozen=True)
class Layout:
    """Where everything is, in pixels. Lists are indexed by node, by GPU, and by GPU then slot."""

    unit: float
    header: pygame.Rect
    strip: pygame.Rect
    legend: pygame.Rect
    times: pygame.Rect
    traffic: pygame.Rect
    saved: pygame.Rect
    nodes: list[pygame.Rect]
    gpus: list[pygame.Rect]
    bars: list[pygame.Rect]
    tiles: list[list[pygame.Rect]]
    gap: int
    """width of the free gutter around every GPU, where the arrow of an operation runs"""


def _split(start: int, length: int, parts: int, gap: int) -> list[tuple[int, int]]:
    """Starts and sizes of `parts` equal pieces with gaps between; edges are rounded, so no remainder piles up."""
    size = (length - gap * (parts - 1)) / parts
    edges = [(round(start + i * (size + gap)), round(start + i * (size + gap) + size)) for i in range(parts)]
    return [(a, b - a) for a, b in edges]


def _grid(area: pygame.Rect, columns: int, count: int, gap: int) -> list[pygame.Rect]:
    xs = _split(area.x, area.w, columns, gap)
    ys = _split(area.y, area.h, -(-count // columns), gap)
    return [pygame.Rect(x, y, w, h) for y, h in ys for x, w in xs][:count]


@lru_cache(maxsize=16)
def layout(nodes: int, gpus_per_node: int, slots: int, width: int = 1280, height: int = 760) -> Layout:
    """Place all parts; of all ways to fold nodes, GPUs and slots into rows, take the one with the most legible tiles.

    The result is shared between calls: read it, do not write to it.
    """
    if width < MIN_WIDTH or height < MIN_HEIGHT:
        raise ValueError(f"picture is {width} x {height}, expected at least {MIN_WIDTH} x {MIN_HEIGHT} to be legible")
    unit = min(width / 1280, height / 760)

    def px(length: float) -> int:
        return round(length * unit)

    edge, gutter, side = px(16), px(12), px(372)
    top = px(72)
    main = width - side - 3 * edge
    strip = pygame.Rect(edge, top, main, px(34))
    legend = pygame.Rect(edge, height - edge - px(46), main, px(46))
    field = pygame.Rect(edge, strip.bottom + gutter, main, legend.top - strip.bottom - 2 * gutter)
    right = width - side - edge
    times = pygame.Rect(right, top, side, px(160))
    traffic = pygame.Rect(right, times.bottom + gutter, side, px(282))
    saved = pygame.Rect(right, traffic.bottom + gutter, side, height - edge - traffic.bottom - gutter)

    dense = nodes * gpus_per_node > 32
    gap, inset, between = 2 * px(4 if dense else 5), px(3 if dense else 6), max(2, px(2 if dense else 3))
    node_head, gpu_head, bar = px(26), px(17), max(3, px(5))

    def inner_node(node: pygame.Rect) -> pygame.Rect:
        head = node_head + gap // 2
        return pygame.Rect(node.x + gap, node.y + head, node.w - 2 * gap, node.h - head - gap)

    def inner_gpu(gpu: pygame.Rect) -> pygame.Rect:
        head = gpu_head + bar + 2 * between
        return pygame.Rect(gpu.x + inset, gpu.y + head, gpu.w - 2 * inset, gpu.h - head - inset)

    def score(folds: tuple[int, int, int]) -> float:
        by_node, by_gpu, by_slot = folds
        node = _grid(field, by_node, nodes, gutter)[0]
        gpu = _grid(inner_node(node), by_gpu, gpus_per_node, gap)[0]
        tile = _grid(inner_gpu(gpu), by_slot, slots, between)[0]
        if tile.w < 1 or tile.h < 1 or gpu.w < 1 or gpu.h < 1:
            return -math.inf
        label = min(tile.w / 3.2, tile.h / 1.7, px(16)) / unit
        holes = sum(-n % c / n for n, c in zip((nodes, gpus_per_node, slots), folds, strict=True))
        return label - 16 * holes - abs(math.log(tile.w / (1.5 * tile.h))) - (2 if gpu.w < px(64) else 0)

    folds = [(a, b, c) for a in range(1, nodes + 1) for b in range(1, gpus_per_node + 1) for c in range(1, slots + 1)]
    by_node, by_gpu, by_slot = max(folds, key=score)
    panels = _grid(field, by_node, nodes, gutter)
    gpus = [gpu for panel in panels for gpu in _grid(inner_node(panel), by_gpu, gpus_per_node, gap)]
    bars = [pygame.Rect(g.x + inset, g.y + gpu_head + between, g.w - 2 * inset, bar) for g in gpus]
    tiles = [_grid(inner_gpu(gpu), by_slot, slots, between) for gpu in gpus]
    header = pygame.Rect(edge, px(14), width - 2 * edge, px(46))
    return Layout(unit, header, strip, legend, times, traffic, saved, panels, gpus, bars, tiles, gap)


@lru_cache(maxsize=2)
def _font(bold: bool) -> pygame.freetype.Font:
    # Both faces come with pygame, so pictures do not depend on the fonts of the machine; a pygame packaged without its
    # examples has only the bold one.
    if not pygame.freetype.get_init():
        pygame.freetype.init()
    regular = Path(pygame.__file__).parent / "examples" / "data" / "sans.ttf"
    return pygame.freetype.Font(None if bold or not regular.exists() else str(regular), 12)


@lru_cache(maxsize=4096)
def _glyphs(text: str, size: int, colour: Colour, bold: bool) -> tuple[pygame.Surface, int, int, int, int]:
    """The text drawn, its bearing, its ascent, its width, and the height of capitals."""
    if not pygame.freetype.get_init():
        pygame.freetype.init()
        _font.cache_clear()
    font = _font(bold)
    if "→" in text and font.get_metrics("→")[0] is None:
        text = text.replace("→", "to")
    surface, box = font.render(text, colour, size=size)
    return surface, box.x, box.y, box.x + box.w, font.get_rect("E", size=size).h


@lru_cache(maxsize=1024)
def _ink(fill: Colour) -> Colour:
    """Black or white, whichever has more contrast on the fill (WCAG relative luminance)."""
    linear = [c / 3294.6 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in fill]
    return INK if 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] > 0.179 else WHITE


def _rgb(colour: npt.NDArray[np.uint8]) -> Colour:
    return int(colour[0]), int(colour[1]), int(colour[2])


@lru_cache(maxsize=2048)
def _box(
    w: int, h: int, radius: int, fill: Colour | None, edge: Colour | None, thick: int, dash: bool
) -> pygame.Surface:
    """Rounded box, antialiased by drawing it larger; cached, since a picture holds hundreds and most repeat."""
    k = 4 if w * h < 40_000 else 2
    big = pygame.Surface((w * k, h * k), pygame.SRCALPHA, 32)
    big.fill((*(edge or fill or BACKGROUND), 0))  # transparent in the edge's colour, or it would darken
    whole = big.get_rect()
    if fill is not None:
        pygame.draw.rect(big, fill, whole, border_radius=radius * k)
    if edge is not None:
        pygame.draw.rect(big, edge, whole, thick * k, border_radius=radius * k)
    if dash:
        clear = (*(edge or BACKGROUND), 0)
        step = 4 * k
        for at in range(radius * k + step // 2, whole.w - radius * k, 2 * step):
            big.fill(clear, (at, 0, step, thick * k))
            big.fill(clear, (at, whole.h - thick * k, step, thick * k))
        for at in range(radius * k + step // 2, whole.h - radius * k, 2 * step):
            big.fill(clear, (0, at, thick * k, step))
            big.fill(clear, (whole.w - thick * k, at, thick * k, step))
    small = pygame.transform.smoothscale(big, (w, h))
    if fill is not None and w > 2 * radius and h > 2 * radius and edge is None:
        small.fill(fill, (radius, 0, w - 2 * radius, h))  # smoothscale rounds: keep the colour exact
        small.fill(fill, (0, radius, w, h - 2 * radius))
    return small


def _size(value: float, unit: str) -> str:
    """Three significant digits without an exponent."""
    value /= {"GB": 1e9, "MB": 1e6, "kB": 1e3, "B": 1.0}[unit]
    return f"{value:.0f}" if value >= 100 or value == 0 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _unit(value: float) -> str:
    return "GB" if value >= 1e9 else "MB" if value >= 1e6 else "kB" if value >= 1e3 else "B"


def _percent(share: float) -> str:
    return f"{100 * share:+.1f} %".replace("-", "−")


@lru_cache(maxsize=8)
def _backdrop(nodes: int, gpus_per_node: int, slots: int, width: int, height: int) -> pygame.Surface:
    """The cards, which are the same in every frame of an environment."""
    at = layout(nodes, gpus_per_node, slots, width, height)
    surface = pygame.Surface((width, height), 0, 32)
    surface.fill(BACKGROUND)
    cards = [(r, CARD, 8) for r in (at.strip, at.legend, at.times, at.traffic, at.saved, *at.nodes)]
    for rect, colour, radius in cards + [(r, CELL, 5) for r in at.gpus]:
        surface.blit(_box(rect.w, rect.h, round(radius * at.unit), colour, None, 0, False), rect)
    return surface


class _Canvas:
    """A surface to write and draw on; lengths and type sizes are in units of the picture of 1280 x 760."""

    def __init__(self, surface: pygame.Surface, unit: float) -> None:
        self.surface, self.unit = surface, unit

    def px(self, length: float) -> int:
        return round(length * self.unit)

    def width(self, text: str, size: float, bold: bool = False) -> int:
        return _glyphs(text, max(8, self.px(size)), TEXT, bold)[3]

    def text(
        self,
        texts: str | Sequence[str],
        x: int,
        middle: int,
        size: float,
        colour: Colour = TEXT,
        bold: bool = False,
        align: float = 0.0,
        room: int | None = None,
    ) -> int:
        """Write the first of `texts` that fits in `room` or nothing; align 0 starts, 0.5 centres, 1 ends at x."""
        for text in [texts] if isinstance(texts, str) else texts:
            glyphs, bearing, ascent, wide, capital = _glyphs(text, max(8, self.px(size)), colour, bold)
            if room is None or wide <= room:
                self.surface.blit(glyphs, (round(x - align * wide) + bearing, middle + (capital + 1) // 2 - ascent))
                return wide
        return 0

    def box(
        self,
        rect: pygame.Rect,
        fill: Colour | None,
        radius: float = 6,
        outline: Colour | None = None,
        dash: bool = False,
    ) -> None:
        if rect.w > 0 and rect.h > 0:
            thick = max(1, self.px(2 if outline != FAINT else 1))
            corner = min(max(2, self.px(radius)), rect.w // 2, rect.h // 2)
            self.surface.blit(_box(rect.w, rect.h, corner, fill, outline, thick, dash), rect)

    def dots(self, count: int, size: int, x: int, y: int, dx: int, dy: int, colour: Colour) -> None:
        for i in range(count):
            self.surface.blit(_box(size, size, size // 2, colour, None, 0, False), (x + i * dx, y + i * dy))


@lru_cache(maxsize=2048)
def _tile(w: int, h: int, expert: int, fill: Colour, copies: int, fresh: bool, unit: float) -> pygame.Surface:
    """One expert: its load as colour, a dot for each replica (four mean four or more), outlined when to be fetched."""
    canvas = _Canvas(pygame.Surface((w, h), pygame.SRCALPHA, 32), unit)
    rect = pygame.Rect(0, 0, w, h)
    canvas.box(rect, fill, 3)
    if fresh:
        canvas.box(rect, None, 3, WHITE)
    label = min(w / 3.2 / unit, h / 1.8 / unit, 18)
    x, y, room = rect.centerx, rect.centery, w - 4
    if copies > 1:
        dots, dot = min(copies, 4), max(2, min(canvas.px(4), h // 7))
        step = dot + max(1, dot // 2)
        span = dots * step - step + dot
        if h >= canvas.px(36):
            y -= dot
            canvas.dots(dots, dot, x - span // 2, h - 2 * dot - 2, step, 0, _ink(fill))
        else:  # no height below the label: a column beside it
            canvas.dots(dots, dot, w - dot - 3, y - span // 2, 0, step, _ink(fill))
            x, room = x - (dot + 3) // 2, room - dot - 3
    canvas.text(f"E{expert}", x, y, label, _ink(fill), bold=True, align=0.5, room=room)
    return canvas.surface


class _Painter(_Canvas):
    """One picture being painted."""

    def __init__(self, frame: Frame, width: int, height: int) -> None:
        gpus, slots = frame.slots.shape
        shape = (gpus // frame.gpus_per_node, frame.gpus_per_node, slots, width, height)
        self.frame = frame
        self.at = layout(*shape)
        super().__init__(_backdrop(*shape).copy(), self.at.unit)
        self.colours = [_rgb(c) for c in load_colours(frame.expert_load)]
        self.replicas = np.bincount(frame.slots[frame.slots >= 0], minlength=len(self.colours)).tolist()
        pairs = frame.gpu_pairs
        self.busiest = int(pairs.argmax()) if pairs.max() > 0 else -1
        self.relative = (pairs / max(float(pairs.mean()), 1e-12)).tolist()
        # One wording for the heads of all GPUs, by the narrowest, so that they line up.
        room = min(bar.w for bar in self.at.bars)
        ratio = self.px(4) + self.width(f"{max(self.relative):.2f}×", 11, True)
        time = self.px(12) + self.width(f"{frame.gpu_compute_us.max():.0f} µs", 11)
        name, number = self.width(f"GPU {gpus - 1}", 11, True), self.width(str(gpus - 1), 11, True)
        self.with_ratio, self.with_name, self.with_time = (
            w <= room for w in (number + ratio, name + ratio, name + ratio + time)
        )

    def card(self, rect: pygame.Rect, title: str, right: str) -> None:
        middle = rect.y + self.px(19)
        room = rect.w - self.px(42) - self.text(title, rect.x + self.px(14), middle, 14, TEXT, bold=True)
        self.text(right, rect.right - self.px(14), middle, 12, MUTED, align=1, room=room)

    def paint(self) -> pygame.Surface:
        self.header()
        self.strip()
        for node in range(len(self.at.nodes)):
            self.node(node)
        for gpu in range(len(self.at.gpus)):
            self.gpu(gpu)
        self.operation()
        self.legend()
        self.times()
        self.traffic()
        self.saved()
        return self.surface

    def header(self) -> None:
        f, area, px = self.frame, self.at.header, self.px
        self.text("MoE placement", area.x, area.y + px(15), 22, TEXT, bold=True)
        gpus, slots = f.slots.shape
        shape = f"{gpus // f.gpus_per_node} × {f.gpus_per_node} GPUs, {slots} slots each, {f.expert_load.size} experts"
        self.text(shape, area.x, area.y + px(37), 12, MUTED, room=px(300))
        steps = (
            ("Window", min(f.window + 1, f.n_windows), f.n_windows, ""),
            ("Layer", min(f.layer + 1, f.n_layers), f.n_layers, f"model layer {f.layer_id}"),
            ("Operation", f.op, f.ops_per_layer, "in this layer"),
        )
        left = area.x + px(340)
        for (name, done, total, note), (x, w) in zip(steps, _split(left, area.right - left, 3, px(28)), strict=True):
            used = self.text(f"{name} {done}", x, area.y + px(17), 15, TEXT, bold=True)
            used += px(6) + self.text(f"of {total}", x + used + px(6), area.y + px(17), 13, MUTED)
            self.text(note, x + w, area.y + px(17), 12, MUTED, align=1, room=w - used - px(10))
            track = pygame.Rect(x, area.y + px(34), w, max(3, px(5)))
            self.box(track, TRACK, 2)
            self.box(pygame.Rect(x, track.y, round(w * min(1.0, done / max(total, 1))), track.h), BLUE, 2)

    def strip(self) -> None:
        area, op, px = self.at.strip, self.frame.last_op, self.px
        x = area.x + px(14) + self.text("Last operation", area.x + px(14), area.centery, 12, MUTED) + px(14)
        told = sentence(op) if op else "none yet"
        colour = MUTED if op is None or op.kind == "nothing" else ORANGE if op.kind == "illegal" else BLUE
        used = self.text(told, x, area.centery, 15, colour, room=area.right - x - px(14))
        fresh = int((self.frame.migrated & (self.frame.slots >= 0)).sum())
        note = f"{fresh} replica{'' if fresh == 1 else 's'} to fetch in this window"
        self.text(note, area.right - px(14), area.centery, 12, MUTED, align=1, room=area.right - x - used - px(34))

    def node(self, node: int) -> None:
        area, gap, per = self.at.nodes[node], self.at.gap, self.frame.gpus_per_node
        middle = area.y + self.px(15)
        used = self.text(f"Node {node}", area.x + gap, middle, 14, TEXT, bold=True)
        mine = slice(node * per, (node + 1) * per)
        traffic = self.frame.traffic_bytes
        out, back = (float(t.sum() - traffic[mine, mine].sum()) for t in (traffic[mine], traffic[:, mine]))
        if len(self.at.nodes) > 1:
            unit = _unit(max(out, back))
            sent, got = _size(out, unit), _size(back, unit)
            notes = (f"sends {sent}, receives {got} {unit}", f"out {sent}, in {got} {unit}", f"out {sent} {unit}")
            self.text(notes, area.right - gap, middle, 11, MUTED, align=1, room=area.w - 2 * gap - used - self.px(10))

    def mean_line(self, x: int, bar: pygame.Rect) -> None:
        over = self.px(2)
        pygame.draw.rect(self.surface, WHITE, (x, bar.y - over, max(1, self.px(1.5)), bar.h + 2 * over))

    def gpu(self, gpu: int) -> None:
        f, area, bar, px = self.frame, self.at.gpus[gpu], self.at.bars[gpu], self.px
        mark, ratio, middle = gpu == self.busiest, self.relative[gpu], area.y + px(10)
        # One scale for all GPUs; at least 1.5 times the mean, so that a balanced cluster looks balanced.
        full = max(1.5, max(self.relative))
        colour = ORANGE if mark else MUTED
        self.text(f"GPU {gpu}" if self.with_name else str(gpu), bar.x, middle, 11, TEXT, bold=True)
        if self.with_ratio:
            used = self.text(f"{ratio:.2f}×", bar.right, middle, 11, colour, bold=mark, align=1)
            if self.with_time:
                self.text(f"{f.gpu_compute_us[gpu]:.0f} µs", bar.right - used - px(8), middle, 11, MUTED, align=1)
        self.box(bar, TRACK, 2)
        self.box(pygame.Rect(bar.x, bar.y, round(bar.w * ratio / full), bar.h), colour, 2)
        self.mean_line(bar.x + min(round(bar.w / full), bar.w - 1), bar)
        if mark:
            self.box(area, None, 5, ORANGE)
        for slot, rect in enumerate(self.at.tiles[gpu]):
            expert = int(f.slots[gpu, slot])
            if expert < 0:
                self.box(rect, None, 3, FAINT, dash=True)
            else:
                look = (self.colours[expert], self.replicas[expert], bool(f.migrated[gpu, slot]))
                self.surface.blit(_tile(rect.w, rect.h, expert, *look, self.unit), rect)

    def operation(self) -> None:
        op, f = self.frame.last_op, self.frame
        if op is None or op.kind in ("nothing", "illegal"):
            return
        # Outside the GPU, so that the mark of the busiest one stays visible.
        ring = 2 * max(2, self.px(2))
        self.box(self.at.gpus[op.gpu].inflate(ring, ring), None, 6, BLUE, dash=op.kind == "delete")
        for gpu, expert in ((op.gpu, op.expert), (op.source, op.victim)):
            if gpu >= 0 and expert >= 0:
                for slot in np.flatnonzero(f.slots[gpu] == expert):
                    self.box(self.at.tiles[gpu][slot].inflate(4, 4), None, 4, BLUE)
        if op.source >= 0 and op.source != op.gpu:
            self.box(self.at.gpus[op.source].inflate(ring, ring), None, 6, BLUE, dash=True)
            route = self.route(op.source, op.gpu)
            thick = max(2, self.px(3))
            for (ax, ay), (bx, by) in pairwise(route):
                line = pygame.Rect(min(ax, bx), min(ay, by), abs(ax - bx), abs(ay - by)).inflate(thick, thick)
                self.box(line, BLUE, 1.5)
            self.arrowhead(route[-2], route[-1])
            if op.kind == "swap":
                self.arrowhead(route[1], route[0])

    def route(self, source: int, target: int) -> list[tuple[int, int]]:
        """Corners of a way from GPU to GPU through the gutters, so that the arrow never crosses a tile or a text."""
        a, b, half = self.at.gpus[source], self.at.gpus[target], self.at.gap // 2
        if a.top == b.top:
            return [(a.centerx, a.top), (a.centerx, a.top - half), (b.centerx, b.top - half), (b.centerx, b.top)]
        down = b.top > a.top
        start, leave = (a.bottom, a.bottom + half) if down else (a.top, a.top - half)
        enter, end = (b.top - half, b.top) if down else (b.bottom + half, b.bottom)
        if abs(leave - enter) <= 2:
            return [(a.centerx, start), (a.centerx, leave), (b.centerx, leave), (b.centerx, end)]
        beside = b
        per = self.frame.gpus_per_node
        if self.at.nodes[source // per].top != self.at.nodes[target // per].top:
            beside = self.at.nodes[target // per]  # the head of a node spans its GPUs: go round it
        x = min((beside.left - half, beside.right + half), key=lambda side: abs(side - a.centerx))
        return [(a.centerx, start), (a.centerx, leave), (x, leave), (x, enter), (b.centerx, enter), (b.centerx, end)]

    def arrowhead(self, behind: tuple[int, int], tip: tuple[int, int]) -> None:
        size = max(8, self.px(13))
        up = tip[1] < behind[1]
        sprite = pygame.Surface((4 * size, 4 * size), pygame.SRCALPHA, 32)
        sprite.fill((*BLUE, 0))
        back, front = (4 * size, 0) if up else (0, 4 * size)
        pygame.draw.polygon(sprite, BLUE, [(0, back), (4 * size, back), (2 * size, front)])
        high = round(size * 0.7)
        sprite = pygame.transform.smoothscale(sprite, (size, high))
        self.surface.blit(sprite, (tip[0] - size // 2, tip[1] - (2 if up else high - 2)))

    def legend(self) -> None:
        area, px, load = self.at.legend, self.px, self.frame.expert_load
        x = area.x + px(14)
        x += self.text("Load of expert", x, area.centery, 12, MUTED) + px(12)
        bar = pygame.Rect(x, area.y + px(11), px(210), px(11))
        self.ramp(bar, VIRIDIS)
        mean = max(float(load.mean()), 1e-12)
        top = float(load.max()) / mean
        taken = bar.x - px(12)
        for tick in (0.0, 0.25, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0):
            at = bar.x + round(bar.w * math.sqrt(tick / max(top, 1e-12)))
            name = "mean" if tick == 1 else f"{tick:g}×" if tick else "0"
            wide = self.width(name, 10)
            if tick <= top and at - wide // 2 > taken:
                pygame.draw.rect(self.surface, MUTED, (at, bar.bottom, 1, px(4)))
                self.text(name, at, bar.bottom + px(11), 10, MUTED, align=0.5)
                taken = at + wide // 2 + px(4)
        x = bar.right + px(30)
        entries = ("replicas", "to fetch", "empty", "mean", "busiest", "operation")
        widths = [px(30) + self.width(name, 12) for name in entries]
        space = (area.right - px(14) - x - sum(widths)) // max(len(entries) - 1, 1)
        for name, wide in zip(entries, widths, strict=True):
            self.sample(name, pygame.Rect(x, area.centery - px(8), px(24), px(16)))
            self.text(name, x + px(30), area.centery, 12, MUTED)
            x += wide + space

    def sample(self, name: str, rect: pygame.Rect) -> None:
        px = self.px
        if name == "mean":
            bar = pygame.Rect(rect.x, rect.centery - px(2), rect.w, max(3, px(5)))
            self.box(bar, TRACK, 2)
            self.mean_line(rect.centerx, bar)
        else:
            edge = {"to fetch": WHITE, "empty": FAINT, "busiest": ORANGE, "operation": BLUE}.get(name)
            self.box(rect, None if name == "empty" else TRACK, 3, edge, dash=name == "empty")
        if name == "replicas":
            self.dots(2, px(4), rect.centerx - px(5), rect.bottom - px(7), px(6), 0, WHITE)

    def ramp(self, bar: pygame.Rect, anchors: str) -> None:
        strip = _ramp(anchors)[np.linspace(0, 255, bar.w).astype(int)]
        image = np.repeat(strip[:, None], bar.h, 1)
        self.surface.blit(pygame.surfarray.make_surface(image), bar)

    def times(self) -> None:
        f, area, px = self.frame, self.at.times, self.px
        share = 1 - f.layer_time_us / f.static_time_us if f.static_time_us else 0.0
        self.card(area, "Time of this layer", "")
        good = BLUE if share >= 0 else ORANGE
        word = "less than static" if share >= 0 else "more than static"
        used = self.text(word, area.right - px(14), area.y + px(19), 12, MUTED, align=1)
        self.text(
            f"{abs(share) * 100:.1f} %", area.right - px(20) - used, area.y + px(19), 17, good, bold=True, align=1
        )
        rows = (("static", f.static_time_us, FAINT), ("start", f.start_time_us, MUTED), ("now", f.layer_time_us, good))
        longest = max(max(value for _, value, _ in rows), 1e-12)
        left, right = area.x + px(62), area.right - px(92)
        for i, (name, value, colour) in enumerate(rows):
            middle = area.y + px(50 + 25 * i)
            self.text(name, area.x + px(14), middle, 12, MUTED)
            self.box(pygame.Rect(left, middle - px(7), round((right - left) * value / longest), px(14)), colour, 2)
            self.text(f"{value:,.1f} µs", area.right - px(14), middle, 12, TEXT, align=1)
        mark = left + round((right - left) * f.static_time_us / longest)
        pygame.draw.rect(self.surface, MUTED, (mark, area.y + px(38), 1, px(74)))
        start = 1 - f.layer_time_us / f.start_time_us if f.start_time_us else 0.0
        slow = int(f.gpu_compute_us.argmax())
        foot = area.y + px(139)
        used = self.text(f"{_percent(start)} saved in this window", area.x + px(14), foot, 12, MUTED)
        compute = f"slowest GPU {slow}: {f.gpu_compute_us[slow]:.0f} µs"
        self.text(compute, area.right - px(14), foot, 12, MUTED, align=1, room=area.w - used - px(38))

    def traffic(self) -> None:
        f, area, px = self.frame, self.at.traffic, self.px
        gpus, per = f.slots.shape[0], f.gpus_per_node
        nodes = gpus // per
        total = float(f.traffic_bytes.sum())
        self.card(area, "Dispatch traffic", f"{_size(total, _unit(total))} {_unit(total)} in all")
        between = f.traffic_bytes.reshape(nodes, per, nodes, per).sum((1, 3))

        cell = max(1, px(192) // gpus)
        heat = pygame.Rect(area.x + px(28), area.y + px(58), cell * gpus, cell * gpus)
        top = max(float(f.traffic_bytes.max()), 1e-12)
        colours = _ramp(ICE)[np.rint(255 * f.traffic_bytes / top).astype(int)]
        image = np.repeat(np.repeat(colours.transpose(1, 0, 2), cell, 0), cell, 1)
        self.surface.blit(pygame.surfarray.make_surface(image), heat)
        groups, name = (nodes, "N") if nodes > 1 else (gpus, "")
        span = heat.w // groups
        for n in range(groups):
            x, y = heat.x + n * span, heat.y + n * span
            if n and nodes > 1:
                pygame.draw.rect(self.surface, CARD, (x - 1, heat.y, 2, heat.h))
                pygame.draw.rect(self.surface, CARD, (heat.x, y - 1, heat.w, 2))
            self.text(f"{name}{n}", x + span // 2, heat.y - px(8), 10, MUTED, align=0.5, room=span)
            if span >= px(10):
                self.text(f"{name}{n}", heat.x - px(5), y + span // 2, 10, MUTED, align=1, room=px(18))
        foot = heat.y + px(192) + px(14)
        unit = _unit(top)
        used = self.text("GPU → GPU  0", heat.x, foot, 11, MUTED) + px(6)
        most = f"{_size(top, unit)} {unit}"
        wide = heat.x + px(192) - self.width(most, 11) - px(6) - heat.x - used
        self.ramp(pygame.Rect(heat.x + used, foot - px(4), max(4, wide), px(8)), ICE)
        self.text(most, heat.x + px(192), foot, 11, MUTED, align=1)

        left, room = area.x + px(28) + px(192) + px(26), area.right - px(14)
        if nodes == 1:
            self.text("one node:", left - px(8), heat.y + px(8), 11, MUTED)
            self.text("nothing crosses", left - px(8), heat.y + px(24), 11, MUTED, room=room - left + px(8))
            return
        largest = max(float(between.max()), 1e-12)
        unit = _unit(largest)
        side = min((room - left) // nodes, px(46))
        for i in range(nodes):
            self.text(
                (f"N{i}", str(i)), left + i * side + side // 2, heat.y - px(8), 10, MUTED, align=0.5, room=side - 3
            )
            self.text(f"N{i}", left - px(5), heat.y + i * side + side // 2, 10, MUTED, align=1, room=px(18))
            for j in range(nodes):
                fill = _rgb(_ramp(ICE)[round(255 * between[i, j] / largest)])
                rect = pygame.Rect(left + j * side, heat.y + i * side, side - 1, side - 1)
                self.box(rect, fill, 2)
                number = _size(between[i, j], unit)
                self.text(number, rect.centerx, rect.centery, 10, _ink(fill), align=0.5, room=rect.w - 2)
        y = heat.y + nodes * side + px(14)
        self.text(f"node → node, {unit}", left, y, 11, MUTED, room=room - left)
        crossing = 1 - float(np.trace(between)) / total if total > 0 else 0.0
        self.text(f"{100 * crossing:.0f} %", left, y + px(26), 17, TEXT, bold=True)
        self.text("crosses nodes", left, y + px(46), 11, MUTED, room=room - left)

    def saved(self) -> None:
        f, area, px = self.frame, self.at.saved, self.px
        mean = f"{_percent(float(np.mean(f.saved)))} on average" if f.saved else "none served yet"
        self.card(area, "Time saved per window", mean)
        plot = pygame.Rect(area.x + px(58), area.y + px(42), area.w - px(72), area.h - px(68))
        # Where there are more windows than pixels for bars, the last ones are shown.
        first = max(0, len(f.saved) - max(1, plot.w // 3))
        shown = f.saved[first:]
        count = max(len(shown), min(f.n_windows, plot.w // 3), 1)
        high, low = max([0.01, *shown]), min([0.0, *shown])
        zero = plot.y + round(plot.h * high / (high - low))
        self.text("0 %", plot.x - px(8), zero, 10, MUTED, align=1)
        for value, y in ((high, plot.y), (low, plot.bottom)):
            if abs(y - zero) >= px(12):
                self.text(_percent(value), plot.x - px(8), y, 10, MUTED, align=1)
        pygame.draw.rect(self.surface, TRACK, (plot.x, plot.y, plot.w, 1))
        for i, (x, w) in enumerate(_split(plot.x, plot.w, count, max(1, min(px(6), plot.w // (4 * count))))):
            if i < len(shown):
                high_px = round(plot.h * abs(shown[i]) / (high - low))
                bar = pygame.Rect(x, zero - high_px if shown[i] > 0 else zero, w, high_px)
                self.box(bar, BLUE if shown[i] > 0 else ORANGE, 2)
        pygame.draw.rect(self.surface, FAINT, (plot.x, zero, plot.w, 1))
        foot = area.bottom - px(12)
        used = self.text(f"window {first + 1}", plot.x, foot, 10, MUTED)
        self.text(str(first + count), plot.right, foot, 10, MUTED, align=1, room=plot.w - used - px(10))


def draw(frame: Frame, width: int = 1280, height: int = 760) -> npt.NDArray[np.uint8]:
    """The picture as (height, width, 3) RGB; the same frame always gives the same picture."""
    pixels = np.empty((height, width, 3), np.uint8)
    # A surface over the array itself: a fifth of the time of pygame's own conversions.
    pygame.image.frombuffer(pixels.data, (width, height), "RGB").blit(_Painter(frame, width, height).paint(), (0, 0))
    return pixels


class Window:
    """The picture on a screen, for render_mode="human": opens at the first `show`, and once closed stays closed."""

    def __init__(
        self,
        width: int = 1280,
        height: int = 760,
        fps: float = 0.0,
        paint: Callable[[Any, int, int], pygame.Surface] | None = None,
    ) -> None:
        self.width, self.height, self.fps = width, height, fps
        # Another task paints its own frames; the window is the same.
        self._paint = paint or (lambda frame, width, height: _Painter(frame, width, height).paint())
        self.closed = False
        self._screen: pygame.Surface | None = None
        self._clock = pygame.time.Clock()

    def show(self, frame: Any) -> None:
        """Show one frame, waiting where needed to keep to `fps` (0: never wait)."""
        if self.closed:
            return
        if self._screen is None:
            pygame.display.init()
            self._screen = pygame.display.set_mode((self.width, self.height))
            pygame.display.set_caption("clustergym")
        # Without reading its events the system would take the window for hung.
        if any(event.type == pygame.QUIT for event in pygame.event.get()):
            self.close()
            return
        self._screen.blit(self._paint(frame, self.width, self.height), (0, 0))
        pygame.display.flip()
        if self.fps > 0:
            self._clock.tick(self.fps)

    def close(self) -> None:
        """Close the window; harmless when it is closed already."""
        if self._screen is not None:
            pygame.display.quit()  # not pygame.quit(): the user's program may use pygame too
        self._screen = None
        self.closed = True
