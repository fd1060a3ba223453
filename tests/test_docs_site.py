"""The documentation site builds without warnings, and its generated pages agree with the code."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


def load_module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


gen_pages = load_module(ROOT / "docs" / "gen_pages.py")


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
    pages += [Path(name).with_suffix(".html") for name in gen_pages.pages()]
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


def test_every_flag_of_every_trainer_is_documented(site: Path) -> None:
    trainers = gen_pages.trainers()
    assert {"ppo", "ppo_federated", "ppo_llm"} <= {path.stem for path in trainers}
    for path in trainers:
        text = (site / "reference" / f"{path.stem}_flags.html").read_text()
        for name, _, _, docstring in (row for rows in gen_pages.flag_groups(path).values() for row in rows):
            assert f"<code>--{name.replace('_', '-')}</code>" in text
            assert docstring, f"{path.name}: {name} has no docstring"


def test_the_reference_contains_the_docstrings(site: Path) -> None:
    text = (site / "reference" / "moe_placement.html").read_text()
    for words in ("Action Space", "Observation Space", "Rewards", "Episode End", "PlacementConfig", "tokens_per_rank"):
        assert words in text


def test_fields_of_a_small_class(tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text(
        '"""Doc."""\nclass Args:\n'
        '    a: int = 1\n    """First ``one``."""\n'
        '    b: str | None = None\n    """Two\n    lines."""\n'
    )
    rows = gen_pages.fields(gen_pages._class(tmp_path / "t.py", "Args"))
    assert rows == [("a", "int", "1", "First `one`."), ("b", "str | None", "None", "Two lines.")]
    page = gen_pages.trainer_page(tmp_path / "t.py")
    assert "| `--a` | `int` | `1` | First `one`. |" in page
    assert "| `--b` | `str \\| None` | `None` | Two lines. |" in page


def test_nested_dataclasses_are_flags_too(tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text(
        "from clustergym.agent.settings import ServerSettings\n"
        'class Inner:\n    a: int = 1\n    """One."""\n'
        'class Args:\n    inner: tyro.conf.OmitArgPrefixes[Inner] = Inner()\n    """Options of PPO."""\n'
        '    server: tyro.conf.OmitArgPrefixes[ServerSettings] = ServerSettings()\n    """Settings."""\n'
    )
    groups = gen_pages.flag_groups(tmp_path / "t.py")
    assert groups[""] == []
    assert groups["Options of PPO"] == [("a", "int", "1", "One.")]
    assert "port" in {name for name, *_ in groups["Settings"]}
