"""Generate reference pages: environments from their docstrings, flags of the trainers from their ``Args``.

Run by mkdocs (plugin gen-files). Sources are parsed, not imported, so that a build takes seconds.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "envs" / "clustergym"
TASKS = {"moe_placement": "MoE placement", "gpu_allocation": "GPU allocation"}


def trainers() -> list[Path]:
    """The trainers that have flags, by name."""
    return [path for path in sorted((ROOT / "cleanrl_ppo").glob("*.py")) if _class(path, "Args") is not None]


def tasks() -> list[str]:
    """Folders with environments."""
    return [name for name in TASKS if (PACKAGE / name / "environment.py").is_file()]


def _class(path: Path, name: str) -> ast.ClassDef | None:
    """A class by name, in the file or in the module of the package that the file imports it from."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return node
        if isinstance(node, ast.ImportFrom) and name in [alias.name for alias in node.names]:
            module = PACKAGE.parent / str(node.module).replace(".", "/")
            return _class(module / "__init__.py" if module.is_dir() else module.with_suffix(".py"), name)
    return None


def _plain(text: str) -> str:
    """Markdown of a reStructuredText docstring: roles and double backticks become code."""
    text = re.sub(r":\w+:`~?([^`]+)`", lambda m: f"`{m[1]}`", text)
    return text.replace("``", "`")


def fields(node: ast.ClassDef) -> list[tuple[str, str, str, str]]:
    """(name, type, default, docstring) of the fields of a dataclass."""
    found = []
    for at, entry in enumerate(node.body):
        if not isinstance(entry, ast.AnnAssign) or not isinstance(entry.target, ast.Name):
            continue
        after = node.body[at + 1] if at + 1 < len(node.body) else None
        docstring = ""
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str):
            docstring = " ".join(after.value.value.split())
        default = "" if entry.value is None else ast.unparse(entry.value)
        found.append((entry.target.id, ast.unparse(entry.annotation), default, _plain(docstring)))
    return found


def flag_groups(path: Path) -> dict[str, list[tuple[str, str, str, str]]]:
    """Heading → fields. The fields of ``Args`` come first, then those of each nested dataclass."""
    node = _class(path, "Args")
    assert node is not None
    own, groups = [], {}
    for row in fields(node):
        _, kind, _, docstring = row
        if nested := re.fullmatch(r"(?:tyro\.conf\.)?OmitArgPrefixes\[(\w+)\]", kind):
            group = _class(path, nested[1])
            assert group is not None, f"{path}: no class {nested[1]}"
            groups[docstring.rstrip(".")] = fields(group)
        else:
            own.append(row)
    return {"": own, **groups}


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def table(rows: list[tuple[str, str, str, str]], flags: bool) -> str:
    """A Markdown table of fields or flags."""
    lines = ["| " + ("flag" if flags else "argument") + " | type | default | |", "| --- | --- | --- | --- |"]
    for name, kind, default, docstring in rows:
        shown = f"--{name.replace('_', '-')}" if flags else name
        lines.append(
            f"| `{shown}` | `{_cell(kind)}` | {f'`{_cell(default)}`' if default else ''} | {_cell(docstring)} |"
        )
    return "\n".join(lines)


def trainer_page(path: Path) -> str:
    """The docstring and the flags of a trainer."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    parts = [f"# {path.name}: flags", _plain(docstring)]
    for title, rows in flag_groups(path).items():
        parts += [f"## {title}"] if title else []
        parts.append(table(rows, flags=True))
    return "\n\n".join(parts) + "\n"


def task_page(name: str) -> str:
    """The docstring of an environment and its arguments."""
    path = PACKAGE / name / "environment.py"
    node = next(
        n
        for n in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(n, ast.ClassDef)
        and n.name.endswith("Env")
        and "Vector" not in n.name
        and "Parallel" not in n.name
    )
    parts = [f"# {TASKS[name]}: reference", ast.get_docstring(node) or ""]
    for config in sorted((PACKAGE / name).glob("batch.py")):
        for entry in ast.parse(config.read_text(encoding="utf-8")).body:
            if isinstance(entry, ast.ClassDef) and entry.name.endswith("Config"):
                parts += [f"## {entry.name}", _plain(ast.get_docstring(entry) or ""), table(fields(entry), flags=False)]
    return "\n\n".join(parts) + "\n"


def pages() -> dict[str, str]:
    """All generated pages by their paths in the site."""
    made = {f"reference/{name}.md": task_page(name) for name in tasks()}
    return made | {f"reference/{path.stem}_flags.md": trainer_page(path) for path in trainers()}


def main() -> None:
    import mkdocs_gen_files

    for name, text in pages().items():
        with mkdocs_gen_files.open(name, "w") as file:
            file.write(text)


if __name__ == "<run_path>":  # the plugin runs the file this way
    main()
