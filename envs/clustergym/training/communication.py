"""Communication matrices of a federation: which agents are neighbours, and with which weight."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from clustergym.training.args import FlagError


def load_matrix(config: Path | None, n_agents: int, bundled: Path) -> NDArray[np.float64]:
    """The matrix (agents, agents). Entry (i, j) is the weight of agent j's policy in the loss of agent i.

    Args:
        config: a JSON file ``{"comm_matrix": rows}`` with an optional "description", or the name of such a file in
            ``bundled``. Rows are objects ``{"i": {"j": weight}}``, where missing entries are 0, or a square list of
            lists. None connects every agent to every other agent with weight 1.
        n_agents: number of rows and columns.
        bundled: folder that is searched for names.

    Raises:
        FlagError: the message names the file, the entry, its value and what was expected.
    """
    if config is None:
        return 1.0 - np.eye(n_agents)
    file = next((f for f in (config, bundled / config.name, bundled / f"{config.name}.json") if f.is_file()), None)
    if file is None:
        names = ", ".join(sorted(each.stem for each in bundled.glob("*.json")))
        raise FlagError(f"--comm-matrix-config {config}: no such file. Bundled matrices: {names}")
    rows = _read_rows(file)
    if isinstance(rows, list):
        _check_length(rows, n_agents, f"{file}: comm_matrix")
        rows = {str(i): row for i, row in enumerate(rows)}
    if not isinstance(rows, dict):
        raise FlagError(f"{file}: comm_matrix is {rows!r}: expected an object of rows or a list of lists")
    matrix = np.zeros((n_agents, n_agents))
    for key, row in rows.items():
        i, where = _agent(key, n_agents, f"{file}: comm_matrix"), f"{file}: comm_matrix[{key}]"
        if isinstance(row, list):
            _check_length(row, n_agents, where)
            row = {str(j): value for j, value in enumerate(row)}
        if not isinstance(row, dict):
            raise FlagError(f'{where} is {row!r}: expected an object {{"neighbour": weight}} or a list')
        for neighbour, value in row.items():
            matrix[i, _agent(neighbour, n_agents, where)] = _weight(value, f"{where}[{neighbour}]")
    return matrix


def _read_rows(file: Path) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        if twice := [key for key in keys if keys.count(key) > 1]:
            raise FlagError(f"{file}: key {twice[0]!r} occurs twice in one object")
        return dict(pairs)

    try:
        document = json.loads(file.read_text(encoding="utf-8"), object_pairs_hook=unique)
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as reason:
        raise FlagError(f"{file}: not JSON: {reason}") from reason
    if (
        not isinstance(document, dict)
        or "comm_matrix" not in document
        or document.keys() - {"comm_matrix", "description"}
    ):
        found = ", ".join(map(repr, document)) if isinstance(document, dict) else type(document).__name__
        raise FlagError(f"{file}: found {found or 'nothing'}: expected 'comm_matrix' and, if you like, 'description'")
    return document["comm_matrix"]


def _check_length(row: list[Any], n_agents: int, where: str) -> None:
    if len(row) != n_agents:
        raise FlagError(f"{where} has {len(row)} entries: expected {n_agents}, one per agent (--n-agents)")


def _weight(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and value >= 0):
        raise FlagError(f"{where} is {value!r}: expected a finite number, 0 or more")
    return float(value)


def _agent(key: str, n_agents: int, where: str) -> int:
    if key not in map(str, range(n_agents)):
        raise FlagError(f"{where} names agent {key!r}: with --n-agents {n_agents}, agents are 0 … {n_agents - 1}")
    return int(key)
