"""Machine code on disk: one folder per user, shared by all copies of the package and all virtual environments.

numba's own cache lies beside each source file. A new checkout or virtual environment would compile everything again.
Here an entry is one file, and its name is a hash of everything that the machine code depends on: sources, signature,
Python, numba, LLVM and processor. Processes that compile the same function at the same time write the same file.
"""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
import stat
import sys
import time
from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numba
from numba.core import config
from numba.core.caching import _Cache
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompileResult
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import cpu_target
from numba.core.serialize import dumps

from clustergym.common.cache import cache_folder
from clustergym.common.files import atomic_file

KEEP_S = 30 * 24 * 3600.0
"""An entry that was not used for so long is deleted."""
_TOUCH_S = 24 * 3600.0


def code_folder() -> Path:
    """The folder of compiled code. It may not exist yet."""
    return cache_folder() / "numba"


@cache
def checked_folder(folder: Path) -> Path:
    """Make the folder if it does not exist; refuse it if another user can write to it.

    numba keeps machine code in pickle files. Who can write to the folder can run code as the user who reads it.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    trusted = stat.S_ISDIR(found.st_mode) and found.st_uid in (0, os.getuid()) and not found.st_mode & 0o022
    if not trusted:
        raise RuntimeError(
            f"the folder of compiled code, {folder}, has mode {stat.S_IMODE(found.st_mode):o} and owner "
            f"{found.st_uid}: expected a folder of your own that only you can write, because its files are code that "
            f"runs. Delete it, or run `chmod go-w {folder}` if you trust its files, or set CLUSTERGYM_CACHE to another "
            "folder"
        )
    return folder


@cache
def _delete_unused(folder: Path) -> None:
    """Delete entries that were not used for long, once per process."""
    for entry in folder.iterdir():
        try:
            if time.time() - entry.stat().st_mtime > KEEP_S:
                entry.unlink()
        except FileNotFoundError:  # deleted by another process
            continue


@cache
def _warn_unwritable(folder: Path, error: str) -> None:
    logging.getLogger("clustergym").warning(
        "cannot keep compiled code in %s (%s): every process compiles again; set CLUSTERGYM_CACHE to a folder that you "
        "can write",
        folder,
        error,
    )


class CodeCache(_Cache):  # type: ignore[misc]
    """What numba asks for the machine code of one function.

    Args:
        function: the Python function.
        fingerprint: hash of all sources that are part of its machine code.
    """

    def __init__(self, function: Callable[..., Any], fingerprint: str) -> None:
        self.function, self.fingerprint = function, fingerprint

    @property
    def cache_path(self) -> str:
        return str(code_folder())

    def _entry(self, signature: Any, codegen: Any) -> Path:
        code = self.function.__code__
        parts = (
            self.fingerprint, self.function.__module__, self.function.__qualname__, code.co_firstlineno,
            hashlib.sha256(code.co_code).hexdigest(), signature, codegen.magic_tuple(), int(config.OPT),
            sys.implementation.cache_tag, sys.abiflags, numba.__version__, version("llvmlite"),
        )  # fmt: skip
        name = hashlib.sha256(repr(parts).encode()).hexdigest()[:40]
        return checked_folder(code_folder()) / f"{self.function.__module__}.{self.function.__name__}-{name}"

    def load_overload(self, signature: Any, target_context: Any) -> Any:
        """The compiled function, or None if this signature was not compiled yet."""
        target_context.refresh()
        try:
            entry = self._entry(signature, target_context.codegen())
            content = entry.read_bytes()
            if time.time() - entry.stat().st_mtime > _TOUCH_S:
                os.utime(entry)
        except OSError:
            return None
        kept_signature, reduced = pickle.loads(content)
        # Types of two modules can have the same name.
        return CompileResult._rebuild(target_context, *reduced) if kept_signature == signature else None

    def save_overload(self, signature: Any, result: Any) -> None:
        """Keep a compiled function."""
        if result.lifted or result.library.has_dynamic_globals:
            raise ValueError(f"{self.function.__qualname__} uses addresses of this process: its code cannot be kept")
        try:
            entry = self._entry(signature, result.codegen)
            with atomic_file(entry) as file:
                file.write(dumps((signature, result._reduce())))
            _delete_unused(entry.parent)
        except OSError as error:
            _warn_unwritable(code_folder(), str(error))

    def enable(self) -> None:
        """The cache is always enabled."""

    def disable(self) -> None:
        """Not supported."""

    def flush(self) -> None:
        """Entries of other sources have other names, so nothing must be deleted."""


class PartOfCaller(JITCodeLibrary):  # type: ignore[misc]
    """The code of a function that only compiled functions call.

    It is kept as LLVM's intermediate code, linked into its callers, and optimized and translated to machine code there.
    numba would do both for every function on its own, together with all functions that it calls, once per level.
    """

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._verify_declare_only_symbols()
        self._finalized = True

    def _optimize_final_module(self) -> None:
        pass


def as_part_of_caller(compile_now: Callable[..., Any]) -> Callable[..., Any]:
    """Let a function of numba that compiles make a :class:`PartOfCaller`."""

    def compiled(*arguments: Any) -> Any:
        target = cpu_target.target_context
        with global_compiler_lock:
            codegen = target.codegen()
            kind, executable = codegen._library_class, target.get_executable
            codegen._library_class = PartOfCaller
            # numba finds the function by this object, which must be built in, and does not call it.
            target.get_executable = lambda library, fndesc, env: [].append
            try:
                return compile_now(*arguments)
            finally:
                codegen._library_class, target.get_executable = kind, executable

    return compiled
