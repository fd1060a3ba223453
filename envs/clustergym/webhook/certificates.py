"""The serving certificate: creation for a first installation, and reloading after a rotation."""

from __future__ import annotations

import datetime
import hashlib
import ipaddress
import logging
import os
import ssl
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from clustergym.common.files import atomic_file

log = logging.getLogger(__name__)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def make_certificates(folder: Path, hosts: list[str], days: int = 825) -> None:
    """Write ca.crt, tls.crt and tls.key for these hosts. The authority's key is not kept: renew all three together."""
    if not hosts:
        raise ValueError(
            "no host for the certificate: expected at least one, such as clustergym-webhook.clustergym.svc"
        )
    folder.mkdir(parents=True, exist_ok=True)
    now = datetime.datetime.now(datetime.UTC)
    # Valid from one hour ago, because the clock of the API server may be behind.
    begin, end = now - datetime.timedelta(hours=1), now + datetime.timedelta(days=days)
    authority_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    issuer = _name("clustergym webhook authority")

    def builder(subject: x509.Name, public: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(issuer)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(begin)
            .not_valid_after(end)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), critical=False
            )
        )

    usage = x509.KeyUsage(
        digital_signature=True, content_commitment=False, key_encipherment=False, data_encipherment=False,
        key_agreement=False, key_cert_sign=True, crl_sign=True, encipher_only=False, decipher_only=False,
    )  # fmt: skip
    authority = (
        builder(issuer, authority_key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .sign(authority_key, hashes.SHA256())
    )
    leaf = (
        builder(_name(hosts[0][:64]), key.public_key())
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([_alternative(host) for host in hosts]), critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    for name, content in (
        ("ca.crt", authority.public_bytes(pem)),
        ("tls.crt", leaf.public_bytes(pem)),
        ("tls.key", private),
    ):
        with atomic_file(folder / name) as file:
            file.write(content)
    os.chmod(folder / "tls.key", 0o600)


def expiry(certificate: Path) -> datetime.datetime:
    """When a certificate expires."""
    return x509.load_pem_x509_certificate(certificate.read_bytes()).not_valid_after_utc


class Reloader:
    """Loads a rotated certificate into the running server. New connections use it; open ones are not affected."""

    def __init__(self, context: ssl.SSLContext, certificate: Path, key: Path) -> None:
        self.context, self.certificate, self.key = context, certificate, key
        self._seen = self._digest()
        self.loads = 0

    def _digest(self) -> str:
        # Compare the content: Secret volumes are replaced through a symbolic link, so file times are not reliable.
        return hashlib.sha256(self.certificate.read_bytes() + b"\0" + self.key.read_bytes()).hexdigest()

    def check(self) -> bool:
        """Load the files if they have changed. Returns True if it did. A key that does not fit yet is tried again."""
        try:
            digest = self._digest()
            if digest == self._seen:
                return False
            # Try another context first: a failure could leave the context in use with a certificate and a wrong key.
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.certificate, self.key)
            self.context.load_cert_chain(self.certificate, self.key)
        except (OSError, ssl.SSLError) as error:
            log.warning("certificate %s cannot be used yet, keeping the old one: %s", self.certificate, error)
            return False
        self._seen = digest
        self.loads += 1
        log.info("certificate %s reloaded", self.certificate)
        return True
