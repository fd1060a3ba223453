"""Hook of the mkdocs build: tables from the code, and names of files in the place of links to them."""

from __future__ import annotations

import re
import sys
from pathlib import Path, PurePosixPath
from posixpath import normpath
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from tables import fill


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Fill in the tables, and replace links to files of the repository that are not in the site."""
    folder = PurePosixPath(page.file.src_uri).parent

    def replaced(match: re.Match[str]) -> str:
        text, target = match[1], match[2]
        outside = normpath(folder / target)
        if not outside.startswith("../"):
            return match[0]
        return text if "`" in text else f"{text} (`{outside.removeprefix('../')}`)"

    return re.sub(r"(?<!!)\[([^\]]+)\]\(((?:\.\./)+[^)#:]*)[^)]*\)", replaced, fill(markdown))
