"""Hook of the mkdocs build: links to files outside the site become the names of the files."""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from posixpath import normpath
from typing import Any


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replace links to files of the repository that are not in the site."""
    folder = PurePosixPath(page.file.src_uri).parent

    def replaced(match: re.Match[str]) -> str:
        text, target = match[1], match[2]
        outside = normpath(folder / target)
        if not outside.startswith("../"):
            return match[0]
        return text if "`" in text else f"{text} (`{outside.removeprefix('../')}`)"

    return re.sub(r"(?<!!)\[([^\]]+)\]\(((?:\.\./)+[^)#:]*)[^)]*\)", replaced, markdown)
