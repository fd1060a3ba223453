"""The curve of ``plan --slots auto``: a table for the terminal, and a table with a picture for the page."""

from __future__ import annotations

import html
from collections.abc import Sequence

from rich.table import Table

from clustergym.plans.slots import SlotCurve, SlotPoint

COLUMNS = ("slots", "spare", "µs per layer", "GB of experts", "KV tokens lost", "requests", "throughput")
_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 460, 210, 62, 24, 40


def _cells(curve: SlotCurve, point: SlotPoint) -> list[str]:
    best = max(each.throughput for each in curve.points)
    return [
        str(point.slots), str(point.spare), f"{point.layer_us:.1f}", f"{point.experts_gb:.1f}", f"{point.kv_lost:,}",
        str(point.requests), f"{100 * point.throughput / best:.1f} %",
    ]  # fmt: skip


def slot_table(curve: SlotCurve) -> Table:
    """All numbers of slots; the chosen one is bold."""
    table = Table(
        title="spare slots against KV cache",
        caption=f"per GPU, {curve.memory_gb:g} GB for experts and KV cache; requests of {curve.context:,} tokens that "
        f"run at once, at most {curve.wanted}; throughput: requests per time, as a share of the best",
    )
    for column in COLUMNS:
        table.add_column(column, justify="right")
    for point in curve.points:
        table.add_row(*_cells(curve, point), style="bold green" if point == curve.chosen else None)
    return table


def slot_section(curve: SlotCurve) -> str:
    """A section of the page."""
    head = "".join(f"<th scope=col>{column}</th>" for column in COLUMNS)
    rows = []
    for point in curve.points:
        first, *others = _cells(curve, point)
        mark, chosen = (" ◆", ' class="chosen"') if point == curve.chosen else ("", "")
        rows.append(f"<tr{chosen}><th scope=row>{first}{mark}</th>{''.join(f'<td>{c}</td>' for c in others)}</tr>")
    spare = [point.spare for point in curve.points]
    chosen_at = curve.points.index(curve.chosen)
    pictures = _line("µs per layer", spare, [p.layer_us for p in curve.points], chosen_at) + _line(
        "requests per GPU at once", spare, [p.requests for p in curve.points], chosen_at
    )
    return (
        f'<h2>Spare slots against KV cache</h2><p class="soft">{html.escape(curve.describe())}. The fewest within '
        "1 % of the best throughput are taken. Times are on a part of the traffic that the tables of planners do not "
        f'use.</p><div class="pair">{pictures}</div><div class="scroll"><table id="slots"><thead><tr>{head}</tr>'
        f"</thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _line(title: str, xs: Sequence[int], ys: Sequence[float], chosen: int) -> str:
    """A picture of ``ys`` from 0, with a larger dot for the chosen point."""
    top, right = 1.1 * max(ys), max(xs) or 1
    at = [
        (_LEFT + (_WIDTH - _LEFT - 16) * x / right, _TOP + (_HEIGHT - _TOP - _BOTTOM) * (1 - y / top))
        for x, y in zip(xs, ys, strict=True)
    ]
    dots = "".join(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{6 if i == chosen else 3}" fill="var(--chosen)">'
        f"<title>{xs[i]} spare: {ys[i]:g}</title></circle>"
        for i, (x, y) in enumerate(at)
    )
    labels = "".join(
        f'<text x="{x:.1f}" y="{_HEIGHT - 22}" font-size="11" text-anchor="middle">{spare}</text>'
        for (x, _), spare in zip(at, xs, strict=True)
    )
    base = _HEIGHT - _BOTTOM
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{title} by spare slots">'
        f'<text x="4" y="14" font-size="12">{title}</text>'
        f'<line class="axis" x1="{_LEFT}" y1="{base}" x2="{_WIDTH - 16}" y2="{base}"/>'
        f'<text class="quiet" x="{_LEFT - 6}" y="{at[chosen][1] + 4:.1f}" font-size="11" text-anchor="end">'
        f"{ys[chosen]:.1f}</text>"
        f'<polyline points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in at)}" fill="none" stroke="var(--chosen)" '
        f'stroke-width="2"/>{dots}{labels}'
        f'<text class="quiet" x="{_WIDTH / 2}" y="{_HEIGHT - 6}" font-size="11" text-anchor="middle">'
        "spare slots per GPU and layer</text></svg>"
    )
