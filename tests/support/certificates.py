"""Certificates of both sides: of the webhook, and of an API server that shows one, as an operator may make them."""

from __future__ import annotations

import datetime
from pathlib import Path

from cryptography.x509.oid import ExtendedKeyUsageOID

from clustergym.kubernetes.certificates import Authority

KUBECONFIG = """\
apiVersion: v1
kind: Config
users:
  - name: {host}
    user:
      client-certificate: {folder}/client.crt
      client-key: {folder}/client.key
"""
ADMISSION = """\
apiVersion: apiserver.config.k8s.io/v1
kind: AdmissionConfiguration
plugins:
  - name: MutatingAdmissionWebhook
    configuration:
      apiVersion: apiserver.config.k8s.io/v1
      kind: WebhookAdmissionConfiguration
      kubeConfigFile: {folder}/webhook-kubeconfig.yaml
"""


def make_certificates(folder: Path, hosts: list[str], days: int = 30) -> None:
    """tls.crt and tls.key for these hosts, ca.crt; client.crt and client.key, client-ca.crt; admission.yaml."""
    folder.mkdir(parents=True, exist_ok=True)
    valid = datetime.timedelta(days=days)
    servers, clients = Authority("servers", valid), Authority("clients", valid)
    certificate, key = servers.sign(hosts[0], ExtendedKeyUsageOID.SERVER_AUTH, hosts)
    client_certificate, client_key = clients.sign("kube-apiserver", ExtendedKeyUsageOID.CLIENT_AUTH, [])
    files = {
        "ca.crt": servers.certificate, "tls.crt": certificate, "tls.key": key, "client-ca.crt": clients.certificate,
        "client.crt": client_certificate, "client.key": client_key,
        "webhook-kubeconfig.yaml": KUBECONFIG.format(host=hosts[0], folder=folder.resolve()).encode(),
        "admission.yaml": ADMISSION.format(folder=folder.resolve()).encode(),
    }  # fmt: skip
    for name, content in files.items():
        (folder / name).write_bytes(content)
