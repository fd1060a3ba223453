"""The placement picture: draws a frame on a surface."""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from clustergym.common.canvas import (
    BACKGROUND,
    BLUE,
    CARD,
    CELL,
    FAINT,
    ICE,
    MUTED,
    ORANGE,
    TEXT,
    TRACK,
    VIRIDIS,
    WHITE,
    Canvas,
    Colour,
    colour_scale,
    contrast_colour,
    pygame,
    rgb,
    rounded_box,
)
from clustergym.moe_placement.viewer.frame import Frame, describe
from clustergym.moe_placement.viewer.layout import layout, split


def paint(frame: Frame, width: int, height: int) -> pygame.Surface:
    """The picture as a surface."""
    return Painter(frame, width, height).paint()


def load_colours(expert_load: npt.NDArray[np.float64]) -> npt.NDArray[np.uint8]:
    """(E, 3) colour of each expert's tile: viridis over the square root of its load; the highest load is the brightest.

    A few experts have many times the mean load. On a linear scale, all others would have nearly the same dark colour.
    """
    top = max(float(expert_load.max()), 1e-12)
    colours: npt.NDArray[np.uint8] = colour_scale(VIRIDIS)[np.rint(255 * np.sqrt(expert_load / top)).astype(int)]
    return colours


def _format_bytes(value: float, unit: str) -> str:
    """Three significant digits without an exponent."""
    value /= {"GB": 1e9, "MB": 1e6, "kB": 1e3, "B": 1.0}[unit]
    return f"{value:.0f}" if value >= 100 or value == 0 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _byte_unit(value: float) -> str:
    return "GB" if value >= 1e9 else "MB" if value >= 1e6 else "kB" if value >= 1e3 else "B"


def _percent(share: float) -> str:
    return f"{100 * share:+.1f} %".replace("-", "−")


@lru_cache(maxsize=8)
def _backdrop(nodes: int, gpus_per_node: int, slots: int, width: int, height: int) -> pygame.Surface:
    """The empty cards. They are equal in all frames of an environment."""
    at = layout(nodes, gpus_per_node, slots, width, height)
    surface = pygame.Surface((width, height), 0, 32)
    surface.fill(BACKGROUND)
    cards = [(r, CARD, 8) for r in (at.last_op, at.legend, at.times, at.traffic, at.saved, *at.nodes)]
    for rect, colour, radius in cards + [(r, CELL, 5) for r in at.gpus]:
        surface.blit(rounded_box(rect.w, rect.h, round(radius * at.unit), colour), rect)
    return surface


@lru_cache(maxsize=2048)
def _tile(w: int, h: int, expert: int, fill: Colour, replicas: int, migrated: bool, unit: float) -> pygame.Surface:
    """The tile of one expert: one dot per replica (at most four), and an outline if its weights must be fetched."""
    canvas = Canvas(pygame.Surface((w, h), pygame.SRCALPHA, 32), unit)
    rect = pygame.Rect(0, 0, w, h)
    canvas.box(rect, fill, 3)
    if migrated:
        canvas.box(rect, None, 3, WHITE)
    label = min(w / 3.2 / unit, h / 1.8 / unit, 18)
    x, y, room = rect.centerx, rect.centery, w - 4
    if replicas > 1:
        dots, dot = min(replicas, 4), max(2, min(canvas.px(4), h // 7))
        step = dot + max(1, dot // 2)
        span = dots * step - step + dot
        if h >= canvas.px(36):
            y -= dot
            canvas.dots(dots, dot, x - span // 2, h - 2 * dot - 2, step, 0, contrast_colour(fill))
        else:  # no space below the label: use a column beside it
            canvas.dots(dots, dot, w - dot - 3, y - span // 2, 0, step, contrast_colour(fill))
            x, room = x - (dot + 3) // 2, room - dot - 3
    canvas.text(f"E{expert}", x, y, label, contrast_colour(fill), bold=True, align=0.5, room=room)
    return canvas.surface


class Painter(Canvas):
    """Draws one frame."""

    def __init__(self, frame: Frame, width: int, height: int) -> None:
        gpus, slots = frame.slots.shape
        shape = (gpus // frame.gpus_per_node, frame.gpus_per_node, slots, width, height)
        self.frame = frame
        self.layout = layout(*shape)
        super().__init__(_backdrop(*shape).copy(), self.layout.unit)
        self.colours = [rgb(c) for c in load_colours(frame.expert_load)]
        self.replicas = np.bincount(frame.slots[frame.slots >= 0], minlength=len(self.colours)).tolist()
        pairs = frame.gpu_pairs
        self.busiest = int(pairs.argmax()) if pairs.max() > 0 else -1
        self.relative_load = (pairs / max(float(pairs.mean()), 1e-12)).tolist()
        # All GPUs show the same columns in their heads: those that fit the narrowest GPU.
        room = min(bar.w for bar in self.layout.bars)
        ratio = self.px(4) + self.width(f"{max(self.relative_load):.2f}×", 11, True)
        time = self.px(12) + self.width(f"{frame.gpu_compute_us.max():.0f} µs", 11)
        name, number = self.width(f"GPU {gpus - 1}", 11, True), self.width(str(gpus - 1), 11, True)
        self.show_ratio, self.show_name, self.show_time = (
            needed <= room for needed in (number + ratio, name + ratio, name + ratio + time)
        )

    def paint(self) -> pygame.Surface:
        self.header()
        self.last_operation()
        for node in range(len(self.layout.nodes)):
            self.node(node)
        for gpu in range(len(self.layout.gpus)):
            self.gpu(gpu)
        self.mark_operation()
        self.legend()
        self.times()
        self.traffic()
        self.saved()
        return self.surface

    def card_title(self, rect: pygame.Rect, title: str, right: str) -> None:
        middle = rect.y + self.px(19)
        room = rect.w - self.px(42) - self.text(title, rect.x + self.px(14), middle, 14, TEXT, bold=True)
        self.text(right, rect.right - self.px(14), middle, 12, MUTED, align=1, room=room)

    def header(self) -> None:
        """Title, shape of the cluster, and progress in intervals, layers and operations."""
        f, area, px = self.frame, self.layout.header, self.px
        self.text("MoE placement", area.x, area.y + px(15), 22, TEXT, bold=True)
        gpus, slots = f.slots.shape
        shape = f"{gpus // f.gpus_per_node} × {f.gpus_per_node} GPUs, {slots} slots each, {f.expert_load.size} experts"
        self.text(shape, area.x, area.y + px(37), 12, MUTED, room=px(300))
        progress = (
            ("Interval", min(f.interval + 1, f.n_intervals), f.n_intervals, ""),
            ("Layer", min(f.layer + 1, f.n_layers), f.n_layers, f"model layer {f.layer_id}"),
            ("Operation", f.op, f.ops_per_layer, "in this layer"),
        )
        left = area.x + px(340)
        for (name, done, total, note), (x, w) in zip(progress, split(left, area.right - left, 3, px(28)), strict=True):
            used = self.text(f"{name} {done}", x, area.y + px(17), 15, TEXT, bold=True)
            used += px(6) + self.text(f"of {total}", x + used + px(6), area.y + px(17), 13, MUTED)
            self.text(note, x + w, area.y + px(17), 12, MUTED, align=1, room=w - used - px(10))
            track = pygame.Rect(x, area.y + px(34), w, max(3, px(5)))
            self.box(track, TRACK, 2)
            self.box(pygame.Rect(x, track.y, round(w * min(1.0, done / max(total, 1))), track.h), BLUE, 2)

    def last_operation(self) -> None:
        """The last operation in words, and the number of replicas to fetch."""
        area, op, px = self.layout.last_op, self.frame.last_op, self.px
        x = area.x + px(14) + self.text("Last operation", area.x + px(14), area.centery, 12, MUTED) + px(14)
        sentence = describe(op) if op else "none yet"
        colour = MUTED if op is None or op.kind == "nothing" else ORANGE if op.kind == "illegal" else BLUE
        used = self.text(sentence, x, area.centery, 15, colour, room=area.right - x - px(14))
        fetches = int((self.frame.migrated & (self.frame.slots >= 0)).sum())
        note = f"{fetches} replica{'' if fetches == 1 else 's'} to fetch in this interval"
        self.text(note, area.right - px(14), area.centery, 12, MUTED, align=1, room=area.right - x - used - px(34))

    def node(self, node: int) -> None:
        """Name of a node and its traffic with other nodes."""
        area, gap, per_node = self.layout.nodes[node], self.layout.gap, self.frame.gpus_per_node
        middle = area.y + self.px(15)
        used = self.text(f"Node {node}", area.x + gap, middle, 14, TEXT, bold=True)
        own = slice(node * per_node, (node + 1) * per_node)
        traffic = self.frame.traffic_bytes
        sent, received = (float(t.sum() - traffic[own, own].sum()) for t in (traffic[own], traffic[:, own]))
        if len(self.layout.nodes) > 1:
            unit = _byte_unit(max(sent, received))
            out, back = _format_bytes(sent, unit), _format_bytes(received, unit)
            notes = (f"sends {out}, receives {back} {unit}", f"out {out}, in {back} {unit}", f"out {out} {unit}")
            self.text(notes, area.right - gap, middle, 11, MUTED, align=1, room=area.w - 2 * gap - used - self.px(10))

    def mean_line(self, x: int, bar: pygame.Rect) -> None:
        over = self.px(2)
        pygame.draw.rect(self.surface, WHITE, (x, bar.y - over, max(1, self.px(1.5)), bar.h + 2 * over))

    def gpu(self, gpu: int) -> None:
        """Name, time and load of a GPU, and the tiles of its slots."""
        f, area, bar, px = self.frame, self.layout.gpus[gpu], self.layout.bars[gpu], self.px
        busiest, ratio, middle = gpu == self.busiest, self.relative_load[gpu], area.y + px(10)
        # All bars have one scale. It ends at 1.5 times the mean or higher, so a balanced cluster looks balanced.
        full = max(1.5, max(self.relative_load))
        colour = ORANGE if busiest else MUTED
        self.text(f"GPU {gpu}" if self.show_name else str(gpu), bar.x, middle, 11, TEXT, bold=True)
        if self.show_ratio:
            used = self.text(f"{ratio:.2f}×", bar.right, middle, 11, colour, bold=busiest, align=1)
            if self.show_time:
                self.text(f"{f.gpu_compute_us[gpu]:.0f} µs", bar.right - used - px(8), middle, 11, MUTED, align=1)
        self.box(bar, TRACK, 2)
        self.box(pygame.Rect(bar.x, bar.y, round(bar.w * ratio / full), bar.h), colour, 2)
        self.mean_line(bar.x + min(round(bar.w / full), bar.w - 1), bar)
        if busiest:
            self.box(area, None, 5, ORANGE)
        for slot, rect in enumerate(self.layout.tiles[gpu]):
            expert = int(f.slots[gpu, slot])
            if expert < 0:
                self.box(rect, None, 3, FAINT, dash=True)
            else:
                style = (self.colours[expert], self.replicas[expert], bool(f.migrated[gpu, slot]))
                self.surface.blit(_tile(rect.w, rect.h, expert, *style, self.unit), rect)

    def mark_operation(self) -> None:
        """Frames around the GPUs and tiles of the last operation, and an arrow for a move."""
        op, f = self.frame.last_op, self.frame
        if op is None or op.kind in ("nothing", "illegal"):
            return
        # Outside the GPU, because the frame of the busiest GPU is inside.
        ring = 2 * max(2, self.px(2))
        self.box(self.layout.gpus[op.gpu].inflate(ring, ring), None, 6, BLUE, dash=op.kind == "delete")
        for gpu, expert in ((op.gpu, op.expert), (op.source, op.victim)):
            if gpu >= 0 and expert >= 0:
                for slot in np.flatnonzero(f.slots[gpu] == expert):
                    self.box(self.layout.tiles[gpu][slot].inflate(4, 4), None, 4, BLUE)
        if op.source >= 0 and op.source != op.gpu:
            self.box(self.layout.gpus[op.source].inflate(ring, ring), None, 6, BLUE, dash=True)
            route = self.route(op.source, op.gpu)
            thick = max(2, self.px(3))
            for (ax, ay), (bx, by) in pairwise(route):
                line = pygame.Rect(min(ax, bx), min(ay, by), abs(ax - bx), abs(ay - by)).inflate(thick, thick)
                self.box(line, BLUE, 1.5)
            self.arrowhead(route[-2], route[-1])
            if op.kind == "swap":
                self.arrowhead(route[1], route[0])

    def route(self, source: int, target: int) -> list[tuple[int, int]]:
        """Corners of an arrow between two GPUs. It runs in the gaps, so it never crosses a tile or a text."""
        a, b, half = self.layout.gpus[source], self.layout.gpus[target], self.layout.gap // 2
        if a.top == b.top:
            return [(a.centerx, a.top), (a.centerx, a.top - half), (b.centerx, b.top - half), (b.centerx, b.top)]
        down = b.top > a.top
        start, leave = (a.bottom, a.bottom + half) if down else (a.top, a.top - half)
        enter, end = (b.top - half, b.top) if down else (b.bottom + half, b.bottom)
        if abs(leave - enter) <= 2:
            return [(a.centerx, start), (a.centerx, leave), (b.centerx, leave), (b.centerx, end)]
        beside = b
        per_node = self.frame.gpus_per_node
        if self.layout.nodes[source // per_node].top != self.layout.nodes[target // per_node].top:
            beside = self.layout.nodes[target // per_node]  # the node's title spans all its GPUs: go around the node
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
        """The colour scale of loads with ticks in multiples of the mean, and a sample of each mark."""
        area, px, load = self.layout.legend, self.px, self.frame.expert_load
        x = area.x + px(14)
        x += self.text("Load of expert", x, area.centery, 12, MUTED) + px(12)
        bar = pygame.Rect(x, area.y + px(11), px(210), px(11))
        self.colour_bar(bar, VIRIDIS)
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
            self.legend_sample(name, pygame.Rect(x, area.centery - px(8), px(24), px(16)))
            self.text(name, x + px(30), area.centery, 12, MUTED)
            x += wide + space

    def legend_sample(self, name: str, rect: pygame.Rect) -> None:
        px = self.px
        if name == "mean":
            bar = pygame.Rect(rect.x, rect.centery - px(2), rect.w, max(3, px(5)))
            self.box(bar, TRACK, 2)
            self.mean_line(rect.centerx, bar)
        else:
            outline = {"to fetch": WHITE, "empty": FAINT, "busiest": ORANGE, "operation": BLUE}.get(name)
            self.box(rect, None if name == "empty" else TRACK, 3, outline, dash=name == "empty")
        if name == "replicas":
            self.dots(2, px(4), rect.centerx - px(5), rect.bottom - px(7), px(6), 0, WHITE)

    def times(self) -> None:
        """Time of this layer now, at the start of the interval, and with the static placement."""
        f, area, px = self.frame, self.layout.times, self.px
        share = 1 - f.layer_time_us / f.static_time_us if f.static_time_us else 0.0
        self.card_title(area, "Time of this layer", "")
        colour_now = BLUE if share >= 0 else ORANGE
        words = "less than static" if share >= 0 else "more than static"
        used = self.text(words, area.right - px(14), area.y + px(19), 12, MUTED, align=1)
        number = f"{abs(share) * 100:.1f} %"
        self.text(number, area.right - px(20) - used, area.y + px(19), 17, colour_now, bold=True, align=1)
        rows = (
            ("static", f.static_time_us, FAINT),
            ("start", f.start_time_us, MUTED),
            ("now", f.layer_time_us, colour_now),
        )
        longest = max(max(value for _, value, _ in rows), 1e-12)
        left, right = area.x + px(62), area.right - px(92)
        for i, (name, value, colour) in enumerate(rows):
            middle = area.y + px(50 + 25 * i)
            self.text(name, area.x + px(14), middle, 12, MUTED)
            self.box(pygame.Rect(left, middle - px(7), round((right - left) * value / longest), px(14)), colour, 2)
            self.text(f"{value:,.1f} µs", area.right - px(14), middle, 12, TEXT, align=1)
        mark = left + round((right - left) * f.static_time_us / longest)
        pygame.draw.rect(self.surface, MUTED, (mark, area.y + px(38), 1, px(74)))
        since_start = 1 - f.layer_time_us / f.start_time_us if f.start_time_us else 0.0
        slowest = int(f.gpu_compute_us.argmax())
        foot = area.y + px(139)
        used = self.text(f"{_percent(since_start)} saved in this interval", area.x + px(14), foot, 12, MUTED)
        compute = f"slowest GPU {slowest}: {f.gpu_compute_us[slowest]:.0f} µs"
        self.text(compute, area.right - px(14), foot, 12, MUTED, align=1, room=area.w - used - px(38))

    def traffic(self) -> None:
        """Bytes from GPU to GPU as a heat map. Another colour scale than that of the loads, to avoid confusion."""
        f, area, px = self.frame, self.layout.traffic, self.px
        gpus = f.slots.shape[0]
        nodes = gpus // f.gpus_per_node
        total = float(f.traffic_bytes.sum())
        self.card_title(
            area, "Dispatch traffic", f"{_format_bytes(total, _byte_unit(total))} {_byte_unit(total)} in all"
        )

        cell = max(1, px(192) // gpus)
        heat = pygame.Rect(area.x + px(28), area.y + px(58), cell * gpus, cell * gpus)
        top = max(float(f.traffic_bytes.max()), 1e-12)
        colours = colour_scale(ICE)[np.rint(255 * f.traffic_bytes / top).astype(int)]
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
        unit = _byte_unit(top)
        used = self.text("GPU → GPU  0", heat.x, foot, 11, MUTED) + px(6)
        most = f"{_format_bytes(top, unit)} {unit}"
        wide = px(192) - self.width(most, 11) - px(6) - used
        self.colour_bar(pygame.Rect(heat.x + used, foot - px(4), max(4, wide), px(8)), ICE)
        self.text(most, heat.x + px(192), foot, 11, MUTED, align=1)
        left = area.x + px(28) + px(192) + px(26)
        self.node_traffic(left, heat.y, area.right - px(14) - left)

    def node_traffic(self, left: int, top: int, width: int) -> None:
        """Bytes from node to node as a table, and the share that crosses nodes."""
        f, px = self.frame, self.px
        per_node = f.gpus_per_node
        nodes = f.slots.shape[0] // per_node
        if nodes == 1:
            self.text("one node:", left - px(8), top + px(8), 11, MUTED)
            self.text("nothing crosses", left - px(8), top + px(24), 11, MUTED, room=width + px(8))
            return
        between = f.traffic_bytes.reshape(nodes, per_node, nodes, per_node).sum((1, 3))
        largest = max(float(between.max()), 1e-12)
        unit = _byte_unit(largest)
        side = min(width // nodes, px(46))
        for i in range(nodes):
            x, y = left + i * side + side // 2, top + i * side + side // 2
            self.text((f"N{i}", str(i)), x, top - px(8), 10, MUTED, align=0.5, room=side - 3)
            self.text(f"N{i}", left - px(5), y, 10, MUTED, align=1, room=px(18))
            for j in range(nodes):
                fill = rgb(colour_scale(ICE)[round(255 * between[i, j] / largest)])
                rect = pygame.Rect(left + j * side, top + i * side, side - 1, side - 1)
                self.box(rect, fill, 2)
                number = _format_bytes(between[i, j], unit)
                self.text(number, rect.centerx, rect.centery, 10, contrast_colour(fill), align=0.5, room=rect.w - 2)
        y = top + nodes * side + px(14)
        self.text(f"node → node, {unit}", left, y, 11, MUTED, room=width)
        total = float(f.traffic_bytes.sum())
        crossing = 1 - float(np.trace(between)) / total if total > 0 else 0.0
        self.text(f"{100 * crossing:.0f} %", left, y + px(26), 17, TEXT, bold=True)
        self.text("crosses nodes", left, y + px(46), 11, MUTED, room=width)

    def saved(self) -> None:
        """One bar per served interval: the share of time saved."""
        f, area, px = self.frame, self.layout.saved, self.px
        mean = f"{_percent(float(np.mean(f.saved)))} on average" if f.saved else "none served yet"
        self.card_title(area, "Time saved per interval", mean)
        plot = pygame.Rect(area.x + px(58), area.y + px(42), area.w - px(72), area.h - px(68))
        # If there are more intervals than fit, show the last ones.
        first = max(0, len(f.saved) - max(1, plot.w // 3))
        shown = f.saved[first:]
        count = max(len(shown), min(f.n_intervals, plot.w // 3), 1)
        high, low = max([0.01, *shown]), min([0.0, *shown])
        zero = plot.y + round(plot.h * high / (high - low))
        self.text("0 %", plot.x - px(8), zero, 10, MUTED, align=1)
        for value, y in ((high, plot.y), (low, plot.bottom)):
            if abs(y - zero) >= px(12):
                self.text(_percent(value), plot.x - px(8), y, 10, MUTED, align=1)
        pygame.draw.rect(self.surface, TRACK, (plot.x, plot.y, plot.w, 1))
        for i, (x, w) in enumerate(split(plot.x, plot.w, count, max(1, min(px(6), plot.w // (4 * count))))):
            if i < len(shown):
                height = round(plot.h * abs(shown[i]) / (high - low))
                bar = pygame.Rect(x, zero - height if shown[i] > 0 else zero, w, height)
                self.box(bar, BLUE if shown[i] > 0 else ORANGE, 2)
        pygame.draw.rect(self.surface, FAINT, (plot.x, zero, plot.w, 1))
        foot = area.bottom - px(12)
        used = self.text(f"interval {first + 1}", plot.x, foot, 10, MUTED)
        self.text(str(first + count), plot.right, foot, 10, MUTED, align=1, room=plot.w - used - px(10))
