"""Who may send requests: bearer tokens from one file per role."""

from __future__ import annotations

import hmac
import logging
from pathlib import Path

log = logging.getLogger(__name__)

OTHERS = 0o007
"""Permission bits of users that are neither the owner nor in the group."""
ROLE_OF = {"/allocate": "webhook", "/feedback": "collector"}
"""Path → role that may POST to it, besides the operator."""


def read_tokens(path: Path) -> set[bytes]:
    """The tokens in a file, one per line. Raises ValueError if it cannot be used."""
    try:
        mode, text = path.stat().st_mode, path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"token file {path} cannot be read: {error}") from None
    if mode & OTHERS:
        raise ValueError(f"token file {path} can be used by every user (mode {mode & 0o777:o}): chmod 600 {path}")
    tokens = {line.strip().encode() for line in text.splitlines() if line.strip()}
    if not tokens:
        raise ValueError(f"token file {path} is empty: expected a token")
    return tokens


class Access:
    """Who may send what: the operator everything, the webhook only /allocate, the collectors only /feedback.

    Without token files, everybody who can connect may do everything.
    """

    def __init__(self, operator: Path | None, webhook: Path | None = None, collector: Path | None = None) -> None:
        files = {"operator": operator, "webhook": webhook, "collector": collector}
        self.files = {role: path for role, path in files.items() if path is not None}
        self.tokens = {role: read_tokens(path) for role, path in self.files.items()}
        self.problems: list[str] = []
        """Why files cannot be used. The tokens of their last valid versions are accepted."""

    def allows(self, method: str, path: str, header: bytes) -> bool:
        """Check an Authorization header in constant time."""
        if not self.tokens:
            return True
        roles = {"operator", ROLE_OF.get(path) if method == "POST" else None}
        given, found = header.removeprefix(b"Bearer "), False
        for role, tokens in self.tokens.items():
            for token in tokens:
                found |= hmac.compare_digest(given, token) and role in roles
        return found and header.startswith(b"Bearer ")

    def refresh(self) -> None:
        """Read the files again. A file that cannot be used does not remove the tokens."""
        problems = []
        for role, path in self.files.items():
            try:
                self.tokens[role] = read_tokens(path)
            except ValueError as error:
                problems.append(str(error))
        if problems != self.problems:
            log.warning("token files: %s", "; ".join(problems) or "all can be read again")
        self.problems = problems
