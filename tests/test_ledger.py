"""docs/37-details.md cannot rot: its lines carry what it says, its tests exist, and what the mutation check breaks is still there."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "37-details.md"
ROW = re.compile(
    r"\| (?P<key>[^|]+) \| [^|]+ \| `(?P<file>[^`:]+):(?P<line>\d+)` \| `(?P<code>[^`]+)` \| (?P<tests>[^|]+) \|"
)


def ledger() -> ModuleType:
    name = "clustergym_details"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / "details.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


def rows() -> list[re.Match[str]]:
    found = [ROW.fullmatch(line) for line in PAGE.read_text().splitlines() if re.match(r"\| [\w ]+ \| .*`", line)]
    assert all(found)
    return [row for row in found if row]


def test_every_detail_has_a_row() -> None:
    keys = {row["key"] for row in rows()}
    assert keys == {str(number) for number in range(1, 38)} | set(ledger().AUXILIARY)


@pytest.mark.parametrize("row", rows(), ids=lambda row: row["key"])
def test_the_line_carries_the_detail_and_the_tests_exist(row: re.Match[str]) -> None:
    line = (ROOT / row["file"]).read_text().splitlines()[int(row["line"]) - 1]
    assert row["code"] in line, f"{row['file']}:{row['line']} is {line.strip()!r}: run python benchmarks/details.py"
    for test in re.findall(r"`([^`]+)`", row["tests"]):
        file, _, function = test.partition("::")
        tree = ast.parse((ROOT / "tests" / file).read_text())
        assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, test


def test_the_page_is_the_ledgers() -> None:
    assert PAGE.read_text() == ledger().page(), "run python benchmarks/details.py"


@pytest.mark.parametrize("detail", ledger().DETAILS, ids=lambda detail: detail.key)
def test_what_the_mutation_check_breaks_is_there_once(detail: Any) -> None:
    source = detail.source.read_text()
    assert detail.mutations
    for old, new in detail.mutations:
        assert source.count(old) == 1, old
        assert old != new
