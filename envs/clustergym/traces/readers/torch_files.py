"""``.pt`` files from strangers: looked through before torch touches them.

``weights_only=True`` keeps torch from running code. It does not keep a file from asking for memory: an entry may be packed a thousand
times, a byte array may be made from one number, and a tensor may claim a shape its storage does not have.
"""

from __future__ import annotations

import pickle
import pickletools
import zipfile
from pathlib import Path
from typing import Any

import torch

_GLOBALS = {"torch._utils _rebuild_tensor_v2", "collections OrderedDict", "torch.storage UntypedStorage"}
_STORAGES = ("Byte", "Char", "Short", "Int", "Long", "Bool", "Half", "BFloat16", "Float", "Double")
_GLOBALS |= {f"torch {kind}Storage" for kind in _STORAGES}


def load_tensors(path: Path) -> Any:
    """What ``torch.save`` wrote there: dicts and lists of tensors, numbers and strings, and nothing else. Storages are mapped."""
    try:
        _check_archive(path)
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    # torch answers broken files with all of these.
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
                raise ValueError(f"{path}: its entries are together longer than the file: refused")
            programs = [m for m in members if m.filename.endswith("/data.pkl")]
            if len(programs) != 1:
                raise ValueError(f"{path}: not a file of torch.save")
            _check_program(archive.read(programs[0]), path)
    except zipfile.BadZipFile as error:
        raise ValueError(f"{path}: not a whole file of torch.save ({error}); was it truncated?") from error


def _check_program(program: bytes, path: Path) -> None:
    """Only what tensors, dicts and lists need may be named in the pickle."""
    try:
        for operation, argument, _ in pickletools.genops(program):
            if operation.name == "GLOBAL" and argument not in _GLOBALS:
                raise ValueError(
                    f"{path}: the file wants {str(argument).replace(' ', '.')}, which no recording needs: refused"
                )
            if operation.name in ("STACK_GLOBAL", "INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "EXT1", "EXT2", "EXT4"):
                raise ValueError(
                    f"{path}: the file makes objects ({operation.name}), which no recording needs: refused"
                )
    except ValueError as error:
        if str(error).startswith(str(path)):
            raise
        raise ValueError(f"{path}: not a readable torch file: {error}") from error


def _check_tensors(value: Any, where: str) -> None:
    """No tensor may be larger than what is stored of it."""
    pending, seen = [value], set()
    while pending:
        item = pending.pop()
        if isinstance(item, torch.Tensor):
            stored = item.untyped_storage().nbytes()
            if item.numel() * item.element_size() > stored:
                raise ValueError(
                    f"{where}: a tensor of shape {tuple(item.shape)} with only {stored} bytes stored: refused"
                )
        elif isinstance(item, (dict, list, tuple)) and id(item) not in seen:
            seen.add(id(item))  # a list may hold itself
            pending.extend(item.values() if isinstance(item, dict) else item)
