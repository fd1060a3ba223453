"""Parts of the documentation that are made from the code. A page has a comment, and docs/hooks.py fills it in:

<!-- fields: clustergym.moe_placement.batch:PlacementConfig -->   fields of a dataclass
<!-- flags: ppo -->                                               flags of a trainer
<!-- commands -->                                                 --help of every clustergym command
<!-- ids --> <!-- scores --> <!-- models --> <!-- gpus --> <!-- profiles -->
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import platform
import re
import sys
import typing
from collections.abc import Callable, Iterable
from functools import partial
from importlib import import_module
from pathlib import Path

import griffe
import tyro

ROOT = Path(__file__).resolve().parents[1]


def plain(text: str) -> str:
    """Markdown of a reStructuredText docstring: roles and double backticks become code."""
    text = re.sub(r":\w+:`~?([^`]+)`", lambda match: f"`{match[1]}`", text)
    return re.sub(r"(?<!`)``(?!`)", "`", text)


def cell(text: str) -> str:
    """Text of a table cell. Characters that Markdown would interpret are escaped outside of code."""
    parts = " ".join(text.split()).replace("|", "\\|").split("`")
    for i in range(0, len(parts), 2):
        parts[i] = parts[i].replace("<", "&lt;").replace("_", "\\_").replace("*", "\\*")
    return "`".join(parts)


def table(heads: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """A Markdown table."""
    heads = list(heads)
    lines = [heads, ["---"] * len(heads), *([cell(str(text)) for text in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def fields(target: str) -> str:
    """The fields of a dataclass, read from its source."""
    module, _, name = target.partition(":")
    found = griffe.load(module, search_paths=[ROOT / "envs"])[name].attributes.values()
    rows = (
        (f"`{f.name}`", f"`{f.annotation}`", f"`{f.value}`" if f.value else "", plain(f.docstring.value))
        for f in found
        if f.docstring
    )
    return table(("name", "type", "default", "meaning"), rows)


def help_of(print_help: Callable[[], object]) -> str:
    """What a command prints for ``--help``, as a block."""
    output, columns = io.StringIO(), os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "80"  # as wide as the column of the site
    try:
        with contextlib.redirect_stdout(output), contextlib.suppress(SystemExit):
            print_help()
    finally:
        os.environ.pop("COLUMNS") if columns is None else os.environ.update(COLUMNS=columns)
    text = output.getvalue().replace(platform.node(), "HOST-NAME")  # of the machine that builds the documentation
    return "```text\n" + re.sub(r" +$", "", text, flags=re.M) + "```"


def flags(trainer: str) -> str:
    sys.path.insert(0, str(ROOT / "cleanrl_ppo"))
    try:
        args = import_module(trainer).Args
    finally:
        sys.path.remove(str(ROOT / "cleanrl_ppo"))
    return help_of(lambda: tyro.cli(args, args=["--help"], prog=f"{trainer}.py"))


def command_names() -> list[str]:
    """Every command. One with subcommands has an entry for each of them."""
    from clustergym.cli import COMMANDS

    found = []
    for name, (module, _) in COMMANDS.items():
        hint = typing.get_type_hints(import_module(f"clustergym.cli.{module}").Command, include_extras=True)
        choices = typing.get_args(typing.get_args(hint["command"])[0]) if "command" in hint else ()
        words = [mark.name for choice in choices for mark in choice.__metadata__ if hasattr(mark, "prefix_name")]
        found += [f"{name} {word}" for word in words] or [name]
    return [*found, "eval --task gpu-allocation"]


def commands(_: str = "") -> str:
    from clustergym.cli import main

    parts = ((name, help_of(partial(main, [*name.split(), "--help"]))) for name in command_names())
    return "\n\n".join(f"## clustergym {name}\n\n{text}" for name, text in parts)


def ids(_: str = "") -> str:
    """The placement ids, and why each exists."""
    from clustergym.ids import placement_ids
    from clustergym.moe_placement import PlacementConfig

    heads = ("id", "why it exists", "trace", "cluster", "profile", "schedule")
    rows = []
    for name, (kind, task) in placement_ids().items():
        why = "The same with one discrete action." if kind.endswith("Flat") else task.why
        config = PlacementConfig(**task.arguments)
        rows.append(
            (f"`{name}`", why, *(f"`{x}`" for x in (config.trace, config.cluster, config.profile, config.schedule)))
        )
    return table(heads, rows)


def scores(_: str = "") -> str:
    """The ladder of scores of the ids that were measured."""
    from clustergym.ids import REFERENCE_SCORES

    measured = json.loads(REFERENCE_SCORES.read_text())
    rows = [
        (f"`{env_id}`", name, f"{score['mean']:.2f} ± {score['ci95']:.2f}", score["episodes"])
        for env_id, found in measured.items()
        for name, score in sorted(found.items(), key=lambda item: item[1]["mean"])
    ]
    return table(("id", "agent", "time saved, %", "episodes"), rows)


def models(_: str = "") -> str:
    from clustergym.moe_placement.specs import MODELS

    heads = ("model", "MoE layers", "experts", "top-k", "hidden size", "expert width", "bytes per weight")
    return table(
        heads,
        (
            (f"`{name}`", m.n_layers, m.n_experts, m.top_k, m.hidden, m.intermediate, m.weight_bytes)
            for name, m in MODELS.items()
        ),
    )


def gpus(_: str = "") -> str:
    from clustergym.moe_placement.presets.clusters import GPUS

    heads = ("GPU", "GB/s inside a node", "GB/s between nodes", "memory GB", "memory GB/s", "TFLOPS (bf16)", "source")
    return table(
        heads,
        (
            (f"`{name}`", g.intra_gb_s, g.inter_gb_s, g.memory_gb, g.hbm_gb_s, g.bf16_tflops, g.source)
            for name, g in GPUS.items()
        ),
    )


def profiles(_: str = "") -> str:
    from clustergym.moe_placement.profiles import PROFILES

    heads = ("profile", "engine", "phase", "replica choice", "transport", "what it stands for")
    return table(
        heads,
        ((f"`{p.name}`", p.engine, p.phase, f"`{p.dispatch}`", f"`{p.transport}`", p.about) for p in PROFILES.values()),
    )


MAKERS: dict[str, Callable[[str], str]] = {
    "fields": fields, "flags": flags, "commands": commands,
    "ids": ids, "scores": scores, "models": models, "gpus": gpus, "profiles": profiles,
}  # fmt: skip


def fill(markdown: str) -> str:
    """Replace the comments of a page."""
    pattern = rf"^<!-- ({'|'.join(MAKERS)})(?:: (\S+))? -->$"
    return re.sub(pattern, lambda match: MAKERS[match[1]](match[2] or ""), markdown, flags=re.M)
