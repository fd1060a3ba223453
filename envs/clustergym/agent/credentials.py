"""Who may send requests: bearer tokens from a file, and credentials for the feedback on one allocation."""

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
    """The tokens of the operator's clients: every line of the file is one. The file is read again when it changes.

    To rotate a token without an interruption, add the new one as a line, update the clients, and remove the old line.
    A token that disappears from the file is accepted for ``overlap_s`` more seconds, because Kubernetes updates the
    Secrets of agents and clients at different times.
    """

    def __init__(self, path: Path | None, overlap_s: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        self.path, self.overlap_s, self.clock = path, overlap_s, clock
        self.problem: str | None = None
        """Why the file cannot be used. The tokens of its last valid version are accepted."""
        self._tokens: set[bytes] = set()
        self._old: dict[bytes, float] = {}
        self._file_version: tuple[int, int, int] | None = None
        if path is not None:
            self._read(path)

    def _read(self, path: Path) -> None:
        """Read the file if it has changed. Raises ValueError if it cannot be used."""
        try:
            status = path.stat()
            file_version = status.st_mtime_ns, status.st_ino, status.st_mode
            if file_version == self._file_version:
                return
            text = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--token-file {path} cannot be read: {error}") from None
        if status.st_mode & OTHERS:
            raise ValueError(
                f"--token-file {path} can be used by every user (mode {status.st_mode & 0o777:o}): chmod 600 {path}"
            )
        tokens = {line.strip().encode() for line in text.splitlines() if line.strip()}
        if not tokens:
            raise ValueError(f"--token-file {path} is empty: expected a token")
        now = self.clock()
        self._old |= dict.fromkeys(self._tokens - tokens, now + self.overlap_s)
        if self._tokens:
            log.info("token file %s was read again: %d token(s)", path, len(tokens))
        self._tokens, self._file_version = tokens, file_version

    def refresh(self) -> None:
        """Read the file if it has changed. A file that cannot be used does not remove the tokens."""
        if self.path is None:
            return
        try:
            self._read(self.path)
            self.problem = None
        except ValueError as error:
            if str(error) != self.problem:
                log.error("%s; the old tokens stay valid", error)
            self.problem = str(error)
        now = self.clock()
        self._old = {token: until for token, until in self._old.items() if until > now}

    def accepts(self, header: bytes) -> bool:
        """Check an Authorization header in constant time."""
        if self.path is None:
            return True
        if not header.startswith(b"Bearer "):
            return False
        given, now = header[7:], self.clock()
        found = False
        for token in self._tokens:
            found |= hmac.compare_digest(given, token)
        for token, until in self._old.items():
            found |= hmac.compare_digest(given, token) and now < until
        return found


class FeedbackCredentials:
    """A credential for one allocation: its id and a code that only the store's key can make.

    It is checked without the store, so a forged one is refused before anything is read or parsed.
    """

    PREFIX = "fb."

    def __init__(self, key: bytes) -> None:
        self.key = key

    def _code(self, allocation_id: str) -> str:
        return hmac.digest(self.key, allocation_id.encode(), "sha256").hex()[:32]

    def issue(self, allocation_id: str) -> str:
        return f"{self.PREFIX}{allocation_id}.{self._code(allocation_id)}"

    def allocation_of(self, header: bytes) -> str | None:
        """The allocation id in an Authorization header with a valid credential, otherwise None."""
        if not header.startswith(b"Bearer fb.") or len(header) > 200 or not header.isascii():
            return None
        allocation_id, _, code = header[10:].decode().rpartition(".")
        return allocation_id if hmac.compare_digest(code, self._code(allocation_id)) else None
