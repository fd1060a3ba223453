"""``clustergym webhook``: the admission webhook, and certificates for a first installation."""

from __future__ import annotations

import asyncio
import base64
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.markup import escape

from clustergym.common.extras import require


@dataclass
class Command:
    """Right-size GPU pods in Kubernetes. Namespaces opt in with the label clustergym.io/mode (Off or Initial),
    their pods with the label clustergym.io/allocate=true. The agent of its node decides about a new pod that names
    its node, the recommender about every other pod. Every failure admits the pod.

    Example: clustergym webhook --cert tls.crt --key tls.key --client-ca client-ca.crt --agent-token-file token
    """

    host: str = "0.0.0.0"
    """Address to listen on."""
    port: int = 8443
    """Port to listen on. The API server calls it."""
    health_port: int = 8081
    """Plain port for probes: /healthz and /readyz only."""
    metrics_port: int = 9090
    """Plain port for Prometheus: /metrics only."""
    cert: Path = Path("/etc/clustergym/tls/tls.crt")
    """Serving certificate (PEM). It is reloaded when it changes."""
    key: Path = Path("/etc/clustergym/tls/tls.key")
    """Private key of the serving certificate."""
    client_ca: Path | None = Path("/etc/clustergym/client-ca/ca.crt")
    """Only clients with a certificate of this authority may call: the API server, with the admission.yaml of
    --make-certs. None lets everybody call who can reach the port."""
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
    agent_client_cert: Path | None = None
    """Client certificate for agents that require one."""
    agent_client_key: Path | None = None
    """Private key of the client certificate."""
    api_server: str | None = None
    """URL of the API server. Default: that of the cluster, with the service account of the pod."""
    api_token_file: Path | None = None
    """File with the bearer token for the API server."""
    api_ca: Path | None = None
    """Certificate authority of the API server."""
    make_certs: Path | None = None
    """Write the certificates of the webhook and of the API server to this folder and exit."""
    cert_host: tuple[str, ...] = ("clustergym-webhook.clustergym.svc",)
    """Host names and addresses in the certificate of --make-certs."""


def run(args: Command, console: Console, line: str) -> None:
    for module in ("cryptography", "fastapi", "httpx", "prometheus_client", "uvicorn"):
        require(module, "agent")
    from clustergym.common.logs import configure_logging
    from clustergym.kubernetes.certificates import make_certificates
    from clustergym.kubernetes.clients import Agents, ApiServer
    from clustergym.kubernetes.names import BACKENDS
    from clustergym.kubernetes.server import Listen, Webhook, serve

    if args.make_certs is not None:
        make_certificates(args.make_certs, list(args.cert_host))
        console.print(
            escape(
                f"wrote to {args.make_certs}: tls.crt and tls.key for {', '.join(args.cert_host)}, ca.crt for the "
                "webhook configuration, client-ca.crt for --client-ca, and admission.yaml, webhook-kubeconfig.yaml, "
                "client.crt and client.key for the API server"
            ),
            soft_wrap=True,
        )
        bundle = base64.b64encode((args.make_certs / "ca.crt").read_bytes()).decode()
        console.print(f"caBundle: {bundle}", soft_wrap=True, highlight=False)
        return
    for path, flag in ((args.cert, "--cert"), (args.key, "--key")):
        if not path.is_file():
            raise ValueError(f"{flag} {path} is not a file; --make-certs DIR creates one")
    if args.client_ca is not None and not args.client_ca.is_file():
        raise ValueError(
            f"--client-ca {args.client_ca} is not a file; --make-certs DIR creates client-ca.crt, and --client-ca None "
            "lets everybody call who can reach the port"
        )
    if args.agent_token_file is not None and not args.agent_token_file.is_file():
        raise ValueError(f"--agent-token-file {args.agent_token_file} is not a file")
    ports = (args.port, args.health_port, args.metrics_port)
    if len(set(ports)) < 3 or not all(0 < port < 65536 for port in ports):
        raise ValueError(f"--port, --health-port and --metrics-port are {ports}: expected three ports, 1 to 65535")
    configure_logging()
    # httpx logs one line per request, which adds nothing to the logged decisions.
    logging.getLogger("httpx").setLevel(logging.WARNING)
    if args.client_ca is None:
        logging.getLogger(__name__).warning("--client-ca None: everybody who can reach port %d may call", args.port)
    credentials = (args.agent_token_file, args.agent_ca, args.agent_client_cert, args.agent_client_key)
    agents = Agents(args.agent_url, *credentials)
    recommender = None if args.recommender_url is None else Agents(args.recommender_url, *credentials)
    api = ApiServer.in_cluster(args.api_server, args.api_token_file, args.api_ca)
    webhook = Webhook(BACKENDS[args.backend], args.deadline_s, api, agents, recommender, args.cert)
    listen = Listen(args.host, *ports, args.cert, args.key, args.client_ca, args.reload_s)
    asyncio.run(serve(webhook, listen))
