"""Certificates of the webhooks and of the API server: creation for a first installation, expiry."""

from __future__ import annotations

import datetime
import ipaddress
import os
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from clustergym.common.files import atomic_file, write_atomically

PEM = serialization.Encoding.PEM
KUBECONFIG_NAME, ADMISSION_NAME = "webhook-kubeconfig.yaml", "admission.yaml"
KUBECONFIG = """\
# The client certificate that the API server shows to the webhook. Users are named after the host of the webhook.
apiVersion: v1
kind: Config
users:
  - name: {host}
    user:
      client-certificate: {folder}/client.crt
      client-key: {folder}/client.key
"""
ADMISSION = """\
# kube-apiserver --admission-control-config-file={folder}/admission.yaml
apiVersion: apiserver.config.k8s.io/v1
kind: AdmissionConfiguration
plugins:
  - name: MutatingAdmissionWebhook
    configuration:
      apiVersion: apiserver.config.k8s.io/v1
      kind: WebhookAdmissionConfiguration
      kubeConfigFile: {folder}/webhook-kubeconfig.yaml
"""


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


class _Authority:
    """A certificate authority that exists only while it signs: its key is not kept."""

    def __init__(self, name: str, days: int) -> None:
        now = datetime.datetime.now(datetime.UTC)
        # Valid from one hour ago, because the clock of the API server may be behind.
        self.begin, self.end = now - datetime.timedelta(hours=1), now + datetime.timedelta(days=days)
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


def make_certificates(folder: Path, hosts: list[str], days: int = 825) -> None:
    """Write the certificates of both sides. The keys of the authorities are not kept: renew all files together.

    For the webhooks: tls.crt and tls.key for these hosts, which the API server trusts through ca.crt. For the API
    server: client.crt and client.key, which the webhooks trust through client-ca.crt, and two configuration files.
    """
    if not hosts:
        raise ValueError(
            "no host for the certificate: expected at least one, such as clustergym-webhook.clustergym.svc"
        )
    folder.mkdir(parents=True, exist_ok=True)
    servers, clients = _Authority("clustergym webhook authority", days), _Authority("clustergym client authority", days)
    certificate, key = servers.sign(hosts[0], ExtendedKeyUsageOID.SERVER_AUTH, hosts)
    client_certificate, client_key = clients.sign("kube-apiserver", ExtendedKeyUsageOID.CLIENT_AUTH, [])
    for name, content in (
        ("ca.crt", servers.certificate),
        ("tls.crt", certificate),
        ("tls.key", key),
        ("client-ca.crt", clients.certificate),
        ("client.crt", client_certificate),
        ("client.key", client_key),
    ):
        with atomic_file(folder / name) as file:
            file.write(content)
        if name.endswith(".key"):
            os.chmod(folder / name, 0o600)
    write_atomically(folder / KUBECONFIG_NAME, KUBECONFIG.format(host=hosts[0], folder=folder.resolve()))
    write_atomically(folder / ADMISSION_NAME, ADMISSION.format(folder=folder.resolve()))


def expiry(certificate: Path) -> datetime.datetime:
    """When a certificate expires."""
    return x509.load_pem_x509_certificate(certificate.read_bytes()).not_valid_after_utc
