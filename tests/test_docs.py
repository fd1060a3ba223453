"""The Python examples in the README and the docs run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = {
    page.name: re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.M | re.S)
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
}


def test_there_are_examples() -> None:
    assert len(PAGES["README.md"]) == 4
    assert PAGES["traces.md"]
    assert PAGES["moe_placement.md"]


@pytest.mark.parametrize("page", [name for name, blocks in PAGES.items() if blocks])
def test_the_examples_of_a_page_run_in_order(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "example"}
    for i, code in enumerate(PAGES[page]):
        exec(compile(code, f"<{page}, example {i + 1}>", "exec"), names)


def test_pages_link_to_files_that_exist() -> None:
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
