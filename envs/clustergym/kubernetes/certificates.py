"""Certificates and tokens that the webhook makes itself: kept in Secrets, renewed before they expire."""

from __future__ import annotations

import asyncio
import base64
import datetime
import ipaddress
import logging
import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from clustergym.common.files import atomic_file
from clustergym.kubernetes.clients import ApiServer, Unavailable

log = logging.getLogger(__name__)

PEM = serialization.Encoding.PEM
VALID = datetime.timedelta(days=90)
RENEWED = datetime.timedelta(days=30)
"""A certificate is renewed so long before it expires."""
PROPAGATION_S = 5.0
"""A new authority is in the webhook configuration for so long before a certificate of it is used."""
TLS_SECRET, TOKEN_SECRET, CONFIGURATION = "clustergym-webhook-tls", "clustergym-agent-token", "clustergym"
ROLES = ("operator", "webhook", "collector")
Data = dict[str, bytes]


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


class Authority:
    """A certificate authority that exists only while it signs: its key is not kept."""

    def __init__(self, name: str, valid: datetime.timedelta = VALID) -> None:
        now = datetime.datetime.now(datetime.UTC)
        # Valid from one hour ago, because the clock of the API server may be behind.
        self.begin, self.end = now - datetime.timedelta(hours=1), now + valid
        self.key, self.name = ec.generate_private_key(ec.SECP256R1()), _name(name)
        usage = x509.KeyUsage(
            digital_signature=True, content_commitment=False, key_encipherment=False, data_encipherment=False,
            key_agreement=False, key_cert_sign=True, crl_sign=True, encipher_only=False, decipher_only=False,
        )  # fmt: skip
        self.certificate = (
            self._builder(self.name, self.key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .sign(self.key, hashes.SHA256())
            .public_bytes(PEM)
        )

    def _builder(self, subject: x509.Name, public: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key())
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self.name)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(self.begin)
            .not_valid_after(self.end)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
            .add_extension(issuer, critical=False)
        )

    def sign(self, name: str, usage: x509.ObjectIdentifier, hosts: list[str]) -> tuple[bytes, bytes]:
        """A certificate and its private key (PEM)."""
        key = ec.generate_private_key(ec.SECP256R1())
        builder = (
            self._builder(_name(name[:64]), key.public_key())
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
        )
        if hosts:
            names = x509.SubjectAlternativeName([_alternative(host) for host in hosts])
            builder = builder.add_extension(names, critical=False)
        private = key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        return builder.sign(self.key, hashes.SHA256()).public_bytes(PEM), private


def expiry(certificate: Path) -> datetime.datetime:
    """When a certificate expires."""
    return x509.load_pem_x509_certificate(certificate.read_bytes()).not_valid_after_utc


def is_usable(data: Data, host: str) -> bool:
    """Whether these are a certificate for the host that does not expire soon, its key, and its authority."""
    try:
        certificate = x509.load_pem_x509_certificate(data["tls.crt"])
        key = serialization.load_pem_private_key(data["tls.key"], None)
        certificate.verify_directly_issued_by(x509.load_pem_x509_certificates(data["ca.crt"])[0])
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except Exception:  # missing or damaged in any way: a new one is made
        return False
    left = certificate.not_valid_after_utc - datetime.datetime.now(datetime.UTC)
    return left > RENEWED and certificate.public_key() == key.public_key() and _alternative(host) in names


def new_certificate(data: Data, host: str) -> Data:
    """A new certificate. The authorities of old ones are kept for replicas that still use them."""
    if is_usable(data, host):
        return {}
    authority = Authority("clustergym webhook authority")
    certificate, key = authority.sign(host, ExtendedKeyUsageOID.SERVER_AUTH, [host])
    old: list[x509.Certificate] = []
    with suppress(KeyError, ValueError):
        old = x509.load_pem_x509_certificates(data["ca.crt"])
    now = datetime.datetime.now(datetime.UTC)
    kept = [one.public_bytes(PEM) for one in old if one.not_valid_after_utc > now][:3]
    return {"tls.crt": certificate, "tls.key": key, "ca.crt": b"".join([authority.certificate, *kept])}


def missing_tokens(data: Data) -> Data:
    """A token for each role that has none."""
    return {role: secrets.token_hex(32).encode() for role in ROLES if not data.get(role, b"").strip()}


class Installation:
    """What the webhook needs to be called and to call agents, without anything that was prepared.

    Two Secrets that exist, but may be empty, hold it. All replicas use the same: who comes second finds what the first
    one has made, because an API server refuses an update of an old version of a Secret.
    """

    def __init__(self, api: ApiServer, namespace: str, folder: Path, with_certificate: bool = True) -> None:
        self.api, self.namespace, self.with_certificate = api, namespace, with_certificate
        self.host = f"clustergym-webhook.{namespace}.svc"
        self.certificate, self.key, self.token = (folder / name for name in ("tls.crt", "tls.key", "token"))

    async def ensure(self) -> None:
        """Make what is missing, tell the API server, and write the files. Raises :class:`Unavailable`."""
        files = {self.token: (await self._update(TOKEN_SECRET, missing_tokens))["webhook"]}
        if self.with_certificate:
            tls = await self._update(TLS_SECRET, lambda data: new_certificate(data, self.host))
            if await self._trust(tls["ca.crt"]) and self.certificate.exists():
                await asyncio.sleep(PROPAGATION_S)
            files |= {self.key: tls["tls.key"], self.certificate: tls["tls.crt"]}
        for path, content in files.items():
            if not path.exists() or path.read_bytes() != content:
                with atomic_file(path) as file:
                    os.fchmod(file.fileno(), 0o600)
                    file.write(content)

    async def _update(self, name: str, change: Callable[[Data], Data]) -> Data:
        path, what = f"/api/v1/namespaces/{self.namespace}/secrets/{name}", f"Secret {name}"
        for _ in range(10):
            secret = await self.api.get(path, what)
            data = {key: base64.b64decode(value) for key, value in (secret.get("data") or {}).items()}
            changed = change(data)
            if not changed:
                return data
            encoded = {key: base64.b64encode(value).decode() for key, value in changed.items()}
            secret["data"] = (secret.get("data") or {}) | encoded
            if await self.api.write("PUT", path, secret, "application/json", what):
                log.info("made %s of %s", ", ".join(changed), what)
        raise Unavailable(f"{what} is changed by others again and again")

    async def _trust(self, authorities: bytes) -> bool:
        """Tell the API server which authorities to trust. True if it did not know."""
        path = f"/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/{CONFIGURATION}"
        what, bundle = f"webhook configuration {CONFIGURATION}", base64.b64encode(authorities).decode()
        found = await self.api.get(path, what)
        patch: list[dict[str, Any]] = []
        for i, one in enumerate(found.get("webhooks") or []):
            if one["clientConfig"].get("caBundle") != bundle:
                patch.append({"op": "test", "path": f"/webhooks/{i}/name", "value": one["name"]})
                patch.append({"op": "add", "path": f"/webhooks/{i}/clientConfig/caBundle", "value": bundle})
        if patch and not await self.api.write("PATCH", path, patch, "application/json-patch+json", what):
            raise Unavailable(f"{what} was changed by others")
        return bool(patch)
