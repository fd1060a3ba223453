"""Communication matrices: which agents are neighbours, and with which weight."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]
"""Shape (agents, agents). Entry (i, j) is the weight of agent j's policy in the loss of agent i."""


def load_matrix(config: Path | None, n_agents: int, bundled: Path, normalise_rows: bool = False) -> Matrix:
    """Load the communication matrix of a federation.

    Args:
        config: path of a JSON file, or the name of a file in ``bundled`` with or without ``.json``. None connects every
            agent to every other agent with weight 1.
        n_agents: number of rows and columns.
        bundled: folder that is searched for names.
        normalise_rows: divide each row by its sum. Rows of zeros stay zero.
    """
    matrix = 1.0 - np.eye(n_agents) if config is None else read_matrix(_find(config, bundled), n_agents)
    if normalise_rows:
        sums = matrix.sum(1, keepdims=True)
        matrix = np.divide(matrix, sums, out=np.zeros_like(matrix), where=sums > 0)
    return matrix


def _find(config: Path, bundled: Path) -> Path:
    for file in (config, bundled / config.name, bundled / f"{config.name}.json"):
        if file.is_file():
            return file
    names = ", ".join(sorted(each.stem for each in bundled.glob("*.json")))
    raise FileNotFoundError(f"--comm-matrix-config {config}: no such file. Bundled matrices: {names}")


def read_matrix(file: Path, n_agents: int) -> Matrix:
    """Read and validate ``{"comm_matrix": rows}``, with an optional "description".

    Rows are either objects ``{"i": {"j": weight}}``, where missing entries are 0, or a square list of lists. The matrix
    can be asymmetric.

    Raises:
        ValueError: the message names the file, the entry, its value and what is allowed.
    """
    rows = _read_rows(file)
    matrix = np.zeros((n_agents, n_agents))
    if isinstance(rows, list):
        if len(rows) != n_agents:
            raise ValueError(f"{file}: comm_matrix has {len(rows)} rows: expected {n_agents} × {n_agents} (--n-agents)")
        for i, row in enumerate(rows):
            if not isinstance(row, list) or len(row) != n_agents:
                found = f"{len(row)} entries" if isinstance(row, list) else repr(row)
                raise ValueError(f"{file}: comm_matrix[{i}] has {found}: expected {n_agents}, the matrix is square")
            matrix[i] = [_weight(value, f"{file}: comm_matrix[{i}][{j}]") for j, value in enumerate(row)]
    elif isinstance(rows, dict):
        for key, row in rows.items():
            i = _agent(key, n_agents, f"{file}: comm_matrix")
            where = f'{file}: comm_matrix["{key}"]'
            if not isinstance(row, dict):
                raise ValueError(f'{where} is {row!r}: expected an object {{"neighbour": weight}}')
            for neighbour, value in row.items():
                matrix[i, _agent(neighbour, n_agents, where)] = _weight(value, f'{where}["{neighbour}"]')
    else:
        raise ValueError(f"{file}: comm_matrix is {rows!r}: expected an object of rows or a list of lists")
    return matrix


def _read_rows(file: Path) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        seen: dict[str, Any] = {}
        for key, value in pairs:
            if key in seen:
                raise ValueError(f"{file}: key {key!r} occurs twice in one object")
            seen[key] = value
        return seen

    try:
        document = json.loads(file.read_text(encoding="utf-8"), object_pairs_hook=unique)
    except (json.JSONDecodeError, UnicodeDecodeError) as reason:
        raise ValueError(f"{file}: not JSON: {reason}") from reason
    if not isinstance(document, dict) or "comm_matrix" not in document:
        found = ", ".join(map(repr, document)) if isinstance(document, dict) else type(document).__name__
        raise ValueError(f'{file}: found {found or "an empty object"}; expected {{"comm_matrix": …}}')
    unknown = sorted(document.keys() - {"comm_matrix", "description"})
    if unknown:
        raise ValueError(f"{file}: unknown key {unknown[0]!r}: expected 'comm_matrix' and 'description'")
    return document["comm_matrix"]


def _weight(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{where} is {value!r}: expected a finite number, 0 or more")
    return float(value)


def _agent(key: str, n_agents: int, where: str) -> int:
    if key not in map(str, range(n_agents)):
        raise ValueError(f"{where} names agent {key!r}: with --n-agents {n_agents}, agents are 0 … {n_agents - 1}")
    return int(key)
