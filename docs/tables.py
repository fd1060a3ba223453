"""Tables of the documentation that are made from the code: flags, options, environment ids, presets.

A page contains a comment, and docs/hooks.py puts the table in its place when the site is built:

    <!-- flags: ppo -->                                    flags of a trainer
    <!-- commands -->                                      every clustergym command with its flags
    <!-- options: clustergym.moe_placement.batch:PlacementConfig -->
    <!-- ids --> <!-- scores --> <!-- models --> <!-- gpus --> <!-- profiles -->
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import re
import sys
import textwrap
import types
import typing
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
TRAINERS = sorted(path.stem for path in (ROOT / "cleanrl_ppo").glob("ppo*.py"))
SHARED = "Flags that all trainers share"


class Row(NamedTuple):
    """A field of a dataclass: a flag of a command, or an option of an environment."""

    name: str
    kind: str
    default: str
    text: str
    positional: bool = False
    alias: str = ""

    @property
    def shown_default(self) -> str:
        return self.default if self.default in ("", "required") else f"`{self.default}`"

    @property
    def flag(self) -> str:
        if self.positional:
            return self.name
        flag = "--" + self.name.replace("_", "-")
        return f"{self.alias}, {flag}" if self.alias else flag


def plain(text: str) -> str:
    """Markdown of a reStructuredText docstring: roles and double backticks become code."""
    text = re.sub(r":\w+:`~?([^`]+)`", lambda match: f"`{match[1]}`", text)
    return re.sub(r"(?<!`)``(?!`)", "`", text)


def docstrings(cls: type) -> dict[str, str]:
    """Field → the docstring under it, for the fields of a class and of its base classes."""
    found: dict[str, str] = {}
    for base in reversed([base for base in cls.__mro__ if dataclasses.is_dataclass(base)]):
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0].body  # type: ignore[attr-defined]
        for entry, after in zip(body, [*body[1:], None], strict=True):
            if isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name):
                value = after.value if isinstance(after, ast.Expr) else None
                is_text = isinstance(value, ast.Constant) and isinstance(value.value, str)
                found[entry.target.id] = plain(" ".join(value.value.split())) if is_text else ""  # type: ignore
    return found


def kind_of(annotation: Any) -> str:
    """A type as a reader writes it: int, path, a | b, list of text."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return " | ".join(str(value) for value in arguments)
    if origin in (typing.Union, types.UnionType):
        return " | ".join(kind_of(argument) for argument in arguments)
    if origin in (list, tuple) and arguments:
        return f"list of {kind_of(arguments[0])}"
    names = {str: "text", Path: "path", type(None): "None", float: "number"}
    return names.get(annotation) or getattr(annotation, "__name__", str(annotation).rsplit(".", 1)[-1])


def shown(value: Any) -> str:
    """A default value in a table."""
    if isinstance(value, list | tuple):
        return " ".join(str(item) for item in value)
    return str(value)


def default_of(field: dataclasses.Field[Any]) -> str:
    if field.name == "node_name":  # the name of the machine that builds the documentation
        return "host name"
    if field.default is not dataclasses.MISSING:
        return shown(field.default)
    if field.default_factory is not dataclasses.MISSING:
        return shown(field.default_factory())
    return "required"


class Group(NamedTuple):
    """Rows under a heading; the first group of a class has none."""

    title: str
    rows: list[Row]


def groups_of(cls: type, prefix: str = "") -> list[Group]:
    """The fields of a dataclass, with a prefix. Nested dataclasses become groups of their own."""
    hints = typing.get_type_hints(cls, include_extras=True)
    texts, own, nested = docstrings(cls), [], []
    for field in dataclasses.fields(cls):
        hint, marks = hints[field.name], []
        while hasattr(hint, "__metadata__"):
            marks += hint.__metadata__
            hint = typing.get_args(hint)[0]
        arguments = [mark for mark in marks if hasattr(mark, "metavar")]
        words = {repr(mark) for mark in marks}
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            plain_names = "OmitArgPrefixes" in words or any(mark.name == "" for mark in arguments)
            first, *more = groups_of(hint, "" if plain_names else f"{prefix}{field.name}.")
            title = texts[field.name] or plain(" ".join((hint.__doc__ or "").split("\n\n")[0].split()))
            nested += [Group(title.rstrip("."), first.rows), *more]
            continue
        metavar = next((mark.metavar for mark in arguments if mark.metavar), None)
        name = next((mark.name for mark in arguments if mark.name), field.name)
        alias = next((mark.aliases[0] for mark in arguments if mark.aliases), "")
        positional = "Positional" in words
        name = metavar or name.upper() if positional else name
        own.append(Row(prefix + name, kind_of(hint), default_of(field), texts[field.name], positional, alias))
    return [Group("", own), *nested]


def cell(text: str) -> str:
    """Text of a table cell. Characters that Markdown would interpret are escaped outside of code."""
    parts = text.replace("\n", " ").replace("|", "\\|").split("`")
    for i in range(0, len(parts), 2):
        parts[i] = parts[i].replace("<", "&lt;").replace("_", "\\_").replace("*", "\\*")
    return "`".join(parts)


def table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table."""
    heads = list(heads)
    lines = [heads, ["---"] * len(heads), *([cell(text) for text in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def flag_table(rows: Iterable[Row]) -> str:
    cells = (
        (f"`{row.flag}`", "switch" if row.kind == "bool" else row.kind, row.shown_default, row.text) for row in rows
    )
    return table(("flag", "type", "default", "meaning"), cells)


def trainer_groups(name: str) -> list[Group]:
    """The flags of a trainer: its own first, then those that all trainers share."""
    sys.path.insert(0, str(ROOT / "cleanrl_ppo"))
    try:
        args = import_module(name).Args
    finally:
        sys.path.remove(str(ROOT / "cleanrl_ppo"))
    groups = groups_of(args)
    inherited = {field.name for base in args.__mro__[1:] if dataclasses.is_dataclass(base) for field in _fields(base)}
    own = [row for row in groups[0].rows if row.name not in inherited]
    shared = [row for row in groups[0].rows if row.name in inherited]
    return [Group("", own), *groups[1:], Group(SHARED, shared)]


def _fields(cls: Any) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(cls)


def flags(name: str) -> str:
    parts = []
    for title, rows in trainer_groups(name):
        if rows:
            parts += [f"### {title}"] if title else []
            parts.append(flag_table(rows))
    return "\n\n".join(parts)


def described(cls: type) -> str:
    """The docstring of a command; its example becomes a code block."""
    text = plain(inspect.cleandoc(cls.__doc__ or ""))
    return re.sub(r"\s*Example: (clustergym .*)$", r"\n\n```sh\n\1\n```", text, flags=re.M)


def command_groups() -> dict[str, tuple[type, list[Group]]]:
    """Command → its class and its flags. A command with subcommands has one entry for each of them."""
    from clustergym.cli import COMMANDS

    found: dict[str, tuple[type, list[Group]]] = {}
    entries = [(name, module) for name, (module, _) in COMMANDS.items()]
    entries.insert(1, ("eval --task gpu-allocation", "eval_gpu"))
    for name, module in entries:
        cls = import_module(f"clustergym.cli.{module}").Command
        hint = typing.get_type_hints(cls, include_extras=True).get("command")
        if hint is None:
            found[name] = cls, groups_of(cls)
            continue
        for choice in typing.get_args(typing.get_args(hint)[0]):
            (word,) = [mark.name for mark in choice.__metadata__ if hasattr(mark, "prefix_name")]
            found[f"{name} {word}"] = typing.get_args(choice)[0], groups_of(typing.get_args(choice)[0])
    return found


def anchor(name: str) -> str:
    """The link to a command on the page."""
    return "#clustergym-" + re.sub(r"\W+", "-", name)


def commands(_: str = "") -> str:
    from clustergym.cli import COMMANDS

    found, overview = command_groups(), []
    for command, (_module, sentence) in COMMANDS.items():
        names = [name for name in found if name.split()[0] == command]
        links = [f"[`{name.removeprefix(command).strip() or name}`]({anchor(name)})" for name in names]
        overview.append((f"`{command}`" if len(links) > 1 else links[0], sentence, " ".join(links[len(links) == 1 :])))
    parts = [table(("command", "what it does", "parts"), overview)]
    for name, (cls, groups) in found.items():
        parts += [f"## clustergym {name}", described(cls)]
        for title, rows in groups:
            if rows:
                parts += [f"**{title}**"] if title else []
                parts.append(flag_table(rows))
    return "\n\n".join(parts)


def options(target: str) -> str:
    """Arguments of an environment: the fields of a configuration."""
    module, _, name = target.partition(":")
    rows = groups_of(getattr(import_module(module), name))[0].rows
    cells = ((f"`{row.name}`", row.kind, row.shown_default, row.text) for row in rows)
    return table(("argument", "type", "default", "meaning"), cells)


def ids(_: str = "") -> str:
    """The parts that ids of the placement ladder are made of."""
    from clustergym.ids import RUNGS, SCHEDULES, ladder

    sizes = table(
        ("size", "trace", "cluster", "other arguments"),
        (
            (f"`{name}`", f"`{size['trace']}`", f"`{size['cluster']}`", ", ".join(
                f"`{key}={value}`" for key, value in size.items() if key not in ("trace", "cluster")
            ))
            for name, size in RUNGS.items()
        ),
    )  # fmt: skip
    profiles = ", ".join(f"`{name}`" for name in dict.fromkeys(task["profile"] for _, task in ladder()))
    schedules = ", ".join(f"`{name}`" for name in SCHEDULES)
    return f"{sizes}\n\n- **Profiles:** {profiles}\n- **Schedules:** {schedules}"


def scores(_: str = "") -> str:
    """Reference scores of the ladder, as far as they are measured: mean ± standard deviation over episodes."""
    from clustergym.ids import REFERENCE_SCORES, ladder

    found = json.loads(REFERENCE_SCORES.read_text()) if REFERENCE_SCORES.is_file() else {}
    tasks = [name for name, _arguments in ladder() if name in found]
    if not tasks:
        return "Not measured yet."
    agents = list(dict.fromkeys(agent for task in tasks for agent in found[task]["saved_percent"] if agent != "no-op"))
    rows = []
    for task in tasks:
        saved = found[task]["saved_percent"]
        cells = (f"{saved[agent][0]:.1f} ± {saved[agent][1]:.1f}" if agent in saved else "" for agent in agents)
        rows.append((f"`{task}`", f"{found[task]['start_us']:.0f}", *(text.replace("-", "−") for text in cells)))
    return table(("task", "start, µs", *agents), rows)


def models(_: str = "") -> str:
    from clustergym.moe_placement.specs import MODELS

    heads = ("model", "MoE layers", "experts", "top-k", "hidden size", "expert width", "bytes per weight")
    rows = (
        (f"`{name}`", m.n_layers, m.n_experts, m.top_k, m.hidden, m.intermediate, m.weight_bytes)
        for name, m in MODELS.items()
    )
    return table(heads, ([str(value) for value in row] for row in rows))


def gpus(_: str = "") -> str:
    from clustergym.moe_placement.presets.clusters import GPUS

    heads = ("GPU", "GB/s inside a node", "GB/s between nodes", "memory GB", "memory GB/s", "TFLOPS (bf16)", "source")
    rows = (
        (f"`{name}`", g.intra_gb_s, g.inter_gb_s, g.memory_gb, g.hbm_gb_s, g.bf16_tflops, g.source)
        for name, g in GPUS.items()
    )
    return table(heads, ([str(value) for value in row] for row in rows))


def profiles(_: str = "") -> str:
    from clustergym.moe_placement.profiles import PROFILES
    from clustergym.plans.planning import DEFAULT_PLANNERS

    heads = ("profile", "engine", "phase", "replica choice", "transport", "default planner", "what it stands for")
    rows = (
        (
            f"`{p.name}`",
            p.engine,
            p.phase,
            f"`{p.dispatch}`",
            f"`{p.transport}`",
            f"`{DEFAULT_PLANNERS[p.name]}`",
            p.about,
        )
        for p in PROFILES.values()
    )
    return table(heads, rows)


MAKERS: dict[str, Callable[[str], str]] = {
    "flags": flags, "commands": commands, "options": options, "ids": ids, "scores": scores, "models": models,
    "gpus": gpus, "profiles": profiles,
}  # fmt: skip


def fill(markdown: str) -> str:
    """Replace the comments of a page by their tables."""
    pattern = rf"^<!-- ({'|'.join(MAKERS)})(?:: (\S+))? -->$"
    return re.sub(pattern, lambda match: MAKERS[match[1]](match[2] or ""), markdown, flags=re.M)
