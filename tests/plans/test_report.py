"""The HTML report in a real browser: no errors, no network, small screens, dark mode, hostile trace names."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clustergym.moe_placement import Simulator
from clustergym.moe_placement.specs import get_cluster
from clustergym.moe_placement.streams import Traffic
from clustergym.planners.evaluation import Result
from clustergym.plans.planning import Plan, Sizes, make_plan
from clustergym.plans.report.html import render, write_report
from clustergym.plans.report.story import Story
from clustergym.traces import LoadTrace, SyntheticConfig, TokenTrace, synthetic_trace

CHROMIUM = Path("/usr/bin/chromium")
# The tests may run as root (no sandbox) and without a network (no background requests).
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
NASTY = "</script><script>window.hacked=1</script><img src=x onerror='window.hacked=1'>@@DATA@@"


@pytest.fixture(scope="module")
def plan() -> Plan:
    config = SyntheticConfig(
        n_tokens=1500,
        n_layers=6,
        first_layer=3,
        n_experts=8,
        top_k=2,
        mean_seq_len=30,
        popularity_skew=0.8,
        model="mixtral-8x7b",
    )
    simulator = Simulator("mixtral-8x7b", get_cluster("h800-2x4", slots_per_gpu=2))
    made = make_plan(
        synthetic_trace(config, seed=0), simulator, "anneal", traffic=Traffic("prefill", 16),
        sizes=Sizes(passes=4), seconds=0.3, force=True,
    )  # fmt: skip
    return dataclasses.replace(made, trace=NASTY)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if not CHROMIUM.exists():
        pytest.skip(f"no browser at {CHROMIUM}: the report cannot be tested")
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=str(CHROMIUM), args=FLAGS)
        try:
            yield opened
        finally:
            opened.close()


class Visit:
    """An open page, with its console messages and requests."""

    def __init__(self, browser: Any, path: Path, width: int = 1200, scheme: str = "light") -> None:
        self.context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.page, self.messages, self.requests = self.context.new_page(), [], []
        self.page.on("console", lambda message: self.messages.append(message.text))
        self.page.on("pageerror", lambda error: self.messages.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(path.as_uri())

    def __enter__(self) -> Any:
        return self.page

    def __exit__(self, *_: object) -> None:
        requests = [url for url in self.requests if not url.startswith("data:")]
        if keep := os.environ.get("CLUSTERGYM_SCREENSHOTS"):
            self.page.screenshot(
                path=str(Path(keep) / f"report-{self.page.viewport_size['width']}.png"), full_page=True
            )
        self.context.close()
        assert self.messages == []
        assert len(requests) == 1
        assert requests[0].startswith("file:")


def open_report(plan: Plan, path: Path) -> Path:
    write_report(path, plan, "sglang", "--init-expert-location <plan>", "clustergym plan & co")
    return path


def test_all_charts_are_drawn(plan: Plan, browser: Any, tmp_path: Path) -> None:
    with Visit(browser, open_report(plan, tmp_path / "r.html")) as page:
        assert page.title() == "Expert placement: mixtral-8x7b on h800-2x4"
        assert page.locator("h1").inner_text() == "mixtral-8x7b on h800-2x4"
        mean, half = plan.versus("eplb")
        word = "less" if mean < 0 else "more"
        said = f"anneal: {100 * abs(mean):.1f} % (± {100 * half:.1f}) {word} time than EPLB on held-out traffic"
        assert page.locator("#headline").inner_text().startswith(f"{said}, sglang-prefill")
        heads = page.locator("#profiles thead th").all_inner_texts()
        assert heads == ["planner", "sglang-prefill", "sglang-decode", "sglang-lp"]
        mean, half = plan.versus("eplb", profile="sglang-decode")
        cells = page.locator("#profiles tbody tr").nth(2).locator("td").all_inner_texts()
        assert cells[1] == f"{100 * mean:+.1f} ± {100 * half:.1f} %"
        rows = page.locator("#planners tbody tr")
        assert rows.count() == 3
        for i, o in enumerate(plan.outcomes.values()):
            assert f"{o.served_us:.1f}" in rows.nth(i).inner_text()
        gpus, layers, planners = 8, 6, 3
        assert page.locator("#bars rect title").count() == gpus * planners
        assert page.locator("#lines polyline:not(.break)").count() == planners
        assert page.locator("#lines :not(.break) > title").count() == layers * planners
        assert page.locator("#lines .break title").text_content().startswith("the axis starts at ")
        # The busiest GPU of each layer, on an axis that starts at zero.
        assert page.locator("#peaks .break").count() == 0
        assert "0" in page.locator("#peaks text").all_text_contents()
        titles = [t.text_content() for t in page.locator("#peaks title").all()]
        assert [t for t in titles if t.startswith("eplb,")] == [
            f"eplb, layer {3 + l}: {peak:,.0f} pairs on the busiest GPU"
            for l, peak in enumerate(np.floor(plan.outcomes["eplb"].peak_pairs + 0.5))
        ]
        assert page.locator("#parts rect title").count() == layers * 3
        assert page.locator("#placement svg").count() == 2
        assert page.locator("#placement rect title").count() == 2 * gpus * 2
        assert page.locator("#traffic rect title").count() == 2 * gpus * (gpus - 1)
        assert page.evaluate("window.hacked") is None
        assert NASTY in page.locator("dl").inner_text()
        assert "GB of it in redundant slots" in page.locator("dl").inner_text()


def demo_result(planner: str, decision_ms: float, totals_us: list[float]) -> Result:
    mean = float(np.mean(totals_us))
    return Result(planner, mean, 0.0, mean, 0.0, decision_ms, len(totals_us), stream_totals_us=totals_us)


def test_demo_shows_the_traffic_and_the_planners(plan: Plan, browser: Any, tmp_path: Path) -> None:
    """Loads by domain are shares of the domain's mean. Swift is slower and decides later than EPLB: not on the line."""
    experts = np.array([[0], [0], [0], [1]] * 5 + [[2]] * 20)[:, None]
    trace = TokenTrace(experts, n_experts=4, seq_lens=[20, 20], domains=["law", "</b>code"], name=NASTY)
    results = [
        demo_result("eplb", 1.0, [100.0, 100.0]),
        demo_result("swift", 2.0, [104.0, 106.0]),
        demo_result("anneal", 50.0, [94.0, 96.0]),
        demo_result("oracle", 60.0, [90.0, 90.0]),
    ]
    write_report(tmp_path / "d.html", plan, "sglang", "load", "clustergym demo", story=Story(trace, results, 2))
    with Visit(browser, tmp_path / "d.html") as page:
        assert page.evaluate("window.hacked") is None
        assert page.locator("#domains text").first.text_content() == "</b>code"
        loads = [t.text_content() for t in page.locator("#domains rect title").all()]
        assert loads[:2] == [
            "</b>code: expert 2 has 4.00 times the mean load",
            "</b>code: expert 0 has 0.00 times the mean load",
        ]
        assert "law: expert 0 has 3.00 times the mean load" in loads
        points = [t.text_content() for t in page.locator("#pareto title").all()]
        assert sorted(point.split(",")[0] for point in points) == [
            "anneal: 5.0 ± 12.7 % saved",
            "eplb: 0.0 ± 0.0 % saved",
            "oracle: 10.0 ± 0.0 % saved",
            "swift: -5.0 ± 12.7 % saved",
        ]
        line = page.locator("#pareto polyline").get_attribute("points")
        assert len(line.split()) == 3  # EPLB, a corner, annealing
        assert page.locator("#statistics tbody tr").count() == 5


def test_slider_shows_one_layer(plan: Plan, browser: Any, tmp_path: Path) -> None:
    with Visit(browser, open_report(plan, tmp_path / "r.html")) as page:
        assert page.locator("#shown").inner_text() == "layer 3; traffic: mean of all"
        page.locator("#layer").fill("4")
        assert page.locator("#shown").inner_text() == "layer 7"
        titles = [t.text_content() for t in page.locator("#bars rect title").all()]
        pairs = np.round(plan.outcomes["anneal"].pairs[4]).astype(int)
        assert [t for t in titles if ", anneal:" in t] == [f"GPU {g}, anneal: {n:,} pairs" for g, n in enumerate(pairs)]
        held = sorted(
            int(e) for e in page.locator("#placement svg").nth(1).locator("text").all_text_contents() if e.isdigit()
        )
        assert held == sorted(plan.best.placement[4].reshape(-1).tolist())
        page.locator("#all").click()
        assert page.locator("#shown").inner_text() == "layer 3; traffic: mean of all"


def test_small_screen_and_dark_mode(plan: Plan, browser: Any, tmp_path: Path) -> None:
    path = open_report(plan, tmp_path / "r.html")
    colours = {}
    for scheme in ("light", "dark"):
        with Visit(browser, path, width=390, scheme=scheme) as page:
            assert page.evaluate("document.documentElement.scrollWidth") <= 390  # no horizontal scrolling
            colours[scheme] = page.evaluate(
                "getComputedStyle(document.body).backgroundColor + getComputedStyle(document.body).color"
            )
            sizes = page.evaluate(
                "[...document.querySelectorAll('button, input')].map(e => e.getBoundingClientRect().height)"
            )
            assert min(sizes) >= 30  # large enough for touch
    assert colours["light"] != colours["dark"]


def test_planners_differ_in_more_than_colour(plan: Plan, browser: Any, tmp_path: Path) -> None:
    with Visit(browser, open_report(plan, tmp_path / "r.html")) as page:
        dashes = page.evaluate(
            "[...document.querySelectorAll('#lines polyline:not(.break)')].map(e => e.getAttribute('stroke-dasharray'))"
        )
        assert len(set(dashes)) == 3
        fills = page.evaluate("[...document.querySelectorAll('#bars rect')].slice(-3).map(e => e.getAttribute('fill'))")
        assert len(set(fills)) == 3
        # The heat map gets brighter with each step, so it is readable without colour.
        brightness = page.evaluate(
            "[...Array(20).keys()].map(i => heat(i / 19).match(/\\d+/g).map(Number))"
            ".map(c => .2126 * c[0] + .7152 * c[1] + .0722 * c[2])"
        )
        assert (np.diff(brightness) > 0).all()


def test_report_on_counts_shows_no_traffic(browser: Any, tmp_path: Path) -> None:
    counts = np.random.default_rng(0).integers(1, 50, (4, 3, 8))
    simulator = Simulator("mixtral-8x7b", get_cluster("h800-2x4", slots_per_gpu=2))
    made = make_plan(LoadTrace(counts, top_k=2, model="mixtral-8x7b"), simulator, "eplb")
    with Visit(browser, open_report(made, tmp_path / "r.html")) as page:
        assert page.locator("#traffic").count() == 0
        assert page.locator("#bars rect title").count() == 8 * 2
        assert "expert-kernel time than the static placement" in page.locator("#headline").inner_text()


def test_report_loads_nothing_from_outside(plan: Plan) -> None:
    """The only URL is the SVG namespace."""
    page = render(plan, "sglang", "load", "command")
    outside = set(re.findall(r"https?://[^\"'\s)]+", page))
    assert outside == {"http://www.w3.org/2000/svg"}
    assert "default-src 'none'" in page
    assert not re.search(r"@@[A-Z]+@@", page.replace("@@DATA@@", ""))
