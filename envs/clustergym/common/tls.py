"""Reload of a rotated TLS certificate."""

from __future__ import annotations

import hashlib
import logging
import ssl
from pathlib import Path

log = logging.getLogger(__name__)


class CertificateReloader:
    """Loads a rotated certificate into the running server. New connections use it; open ones are not affected."""

    def __init__(self, context: ssl.SSLContext, certificate: Path, key: Path, client_ca: Path | None = None) -> None:
        self.context, self.certificate, self.key, self.client_ca = context, certificate, key, client_ca
        self._seen = self._digest()
        self.loads = 0
        self.problem: str | None = None

    def _digest(self) -> str:
        # Compare the content: Secret volumes are replaced through a symbolic link, so file times are not reliable.
        files = [self.certificate, self.key, *([] if self.client_ca is None else [self.client_ca])]
        return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()

    def _load(self, context: ssl.SSLContext) -> None:
        context.load_cert_chain(self.certificate, self.key)
        if self.client_ca is not None:
            # Authorities are added: those of the old file are accepted until the process restarts.
            context.load_verify_locations(self.client_ca)

    def check(self) -> bool:
        """Load the files if they have changed. Returns True if it did. A key that does not fit yet is tried again."""
        try:
            digest = self._digest()
            if digest == self._seen:
                self.problem = None
                return False
            # Try another context first: a failure could leave the context in use with a certificate and a wrong key.
            self._load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
            self._load(self.context)
        except (OSError, ssl.SSLError) as error:
            problem = f"certificate {self.certificate} cannot be used yet, keeping the old one: {error}"
            if problem != self.problem:
                log.warning("%s", problem)
            self.problem = problem
            return False
        self._seen, self.problem = digest, None
        self.loads += 1
        log.info("certificate %s reloaded", self.certificate)
        return True
