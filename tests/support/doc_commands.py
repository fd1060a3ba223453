"""The commands in the sh blocks of Markdown files."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from clustergym.training.args import parse_args
from trainers import load_trainer

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


def check_script(words: list[str], folder: Path) -> None:
    """A trainer must parse its flags. The flags of other scripts must be in their source."""
    script, flags = ROOT / words[0], words[1:]
    assert script.is_file(), words[0]
    if script.parent.name == "cleanrl_ppo":
        (folder / "ppo.yaml").write_text("seed: 1\n")
        module = load_trainer(script.stem)
        presets, ranges = {"seed": getattr(module, "SEED_PRESET", {})}, getattr(module, "RANGES", None)
        parse_args(module.Args, argv=flags, presets=presets, ranges=ranges)
        return
    source = script.read_text()
    for import_ in re.findall(r"^from (\w+) import", source, flags=re.M):
        if (script.parent / f"{import_}.py").is_file():
            source += (script.parent / f"{import_}.py").read_text()
    for flag in (word.partition("=")[0] for word in flags if word.startswith("--")):
        name = flag.removeprefix("--").removeprefix("no-")
        assert name in source or name.replace("-", "_") in source, f"{words[0]} has no {flag}"
