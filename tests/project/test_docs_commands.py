"""The commands on all pages are understood: programs, flags, targets and extras exist. test_readme.py runs those
of the README."""

from __future__ import annotations

import re
import shlex
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
import tyro

from clustergym.cli import COMMANDS, module_of
from doc_commands import ROOT, check_script, commands, words_of

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINES = [(page.relative_to(ROOT).as_posix(), line) for page in PAGES for line in commands(page)]
OTHERS = {"kubectl", "docker", "git", "wandb", "tensorboard", "vllm", "chmod", "for", "done", "curl", "openssl"}
"""Programs that are not ours."""
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def without_placeholders(words: list[str]) -> list[str]:
    return ["1" if "…" in word else word for word in words]


def check_clustergym(words: list[str]) -> None:
    assert words[0] in COMMANDS, words
    if words[:2] == ["agent", "serve"]:
        check_script(["cleanrl_ppo/ppo_gpu_alloc_online.py", *words[2:]], Path.cwd())
        return
    command = import_module(f"clustergym.cli.{module_of(words)}").Command
    tyro.cli(command, args=words[1:], prog="clustergym")


def check_make(words: list[str]) -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.M)
    assert set(words) <= set(targets), words


def check_pip(words: list[str]) -> None:
    for target in words[1:]:
        for extra in re.findall(r"\[([\w,]+)\]", target) if target.startswith((".", "clustergym")) else []:
            assert set(extra.split(",")) <= EXTRAS.keys(), target


@pytest.mark.parametrize(("page", "line"), LINES, ids=[f"{page}: {line[:60]}" for page, line in LINES])
def test_a_command_is_understood(page: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if re.match(r"\w+=\$\(", line):  # a variable of the shell
        return
    for part in re.split(r"\s*(?:&&|\||>)\s*", line):
        words = without_placeholders(words_of(part))
        if not words:
            continue
        program, rest = Path(words[0]).name, words[1:]
        if program == "clustergym":
            check_clustergym(rest)
        elif program in ("python", "torchrun"):
            scripts = [i for i, word in enumerate(rest) if word.endswith(".py")]
            if scripts and "-c" not in rest:
                check_script(rest[scripts[0] :], tmp_path)
        elif program == "make":
            check_make(rest)
        elif program == "pip":
            check_pip(rest)
        else:
            tools = {"pytest", "pre-commit", "ruff", "mypy", "codespell", "lint-imports", "mkdocs"}
            # The rest of a line after > or | is a file name.
            assert program in OTHERS | tools or part != line, f"{page}: what is {shlex.quote(program)}?"


def test_there_are_commands() -> None:
    assert len(LINES) > 60
    assert commands(ROOT / "docs" / "guides" / "agent.md")[-1].startswith("clustergym agent serve")
