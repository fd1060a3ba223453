"""Draw the pictures of docs/concepts.md and of both environments: ``python docs/make_pictures.py``.

A test compares the drawings with the files.
"""

from __future__ import annotations

from pathlib import Path
from xml.sax.saxutils import escape

FOLDER = Path(__file__).parent / "images" / "concepts"
INK, SOFT, LINE, PANEL = "#1f2430", "#5c6470", "#c4c9d2", "#f2f4f7"
BLUE, GREEN, RED, GOLD, PURPLE, CYAN = "#4477aa", "#228833", "#cc4455", "#c9a227", "#aa3377", "#3399bb"
EXPERTS = {"A": RED, "B": BLUE, "C": GREEN, "D": GOLD, "E": PURPLE, "F": CYAN, "G": "#7a7f87", "H": "#8a6d3b"}


class Picture:
    """An SVG file, drawn part by part."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            f'role="img" font-family="system-ui, Segoe UI, Helvetica, Arial, sans-serif">'
            f"<title>{escape(title)}</title>",
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            f'<path d="M0 0L8 4L0 8Z" fill="{SOFT}"/></marker></defs>',
            f'<rect width="{width}" height="{height}" rx="10" fill="#ffffff"/>',
        ]

    def box(
        self,
        x: float,
        y: float,
        w: float,
        h: float,
        fill: str = "none",
        stroke: str = LINE,
        rx: float = 6,
        more: str = "",
    ) -> None:
        self.parts.append(
            f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="{rx}" fill="{fill}" stroke="{stroke}" {more}/>'
        )

    def text(
        self,
        x: float,
        y: float,
        words: str,
        size: float = 14,
        colour: str = INK,
        anchor: str = "start",
        bold: bool = False,
    ) -> None:
        weight = ' font-weight="600"' if bold else ""
        self.parts.append(
            f'<text x="{x}" y="{y}" font-size="{size}" fill="{colour}" text-anchor="{anchor}"{weight}>'
            f"{escape(words)}</text>"
        )

    def arrow(self, x1: float, y1: float, x2: float, y2: float, colour: str = SOFT, width: float = 1.6) -> None:
        self.parts.append(
            f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{colour}" stroke-width="{width}" '
            'marker-end="url(#tip)"/>'
        )

    def line(
        self, x1: float, y1: float, x2: float, y2: float, colour: str = LINE, width: float = 1.5, more: str = ""
    ) -> None:
        self.parts.append(
            f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{colour}" stroke-width="{width}" {more}/>'
        )

    def dot(self, x: float, y: float, colour: str, r: float = 5) -> None:
        self.parts.append(f'<circle cx="{x}" cy="{y}" r="{r}" fill="{colour}"/>')

    def expert(self, x: float, y: float, name: str, size: float = 30, replica: bool = False) -> None:
        """A slot with an expert; an empty name is an empty slot."""
        if not name:
            self.box(x, y, size, size, "none", LINE, 4, 'stroke-dasharray="3 3"')
            return
        stroke = f'{INK}" stroke-width="2.5' if replica else "none"
        self.box(x, y, size, size, EXPERTS[name], stroke, 4)
        self.text(x + size / 2, y + size / 2 + 5, name, 14, "#ffffff", "middle", True)

    def save(self) -> str:
        return "\n".join([*self.parts, "</svg>"]) + "\n"


def serving_pass() -> str:
    """One forward pass of one layer: dispatch, compute, combine."""
    p = Picture(860, 330, "One forward pass: tokens travel from their rank to the experts and back")
    p.text(20, 30, "One forward pass of one MoE layer", 17, bold=True)
    held = [("A", "B"), ("C", "D"), ("E", "F"), ("G", "A")]
    for node in (0, 1):
        p.box(20 + 420 * node, 50, 400, 190, PANEL)
        p.text(34 + 420 * node, 72, f"node {node}", 13, SOFT)
    loads = (6, 4, 2, 4)
    for rank in range(4):
        x = 34 + 420 * (rank // 2) + 192 * (rank % 2)
        p.box(x, 84, 180, 142, "#ffffff", SOFT)
        p.text(x + 10, 104, f"GPU {rank} = rank {rank}", 13, bold=True)
        p.text(x + 10, 130, "tokens", 12, SOFT)
        for i in range(4):
            p.dot(x + 70 + 18 * i, 126, INK, 4.5)
        p.text(x + 10, 164, "slots", 12, SOFT)
        for i, name in enumerate((*held[rank], "")):
            p.expert(x + 62 + 35 * i, 144, name, replica=name == "A")
        p.text(x + 10, 205, "work", 12, SOFT)
        p.box(x + 62, 195, 17 * loads[rank], 12, RED if loads[rank] == max(loads) else BLUE, "none", 3)
    steps = (
        ("dispatch", "tokens travel to their experts", CYAN),
        ("compute", "the busiest GPU sets the time", BLUE),
        ("combine", "results travel back", GREEN),
    )
    for i, (name, why, colour) in enumerate(steps):
        x = 20 + 278 * i
        p.box(x, 256, 262, 54, "#ffffff", colour, 6, 'stroke-width="2"')
        p.text(x + 14, 278, f"{i + 1}. {name}", 14, colour, bold=True)
        p.text(x + 14, 298, why, 12.5, SOFT)
        if i < 2:
            p.arrow(x + 262, 283, x + 277, 283)
    return p.save()


def interval() -> str:
    """Intervals of many passes, with a decision between two of them."""
    p = Picture(860, 256, "Intervals: many passes between two placement decisions")
    p.text(20, 30, "Time: passes, intervals, decisions", 17, bold=True)
    for i in range(3):
        x = 40 + 265 * i
        p.box(x, 70, 235, 64, PANEL)
        p.text(x + 117, 62, f"interval {i + 1}: about 1,000 passes", 13, SOFT, "middle")
        for k in range(18):
            sampled = k in (5, 12)
            p.box(x + 10 + 12 * k, 84, 8, 36, GOLD if sampled else "#d5dae2", "none", 2)
    for i in range(2):
        x = 290 + 265 * i
        p.arrow(x, 176, x, 128, RED, 2)
        p.text(x, 192, "decision", 13, RED, "middle", True)
    p.box(40, 206, 10, 14, GOLD, "none", 2)
    p.text(58, 218, "sampled pass: it is simulated exactly, and the planner sees it after the interval", 13, SOFT)
    p.text(
        58, 238, "decision: the planner may move experts; a move costs migration time in the next interval", 13, SOFT
    )
    p.line(40, 146, 806, 146, SOFT)
    p.arrow(800, 146, 815, 146)
    p.text(822, 150, "time", 12.5, SOFT)
    return p.save()


def placement() -> str:
    """The same experts before and after planning."""
    p = Picture(860, 330, "A placement: which GPU holds which experts, with replicas of the hot ones")
    p.text(20, 30, "A placement: the experts of every GPU, for one layer", 17, bold=True)
    load = {"A": 6.0, "B": 2.0, "C": 2.0, "D": 1.0, "E": 1.0, "F": 2.0, "G": 1.0, "H": 1.0}
    plans = {
        "static: experts in their order": [("A", "B", ""), ("C", "D", ""), ("E", "F", ""), ("G", "H", "")],
        "planned: the hot expert A has three replicas": [
            ("A", "B", ""),
            ("A", "C", ""),
            ("A", "E", "D"),
            ("F", "G", "H"),
        ],
    }
    for i, (title, rows) in enumerate(plans.items()):
        x = 20 + 420 * i
        p.box(x, 48, 400, 236, PANEL)
        p.text(x + 14, 72, title, 14, bold=True)
        names = [name for row in rows for name in row if name]
        work = [sum(load[name] / names.count(name) for name in row if name) for row in rows]
        for g, row in enumerate(rows):
            y = 86 + 48 * g
            p.text(x + 14, y + 22, f"GPU {g}", 13)
            for s, name in enumerate(row):
                p.expert(x + 66 + 36 * s, y, name, replica=bool(name) and names.count(name) > 1)
            p.box(x + 186, y + 7, 24 * work[g], 16, RED if work[g] == max(work) else BLUE, "none", 3)
            p.text(x + 186 + 24 * work[g] + 6, y + 20, f"{work[g]:.0f}", 12, SOFT)
    p.box(24, 298, 20, 16, "none", LINE, 4, 'stroke-dasharray="3 3"')
    p.text(52, 311, "empty slot", 12.5, SOFT)
    p.box(150, 298, 20, 16, RED, f'{INK}" stroke-width="2.5', 4)
    p.text(178, 311, "replica: one of several copies of an expert", 12.5, SOFT)
    p.box(470, 301, 30, 12, RED, "none", 3)
    p.text(508, 311, "load of the busiest GPU: it sets the time (8, then 4)", 12.5, SOFT)
    return p.save()


def profile() -> str:
    """Three transports of the engine profiles."""
    p = Picture(860, 300, "Engine profiles differ in how tokens travel")
    p.text(20, 30, "A profile: how an engine sends a token that needs three experts", 17, bold=True)
    panels = (
        ("dedup", "one copy per GPU and remote node", "SGLang prefill, TensorRT-LLM", ((0, 1), (0, 2), (2, 3))),
        ("per-expert", "one copy per expert", "SGLang decode, vLLM with DeepEP", ((0, 1), (0, 2), (0, 3))),
        ("all-gather", "every GPU gets every token", "vLLM by default", ((0, 1), (0, 2), (0, 3), (0, 4))),
    )
    spots = ((30, 68), (30, 158), (158, 68), (158, 113), (158, 158))
    for i, (name, what, who, copies) in enumerate(panels):
        x0 = 20 + 280 * i
        p.box(x0, 48, 262, 236, "#ffffff", LINE)
        p.text(x0 + 14, 72, name, 15, BLUE, bold=True)
        p.text(x0 + 14, 248, what, 12.5)
        p.text(x0 + 14, 268, who, 12.5, SOFT)
        p.box(x0 + 14, 84, 104, 144, PANEL)
        p.box(x0 + 142, 84, 106, 144, PANEL)
        for k, (dx, dy) in enumerate(spots):
            p.box(x0 + dx, 24 + dy, 74, 30, "#ffffff", SOFT, 5)
            p.text(x0 + dx + 10, 24 + dy + 19, "GPU", 11, SOFT)
            experts = {1: "A", 2: "B", 3: "C"}
            if k in experts:
                p.expert(x0 + dx + 46, 24 + dy + 5, experts[k], 20)
        p.dot(x0 + 86, 24 + 68 + 15, INK, 5)
        for a, b in copies:
            (ax, ay), (bx, by) = spots[a], spots[b]
            start, end = (x0 + ax + 74, 39 + ay), (x0 + bx, 39 + by)
            if bx == ax:
                start, end = (x0 + ax + 37, 54 + ay), (x0 + ax + 37, 24 + by)
            p.arrow(*start, *end, colour=RED, width=1.8)
    return p.save()


PICTURES = {"pass.svg": serving_pass, "interval.svg": interval, "placement.svg": placement, "profile.svg": profile}


def viewer(path: Path) -> None:
    """The placement environment in the middle of an episode of a greedy agent."""
    import gymnasium
    import matplotlib.image
    import numpy as np

    env = gymnasium.make(
        "clustergym:MoEPlacementDrift-v0", trace="synthetic", cluster="h800-4x4", tokens_per_rank=64, intervals=4,
        lookahead=True,        render_mode="rgb_array",
    )  # fmt: skip
    obs, _ = env.reset(seed=4)
    layer_steps = env.unwrapped.batch.config.ops_per_layer
    for _ in range(2 * 8 * layer_steps + 3 * layer_steps + layer_steps // 2):
        savings = obs["lookahead"]
        obs, *_ = env.step(np.unravel_index(int(np.argmax(savings)), savings.shape))
    matplotlib.image.imsave(path, env.render())


def allocation(path: Path) -> None:
    """The allocation environment after an episode under the rule vpa."""
    import gymnasium
    import matplotlib.image

    from clustergym.gpu_allocation.rules import RULES

    env = gymnasium.make("clustergym:GPUAllocationHistory-v0", render_mode="rgb_array")
    env.reset(seed=1)
    rule = RULES["vpa"](env.unwrapped.batch)
    for _ in range(100):
        env.step(rule.act()[0].numpy())
        rule.learn()
    matplotlib.image.imsave(path, env.render())


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, draw in PICTURES.items():
        (FOLDER / name).write_text(draw(), encoding="utf-8")
    viewer(FOLDER.parent / "placement.png")
    allocation(FOLDER.parent / "gpu_allocation.png")


if __name__ == "__main__":
    main()
