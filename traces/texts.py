"""Texts of many domains that are on every machine with clustergym: files of its dependencies, and generated texts.

Each domain is an iterator over texts, in an order that depends on the seed only. :func:`read_domain` decides by the
content of a paragraph whether a model may be trained on it or its routing is recorded, never both.
"""

from __future__ import annotations

import base64
import datetime
import dis
import importlib
import importlib.util
import inspect
import json
import pydoc
import random
import re
import string
import sysconfig
import unicodedata
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType

# Modules of the standard library whose source, documentation and bytecode are used. All are pure Python.
MODULES = (
    "argparse", "ast", "base64", "bisect", "calendar", "cmd", "code", "codecs", "collections", "configparser",
    "contextlib", "copy", "csv", "dataclasses", "datetime", "difflib", "dis", "doctest", "email.message", "enum",
    "fileinput", "fractions", "functools", "gettext", "glob", "gzip", "heapq", "html.parser", "http.client",
    "http.cookies", "imaplib", "inspect", "ipaddress", "json.decoder", "json.encoder", "locale", "logging", "mailbox",
    "mimetypes", "optparse", "os", "pathlib", "pdb", "pickle", "pkgutil", "platform", "plistlib", "poplib", "pprint",
    "pydoc", "queue", "random", "sched", "selectors", "shelve", "shlex", "shutil", "smtplib", "socket",
    "socketserver", "ssl", "statistics", "string", "subprocess", "tarfile", "tempfile", "textwrap", "threading",
    "timeit", "tokenize", "trace", "traceback", "types", "typing", "unittest.case", "urllib.parse", "urllib.request",
    "uuid", "warnings", "weakref", "zipfile",
)  # fmt: skip
TRAINING_SHARE = 0.3
"""Share of the paragraphs of a domain that a model may be trained on."""
_MAX_FILE_BYTES = 400_000
_WORDS = [
    "node", "queue", "cache", "token", "expert", "layer", "batch", "kernel", "memory", "driver", "index", "table",
    "image", "record", "signal", "packet", "buffer", "thread", "socket", "policy", "window", "bundle", "filter",
    "review", "update", "commit", "branch", "result", "metric", "sample", "vector", "matrix", "stream",
]  # fmt: skip
_NAMES = "anna boris chen dana emil fatima george hana ivan jose keiko liam maria nils olga pedro".split()  # noqa: SIM905
_MORSE = ".- -... -.-. -.. . ..-. --. .... .. .--- -.- .-.. -- -. --- .--. --.- .-. ... - ..- ...- .-- -..- -.-- --.."


def modules() -> list[ModuleType]:
    return [importlib.import_module(name) for name in MODULES]


def tidy(text: str) -> str:
    """Remove memory addresses, file paths and environment variables, which differ between runs."""
    text = re.sub(r"<a href=\"file:[^>]*>[^<]*</a>", "", text)
    text = re.sub(r", file \"[^\"]*\"", "", text)
    text = re.sub(r"environ\(\{.*?\}\)", "environ({})", text)
    return re.sub(r"\b0x[0-9a-f]{6,}\b", "0x0", text)


# Texts that come with Python


def help_text() -> Iterator[str]:
    """English: the topics of the built-in help of Python."""
    from pydoc_data.topics import topics

    yield from (topics[name] for name in sorted(topics))


def source_text() -> Iterator[str]:
    """Programs: the source code of modules. Used by traces/make_tiny_moe.py."""
    yield from (inspect.getsource(module) for module in modules())


def html_text() -> Iterator[str]:
    """Markup: the HTML documentation of modules by pydoc, one line per paragraph."""
    for module in modules():
        yield "\n\n".join(tidy(pydoc.HTMLDoc().docmodule(module)).splitlines())


def bytecode_text() -> Iterator[str]:
    """Listings: the bytecode of functions."""
    for module in modules():
        for _, function in inspect.getmembers(module, lambda f: isinstance(f, FunctionType)):
            yield tidy(dis.Bytecode(function).dis())


def json_text() -> Iterator[str]:
    """Data: signatures of functions as JSON."""
    for module in modules():
        for name, function in inspect.getmembers(module, inspect.isfunction):
            parameters = {p.name: tidy(str(p)) for p in inspect.signature(function).parameters.values()}
            about = {"module": module.__name__, "function": name, "line": function.__code__.co_firstlineno}
            sizes = {"stack": function.__code__.co_stacksize, "names": list(function.__code__.co_names)}
            yield json.dumps(about | {"parameters": parameters} | sizes, indent=2)


def names_text(last: int = 0x3000) -> Iterator[str]:
    """Tables: numbers, categories and names of Unicode characters, 16 rows per paragraph."""
    rows = [
        f"{point:06X};{unicodedata.category(character)};{name};{point};{unicodedata.bidirectional(character)}"
        for point, character in ((point, chr(point)) for point in range(0x20, last))
        if (name := unicodedata.name(character, ""))
    ]
    yield from ("\n".join(rows[i : i + 16]) for i in range(0, len(rows), 16))


# Files of packages that clustergym depends on


def _package(name: str) -> Path:
    """Folder of an installed package, found without importing it."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise ValueError(f"{name} is not installed, but clustergym depends on it")
    return Path(spec.origin).parent


def _files(folder: Path, patterns: tuple[str, ...], rng: random.Random, without: str = "") -> Iterator[str]:
    """The text of the files that match, in random order."""
    found = sorted({path for pattern in patterns for path in folder.rglob(pattern)})
    found = [path for path in found if not without or without not in str(path.relative_to(folder))]
    rng.shuffle(found)
    for path in found:
        if path.is_file() and path.stat().st_size <= _MAX_FILE_BYTES:
            yield path.read_text(encoding="utf-8", errors="replace")


def _standard_library(rng: random.Random) -> Iterator[str]:
    folder = Path(sysconfig.get_path("stdlib"))
    yield from (
        text
        for part in sorted(folder.iterdir())
        if part.suffix == ".py"
        for text in [part.read_text("utf-8", "replace")]
    )
    for name in ("asyncio", "email", "http", "importlib", "json", "logging", "multiprocessing", "unittest", "xml"):
        yield from _files(folder / name, ("*.py",), rng)


def _docstrings(rng: random.Random) -> Iterator[str]:
    """English: the text of long docstrings in scientific packages."""
    for name in ("scipy", "numpy"):
        for text in _files(_package(name), ("*.py",), rng, without="tests"):
            yield "\n\n".join(found for found in re.findall(r'"""(.*?)"""', text, re.DOTALL) if len(found) > 200)


def _readmes(rng: random.Random) -> Iterator[str]:
    """Markdown: descriptions of installed packages."""
    for text in _files(_package("numpy").parent, ("*.dist-info/METADATA",), rng):
        yield text.partition("\n\n")[2]


FILES: dict[str, Callable[[random.Random], Iterator[str]]] = {
    "help": lambda rng: help_text(),
    "stdlib": _standard_library,
    "html": lambda rng: html_text(),
    "bytecode": lambda rng: bytecode_text(),
    "json": lambda rng: json_text(),
    "unicode": lambda rng: names_text(0x20000),
    "docstrings": _docstrings,
    "readmes": _readmes,
    "licences": lambda rng: _files(_package("numpy").parent, ("*LICENSE*", "*COPYING*", "*NOTICE*"), rng),
    "numpy": lambda rng: _files(_package("numpy"), ("*.py",), rng, without="tests"),
    "tests": lambda rng: _files(_package("scipy"), ("test_*.py",), rng),
    "torch": lambda rng: _files(_package("torch"), ("*.py",), rng),
    "stubs": lambda rng: _files(_package("numpy").parent, ("numpy/**/*.pyi", "torch/**/*.pyi"), rng),
    "headers": lambda rng: _files(_package("torch") / "include" / "ATen", ("*.h",), rng),
}
"""Domains of texts that are installed with clustergym. How much there is depends on the versions."""


# Generated texts: one text per call


def _arithmetic(rng: random.Random) -> str:
    lines = []
    for _ in range(12):
        a, b, sign = rng.randrange(1000), rng.randrange(1, 1000), rng.choice("+-*")
        lines.append(f"{a} {sign} {b} = {a + b if sign == '+' else a - b if sign == '-' else a * b}")
    return "\n".join(lines)


def _moment(rng: random.Random) -> datetime.datetime:
    return datetime.datetime(2020, 1, 1) + datetime.timedelta(seconds=rng.randrange(5 * 365 * 86400))


def _log(rng: random.Random) -> str:
    when, lines = _moment(rng), []
    for _ in range(8):
        when += datetime.timedelta(milliseconds=rng.randrange(5000))
        level, word = rng.choice(["INFO", "INFO", "WARN", "ERROR", "DEBUG"]), rng.choice(_WORDS)
        lines.append(f"{when.isoformat()} {level} [{word}-{rng.randrange(32)}] {rng.choice(_WORDS)}={rng.random():.3f}")
    return "\n".join(lines)


def _requests(rng: random.Random) -> str:
    return "\n".join(
        f"10.{rng.randrange(256)}.{rng.randrange(256)}.{rng.randrange(256)} - - [{_moment(rng):%d/%b/%Y:%H:%M:%S}] "
        f'"{rng.choice(["GET", "POST", "PUT"])} /{rng.choice(_WORDS)}/{rng.randrange(9999)} HTTP/1.1" '
        f"{rng.choice([200, 200, 200, 304, 404, 500])} {rng.randrange(90000)}"
        for _ in range(6)
    )


def _csv(rng: random.Random) -> str:
    head = rng.sample(_WORDS, 4)
    rows = [",".join([rng.choice(_NAMES), *(f"{rng.gauss(50, 20):.1f}" for _ in range(3))]) for _ in range(10)]
    return "\n".join([",".join(head), *rows])


def _sql(rng: random.Random) -> str:
    table, (a, b, c) = rng.choice(_WORDS), rng.sample(_WORDS, 3)
    return (
        f"SELECT {a}, COUNT({b}) AS total\nFROM {table} JOIN {c} ON {table}.id = {c}.{table}_id\n"
        f"WHERE {a} > {rng.randrange(500)} AND {b} IN ('{rng.choice(_NAMES)}', '{rng.choice(_NAMES)}')\n"
        f"GROUP BY {a} ORDER BY total DESC LIMIT {rng.randrange(1, 100)};\n"
        f"UPDATE {table} SET {c} = {c} + {rng.randrange(9)} WHERE id = {rng.randrange(10**6)};"
    )


def _xml(rng: random.Random) -> str:
    rows = [
        f'  <{word} id="{rng.randrange(9999)}" owner="{rng.choice(_NAMES)}">{rng.choice(_WORDS)}</{word}>'
        for word in rng.choices(_WORDS, k=7)
    ]
    return "\n".join([f'<{_WORDS[0]} version="{rng.randrange(9)}.{rng.randrange(9)}">', *rows, f"</{_WORDS[0]}>"])


def _yaml(rng: random.Random) -> str:
    name = f"{rng.choice(_WORDS)}-{rng.choice(_WORDS)}"
    return (
        f"apiVersion: v1\nkind: Pod\nmetadata:\n  name: {name}\n  labels:\n    app: {rng.choice(_WORDS)}\nspec:\n"
        f"  containers:\n    - name: {rng.choice(_WORDS)}\n"
        f"      image: registry/{name}:{rng.randrange(9)}.{rng.randrange(99)}\n      resources:\n        limits:\n"
        f"          memory: {rng.randrange(1, 64)}Gi\n          cpu: {rng.randrange(1, 32)}"
    )


def _hex_dump(rng: random.Random) -> str:
    start, lines = rng.randrange(2**20) * 16, []
    for i in range(6):
        row = bytes(
            rng.choice(b"\x00\x00\xff clustergym") if rng.random() < 0.5 else rng.randrange(256) for _ in range(16)
        )
        shown = "".join(chr(c) if 32 <= c < 127 else "." for c in row)
        lines.append(f"{start + 16 * i:08x}  {row.hex(' ')}  |{shown}|")
    return "\n".join(lines)


def _base64(rng: random.Random) -> str:
    return base64.encodebytes(rng.randbytes(rng.randrange(150, 300))).decode().strip()


def _dna(rng: random.Random) -> str:
    weights = [rng.random() + 0.1 for _ in "ACGT"]
    rows = ["".join(rng.choices("ACGT", weights, k=60)) for _ in range(6)]
    return f">seq{rng.randrange(10**6)} {rng.choice(_NAMES)}\n" + "\n".join(rows)


def _matrix(rng: random.Random) -> str:
    return "\n".join(" ".join(f"{rng.gauss(0, 1):8.4f}" for _ in range(6)) for _ in range(7))


def _lisp(rng: random.Random) -> str:
    def tree(depth: int) -> str:
        if depth == 0 or rng.random() < 0.2:
            return rng.choice([rng.choice(_WORDS), str(rng.randrange(100))])
        return (
            f"({rng.choice(['car', 'cdr', 'list', 'if', 'let', '+', '*'])} {' '.join(tree(depth - 1) for _ in 'ab')})"
        )

    return "\n".join(f"(define ({rng.choice(_WORDS)} x) {tree(3)})" for _ in range(4))


def _chess(rng: random.Random) -> str:
    def move() -> str:
        square = rng.choice("abcdefgh") + rng.choice("12345678")
        return (
            rng.choice(["", "", "N", "B", "R", "Q", "K"])
            + rng.choice(["", "", "x"])
            + square
            + rng.choice(["", "", "+"])
        )

    return " ".join(f"{i}. {move()} {move()}" for i in range(1, rng.randrange(20, 40))) + rng.choice(
        [" 1-0", " 0-1", " 1/2"]
    )


def _prose(rng: random.Random) -> str:
    def sentence() -> str:
        return (
            f"{rng.choice(_NAMES).capitalize()} {rng.choice(['reads', 'moves', 'opens', 'keeps', 'finds'])} the "
            f"{rng.choice(['old', 'small', 'fast', 'empty', 'broken'])} {rng.choice(_WORDS)} "
            f"{rng.choice(['before', 'after', 'because of', 'without'])} the {rng.choice(_WORDS)}."
        )

    return " ".join(sentence() for _ in range(6))


def _latex(rng: random.Random) -> str:
    def term() -> str:
        a, b = rng.sample(string.ascii_lowercase, 2)
        return rng.choice([
            rf"\frac{{{a}_{{{rng.randrange(9)}}}}}{{{b}^{rng.randrange(2, 9)}}}", rf"\sum_{{{a}=0}}^{{{b}}} {a}^2",
            rf"\alpha_{{{a}}}", rf"\sqrt{{{a} + {b}}}", rf"\int_0^{{{a}}} {b}\,d{b}",
        ])  # fmt: skip

    rows = [rf"  {term()} &= {term()} + {term()} \\" for _ in range(5)]
    return "\n".join([r"\begin{align}", *rows, r"\end{align}"])


def _assembler(rng: random.Random) -> str:
    registers = ["rax", "rbx", "rcx", "rdx", "rsi", "rdi", "r8", "r9"]
    rows = [f"{rng.choice(_WORDS)}_{rng.randrange(99)}:"]
    for _ in range(12):
        a, b = rng.sample(registers, 2)
        rows.append(rng.choice([
            f"    mov     {a}, {b}", f"    add     {a}, {rng.randrange(256)}",
            f"    lea     {a}, [{b} + {8 * rng.randrange(9)}]", f"    cmp     {a}, {b}",
            f"    jne     .L{rng.randrange(40)}", "    ret",
        ]))  # fmt: skip
    return "\n".join(rows)


def _morse(rng: random.Random) -> str:
    code = dict(zip(string.ascii_lowercase, _MORSE.split(), strict=True))
    return "\n".join(" / ".join(" ".join(code[c] for c in word) for word in rng.choices(_WORDS, k=4)) for _ in range(4))


def _config(rng: random.Random) -> str:
    return "\n\n".join(
        f"[{rng.choice(_WORDS)}.{rng.choice(_WORDS)}]\n"
        + "\n".join(
            f"{word} = {rng.choice(['true', 'false', rng.randrange(999), repr(rng.choice(_NAMES))])}"
            for word in rng.sample(_WORDS, 4)
        )
        for _ in range(2)
    ).replace("\n\n", "\n")


def _messages(rng: random.Random) -> str:
    return "\n".join(
        f"{rng.choice(_NAMES)}: {rng.choice(['did you see', 'please check', 'thanks for', 'i lost', 'where is'])} the "
        f"{rng.choice(_WORDS)}{rng.choice(['?', '!', '...', ' :)'])}"
        for _ in range(8)
    )


GENERATED: dict[str, Callable[[random.Random], str]] = {
    "arithmetic": _arithmetic, "log": _log, "requests": _requests, "csv": _csv, "sql": _sql, "xml": _xml,
    "yaml": _yaml, "hexdump": _hex_dump, "base64": _base64, "dna": _dna, "matrix": _matrix, "lisp": _lisp,
    "chess": _chess, "prose": _prose, "latex": _latex, "assembler": _assembler, "morse": _morse, "config": _config,
    "messages": _messages,
}  # fmt: skip
"""Domains of texts that are generated, without limit."""
DOMAINS = (*FILES, *GENERATED)


@dataclass(frozen=True)
class DomainText:
    """Paragraphs of a domain. No paragraph is in both parts."""

    train: list[str]
    recorded: list[str]


def domain_texts(domain: str, rng: random.Random) -> Iterator[str]:
    """Texts of a domain in random order: all files, or generated texts without end."""
    if domain in FILES:
        yield from FILES[domain](rng)
    else:
        while True:
            yield GENERATED[domain](rng)


def read_domain(domain: str, train: int, recorded: int, seed: int = 0) -> DomainText:
    """Paragraphs with at least so many characters in each part, or all that there are.

    The content of a paragraph decides its part. So neither part depends on how much is read of the other.
    """
    rng = random.Random(f"{domain} {seed}")
    parts: tuple[dict[str, None], dict[str, None]] = ({}, {})
    sizes, wanted = [0, 0], (train, recorded)
    for text in domain_texts(domain, rng):
        for piece in re.split(r"\n\s*\n", text):
            piece = piece.strip("\n")
            part = int(zlib.crc32(piece.encode()) / 2**32 >= TRAINING_SHARE)
            if sizes[part] < wanted[part] and piece.strip() and piece not in parts[part]:
                parts[part][piece] = None
                sizes[part] += len(piece) + 1
        if sizes[0] >= train and sizes[1] >= recorded:
            break
    return DomainText(list(parts[0]), list(parts[1]))
