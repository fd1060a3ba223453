"""The documentation site builds without warnings, and its generated pages agree with the code."""

from __future__ import annotations

import html
import importlib.util
import os
import re
import shlex
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType

import pytest

from clustergym.agent.metrics import TEXTS
from clustergym.cli import COMMANDS
from clustergym.gpu_allocation.environment import EPISODE_INFO, INFO
from clustergym.gpu_allocation.rules import RULES
from clustergym.moe_placement.environment import STEP_INFO
from clustergym.planners.registry import PLANNERS
from doc_commands import check_script

ROOT = Path(__file__).parents[2]


def load_module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


tables = load_module(ROOT / "docs" / "tables.py")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site. With --strict, a warning is an error."""
    out = tmp_path_factory.mktemp("site")
    quiet = {"NO_MKDOCS_2_WARNING": "1", "DISABLE_MKDOCS_2_WARNING": "true"}
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)],
        cwd=ROOT, env={**os.environ, **quiet}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert built.returncode == 0, built.stdout + built.stderr
    return out


class Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.ids: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for key, value in attrs:
            if key in ("href", "src") and value:
                self.targets.append(value)
            elif key == "id" and value:
                self.ids.add(value)


def test_every_page_is_in_the_site_and_in_its_navigation(site: Path) -> None:
    pages = [p.relative_to(ROOT / "docs").with_suffix(".html") for p in (ROOT / "docs").rglob("*.md")]
    front = Links()
    front.feed((site / "index.html").read_text())
    for page in pages:
        assert (site / page).is_file(), page
        assert page.as_posix() in {t.split("#")[0] for t in front.targets} or page.name == "index.html", page


def test_links_inside_the_site_have_targets(site: Path) -> None:
    for page in site.rglob("*.html"):
        if page.name == "404.html":  # served from any path, so its links start at the root
            continue
        links = Links()
        links.feed(page.read_text())
        for target in links.targets:
            path, _, anchor = target.partition("#")
            if re.match(r"\w+:|//", target) or (not path and not anchor):
                continue
            file = page.parent / path if path else page
            assert file.exists(), f"{page.relative_to(site)} links to {target}"


def test_nothing_is_loaded_from_other_hosts(site: Path) -> None:
    for page in site.rglob("*.html"):
        text = page.read_text()
        loaded = re.findall(r"<(?:script|img|iframe)[^>]+src=\"(https?:[^\"]+)", text)
        loaded += re.findall(r"<link[^>]+rel=\"(?:stylesheet|preconnect)\"[^>]+href=\"(https?:[^\"]+)", text)
        assert not loaded, page


def text_of(page: Path) -> str:
    return html.unescape(re.sub(r"<[^>]+>", "", page.read_text()))


@pytest.mark.parametrize("trainer", [page.stem for page in (ROOT / "docs" / "reference").glob("ppo*.md")])
def test_the_flags_of_a_trainer_are_on_its_page(site: Path, trainer: str) -> None:
    text = text_of(site / "reference" / f"{trainer}.html")
    assert f"usage: {trainer}.py" in text
    assert "--seed INT" in text


def test_the_help_of_every_command_is_on_the_page(site: Path) -> None:
    text = text_of(site / "reference" / "cli.html")
    names = tables.command_names()
    assert {"eval", "plan", "trace import", "bench run", "agent rollback", "collector"} <= {*names}
    for name in names:
        assert f"usage: clustergym {name.removesuffix(' --task gpu-allocation')}" in text, name


def test_pages_of_environments_have_docstrings_and_arguments(site: Path) -> None:
    text = text_of(site / "reference" / "moe-placement.html")
    for words in ("Action Space", "Observation Space", "Rewards", "Episode End", "saved_vs_start", "tokens_per_rank"):
        assert words in text
    assert "pod_spread" in text_of(site / "reference" / "gpu-allocation.html")


def test_every_planner_and_rule_is_explained() -> None:
    planners = (ROOT / "docs" / "reference" / "planners.md").read_text()
    assert [name for name in PLANNERS if f"`{name}`" not in planners] == []
    rules = (ROOT / "docs" / "reference" / "gpu-allocation.md").read_text()
    assert [name for name in [*RULES, "oracle"] if f"`{name}`" not in rules] == []


def test_every_exported_metric_and_info_key_is_explained() -> None:
    page = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    package = ROOT / "envs" / "clustergym"
    sources = ("agent/metrics.py", "kubernetes/server.py", "agent/collector/collect.py")
    found = {name for file in sources for name in re.findall(r'"(clustergym_\w+)"', (package / file).read_text())}
    found |= {f"clustergym_{name}_mean" for name in TEXTS}
    assert len(found) > 30
    assert [name for name in found if name not in page] == []
    placement = (ROOT / "docs" / "reference" / "moe-placement.md").read_text()
    assert [key for key in STEP_INFO if f"`{key}`" not in placement] == []
    allocation = (ROOT / "docs" / "reference" / "gpu-allocation.md").read_text()
    assert [key for key in (*INFO, *EPISODE_INFO) if f"`{key}`" not in allocation] == []


RESULTS = sorted((ROOT / "docs" / "results").glob("*.md"))


@pytest.mark.parametrize("page", RESULTS, ids=[page.stem for page in RESULTS])
def test_commands_of_results_exist(page: Path, tmp_path: Path) -> None:
    for line in re.findall(r"`((?:python|clustergym) [^`]+)`", page.read_text()):
        words = [word for word in shlex.split(line.replace("\n", " ")) if "…" not in word]
        if words[0] == "clustergym":
            assert words[1] in COMMANDS, line
        else:
            check_script(words[1:], tmp_path)


def test_no_table_is_left_out(site: Path) -> None:
    for page in site.rglob("*.html"):
        assert not re.search(r"<!-- (fields|flags|commands|ids|models|gpus|profiles)", page.read_text()), page


def test_fields_of_a_dataclass() -> None:
    page = tables.fill("<!-- fields: clustergym.traces.synthetic:SyntheticConfig -->")
    assert "| `top_k` | `int` | `6` | " in page
    assert tables.fill("<!-- unknown -->") == "<!-- unknown -->"
    assert tables.cell("A *trace* | file_name, <seed> `a_b`") == "A \\*trace\\* \\| file\\_name, &lt;seed> `a_b`"


def test_roles_and_double_backticks_become_code() -> None:
    text = "See :class:`~a.B` and ``x``.\n\n```python\n>>> y\n```"
    assert tables.plain(text) == "See `a.B` and `x`.\n\n```python\n>>> y\n```"
