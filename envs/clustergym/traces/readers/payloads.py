"""Routed experts as engines send them over HTTP: base64 in a JSON answer, in a file of answers, or bare, one a line."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from clustergym.traces.readers.base import lines_of, parse_json

KEY = "routed_experts"
NPY_BASE64 = base64.b64encode(b"\x93NUMPY")[:8].decode()
"""How the base64 of a ``.npy`` file begins."""


def payloads(path: Path) -> Iterator[tuple[str, bytes]]:
    """(where, decoded bytes) of every answer in the file, in order."""
    for where, text in texts(path):
        try:
            yield where, base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError) as error:
            raise ValueError(f"{where}: not base64: {error}") from error


def texts(path: Path) -> Iterator[tuple[str, str]]:
    """(where, base64 text) of every answer: the value of each ``routed_experts`` in ``.json`` and ``.jsonl``, else each line."""
    if path.suffix == ".json":
        document = parse_json(path.read_bytes(), str(path))
        yield from ((f"{path}, answer {i}", text) for i, text in enumerate(_find(document, str(path)), 1))
        return
    for number, line in lines_of(path):
        where = f"{path}, line {number}"
        if line.startswith((b"{", b"[")):
            yield from ((where, text) for text in _find(parse_json(line, where), where))
        else:
            yield where, line.decode("ascii", "replace")


def _find(document: Any, where: str) -> list[str]:
    """Values of ``routed_experts`` anywhere in a document, in order."""
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
        raise ValueError(f"{where}: no {KEY!r} in it: ask the engine for them (return_routed_experts)")
    return found
