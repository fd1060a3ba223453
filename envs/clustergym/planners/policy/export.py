"""Policy files: what the trainer exports and the planners load."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from clustergym.common.checkpoints import CheckpointError, load_checkpoint, save_checkpoint
from clustergym.moe_placement.kernels.observation import N_EXPERT_FEATURES, N_GPU_FEATURES
from clustergym.moe_placement.kernels.state import N_PARTS
from clustergym.moe_placement.simulator import norm_log2
from clustergym.planners.policy.network import PolicyNetwork

KIND = "moe-policy"
FILE_NAME = "policy.pt"
PRETRAINED = Path(__file__).parent / "pretrained" / FILE_NAME
FEATURES = [N_EXPERT_FEATURES, N_GPU_FEATURES, N_PARTS]
"""Sizes of the network's inputs. Weights for other sizes cannot be used."""
NETWORK_VERSION = 3
"""Increased when the weights of an older file would get another meaning."""


@dataclass(frozen=True)
class PolicySettings:
    """Options of the task that a policy was trained on. A planner must use the same ones."""

    norm: int = 4
    """Norm over GPUs in the look-ahead; 0 is the true time."""
    horizon: float = 4.0
    """Number of intervals over which the cost of a migration is spread."""
    operations: int = 16
    """Operations per layer between two intervals."""

    def __post_init__(self) -> None:
        norm_log2(self.norm)
        if self.horizon <= 0 or self.operations < 1:
            raise ValueError(
                f"horizon is {self.horizon} and operations {self.operations}: expected more than 0 and at least 1"
            )

    def passes(self, passes_per_interval: int) -> int:
        """Forward passes over which the cost of a migration is spread."""
        return max(1, round(passes_per_interval * self.horizon))


def save_policy(
    path: Path,
    network: Mapping[str, Any],
    weights: Mapping[str, Tensor],
    settings: PolicySettings,
    about: Mapping[str, Any],
) -> None:
    """Write a policy file: network options, weights, task settings, and where it comes from (``about``, plain data)."""
    content = {
        "network": dict(network),
        "weights": dict(weights),
        "view": asdict(settings),
        "features": FEATURES,
        "network_version": NETWORK_VERSION,
        "about": dict(about),
    }
    save_checkpoint(path, KIND, content)


def read_policy(source: str | Path) -> dict[str, Any]:
    """The checked content of a policy file, of the policy file in a run folder, or of ``pretrained``."""
    path = PRETRAINED if str(source) == "pretrained" else Path(source)
    if path.is_dir():
        path = path / FILE_NAME
    content = load_checkpoint(path, KIND)
    if content.get("network_version") != NETWORK_VERSION:
        raise CheckpointError(f"{path} was written by an earlier clustergym with other networks: train it again")
    if content["features"] != FEATURES:
        raise CheckpointError(
            f"{path} reads {content['features']} features per expert, GPU and look-ahead, this clustergym has "
            f"{FEATURES}: train it again"
        )
    return content


def initial_weights(source: str | Path, network: Mapping[str, Any], settings: PolicySettings) -> Mapping[str, Tensor]:
    """Weights to start a training from. Raises CheckpointError if they are of another network or task."""
    found = read_policy(source)
    for key, expected in (("network", dict(network)), ("view", asdict(settings))):
        if found[key] != expected:
            raise CheckpointError(
                f"--init {source} has {key} options {found[key]}, but the arguments ask for {expected}"
            )
    weights: Mapping[str, Tensor] = found["weights"]
    return weights


def describe_run(args: Mapping[str, Any], steps: int) -> dict[str, Any]:
    """Where a policy comes from. Files by name only: folders and accounts of this machine mean nothing to others."""
    private = ("run_dir", "config", "wandb_project_name", "wandb_entity")
    files = {key: ", ".join(Path(file).name for file in args[key]) for key in ("trace", "eval_trace")}
    return {"args": {key: str(value) for key, value in args.items() if key not in private} | files, "steps": steps}


def load_policy(source: str | Path = "pretrained") -> tuple[PolicyNetwork, PolicySettings]:
    """The actors and their task settings from a policy file, a run folder, or ``pretrained``."""
    content = read_policy(source)
    return PolicyNetwork.from_state(content["network"], content["weights"]), PolicySettings(**content["view"])
