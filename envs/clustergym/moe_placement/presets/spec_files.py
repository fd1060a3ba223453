"""Models and clusters in YAML files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

from clustergym.common.yaml_files import parse_yaml
from clustergym.moe_placement.presets.cluster_spec import ClusterSpec
from clustergym.moe_placement.presets.model_spec import ModelSpec

_MAX_BYTES = 16 << 20


def is_spec_file(name: str) -> bool:
    """Whether a name is that of a YAML file."""
    return name.endswith((".yaml", ".yml"))


def read_text(path: Path) -> str:
    """The text of a small file. A ValueError names a file that is missing, too large or not UTF-8."""
    if not path.is_file():
        raise ValueError(f"no file at {path}")
    if path.stat().st_size > _MAX_BYTES:
        raise ValueError(f"{path}: {path.stat().st_size} bytes: a file with sizes of a model or cluster is small")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text: {error}") from error


def _read_yaml(path: Path) -> dict[str, Any]:
    document = parse_yaml(read_text(path), str(path), aliases=False)
    if not isinstance(document, dict) or not all(isinstance(key, str) for key in document):
        raise ValueError(f"{path}: expected a mapping of names to values")
    return document


def _checked(values: dict[str, Any], kind: type, path: Path) -> dict[str, Any]:
    """``values`` if every key is a field of ``kind`` with a value of its type."""
    types = {f.name: str(f.type) for f in fields(kind)}
    for key, value in values.items():
        if key not in types:
            raise ValueError(f"{path}: unknown key {key!r}; the keys are: {', '.join(types)}")
        if not _fits(value, types[key]):
            raise ValueError(f"{path}: {key} is {value!r}: expected {types[key]}")
    missing = [f.name for f in fields(kind) if f.default is MISSING and f.name not in values]
    if missing:
        raise ValueError(f"{path}: no {missing[0]}; a file needs {', '.join(missing)}")
    return values


def _fits(value: Any, kind: str) -> bool:
    integer = isinstance(value, int) and not isinstance(value, bool)
    if kind.startswith("tuple"):
        return isinstance(value, list) and all(isinstance(v, int) and not isinstance(v, bool) for v in value)
    if kind.startswith("float"):
        return integer or isinstance(value, float)
    return integer if kind.startswith("int") else isinstance(value, str)


def read_model(path: Path) -> ModelSpec:
    """A model from a YAML file whose keys are the fields of :class:`ModelSpec`. The name defaults to the file's."""
    values = {"name": path.stem, "source": str(path)} | _read_yaml(path)
    try:
        return ModelSpec(**_checked(values, ModelSpec, path))
    except ValueError as error:
        raise _naming(path, error) from error


def read_cluster(path: Path, of_gpu: Callable[[str, str, int, int], ClusterSpec]) -> ClusterSpec:
    """A cluster from a YAML file whose keys are the fields of :class:`ClusterSpec`.

    ``gpu: h200`` fills in the figures of that GPU. ``links:`` may hold the bandwidths and latencies. A measured matrix
    is ``link_gb_s`` or, as times, ``link_us_per_mb``; the two bandwidths of nodes then follow from it.
    """
    values = _read_yaml(path)
    links = values.pop("links", {})
    if not isinstance(links, dict):
        raise ValueError(f"{path}: links is {links!r}: expected a mapping of bandwidths and latencies")
    if twice := sorted(set(links) & set(values)):
        raise ValueError(f"{path}: {twice[0]} is given twice")
    gpu, matrix = values.pop("gpu", None), _matrix(values, path)
    values = _checked({"name": path.stem} | values | links, ClusterSpec, path)
    values = _of_matrix(matrix, values) | values if matrix else values
    try:
        if gpu is None:
            return ClusterSpec(**({"source": str(path)} | values))
        return replace(of_gpu(str(gpu), values["name"], values["n_nodes"], values["gpus_per_node"]), **values)
    except ValueError as error:
        raise _naming(path, error) from error


def _matrix(values: dict[str, Any], path: Path) -> tuple[tuple[float, ...], ...]:
    """The matrix of bandwidths in GB/s, taken out of ``values``; empty if there is none."""
    given = [key for key in ("link_gb_s", "link_us_per_mb") if key in values]
    if not given:
        return ()
    rows = values.pop(given[0])
    numbers = isinstance(rows, list) and all(
        isinstance(row, list) and all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in row)
        for row in rows
    )
    if len(given) > 1 or not numbers:
        raise ValueError(f"{path}: expected one of link_gb_s and link_us_per_mb, a list of rows of numbers")
    if given[0] == "link_gb_s":
        return tuple(tuple(map(float, row)) for row in rows)
    return tuple(tuple(1e3 / v if v > 0 else 0.0 for v in row) for row in rows)  # 1 MB in 1 µs is 1000 GB/s


def _of_matrix(matrix: tuple[tuple[float, ...], ...], values: dict[str, Any]) -> dict[str, Any]:
    """The matrix, and the bandwidth at which its mean time per byte is that inside a node and between nodes."""
    per_node, times = values.get("gpus_per_node", 0), {"intra_gb_s": [0.0], "inter_gb_s": [0.0]}
    for i, row in enumerate(matrix):
        for j, value in enumerate(row):
            if i != j and value > 0 and per_node:
                times["intra_gb_s" if i // per_node == j // per_node else "inter_gb_s"].append(1 / value)
    means = {key: (len(each) - 1) / sum(each) for key, each in times.items() if len(each) > 1}
    return {"link_gb_s": matrix} | means


def _naming(path: Path, error: ValueError) -> ValueError:
    return error if str(path) in str(error) else ValueError(f"{path}: {error}")
