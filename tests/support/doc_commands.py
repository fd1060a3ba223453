"""The commands in the sh blocks of Markdown files."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def blocks(page: Path, language: str) -> list[str]:
    """Code blocks of a language, also indented ones."""
    found = re.findall(rf"^( *)```{language}\n(.*?)^\1```", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    return [re.sub(rf"^{indent}", "", code, flags=re.M) for indent, code in found]


def commands(page: Path) -> list[str]:
    """Command lines of the sh blocks, without comments. Lines that end in a backslash are joined."""
    lines = [line for code in blocks(page, "sh") for line in code.replace("\\\n", " ").splitlines()]
    plain = [" ".join(re.sub(r"\s+#.*", "", line).split()) for line in lines]
    return [line for line in plain if line and not line.startswith("#")]


def words_of(command: str) -> list[str]:
    """The words of a command. Variables before the program are left out."""
    words = shlex.split(command)
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words.pop(0)
    return words
