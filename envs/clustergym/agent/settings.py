"""Settings of the agent's server."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass
class ServerSettings:
    """Settings of the HTTP server, the store and the learner process."""

    port: int = 8080
    """Port to listen on."""
    host: str = "127.0.0.1"
    """Address to listen on. Any address other than loopback requires --token-file or --client-ca."""
    store: Path = Path("runs/ppo_gpu_alloc_online")
    """Folder for the database and the checkpoint. An existing store is resumed."""
    token_file: Path | None = None
    """File with the bearer token that clients must send. It is read again when it changes."""
    tls_cert: Path | None = None
    """Serve HTTPS with this certificate (PEM)."""
    tls_key: Path | None = None
    """Private key of the certificate."""
    client_ca: Path | None = None
    """Require client certificates signed by this authority (mutual TLS)."""
    max_body_bytes: int = 16_384
    """Maximum size of a request body."""

    explore: Literal["off", "best-effort", "all"] = "all"
    """Pods whose allocations are sampled and learned from. All other pods get the mean action."""
    shadow: bool = False
    """Log the decisions, but grant every request in full."""
    ttl_s: float = 86_400.0
    """Feedback is expired if it arrives more than this many seconds after the allocation."""
    telemetry_s: float = 0.5
    """Seconds between two samples of the GPU load. 0: sample at each request."""
    gpu_index: int = 0
    """Index of the shared GPU."""
    durability: Literal["process", "power"] = "process"
    """What an answered request survives: process is a killed process, power also a power failure (with fsync)."""
    retention_days: float = 30.0
    """Allocations older than this are deleted from the store."""

    batch_size: int = 32
    """Number of experiences that an update waits for."""
    max_batch: int = 1024
    """Maximum number of experiences in one update."""
    max_policy_lag: int = 16
    """Feedback is stale if its policy is more than this many updates old: it is stored, but not learned from."""
    update_interval_s: float = 0.2
    """Seconds between two checks for new experiences, and minimum seconds between two updates."""

    def check(self) -> None:
        """Raise ValueError for settings that cannot work or are not safe."""
        loopback = self.host in ("localhost", "::1") or self.host.startswith("127.")
        if not loopback and self.token_file is None and self.client_ca is None:
            raise ValueError(
                f"--host {self.host} without --token-file or --client-ca would let anybody on the network train the "
                "agent: add one of them, or listen on 127.0.0.1"
            )
        if (self.tls_cert is None) != (self.tls_key is None) or (self.client_ca and not self.tls_cert):
            raise ValueError("--tls-cert and --tls-key must be given together, and --client-ca requires both")
        check_positive(self, "ttl_s", "batch_size", "max_body_bytes", "retention_days", "update_interval_s")
        if self.max_batch < self.batch_size:
            raise ValueError(f"--max-batch {self.max_batch} is less than --batch-size {self.batch_size}")


def check_positive(settings: object, *names: str) -> None:
    """Raise ValueError if one of these settings is not greater than 0."""
    for name in names:
        if getattr(settings, name) <= 0:
            raise ValueError(f"--{name.replace('_', '-')} is {getattr(settings, name)}: expected more than 0")
