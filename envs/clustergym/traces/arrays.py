"""Arrays in files, read with suspicion: no pickles, no more memory than the file can honestly hold.

A ``.npz`` is a zip of ``.npy`` members. Both say in a header how much is to come, and both may lie: a few kilobytes can claim a
terabyte, or really unpack to one. So sizes are checked against each other before anything is allocated.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

SMALL_BYTES = 256 << 20
"""Unpacks to this much: allowed, however well it was packed."""
MAX_RATIO = 64
"""Beyond that, a file may unpack to this many times its own size. Expert ids pack 2 to 4 times, a bomb a thousand times."""
_CHUNK = 1 << 20


def read_npz(path: Path, wanted: Iterable[str]) -> dict[str, npt.NDArray[Any]]:
    """The named arrays of a ``.npz`` file, those that are there. Others are not even unpacked."""
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
    # An encrypted member is a RuntimeError, an unknown compression a NotImplementedError (which is one too).
    except (zipfile.BadZipFile, RuntimeError) as error:
        raise ValueError(
            f"{path}: not a whole .npz file ({error}); was it truncated, or saved in another format?"
        ) from error


def check_unpacked(path: Path, members: Iterable[zipfile.ZipInfo]) -> None:
    """Refuse a zip bomb by its directory. (A member that holds more than the directory says is cut there by ``zipfile``.)"""
    total, packed = sum(info.file_size for info in members), path.stat().st_size
    if total > SMALL_BYTES and total > MAX_RATIO * packed:
        raise ValueError(
            f"{path}: {packed} bytes that would unpack to {total}: more than {MAX_RATIO} times as many look like a zip bomb"
        )


def names_of_npz(path: Path) -> list[str]:
    """Names of the arrays in a ``.npz`` file, without reading them; none where it is not such a file."""
    try:
        with zipfile.ZipFile(path) as archive:
            return [Path(name).stem for name in archive.namelist()]
    except (zipfile.BadZipFile, OSError):
        return []


def read_npy(file: IO[bytes], n_bytes: int, where: str) -> npt.NDArray[Any]:
    """Read one array, after checking that its header and its size agree (a lying header could ask for any memory)."""
    try:
        version = np.lib.format.read_magic(file)
        header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}.get(version)
        if header is None:
            raise ValueError(f"format version {version} is not known")
        shape, fortran, dtype = header(file)
        if dtype.hasobject:
            raise ValueError("it holds pickled Python objects, which are never loaded: save a plain integer array")
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
        if file.read(1):  # zipfile compares the checksum when it meets the end
            raise ValueError(f"more than the {expected} bytes that the header announces")
    except (ValueError, EOFError, OSError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"{where}: not a readable .npy array: {error}") from error
    return data.view(dtype).reshape(shape, order="F" if fortran else "C") if dtype.itemsize else np.empty(shape, dtype)


def write_npz(file: IO[bytes], fields: Mapping[str, Any]) -> None:
    """Write arrays as a compressed ``.npz`` file, no pickles."""
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for key, value in fields.items():
            with archive.open(f"{key}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.asanyarray(value), allow_pickle=False)


def one_integer(fields: Mapping[str, npt.NDArray[Any]], key: str, path: Path) -> int:
    """A positive integer among the fields, 0 where it is absent."""
    if key not in fields:
        return 0
    value = fields[key]
    if value.size != 1 or value.dtype.kind not in "iu" or int(value.item()) < 1:
        raise ValueError(f"{path}: {key} must be one positive integer, found {value.dtype} of shape {value.shape}")
    return int(value.item())


def one_string(fields: Mapping[str, npt.NDArray[Any]], key: str, path: Path) -> str | None:
    """A string among the fields, None where it is absent or empty."""
    value = fields.get(key, np.array(""))
    if value.size != 1 or value.dtype.kind != "U":
        raise ValueError(f"{path}: {key} must be one string, found {value.dtype} of shape {value.shape}")
    return str(value.item()) or None
