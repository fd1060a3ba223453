"""Settings of the agent's server."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from clustergym.agent.owners import GuardSettings
from clustergym.agent.rails import RailSettings


@dataclass
class ServerSettings:
    """Settings of the HTTP server, the store and the learner process."""

    port: int = 8080
    """Port to listen on."""
    host: str = "127.0.0.1"
    """Address to listen on. Any address other than loopback requires --token-file."""
    store: Path = Path("runs/ppo_gpu_alloc_online")
    """Folder for the database. An existing store is resumed."""
    token_file: Path | None = None
    """File with the bearer tokens of the operator, who may do everything, one per line. It is read again when it
    changes, and must not be readable by every user."""
    webhook_token_file: Path | None = None
    """File with the bearer tokens of the admission webhook, which may only ask for allocations."""
    collector_token_file: Path | None = None
    """File with the bearer tokens of the collectors, which may only send feedback."""
    tls_cert: Path | None = None
    """Serve HTTPS with this certificate (PEM). It is loaded again when it changes."""
    tls_key: Path | None = None
    """Private key of the certificate."""
    max_body_bytes: int = 16_384
    """Maximum size of a request body."""
    max_connections: int = 512
    """Maximum number of open connections. Requests on further ones are answered 503."""
    read_timeout_s: float = 5.0
    """Maximum seconds for a client to send its first request, and the body of each."""

    explore: Literal["off", "best-effort", "all"] = "best-effort"
    """Pods that get a sampled action when the policy decides; other pods get the most probable one. While the rule
    decides, samples are only scored, so every pod is learned from. off: no learning."""
    shadow: bool = False
    """Decide, score and learn, but grant every request in full."""
    rails: bool = True
    """Limit every grant, and let the VPA rule decide until a test says that the policy is better. Without, the policy
    decides about every pod."""
    memory_margin: float = RailSettings.memory_margin
    """Rail: a grant is at least the owner's peak memory × this."""
    cores_margin: float = RailSettings.cores_margin
    """Rail: a grant is at least the largest need of the owner × this. Margins are larger while few pods were seen."""
    margin_sensitive: float = RailSettings.margin_sensitive
    """Rail: the margin of cores and memory for latency-sensitive pods."""
    grant_floor: float = RailSettings.floor
    """Rail: a grant is at least this share of the request."""
    qos_guard: float = GuardSettings.qos
    """Rail: an owner's pods get their request if the running QoS of latency-sensitive pods is below this."""
    qos_guard_best_effort: float = GuardSettings.qos_best_effort
    """Rail: the same for best-effort pods."""
    warmup_pods: int = GuardSettings.warmup_pods
    """Rail: the first pods of an owner get their request. Ten minutes of a running pod count like a pod."""
    ttl_s: float = 7 * 86_400.0
    """Feedback is expired if it arrives more than this many seconds after the allocation."""
    min_run_s: float = 0.0
    """Final feedback that arrives earlier than this after the allocation is ignored: the pod cannot have run."""
    telemetry: bool = True
    """Read the GPU load from NVML. A recommender has no GPU."""
    telemetry_s: float = 0.5
    """Seconds between two samples of the GPU load. 0: sample at each request."""
    gpus: tuple[int, ...] = ()
    """Indices of the shared GPUs. Default: all GPUs of the node."""
    history_from: str | None = None
    """URL of a Prometheus with what pods used before: owners of whom nothing is known begin with it."""
    history_days: int = 7
    """Days that are read at the start."""
    keep_allocations: int = 1_000_000
    """Older allocations than so many are deleted from the store."""

    batch_size: int = 32
    """Number of experiences that an update waits for."""
    max_batch: int = 1024
    """Maximum number of experiences in one update."""
    max_policy_lag: int = 16
    """Decisions of a policy that is more than this many updates old are not learned from."""
    update_interval_s: float = 0.2
    """Seconds between two checks for new experiences, and minimum seconds between two updates."""

    @property
    def rail_settings(self) -> RailSettings:
        return RailSettings(self.memory_margin, self.cores_margin, self.margin_sensitive, self.grant_floor)

    @property
    def guard_settings(self) -> GuardSettings:
        return GuardSettings(self.qos_guard, self.qos_guard_best_effort, self.warmup_pods)

    def check(self) -> None:
        """Raise ValueError for settings that cannot work or are not safe."""
        loopback = self.host in ("localhost", "::1") or self.host.startswith("127.")
        if not loopback and self.token_file is None:
            raise ValueError(
                f"--host {self.host} without --token-file would let anybody on the network train the agent: add it, or "
                "listen on 127.0.0.1"
            )
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("--tls-cert and --tls-key must be given together")
        if self.token_file is None and (self.webhook_token_file or self.collector_token_file):
            raise ValueError("--webhook-token-file and --collector-token-file need --token-file, that of the operator")
        if not 0 <= self.port <= 65535:
            raise ValueError(f"--port is {self.port}: expected 0 to 65535")
        for name in (
            "ttl_s", "batch_size", "max_body_bytes", "keep_allocations", "update_interval_s", "max_connections",
            "read_timeout_s",
        ):  # fmt: skip
            if getattr(self, name) <= 0:
                raise ValueError(f"--{name.replace('_', '-')} is {getattr(self, name)}: expected more than 0")
        for name in ("grant_floor", "qos_guard", "qos_guard_best_effort"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"--{name.replace('_', '-')} is {getattr(self, name)}: expected 0 to 1")
        if self.max_batch < self.batch_size:
            raise ValueError(f"--max-batch {self.max_batch} is less than --batch-size {self.batch_size}")
