"""Compile functions with numba, cache the machine code on disk, and warn users who wait for it.

The functions of an environment are compiled for the CPU (:func:`device`); a CUDA kernel that calls them compiles them
as device functions. Under numba's CUDA simulator they stay plain Python, because simulated device arrays cannot enter
compiled code. There, and with NUMBA_DISABLE_JIT, a numpy number keeps its width: ``int()`` and ``float()`` stand where
more bits are needed than the array has.

Private parts of numba are used: the option ``_nrt``, the call template, and the interface of its caches.
"""

from __future__ import annotations

import ast
import hashlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from threading import Timer
from typing import Any, TypeVar

import numba
import numpy as np
from numba import config, njit, types

Function = TypeVar("Function", bound=Callable[..., Any])

_PACKAGE = Path(__file__).resolve().parents[1]
WARN_AFTER_S = 3.0
PLAIN_PYTHON = bool(config.ENABLE_CUDASIM or config.DISABLE_JIT)
index = np.uint64
"""An index that cannot be negative: numba then omits the check for negative values, which halves the time of hot loops.
"""
_warned = False


def source_fingerprint(paths: Iterable[Path]) -> str:
    """Hash of source files, in the order of their paths."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(paths))).hexdigest()


@cache
def _direct_imports(path: Path) -> frozenset[Path]:
    """The files of this package that a file imports."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if not isinstance(node, ast.ImportFrom) or node.module is None:
            continue
        # What is imported from a package may be a module.
        for module in (node.module, *(f"{node.module}.{name.name}" for name in node.names)):
            root, *parts = module.split(".")
            source = _PACKAGE.joinpath(*parts).with_suffix(".py")
            if root == _PACKAGE.name and source.is_file():
                found.add(source)
    return frozenset(found)


def imported_sources(path: Path) -> frozenset[Path]:
    """A file of this package and all files of it that it imports, directly or not."""
    found, waiting = {path}, [path]
    while waiting:
        new = _direct_imports(waiting.pop()) - found
        found |= new
        waiting += new
    return frozenset(found)


def _at_level_1(compile_now: Callable[..., Any]) -> Callable[..., Any]:
    """Let LLVM optimize at its level 1: three quarters of the time of level 3, for code that runs as fast."""

    def compiled(*arguments: Any) -> Any:
        before = config.OPT
        if "NUMBA_OPT" not in os.environ:
            config.OPT = type(before)(1)
        try:
            return compile_now(*arguments)
        finally:
            config.OPT = before

    return compiled


def _probe() -> None:
    """Never called: only its compiler object is inspected."""


@cache
def private_api_available() -> bool:
    """Whether this numba has the private options and attributes that :func:`compiler` uses; logs a warning if not."""
    try:
        import clustergym.common.code_cache  # noqa: F401

        probe = njit(_nrt=False)(_probe)
        if callable(probe.get_call_template) and hasattr(probe, "_cache"):
            return True
    except (AttributeError, ImportError, KeyError, TypeError):
        pass
    logging.getLogger("clustergym").warning(
        "numba %s lacks private functions that clustergym uses: results are the same, but the simulator is slower and "
        "compiles for minutes at every start; install the numba version of constraints.txt",
        numba.__version__,
    )
    return False


def compiler(fingerprint: str) -> Callable[[Function], Function]:
    """A decorator that compiles functions that allocate nothing and do not need the interpreter lock.

    Args:
        fingerprint: :func:`source_fingerprint` of all files with code that is part of the compiled functions. The
            functions that a function calls are compiled into it.
    """

    def compiled(function: Function) -> Function:
        if config.DISABLE_JIT:
            return function
        result: Any
        if not private_api_available():
            # No cache on disk: numba alone would keep using a caller after a function that it calls has changed.
            result = njit(nogil=True, error_model="numpy")(function)
        else:
            from clustergym.common.code_cache import CodeCache, as_part_of_caller  # imports private parts of numba

            # Without reference counts. Nothing is allocated, and the counts are atomic: threads that write them to the
            # same cache lines would spend more time on them than on the work.
            # No wrapper for calls from C: converting hundreds of arguments takes long to compile.
            result = njit(nogil=True, error_model="numpy", _nrt=False, no_cfunc_wrapper=True)(function)
            result._cache = CodeCache(function, fingerprint)
            result.compile = _at_level_1(result.compile)
            # Compiled functions that call this one get another version of it, see PartOfCaller.
            part: Any = njit(
                nogil=True, error_model="numpy", _nrt=False, no_cfunc_wrapper=True, no_cpython_wrapper=True
            )(function)
            part.compile = as_part_of_caller(_at_level_1(part.compile))
            template = part.get_call_template

            def without_literals(args: Any, kws: Any) -> Any:
                """Keep numba from compiling a function again for each constant argument."""
                part.targetoptions["forceinline"] = result.targetoptions.get("forceinline", False)
                return template([types.unliteral(a) for a in args], {k: types.unliteral(a) for k, a in kws.items()})

            result.get_call_template, result.get_overload = without_literals, part.get_overload
        typed: Function = result
        return typed

    return compiled


@cache
def _fingerprint(path: Path) -> str:
    """A function is compiled again only if its file, or one that this file imports, has changed."""
    return source_fingerprint(imported_sources(path))


def device(function: Any) -> Any:
    """Compile a function of one environment, which allocates nothing."""
    if PLAIN_PYTHON:
        return function
    return compiler(_fingerprint(Path(function.__code__.co_filename)))(function)


def inlined(function: Any) -> Any:
    """As :func:`device`, but compiled into its callers.

    Passing a state of dozens of arrays to a function takes longer than most functions of the simulators.
    """
    compiled = device(function)
    if hasattr(compiled, "targetoptions"):
        compiled.targetoptions["forceinline"] = True
    return compiled


def _warn() -> None:
    global _warned
    if not _warned:
        _warned = True
        logging.getLogger("clustergym").warning(
            "compiling the simulator for this machine: about a minute, once; the result is cached on disk"
        )


@contextmanager
def warn_while_compiling() -> Iterator[None]:
    """Log, once per process, that kernels are being compiled, if the block takes longer than a few seconds."""
    timer = Timer(WARN_AFTER_S, _warn)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
