"""Communication matrices of ``ppo_federated.py``."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from clustergym.training.args import FlagError
from trainers import FOLDER, load_trainer

BUNDLED = FOLDER / "comm_matrices"
load_matrix = load_trainer("ppo_federated").load_matrix


@pytest.mark.parametrize(
    ("name", "n_agents", "edges"),
    [("pair", 2, 2), ("two_pairs", 4, 4), ("ring", 4, 8), ("star", 4, 6), ("all_to_all", 4, 12)],
)
def test_bundled_matrices_load_by_name_and_by_path(name: str, n_agents: int, edges: int) -> None:
    for path in (name, f"{name}.json", f"comm_matrices/{name}.json", str(BUNDLED / f"{name}.json")):
        matrix = load_matrix(Path(path), n_agents)
        assert matrix.shape == (n_agents, n_agents)
        assert np.count_nonzero(matrix) == edges
        assert (matrix == matrix.T).all()
        assert not matrix.diagonal().any()


def test_rows_are_objects_or_lists_and_the_default_connects_all(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    path.write_text('{"comm_matrix": {"0": {"1": 10, "2": 30}, "2": {"0": 0.5}}, "description": "asymmetric"}')
    assert load_matrix(path, 3).tolist() == [[0, 10, 30], [0, 0, 0], [0.5, 0, 0]]
    path.write_text('{"comm_matrix": [[1, 2], [0, 3]]}')
    assert load_matrix(path, 2).tolist() == [[1, 2], [0, 3]]
    assert load_matrix(None, 3).tolist() == [[0, 1, 1], [1, 0, 1], [1, 1, 0]]


def test_unknown_matrix_names_the_bundled_ones() -> None:
    with pytest.raises(FlagError, match=r"nowhere: no such file\. Bundled matrices: 4_agents, all_to_all, pair"):
        load_matrix(Path("nowhere"), 2)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('{"comm_matrix": {"0": {"2": 1}}}', r"comm_matrix\[0\] names agent '2': with --n-agents 2, agents are 0 … 1"),
        ('{"comm_matrix": {"-1": {"0": 1}}}', r"comm_matrix names agent '-1': with --n-agents 2, agents are 0 … 1"),
        ('{"comm_matrix": {"01": {"0": 1}}}', r"names agent '01'"),
        ('{"comm_matrix": {"zero": {"0": 1}}}', r"names agent 'zero'"),
        ('{"comm_matrix": {"0": {"1": -2}}}', r"comm_matrix\[0\]\[1\] is -2: expected a number from 0 to 1e30"),
        ('{"comm_matrix": {"0": {"1": NaN}}}', r"comm_matrix\[0\]\[1\] is nan"),
        ('{"comm_matrix": {"0": {"1": Infinity}}}', r"comm_matrix\[0\]\[1\] is inf"),
        ('{"comm_matrix": {"0": {"1": 1' + '0' * 400 + '}}}', r"expected a number from 0"),
        ('{"comm_matrix": {"0": {"1": true}}}', r"is True: expected a number"),
        ('{"comm_matrix": {"0": {"1": "10"}}}', r"is '10': expected a number"),
        ('{"comm_matrix": {"0": 1}}', r"comm_matrix\[0\] is 1: expected an object"),
        ('{"comm_matrix": {"0": {"1": 1, "1": 2}}}', r"key '1' occurs twice"),
        ('{"comm_matrix": [[0, 1]]}', r"comm_matrix has 1 entries: expected 2, one per agent"),
        ('{"comm_matrix": [[0, 1], [1]]}', r"comm_matrix\[1\] has 1 entries: expected 2, one per agent"),
        ('{"comm_matrix": 3}', r"comm_matrix is 3: expected an object of rows"),
        ('{"matrix": {}}', r"found 'matrix': expected 'comm_matrix'"),
        ('{"comm_matrix": {}, "n": 2}', r"found 'comm_matrix', 'n': expected"),
        ("[1, 2", r"not JSON"),
        ("[" * 100_000, r"not JSON"),
    ],
)  # fmt: skip
def test_invalid_matrix_is_rejected_with_file_and_entry(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(FlagError, match=complaint) as caught:
        load_matrix(path, 2)
    assert str(path) in str(caught.value)
