"""Who may send requests: bearer tokens from one file per role."""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import Callable
from pathlib import Path

log = logging.getLogger(__name__)

OTHERS = 0o007
"""Permission bits of users that are neither the owner nor in the group."""


class BearerTokens:
    """The tokens of one role: every line of the file is one. The file is read again when it changes.

    A token that disappears from the file is accepted for ``overlap_s`` more seconds, because Kubernetes updates the
    Secrets of agents and clients at different times.
    """

    def __init__(self, path: Path, overlap_s: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        self.path, self.overlap_s, self.clock = path, overlap_s, clock
        self.problem: str | None = None
        """Why the file cannot be used. The tokens of its last valid version are accepted."""
        self._until: dict[bytes, float] = {}
        """Accepted tokens, and until when; infinity while they are in the file."""
        self._file_version: tuple[int, int, int] | None = None
        self._read()

    def _read(self) -> None:
        """Read the file if it has changed. Raises ValueError if it cannot be used."""
        path = self.path
        try:
            status = path.stat()
            file_version = status.st_mtime_ns, status.st_ino, status.st_mode
            if file_version == self._file_version:
                return
            text = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"token file {path} cannot be read: {error}") from None
        if status.st_mode & OTHERS:
            raise ValueError(
                f"token file {path} can be used by every user (mode {status.st_mode & 0o777:o}): chmod 600 {path}"
            )
        tokens = {line.strip().encode() for line in text.splitlines() if line.strip()}
        if not tokens:
            raise ValueError(f"token file {path} is empty: expected a token")
        end = self.clock() + self.overlap_s
        old = {token: min(until, end) for token, until in self._until.items()}
        self._until = old | dict.fromkeys(tokens, float("inf"))
        self._file_version = file_version
        log.info("token file %s was read: %d token(s)", path, len(tokens))

    def refresh(self) -> None:
        """Read the file if it has changed. A file that cannot be used does not remove the tokens."""
        try:
            self._read()
            self.problem = None
        except ValueError as error:
            if str(error) != self.problem:
                log.error("%s; the old tokens stay valid", error)
            self.problem = str(error)

    def accepts(self, header: bytes) -> bool:
        """Check an Authorization header in constant time."""
        given, now = header.removeprefix(b"Bearer "), self.clock()
        found = False
        for token, until in self._until.items():
            found |= hmac.compare_digest(given, token) and now < until
        return found and header.startswith(b"Bearer ")


class Access:
    """Who may send what: the operator everything, the webhook only /allocate, the collectors only /feedback.

    Without token files, everybody who can connect may do everything.
    """

    ROLE_OF = {"/allocate": "webhook", "/feedback": "collector"}
    """Path to the role that may POST to it."""

    def __init__(
        self, operator: Path | None, webhook: Path | None = None, collector: Path | None = None, overlap_s: float = 0.0
    ) -> None:
        files = {"operator": operator, "webhook": webhook, "collector": collector}
        self.tokens = {role: BearerTokens(path, overlap_s) for role, path in files.items() if path is not None}

    def allows(self, method: str, path: str, header: bytes) -> bool:
        """Check an Authorization header."""
        roles = ["operator"]
        if method == "POST" and path in self.ROLE_OF:
            roles.append(self.ROLE_OF[path])
        return not self.tokens or any(self.tokens[role].accepts(header) for role in roles if role in self.tokens)

    def refresh(self) -> None:
        """Read the files that have changed."""
        for tokens in self.tokens.values():
            tokens.refresh()

    @property
    def problems(self) -> list[str]:
        """Why files cannot be used."""
        return [tokens.problem for tokens in self.tokens.values() if tokens.problem]
