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
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return next((node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name), None)


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
    node = _class(path, "Args")
    assert node is not None
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return f"# {path.name}: flags\n\n{_plain(docstring)}\n\n{table(fields(node), flags=True)}\n"


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
