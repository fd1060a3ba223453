"""``clustergym webhook``: the admission webhook."""

from __future__ import annotations

import asyncio
import logging
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console

from clustergym.common.extras import require


@dataclass
class Command:
    """Right-size GPU pods in Kubernetes. Namespaces opt in with the label clustergym.io/mode (Off or Initial),
    their pods with the label clustergym.io/allocate=true. The agent of its node decides about a new pod that names
    its node, the recommender about every other pod. Every failure admits the pod.

    Example: clustergym webhook --cert tls.crt --key tls.key --agent-token-file token
    """

    host: str = "0.0.0.0"
    """Address to listen on."""
    port: int = 8443
    """Port to listen on. The API server calls it."""
    health_port: int = 8081
    """Plain port for probes: /healthz and /readyz only."""
    metrics_port: int = 9090
    """Plain port for Prometheus: /metrics only."""
    secrets_namespace: str | None = None
    """Make what is missing in Secrets of this namespace: in clustergym-agent-token a token for each role, instead of
    --agent-token-file, and without --cert in clustergym-webhook-tls a certificate, which is renewed in time and made
    known to the API server."""
    cert: Path | None = None
    """Serving certificate (PEM). It is reloaded when it changes."""
    key: Path | None = None
    """Private key of the serving certificate."""
    client_ca: Path | None = None
    """Only clients with a certificate of this authority may call: the API server, if it has one. Without, everybody
    may call who can reach the port."""
    backend: Literal["mps", "hami", "kai"] = "mps"
    """What enforces the limits and schedules pods: NVIDIA MPS, HAMi, or the KAI scheduler (with MPS)."""
    deadline_s: float = 2.0
    """Maximum time of a decision. It is shortened to 80 % of timeoutSeconds of the webhook if that is less."""
    reload_s: float = 10.0
    """Seconds between two checks for a new certificate."""
    recommender_url: str | None = None
    """URL of the agent that is asked about pods that do not name their node. None: they get their request."""
    agent_url: str = "http://{ip}:8080"
    """URL of the agent on a node. {ip} is the InternalIP of the node, {node} its name."""
    agent_token_file: Path | None = None
    """File with the bearer token for the agents."""
    agent_ca: Path | None = None
    """Certificate authority of the agents, for an https --agent-url."""
    api_server: str | None = None
    """URL of the API server. Default: that of the cluster, with the service account of the pod."""
    api_token_file: Path | None = None
    """File with the bearer token for the API server."""
    api_ca: Path | None = None
    """Certificate authority of the API server."""


def run(args: Command, console: Console, line: str) -> None:
    for module in ("cryptography", "fastapi", "httpx", "prometheus_client", "uvicorn"):
        require(module, "agent")
    from clustergym.common.logs import configure_logging
    from clustergym.kubernetes.certificates import Installation
    from clustergym.kubernetes.clients import Agents, ApiServer
    from clustergym.kubernetes.names import BACKENDS
    from clustergym.kubernetes.server import Listen, Webhook, serve

    if (args.cert is None) != (args.key is None):
        raise ValueError("--cert and --key must be given together")
    if args.cert is None and args.secrets_namespace is None:
        raise ValueError("no certificate: give --cert and --key, or --secrets-namespace, which makes one")
    if args.agent_token_file is not None and args.secrets_namespace is not None:
        raise ValueError("--secrets-namespace makes the tokens: drop --agent-token-file")
    for flag in ("cert", "key", "client_ca", "agent_token_file"):
        path = getattr(args, flag)
        if path is not None and not path.is_file():
            raise ValueError(f"--{flag.replace('_', '-')} {path} is not a file")
    ports = (args.port, args.health_port, args.metrics_port)
    if len(set(ports)) < 3 or not all(0 < port < 65536 for port in ports):
        raise ValueError(f"--port, --health-port and --metrics-port are {ports}: expected three ports, 1 to 65535")
    configure_logging()
    # httpx logs one line per request, which adds nothing to the logged decisions.
    logging.getLogger("httpx").setLevel(logging.WARNING)
    api, installation = ApiServer.in_cluster(args.api_server, args.api_token_file, args.api_ca), None
    with tempfile.TemporaryDirectory() as folder:
        cert, key, token = args.cert, args.key, args.agent_token_file
        if args.secrets_namespace is not None:
            installation = Installation(api, args.secrets_namespace, Path(folder), with_certificate=cert is None)
            token = installation.token
            cert, key = cert or installation.certificate, key or installation.key
        assert cert is not None
        assert key is not None
        agents = Agents(args.agent_url, token, args.agent_ca)
        recommender = None if args.recommender_url is None else Agents(args.recommender_url, token, args.agent_ca)
        webhook = Webhook(BACKENDS[args.backend], args.deadline_s, api, agents, recommender, cert)
        listen = Listen(args.host, *ports, cert, key, args.client_ca, args.reload_s, installation)
        asyncio.run(serve(webhook, listen))
