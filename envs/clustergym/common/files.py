"""Atomic file writes."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any


@contextmanager
def atomic_file(path: str | os.PathLike[str], mode: str = "wb") -> Iterator[IO[Any]]:
    """A temporary file that replaces ``path`` when the block ends. If the block raises, ``path`` is left unchanged.

    Readers see either the old file or the complete new one, also after a crash.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    try:
        # Opened like any other file, so the umask decides who can read it.
        with open(temporary, mode.replace("w", "x")) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno and error.filename in (None, str(temporary)):
            error.filename = str(path)  # a full disk names no file, and nobody knows the temporary one
        raise


def write_atomically(path: str | os.PathLike[str], text: str) -> None:
    """Replace the text of a file atomically."""
    with atomic_file(path, "w") as file:
        file.write(text)
