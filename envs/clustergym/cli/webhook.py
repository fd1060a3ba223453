"""``clustergym webhook``: the admission webhooks over TLS, and certificates for a first installation."""

from __future__ import annotations

import asyncio
import base64
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.markup import escape


@dataclass
class Command:
    """Right-size GPU pods at admission: webhook A (pods) injects limits that follow annotations, webhook B (pods/binding)
    asks the node's agent and sets them. Pods opt in with the label clustergym.io/allocate=true; every failure admits the pod.

    Example: clustergym webhook --cert tls.crt --key tls.key --agent-token-file token
    """

    host: str = "0.0.0.0"
    """Address to listen on."""
    port: int = 8443
    """Port to listen on."""
    cert: Path = Path("/etc/clustergym/tls/tls.crt")
    """Serving certificate (PEM); a rotated one is loaded while running."""
    key: Path = Path("/etc/clustergym/tls/tls.key")
    """Its private key."""
    client_ca: Path | None = None
    """Ask callers for a certificate signed by this authority (API servers started with a kubeConfig for webhooks)."""
    backend: Literal["mps", "hami"] = "mps"
    """What enforces the limits: NVIDIA MPS, or HAMi."""
    deadline_s: float = 2.0
    """At most this long for a decision; always less than the webhook's timeoutSeconds."""
    reload_s: float = 10.0
    """Seconds between two looks at the certificate."""
    agent_url: str = "http://{ip}:8080"
    """Where a node's agent listens; {ip} is the node's InternalIP, {node} its name."""
    agent_token_file: Path | None = None
    """Bearer token for the agents."""
    agent_ca: Path | None = None
    """Authority of the agents' certificates, for an https --agent-url."""
    agent_client_cert: Path | None = None
    """Certificate to show to agents that ask for one."""
    agent_client_key: Path | None = None
    """Its private key."""
    api_server: str | None = None
    """URL of the API server; by default the cluster's own, with the pod's service account."""
    api_token_file: Path | None = None
    """Bearer token for the API server."""
    api_ca: Path | None = None
    """Authority of the API server's certificate."""
    make_certs: Path | None = None
    """Write ca.crt, tls.crt and tls.key into this folder and end; for installations without cert-manager."""
    cert_host: tuple[str, ...] = ("clustergym-webhook.clustergym.svc",)
    """Names and addresses that --make-certs certifies."""


def run(args: Command, console: Console, line: str) -> None:
    from clustergym.webhook.certificates import make_certificates
    from clustergym.webhook.clients import Agents, ApiServer
    from clustergym.webhook.server import Settings, Webhooks, create_app, serve

    if args.make_certs is not None:
        make_certificates(args.make_certs, list(args.cert_host))
        console.print(escape(f"wrote ca.crt, tls.crt and tls.key to {args.make_certs} for {', '.join(args.cert_host)}"))
        bundle = base64.b64encode((args.make_certs / "ca.crt").read_bytes()).decode()
        console.print(f"caBundle: {bundle}", soft_wrap=True, highlight=False)
        return
    for path, flag in ((args.cert, "--cert"), (args.key, "--key")):
        if not path.is_file():
            raise ValueError(f"{flag} {path} is not a file; --make-certs DIR makes a pair")
    if args.agent_token_file is not None and not args.agent_token_file.is_file():
        raise ValueError(f"--agent-token-file {args.agent_token_file} is not a file")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    # One line a request from the client library says nothing that the decisions do not.
    logging.getLogger("httpx").setLevel(logging.WARNING)
    agents = Agents(args.agent_url, args.agent_token_file, args.agent_ca, args.agent_client_cert, args.agent_client_key)
    api = ApiServer.in_cluster(args.api_server, args.api_token_file, args.api_ca)
    webhooks = Webhooks(Settings(args.backend, args.deadline_s), api, agents, args.cert)
    asyncio.run(serve(create_app(webhooks), args.host, args.port, args.cert, args.key, args.client_ca, args.reload_s))
