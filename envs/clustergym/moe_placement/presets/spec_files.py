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

    ``gpu: h200`` fills in the figures of that GPU. ``links:`` may hold the bandwidths and latencies.
    """
    values = _read_yaml(path)
    links = values.pop("links", {})
    if not isinstance(links, dict):
        raise ValueError(f"{path}: links is {links!r}: expected a mapping of bandwidths and latencies")
    if twice := sorted(set(links) & set(values)):
        raise ValueError(f"{path}: {twice[0]} is given twice")
    gpu = values.pop("gpu", None)
    values = _checked({"name": path.stem} | values | links, ClusterSpec, path)
    try:
        if gpu is None:
            return ClusterSpec(**({"source": str(path)} | values))
        return replace(of_gpu(str(gpu), values["name"], values["n_nodes"], values["gpus_per_node"]), **values)
    except ValueError as error:
        raise _naming(path, error) from error


def _naming(path: Path, error: ValueError) -> ValueError:
    return error if str(path) in str(error) else ValueError(f"{path}: {error}")
