"""The Python examples in the docs run."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from clustergym.planners.registry import PLANNERS

ROOT = Path(__file__).parents[2]
FILES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
PAGES = {
    page.relative_to(ROOT).as_posix(): re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.M | re.S)
    for page in FILES
    # tests/moe_placement/test_libraries.py runs what is installed, tests/project/test_readme.py runs the README.
    if page.name not in ("libraries.md", "README.md")
}


def test_there_are_examples() -> None:
    assert PAGES["docs/reference/file-formats.md"]
    assert PAGES["docs/reference/moe-placement.md"]


@pytest.mark.parametrize("page", [name for name, blocks in PAGES.items() if blocks])
def test_the_examples_of_a_page_run_in_order(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names, kept = {"__name__": "example"}, dict(PLANNERS)
    try:
        for i, code in enumerate(PAGES[page]):
            exec(compile(code, f"<{page}, example {i + 1}>", "exec"), names)
    finally:  # planners that an example registers are gone afterwards
        PLANNERS.clear()
        PLANNERS.update(kept)


def test_pages_link_to_files_that_exist() -> None:
    for page in FILES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_picture_is_on_a_page() -> None:
    texts = "".join(page.read_text() for page in FILES)
    pictures = [path for kind in ("png", "svg") for path in (ROOT / "docs").rglob(f"images/**/*.{kind}")]
    assert len(pictures) > 10
    assert [path.name for path in pictures if f"/{path.name})" not in texts] == []


def test_the_files_on_the_architecture_page_exist() -> None:
    text = (ROOT / "docs" / "development" / "architecture.md").read_text()
    folders = (ROOT, ROOT / "envs" / "clustergym")
    named = set(re.findall(r"`([\w./-]+(?:/|\.py|\.toml))`", text))
    assert len(named) > 40
    missing = [name for name in named if not any((folder / name).exists() for folder in folders)]
    assert not missing
    # The diagram of moe_placement/ has one line per module.
    (diagram,) = re.findall(r"Each line imports only lines below it:\n\n```text\n(.*?)```", text, flags=re.S)
    shown = set(re.findall(r"(?:^|  )(\w+)(?:/|\.py)(?=\s)", diagram, flags=re.M))
    modules = {path.stem for path in (ROOT / "envs/clustergym/moe_placement").iterdir()}
    assert shown == modules - {"__init__", "__pycache__"}


def test_the_levels_on_the_architecture_page_are_those_of_the_contract() -> None:
    text = (ROOT / "docs" / "development" / "architecture.md").read_text()
    (diagram,) = re.findall(r"^## Packages\n.+?```text\n(.*?)```", text, flags=re.S | re.M)
    shown: list[set[str]] = []
    for number, name in re.findall(r"^(\d| )  (\S+?)(?:/|\.py)(?= )", diagram, flags=re.M):
        if number != " ":
            shown.append(set())
        shown[-1].add(name)
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]
    levels = [{re.sub(r"^\w+_v0$", "*_v0", name) for name in layer.split(" | ")} for layer in contract["layers"]]
    assert shown == [{"cleanrl_ppo"}, *levels]


def test_the_classes_and_functions_on_the_architecture_page_exist() -> None:
    text = (ROOT / "docs" / "development" / "architecture.md").read_text()
    folders = (ROOT / "cleanrl_ppo", ROOT / "envs" / "clustergym")
    source = "\n".join(path.read_text() for folder in folders for path in folder.rglob("*.py"))
    others = {"env.step", "nav", "torchrun"} | set(re.findall(r"`(\w+\.(?:py|toml|yml))`", text))
    named = set(re.findall(r"`([A-Za-z_]\w*(?:\.\w+)?)`", text)) - others
    assert named >= {"Interval", "Planner", "TokenTrace", "train"}
    defined = set(re.findall(r"^ *(?:class|def) (\w+)", source, flags=re.M))
    assert not {part for name in named for part in name.split(".")} - defined
