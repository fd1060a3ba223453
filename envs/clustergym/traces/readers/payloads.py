"""Routed experts as engines send them over HTTP: base64 text in JSON responses, or one base64 text per line."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from clustergym.traces.readers.base import lines_of, parse_json

KEY = "routed_experts"
NPY_BASE64 = base64.b64encode(b"\x93NUMPY")[:8].decode()
"""First characters of the base64 of a ``.npy`` file."""


def payloads(path: Path) -> Iterator[tuple[str, bytes]]:
    """(place, decoded bytes) of every response in the file, in order."""
    for where, text in texts(path):
        try:
            yield where, base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError) as error:
            raise ValueError(f"{where}: not base64: {error}") from error


def texts(path: Path) -> Iterator[tuple[str, str]]:
    """(place, base64 text) of every response: each ``routed_experts`` in JSON, otherwise each line."""
    if path.suffix == ".json":
        document = parse_json(path.read_bytes(), str(path))
        yield from ((f"{path}, response {i}", text) for i, text in enumerate(_find(document, str(path)), 1))
        return
    for number, line in lines_of(path):
        where = f"{path}, line {number}"
        if line.startswith((b"{", b"[")):
            yield from ((where, text) for text in _find(parse_json(line, where), where))
        else:
            yield where, line.decode("ascii", "replace")


def _find(document: Any, where: str) -> list[str]:
    """All values of ``routed_experts`` in a document, at any depth, in order."""
    found, pending = [], [document]
    while pending:
        item = pending.pop()
        if isinstance(item, dict):
            for key, value in reversed(item.items()):
                if key == KEY and isinstance(value, str):
                    found.append(value)
                else:
                    pending.append(value)
        elif isinstance(item, list):
            pending.extend(reversed(item))
    if not found:
        raise ValueError(f"{where}: no {KEY!r} found: request them from the engine (return_routed_experts)")
    return found
