"""Read and write arrays in files that may be hostile: no pickles, and sizes are checked before memory is allocated.

A ``.npz`` file is a zip archive of ``.npy`` members. The headers of both announce sizes, and both may be wrong: a few
kilobytes can claim a terabyte, or unpack to one.
"""

from __future__ import annotations

import lzma
import os
import tokenize
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from clustergym.common.files import atomic_file

FORMAT_VERSION = 1
# Default of the optional arrays of a trace. None would not fit their type; construction replaces it.
UNGIVEN: Any = None
SMALL_BYTES = 256 << 20
"""A file may always unpack to this size."""
MAX_RATIO = 64
"""A larger file may unpack to this many times its own size. Expert ids compress 3 to 8 times, a zip bomb 1000 times."""
_CHUNK = 1 << 20
BAD_ZIP = (zipfile.BadZipFile, RuntimeError, OSError)
"""zipfile raises RuntimeError for encryption, NotImplementedError (a subclass) for unknown compression or versions, and
OSError if an offset points before the file."""
_BAD_NPY = (
    ValueError,
    EOFError,
    OSError,
    SyntaxError,
    tokenize.TokenError,
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
)
"""The header of an array is Python source, which numpy parses."""


def read_npz(path: Path, wanted: Iterable[str]) -> dict[str, npt.NDArray[Any]]:
    """The arrays named in ``wanted`` that a ``.npz`` file contains. Other arrays are not unpacked."""
    try:
        with zipfile.ZipFile(path) as archive:
            found = {Path(info.filename).stem: info for info in archive.infolist()}
            members = {key: found[key] for key in wanted if key in found}
            check_unpacked(path, members.values())
            fields = {}
            for key, info in members.items():
                with archive.open(info) as file:
                    fields[key] = read_npy(file, info.file_size, f"{path}, array {key!r}")
            return fields
    except BAD_ZIP as error:
        raise ValueError(
            f"{path}: not a complete .npz file ({error}); was it truncated, or saved in another format?"
        ) from error


def check_unpacked(path: Path, members: Iterable[zipfile.ZipInfo]) -> None:
    """Refuse a zip bomb by the sizes in its directory. ``zipfile`` never unpacks more of a member than that."""
    total, packed = sum(info.file_size for info in members), path.stat().st_size
    if total > SMALL_BYTES and total > MAX_RATIO * packed:
        raise ValueError(
            f"{path}: {packed} bytes would unpack to {total}, more than {MAX_RATIO} times as many: a zip bomb?"
        )


def names_of_npz(path: Path) -> list[str]:
    """Names of the arrays in a ``.npz`` file, without reading them. Empty if it is not such a file."""
    try:
        with zipfile.ZipFile(path) as archive:
            return [Path(name).stem for name in archive.namelist()]
    except BAD_ZIP:
        return []


def read_npy(file: IO[bytes], n_bytes: int, where: str) -> npt.NDArray[Any]:
    """Read one array from a file of ``n_bytes``. Memory is allocated only if the header agrees with that size."""
    try:
        version = np.lib.format.read_magic(file)
        header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}.get(version)
        if header is None:
            raise ValueError(f"unknown format version {version}")
        shape, fortran, dtype = header(file)
        if dtype.hasobject:
            raise ValueError("it contains pickled Python objects, which are never loaded: save a plain integer array")
        expected = int(np.prod(shape, dtype=object)) * dtype.itemsize
        found = n_bytes - file.tell()
        if found != expected:
            raise ValueError(f"truncated or malformed: the header announces {expected} bytes, found {found}")
        data = np.empty(expected, np.uint8)
        filled = 0
        while filled < expected:
            piece = file.read(min(_CHUNK, expected - filled))
            if not piece:
                raise ValueError(f"truncated: expected {expected} bytes, found {filled}")
            data[filled : filled + len(piece)] = np.frombuffer(piece, np.uint8)
            filled += len(piece)
        if file.read(1):  # zipfile checks the checksum when it reaches the end of a member
            raise ValueError(f"more than the {expected} bytes that the header announces")
    except _BAD_NPY as error:
        raise ValueError(f"{where}: not a readable .npy array: {error}") from error
    return data.view(dtype).reshape(shape, order="F" if fortran else "C") if dtype.itemsize else np.empty(shape, dtype)


def check_trace_name(path: Path) -> None:
    """Raise a ValueError if a trace cannot be saved under this name."""
    if path.suffix != ".npz":
        raise ValueError(f"traces are saved as .npz, found {path.name!r}")


def write_trace(source: str | os.PathLike[str], fields: Mapping[str, Any]) -> Path:
    """Write the arrays of a trace atomically as a compressed ``.npz`` file, no pickles. Returns the path."""
    path = Path(source)
    check_trace_name(path)
    fields = {**fields, "format_version": np.int64(FORMAT_VERSION)}
    with atomic_file(path) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_LZMA) as archive:
        for key, value in fields.items():
            with archive.open(f"{key}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.asanyarray(value), allow_pickle=False)
    return path


def integers(array: Any, what: str, name: str) -> npt.NDArray[np.int64]:
    values = np.atleast_1d(np.asarray(array))
    if values.dtype.kind not in "iu":
        raise ValueError(f"{name}: {what} has dtype {values.dtype}: expected integers")
    return values.astype(np.int64)


def layer_indices(given: Any, n_layers: int, name: str) -> npt.NDArray[np.int64]:
    """(L,) global index of each layer: those given, checked, or 0 … L−1 for None."""
    layer_ids = np.arange(n_layers) if given is None else integers(given, "layer_ids", name)
    if layer_ids.shape != (n_layers,):
        raise ValueError(
            f"{name}: layer_ids has shape {layer_ids.shape}, but the trace has {n_layers} layers: give one id per layer"
        )
    if len(np.unique(layer_ids)) != n_layers or layer_ids.min() < 0:
        raise ValueError(f"{name}: layer_ids must be distinct and not negative, found {layer_ids.tolist()}")
    return layer_ids


def one_integer(fields: Mapping[str, npt.NDArray[Any]], key: str, path: Path) -> int:
    """The positive integer ``fields[key]``, or 0 if it is absent."""
    if key not in fields:
        return 0
    value = fields[key]
    if value.size != 1 or value.dtype.kind not in "iu" or int(value.item()) < 1:
        raise ValueError(f"{path}: {key} must be one positive integer, found {value.dtype} of shape {value.shape}")
    return int(value.item())


def one_string(fields: Mapping[str, npt.NDArray[Any]], key: str, path: Path) -> str | None:
    """The string ``fields[key]``, or None if it is absent or empty."""
    value = fields.get(key, np.array(""))
    if value.size != 1 or value.dtype.kind != "U":
        raise ValueError(f"{path}: {key} must be one string, found {value.dtype} of shape {value.shape}")
    return str(value.item()) or None
