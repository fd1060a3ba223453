"""Load ``.pt`` files from untrusted sources. They are checked before torch opens them.

With ``weights_only=True`` torch runs no code of a file. But a file can still make it allocate any amount of memory: an
entry may be compressed a thousand times, a byte array may be created from its length, and a tensor may have a shape
that is larger than its storage.
"""

from __future__ import annotations

import pickle
import pickletools
import zipfile
from pathlib import Path
from typing import Any

import torch

from clustergym.traces.arrays import BAD_ZIP

_GLOBALS = {"torch._utils _rebuild_tensor_v2", "collections OrderedDict", "torch.storage UntypedStorage"}
_STORAGES = ("Byte", "Char", "Short", "Int", "Long", "Bool", "Half", "BFloat16", "Float", "Double")
_GLOBALS |= {f"torch {kind}Storage" for kind in _STORAGES}


class _RefusedError(ValueError):
    """The pickle in a file does something that no recording needs."""


def load_tensors(path: Path) -> Any:
    """Load dicts and lists of tensors, numbers and strings that ``torch.save`` wrote. Storages are memory-mapped."""
    try:
        _check_archive(path)
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    # Broken files make torch raise any of these.
    except (pickle.UnpicklingError, RuntimeError, EOFError, KeyError, TypeError, IndexError, AttributeError) as error:
        reason = str(error).split("\n")[0][:200]
        raise ValueError(f"{path}: not a readable torch file: {reason}") from error
    _check_tensors(loaded, str(path))
    return loaded


def _check_archive(path: Path) -> None:
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            packed = [m.filename for m in members if m.compress_type != zipfile.ZIP_STORED]
            if packed:
                raise ValueError(f"{path}: {packed[0]} is compressed, which torch.save never does: refused")
            if sum(m.file_size for m in members) > path.stat().st_size:
                raise ValueError(f"{path}: its entries are larger than the file: refused")
            programs = [m for m in members if m.filename.endswith("/data.pkl")]
            if len(programs) != 1:
                raise ValueError(f"{path}: not a file that torch.save wrote")
            _check_program(archive.read(programs[0]), path)
    except BAD_ZIP as error:
        raise ValueError(f"{path}: not a complete file of torch.save ({error}); was it truncated?") from error


def _check_program(program: bytes, path: Path) -> None:
    """Refuse a pickle that names anything but the globals that tensors, dicts and lists need."""
    try:
        for operation, argument, _ in pickletools.genops(program):
            if operation.name == "GLOBAL" and argument not in _GLOBALS:
                raise _RefusedError(
                    f"{path}: the file names {str(argument).replace(' ', '.')}, which no recording needs: refused"
                )
            if operation.name in ("STACK_GLOBAL", "INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "EXT1", "EXT2", "EXT4"):
                raise _RefusedError(
                    f"{path}: the file creates objects ({operation.name}), which no recording needs: refused"
                )
    except _RefusedError:
        raise
    except ValueError as error:  # pickletools cannot parse the program
        raise ValueError(f"{path}: not a readable torch file: {error}") from error


def _check_tensors(value: Any, where: str) -> None:
    """Refuse tensors that are larger than their storage."""
    pending, seen = [value], set()
    while pending:
        item = pending.pop()
        if isinstance(item, torch.Tensor):
            stored = item.untyped_storage().nbytes()
            if item.numel() * item.element_size() > stored:
                raise ValueError(
                    f"{where}: a tensor of shape {tuple(item.shape)} has a storage of only {stored} bytes: refused"
                )
        elif isinstance(item, (dict, list, tuple)) and id(item) not in seen:
            seen.add(id(item))  # a list may contain itself
            pending.extend(item.values() if isinstance(item, dict) else item)
