"""Optional dependencies: the error says which extra installs them."""

from __future__ import annotations

import json
import sys

import pytest

from clustergym.common.extras import MissingExtra, require


def test_require_returns_the_module():
    assert require("json", "render") is json


@pytest.mark.parametrize("module", ["no_such_module", "no_such_module.inside"])
def test_a_missing_module_names_the_extra_in_one_line(module):
    with pytest.raises(MissingExtra) as raised:
        require(module, "render")
    assert str(raised.value) == f"{module} is not installed: pip install 'clustergym[render]'"


def test_a_broken_module_keeps_its_own_error(tmp_path, monkeypatch):
    (tmp_path / "half_installed.py").write_text("import no_such_dependency\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'no_such_dependency'$"):
        require("half_installed", "render")
    assert "half_installed" not in sys.modules
