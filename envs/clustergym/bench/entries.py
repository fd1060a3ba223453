"""What takes part: planners and rules by name, submitted functions, agents and checkpoints."""

from __future__ import annotations

import hashlib
import importlib.util
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from clustergym.gpu_allocation.rules import RULES
from clustergym.planners.registry import PLANNERS, planner_class

Kind = Literal["named", "function", "agent", "checkpoint"]


@dataclass(frozen=True)
class Entry:
    """One participant."""

    kind: Kind
    target: str
    """Name of a planner or rule, ``module:function``, ``file.py:function``, or the path of a checkpoint or of a folder
    with checkpoints."""
    label: str = ""
    """Name in tables; by default the target."""

    @property
    def name(self) -> str:
        return self.label or self.target

    @property
    def folder(self) -> str:
        """Name of the folder with the results."""
        return re.sub(r"[^A-Za-z0-9._-]+", "_", self.name).strip("._") or "entry"

    @property
    def code_sha256(self) -> str:
        """Hash of the file of a function or checkpoint. Named entries are part of the code of clustergym."""
        if self.kind == "named":
            return ""
        paths = checkpoints(self.target) if self.kind == "checkpoint" else [_source(self.target)]
        return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def checkpoints(target: str) -> list[Path]:
    """A checkpoint, or all of a folder.

    Raises:
        ValueError: there is none.
    """
    path = Path(target)
    found = sorted(path.glob("*.pt")) if path.is_dir() else [path]
    if not found or not found[0].is_file():
        raise ValueError(f"no checkpoint at {target}")
    return found


def _source(target: str) -> Path:
    """The file of ``module:function``, found without importing it."""
    module = target.rpartition(":")[0]
    if module.endswith(".py"):
        path = Path(module)
    else:
        try:
            spec = importlib.util.find_spec(module)
        except (ModuleNotFoundError, ValueError):
            spec = None
        if spec is None or spec.origin is None:
            raise ValueError(f"no module {module!r}: give module:function or file.py:function")
        path = Path(spec.origin)
    if not path.is_file():
        raise ValueError(f"no file at {path}")
    return path


def named_entries(kind: str) -> list[str]:
    """Names of all entries of a kind of task, except planners for small instances only."""
    if kind == "allocation":
        return list(RULES)
    return [name for name in PLANNERS if not planner_class(name).small_only]


def sees_the_future(entry: Entry, kind: str) -> bool:
    """Whether the entry uses data of the future. It is a bound, not a competitor."""
    if entry.kind != "named":
        return False
    if kind == "allocation":
        return entry.target == "oracle"
    planner = planner_class(entry.target)
    return planner.needs_future or planner.needs_mixture


def parse_entries(
    kind: str, planners: list[str], agents: list[str], policies: list[Path], label: str | None = None
) -> list[Entry]:
    """Entries from the flags of the command line. Without any, every named entry.

    Raises:
        ValueError: a name is unknown, or a file does not exist.
    """
    known = named_entries(kind)
    entries: list[Entry] = []
    if planners == ["all"] or not (planners or agents or policies):
        entries = [Entry("named", name) for name in known]
        planners = []
    for name in planners:
        if ":" in name:
            if kind == "allocation":
                raise ValueError(f"--planner {name}: an allocation suite takes rules by name, --agent and --checkpoint")
            entries.append(Entry("function", name))
        elif name in known or (kind == "placement" and name in PLANNERS):
            entries.append(Entry("named", name))
        else:
            raise ValueError(
                f"unknown planner {name!r}; give module:function, file.py:function or one of: {', '.join(known)}"
            )
    entries += [Entry("agent", target) for target in agents]
    entries += [Entry("checkpoint", str(path)) for path in policies]
    for entry in entries:
        _ = entry.code_sha256
    if label is not None:
        if len(entries) != 1:
            raise ValueError(f"--label {label!r} names one entry, but there are {len(entries)}")
        entries = [Entry(entries[0].kind, entries[0].target, label)]
    folders = [entry.folder for entry in entries]
    if len(set(folders)) < len(folders):
        raise ValueError("two entries have the same name: run them one at a time with --label")
    return entries
