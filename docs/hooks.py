"""Hooks of the mkdocs build: the navigation from the existing pages, and links to files outside the site."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
# Sections and patterns of their pages, in order. A page belongs to the first pattern that matches.
SECTIONS: list[tuple[str, list[str]]] = [
    ("Tasks", ["moe_placement", "gpu_allocation", "reference/moe_placement", "reference/gpu_allocation"]),
    ("Serving engineers", ["engines", "planners", "placement_results", "traces", "record.*"]),
    ("Benchmark", ["bench", "leaderboard"]),
    ("Trainers", ["ppo", "ppo_.*", "37-details", "sweeps"]),
    ("Operators", ["agent.*", "webhook.*", "kubernetes.*", "deploy.*"]),
    ("Developers", ["architecture"]),
    ("More", ["(?!index|reference/).*"]),
    ("Flags", ["reference/.*"]),
]


def on_config(config: Any) -> Any:
    """Build the navigation. Every page gets a place."""
    spec = importlib.util.spec_from_file_location("gen_pages", DOCS / "gen_pages.py")
    assert spec is not None
    assert spec.loader is not None
    gen_pages = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(gen_pages)
    generated = gen_pages.pages()
    there = sorted([p.relative_to(DOCS).with_suffix("").as_posix() for p in DOCS.rglob("*.md")])
    left = dict.fromkeys([*there, *(name.removesuffix(".md") for name in generated)])
    left.pop("index", None)
    nav: list[Any] = [{"clustergym": "index.md"}]
    for title, patterns in SECTIONS:
        pages = []
        for pattern in patterns:
            for name in [n for n in left if re.fullmatch(pattern, n)]:
                del left[name]
                pages.append(f"{name}.md")
        if pages:
            nav.append({title: pages})
    config.nav = nav
    return config


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replace links to files outside the site by the names of the files."""
    return re.sub(r"\[([^\]]+)\]\(\.\./([^)#]+)[^)]*\)", _outside, markdown)


def _outside(match: re.Match[str]) -> str:
    return match[1] if "`" in match[1] else f"{match[1]} (`{match[2]}`)"
