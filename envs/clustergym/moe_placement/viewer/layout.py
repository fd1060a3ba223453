"""Positions of all parts of the placement picture, in pixels."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from clustergym.common.canvas import REFERENCE_HEIGHT, REFERENCE_WIDTH, pygame

MIN_WIDTH, MIN_HEIGHT = 800, 475


@dataclass(frozen=True)
class Layout:
    """Rectangles of all parts. Index ``nodes`` by node, ``gpus`` and ``bars`` by GPU, ``tiles`` by GPU and slot."""

    unit: float
    header: pygame.Rect
    last_op: pygame.Rect
    legend: pygame.Rect
    times: pygame.Rect
    traffic: pygame.Rect
    saved: pygame.Rect
    nodes: list[pygame.Rect]
    gpus: list[pygame.Rect]
    bars: list[pygame.Rect]
    tiles: list[list[pygame.Rect]]
    gap: int
    """Free space between GPUs. The arrows of operations are drawn there."""


def split(start: int, length: int, parts: int, gap: int) -> list[tuple[int, int]]:
    """(start, size) of ``parts`` equal pieces with gaps between them. Edges are rounded, so errors do not add up."""
    size = (length - gap * (parts - 1)) / parts
    edges = [(round(start + i * (size + gap)), round(start + i * (size + gap) + size)) for i in range(parts)]
    return [(a, b - a) for a, b in edges]


def grid(area: pygame.Rect, columns: int, count: int, gap: int) -> list[pygame.Rect]:
    """``count`` equal cells in rows of ``columns``."""
    xs = split(area.x, area.w, columns, gap)
    ys = split(area.y, area.h, -(-count // columns), gap)
    return [pygame.Rect(x, y, w, h) for y, h in ys for x, w in xs][:count]


@lru_cache(maxsize=16)
def layout(
    nodes: int, gpus_per_node: int, slots: int, width: int = REFERENCE_WIDTH, height: int = REFERENCE_HEIGHT
) -> Layout:
    """Arrange nodes, GPUs and slots in rows and columns such that the tiles are as legible as possible.

    The result is cached and shared between calls: do not modify it.
    """
    if width < MIN_WIDTH or height < MIN_HEIGHT:
        raise ValueError(f"picture is {width} x {height}, expected at least {MIN_WIDTH} x {MIN_HEIGHT} to be legible")
    unit = min(width / REFERENCE_WIDTH, height / REFERENCE_HEIGHT)

    def px(length: float) -> int:
        return round(length * unit)

    edge, gutter, side = px(16), px(12), px(372)
    top = px(72)
    main = width - side - 3 * edge
    last_op = pygame.Rect(edge, top, main, px(34))
    legend = pygame.Rect(edge, height - edge - px(46), main, px(46))
    field = pygame.Rect(edge, last_op.bottom + gutter, main, legend.top - last_op.bottom - 2 * gutter)
    right = width - side - edge
    times = pygame.Rect(right, top, side, px(160))
    traffic = pygame.Rect(right, times.bottom + gutter, side, px(282))
    saved = pygame.Rect(right, traffic.bottom + gutter, side, height - edge - traffic.bottom - gutter)

    dense = nodes * gpus_per_node > 32
    gap, inset, between = 2 * px(4 if dense else 5), px(3 if dense else 6), max(2, px(2 if dense else 3))
    node_head, gpu_head, bar = px(26), px(17), max(3, px(5))

    def inside_node(node: pygame.Rect) -> pygame.Rect:
        head = node_head + gap // 2
        return pygame.Rect(node.x + gap, node.y + head, node.w - 2 * gap, node.h - head - gap)

    def inside_gpu(gpu: pygame.Rect) -> pygame.Rect:
        head = gpu_head + bar + 2 * between
        return pygame.Rect(gpu.x + inset, gpu.y + head, gpu.w - 2 * inset, gpu.h - head - inset)

    def score(columns: tuple[int, int, int]) -> float:
        """Size of the labels, minus penalties for empty cells, for tiles that are not about 3 : 2, for narrow GPUs."""
        node_columns, gpu_columns, slot_columns = columns
        node = grid(field, node_columns, nodes, gutter)[0]
        gpu = grid(inside_node(node), gpu_columns, gpus_per_node, gap)[0]
        tile = grid(inside_gpu(gpu), slot_columns, slots, between)[0]
        if tile.w < 1 or tile.h < 1 or gpu.w < 1 or gpu.h < 1:
            return -math.inf
        label = min(tile.w / 3.2, tile.h / 1.7, px(16)) / unit
        empty = sum(-n % c / n for n, c in zip((nodes, gpus_per_node, slots), columns, strict=True))
        return label - 16 * empty - abs(math.log(tile.w / (1.5 * tile.h))) - (2 if gpu.w < px(64) else 0)

    choices = [(a, b, c) for a in range(1, nodes + 1) for b in range(1, gpus_per_node + 1) for c in range(1, slots + 1)]
    node_columns, gpu_columns, slot_columns = max(choices, key=score)
    panels = grid(field, node_columns, nodes, gutter)
    gpus = [gpu for panel in panels for gpu in grid(inside_node(panel), gpu_columns, gpus_per_node, gap)]
    bars = [pygame.Rect(g.x + inset, g.y + gpu_head + between, g.w - 2 * inset, bar) for g in gpus]
    tiles = [grid(inside_gpu(gpu), slot_columns, slots, between) for gpu in gpus]
    header = pygame.Rect(edge, px(14), width - 2 * edge, px(46))
    return Layout(unit, header, last_op, legend, times, traffic, saved, panels, gpus, bars, tiles, gap)
