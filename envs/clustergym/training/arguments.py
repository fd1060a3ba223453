"""Arguments of a run as plain data, and the check that a resumed run uses the same ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

from clustergym.common.checkpoints import CheckpointError


def plain_args(args: object) -> dict[str, Any]:
    """Convert an Args dataclass to values that a checkpoint can hold. A nested dataclass becomes a nested dict."""

    def plain(value: Any) -> Any:
        if is_dataclass(value):
            return plain_args(value)
        return str(value) if isinstance(value, Path) else value

    return {key: plain(value) for key, value in vars(args).items()}


def check_same_args(saved: Mapping[str, Any], given: Mapping[str, Any], may_differ: Iterable[str] = ()) -> None:
    """Raise CheckpointError if a run would resume with other hyperparameters than those in its checkpoint."""
    ignored = {"resume", "run_dir", "track", "cuda", "save_model", *may_differ}
    differing = [
        f"{key} was {saved.get(key)!r}, now {given.get(key)!r}"
        for key in sorted(saved.keys() | given.keys())
        if key not in ignored and saved.get(key) != given.get(key)
    ]
    if differing:
        raise CheckpointError("cannot resume with other arguments: " + "; ".join(differing))
