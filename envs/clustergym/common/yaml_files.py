"""YAML from untrusted sources."""

from __future__ import annotations

from typing import Any

from clustergym.common.extras import require

MAX_DEPTH = 16
"""Deeper nesting would overflow the stack of the loader in C, and take the one in Python minutes."""


def parse_yaml(text: str, where: str, aliases: bool = True) -> Any:
    """The document. A ValueError names what is wrong: not YAML, nested too deep, or an alias where none is allowed.

    An alias repeats a part of the document, so a few bytes can unfold to gigabytes.
    """
    yaml = require("yaml", "engines")
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    depth = 0
    try:
        for event in yaml.parse(text, Loader=loader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_DEPTH:
                raise ValueError(f"{where}: not valid YAML: nested more than {MAX_DEPTH} deep")
            if not aliases and isinstance(event, yaml.AliasEvent):
                raise ValueError(f"{where}: YAML aliases are not allowed")
        return yaml.load(text, Loader=loader)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"{where}: not valid YAML: {str(error).splitlines()[0]}") from error
