"""``clustergym collector``: feedback to the allocation agents without code in the workloads."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from clustergym.common.extras import require


@dataclass
class Command:
    """Report to the agents what the pods of a node used and whether they met their objectives, during their lives and
    at their ends. Usage comes from --metrics-url (DCGM exporter or HAMi) or from NVML.

    Example: clustergym collector --node node-1 --agent-url http://127.0.0.1:8080 --agent-token-file token --nvml
    """

    node: str
    """Name of the node whose pods are watched."""
    agent_url: str | None = None
    """URL of the agent on this node."""
    recommender_url: str | None = None
    """URL of the agent that decides when pods are created."""
    agent_token_file: Path | None = None
    """File with the bearer token of the collectors for the agents."""
    agent_ca: Path | None = None
    """Certificate authority of the agents, for https URLs."""
    metrics_url: str | None = None
    """Metrics of the GPUs of this node: those of a DCGM exporter (http://…:9400/metrics) or of HAMi (port 31992)."""
    nvml: bool = False
    """Read the usage from NVML. Needs the process namespace of the host (hostPID) to find the pod of a process."""
    simulate: bool = False
    """Invent the usage, for a demo on nodes without GPUs."""
    proc: Path = Path("/proc")
    """Where the processes of the host are."""
    prometheus_url: str | None = None
    """Evaluates the queries of --qos-queries. Without it, a default rule judges every pod."""
    qos_queries: Path | None = None
    """Folder, such as a mounted ConfigMap, with one PromQL query per file; $namespace and $pod are replaced. A pod
    chooses one by its file name in the annotation clustergym.io/qos-query."""
    prometheus_token_file: Path | None = None
    """File with the bearer token for Prometheus."""
    prometheus_ca: Path | None = None
    """Certificate authority of Prometheus."""
    interval_s: float = 15.0
    """Seconds between two samples."""
    report_s: float = 60.0
    """Seconds between two reports on a pod."""
    host: str = "0.0.0.0"
    """Address of the health and metrics pages."""
    port: int = 9091
    """Plain port for probes and Prometheus: /healthz and /metrics only."""
    api_server: str | None = None
    """URL of the API server. Default: that of the cluster, with the service account of the pod."""
    api_token_file: Path | None = None
    """File with the bearer token for the API server."""
    api_ca: Path | None = None
    """Certificate authority of the API server."""


def run(args: Command, console: Console, line: str) -> None:
    for module in ("fastapi", "httpx", "prometheus_client", "uvicorn"):
        require(module, "agent")
    from clustergym.agent.collector.collect import Collector
    from clustergym.agent.collector.quality import Prometheus, read_queries
    from clustergym.agent.collector.server import serve
    from clustergym.agent.collector.usage import MetricsPage, Nvml, Simulated, UsageSource
    from clustergym.common.logs import configure_logging
    from clustergym.kubernetes.clients import ApiServer, Client, is_name

    agents = {"node": args.agent_url, "recommender": args.recommender_url}
    urls = {name: url.rstrip("/") for name, url in agents.items() if url is not None}
    if not urls:
        raise ValueError("no agent to report to: give --agent-url, --recommender-url or both")
    if (args.metrics_url is not None) + args.nvml + args.simulate != 1:
        raise ValueError("no source of the usage, or two: give one of --metrics-url, --nvml and --simulate")
    for name in ("agent_token_file", "prometheus_token_file"):
        path = getattr(args, name)
        if path is not None and not path.is_file():
            raise ValueError(f"--{name.replace('_', '-')} {path} is not a file")
    if (args.prometheus_url is None) != (args.qos_queries is None):
        raise ValueError("--prometheus-url and --qos-queries must be given together")
    if not is_name(args.node):
        raise ValueError(f"--node {args.node!r} is not a Kubernetes name")
    configure_logging()
    logging.getLogger("httpx").setLevel(logging.WARNING)
    source: UsageSource
    if args.metrics_url is not None:
        source = MetricsPage(Client(), args.metrics_url)
    else:
        source = Simulated() if args.simulate else Nvml(args.proc)
    prometheus = None
    if args.prometheus_url is not None and args.qos_queries is not None:
        client = Client(args.prometheus_token_file, args.prometheus_ca, timeout_s=6.0)
        prometheus = Prometheus(client, args.prometheus_url, read_queries(args.qos_queries))
    collector = Collector(
        args.node,
        ApiServer.in_cluster(args.api_server, args.api_token_file, args.api_ca),
        source,
        prometheus,
        Client(args.agent_token_file, args.agent_ca),
        urls,
        args.interval_s,
        args.report_s,
    )
    asyncio.run(serve(collector, args.host, args.port))
