"""``clustergym webhook``: the admission webhooks, and certificates for a first installation."""

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
    """Right-size GPU pods in Kubernetes. The pod webhook makes containers read their limits from annotations. The
    binding webhook asks the agent of the node and sets these annotations. Pods opt in with the label
    clustergym.io/allocate=true. Every failure admits the pod.

    Example: clustergym webhook --cert tls.crt --key tls.key --agent-token-file token
    """

    host: str = "0.0.0.0"
    """Address to listen on."""
    port: int = 8443
    """Port to listen on."""
    cert: Path = Path("/etc/clustergym/tls/tls.crt")
    """Serving certificate (PEM). It is reloaded when it changes."""
    key: Path = Path("/etc/clustergym/tls/tls.key")
    """Private key of the serving certificate."""
    client_ca: Path | None = None
    """Require client certificates signed by this authority. The API server needs a kubeConfig for webhooks."""
    backend: Literal["mps", "hami"] = "mps"
    """What enforces the limits: NVIDIA MPS or HAMi."""
    deadline_s: float = 2.0
    """Maximum time of a decision. It is shortened to 80 % of timeoutSeconds of the webhook if that is less."""
    reload_s: float = 10.0
    """Seconds between two checks for a new certificate."""
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
    """Write ca.crt, tls.crt and tls.key to this folder and exit, for installations without cert-manager."""
    cert_host: tuple[str, ...] = ("clustergym-webhook.clustergym.svc",)
    """Host names and addresses in the certificate of --make-certs."""


def run(args: Command, console: Console, line: str) -> None:
    for module in ("cryptography", "fastapi", "httpx", "prometheus_client", "uvicorn"):
        require(module, "agent")
    from clustergym.webhook.certificates import make_certificates
    from clustergym.webhook.clients import Agents, ApiServer
    from clustergym.webhook.names import BACKENDS
    from clustergym.webhook.server import Webhooks, create_app, serve

    if args.make_certs is not None:
        make_certificates(args.make_certs, list(args.cert_host))
        console.print(escape(f"wrote ca.crt, tls.crt and tls.key to {args.make_certs} for {', '.join(args.cert_host)}"))
        bundle = base64.b64encode((args.make_certs / "ca.crt").read_bytes()).decode()
        console.print(f"caBundle: {bundle}", soft_wrap=True, highlight=False)
        return
    for path, flag in ((args.cert, "--cert"), (args.key, "--key")):
        if not path.is_file():
            raise ValueError(f"{flag} {path} is not a file; --make-certs DIR creates one")
    if args.agent_token_file is not None and not args.agent_token_file.is_file():
        raise ValueError(f"--agent-token-file {args.agent_token_file} is not a file")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    # httpx logs one line per request, which adds nothing to the logged decisions.
    logging.getLogger("httpx").setLevel(logging.WARNING)
    agents = Agents(args.agent_url, args.agent_token_file, args.agent_ca, args.agent_client_cert, args.agent_client_key)
    api = ApiServer.in_cluster(args.api_server, args.api_token_file, args.api_ca)
    webhooks = Webhooks(BACKENDS[args.backend], args.deadline_s, api, agents, args.cert)
    asyncio.run(serve(create_app(webhooks), args.host, args.port, args.cert, args.key, args.client_ca, args.reload_s))
