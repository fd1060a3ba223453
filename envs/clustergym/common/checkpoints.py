"""Checkpoint files: written atomically, validated on loading, without pickled code."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from clustergym.common.files import atomic_file

CHECKPOINT_NAME = "checkpoint.pt"
_FORMAT = "clustergym-checkpoint"
_SCHEMA = 1


class CheckpointError(ValueError):
    """A checkpoint that cannot be used. The message says what was found, where, and what to do."""


def save_checkpoint(path: Path, kind: str, state: Mapping[str, Any]) -> None:
    """Write ``state`` (tensors, numbers, strings, lists and dicts of them) atomically.

    A process that is killed at any moment leaves a complete checkpoint. ``kind`` names the trainer and is checked on
    loading.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as file:
        torch.save({"format": _FORMAT, "schema": _SCHEMA, "kind": kind, "state": dict(state)}, file)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def load_checkpoint(path: Path, kind: str | Collection[str], device: torch.device | str = "cpu") -> dict[str, Any]:
    """Load the state that :func:`save_checkpoint` wrote. Only plain data is loaded: a checkpoint cannot run code.

    ``kind`` is the expected kind, or several kinds of which one is expected.

    Raises:
        FileNotFoundError: the file does not exist.
        CheckpointError: the file is truncated, is not a clustergym checkpoint, belongs to another trainer, or comes
            from a newer clustergym.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no checkpoint at {path}")
    try:
        content = torch.load(path, map_location=device, weights_only=True)
    except Exception as reason:  # a broken file can raise almost anything in torch
        summary = str(reason).partition("\n")[0] or type(reason).__name__
        raise CheckpointError(
            f"{path} ({path.stat().st_size} bytes) is truncated or not a clustergym checkpoint: {summary}"
        ) from reason
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        found = ", ".join(map(str, list(content)[:5])) if isinstance(content, dict) else type(content).__name__
        raise CheckpointError(f"{path} was not written by clustergym: found {found}")
    if content["schema"] > _SCHEMA:
        raise CheckpointError(
            f"{path} has schema {content['schema']}, but this clustergym reads up to {_SCHEMA}: update clustergym"
        )
    kinds = [kind] if isinstance(kind, str) else kind
    if content["kind"] not in kinds:
        raise CheckpointError(f"{path} belongs to {content['kind']!r}, not to {' or '.join(map(repr, kinds))}")
    state: dict[str, Any] = content["state"]
    return state
