"""The page of the 37 details matches the ledger, and the ledger matches the trainers and their tests."""

from __future__ import annotations

import ast

import pytest

from ledger import AUXILIARY, DETAILS, PAGE, TESTS, Detail, page

each_detail = pytest.mark.parametrize("detail", DETAILS, ids=lambda detail: detail.key)


def test_ledger_has_every_detail_once() -> None:
    assert [detail.key for detail in DETAILS] == [*map(str, range(1, 38)), *AUXILIARY]


def test_page_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "run python tests/details/ledger.py"


@each_detail
def test_code_and_tests_of_a_detail_exist(detail: Detail) -> None:
    assert detail.line()
    assert detail.tests
    for test in detail.tests:
        file, _, function = test.partition("[")[0].partition("::")
        tree = ast.parse((TESTS / file).read_text())
        assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, test


@each_detail
def test_text_that_a_mutation_replaces_occurs_once(detail: Detail) -> None:
    source = detail.source.read_text()
    assert detail.mutations
    for old, new in detail.mutations:
        assert source.count(old) == 1, old
        assert old != new
