"""What a plan was made for, in a file beside it: the engines' own formats have no room for it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from clustergym.common.files import write_atomically
from clustergym.moe_placement.presets.cluster_spec import ClusterSpec
from clustergym.moe_placement.presets.clusters import get_cluster
from clustergym.moe_placement.presets.model_spec import ModelSpec
from clustergym.moe_placement.presets.models import get_model
from clustergym.plans.engines.base import read_json
from clustergym.traces.readers.slot_plans import PlanError


def meta_path(plan: Path) -> Path:
    """``plan.json`` → ``plan.json.meta.json``"""
    return plan.with_name(plan.name + ".meta.json")


@dataclass(frozen=True)
class PlanMeta:
    """Engine, profile, model and cluster of a plan."""

    engine: str
    profile: str
    both_phases: bool
    """The plan is for prefill and decode together."""
    model: ModelSpec
    cluster: ClusterSpec
    served_as: str = ""
    """Profiles with their shares of the tokens, for people"""
    trace: str = ""
    command: str = ""

    def write(self, plan: Path) -> None:
        """Write the file beside a plan that is written already."""
        document = asdict(self) | {"plan_sha256": _digest(plan)}
        write_atomically(meta_path(plan), json.dumps(document, indent=2) + "\n")


def _digest(plan: Path) -> str:
    return hashlib.sha256(plan.read_bytes()).hexdigest()


def _spec(kind: type[Any], fields: Any, path: Path) -> Any:
    if not isinstance(fields, dict):
        raise PlanError(f"{path}: the {kind.__name__} is not a JSON object")
    try:
        return kind(**{key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()})
    except (TypeError, ValueError) as error:
        raise PlanError(f"{path}: not a {kind.__name__}: {error}") from None


def read_meta(plan: Path) -> PlanMeta | None:
    """What the file beside a plan says; None if there is none. A file of another plan is refused."""
    path = meta_path(plan)
    if not path.is_file() or not plan.is_file():
        return None
    document = read_json(path)
    if not isinstance(document, dict) or document.pop("plan_sha256", None) != _digest(plan):
        raise PlanError(f"{path} does not belong to {plan}, which has changed since: delete {path.name}")
    model, cluster = (
        _spec(kind, document.pop(key, None), path) for key, kind in (("model", ModelSpec), ("cluster", ClusterSpec))
    )
    kinds = {"engine": str, "profile": str, "both_phases": bool, "served_as": str, "trace": str, "command": str}
    wrong = [key for key, kind in kinds.items() if not isinstance(document.get(key), kind)]
    if wrong or set(document) != set(kinds):
        raise PlanError(f"{path}: expected the keys {', '.join(kinds)}, found {', '.join(document)}")
    return PlanMeta(model=model, cluster=cluster, **document)


def model_and_cluster(
    plan: Path, model: str | None, cluster: str | None
) -> tuple[ModelSpec, ClusterSpec, PlanMeta | None]:
    """What the command line says, else the file beside the plan. With other sizes than there, the file is ignored."""
    meta = read_meta(plan) if model is None or cluster is None or meta_path(plan).is_file() else None
    missing = [flag for flag, value in (("--model", model), ("--cluster", cluster)) if value is None]
    if missing and meta is None:
        raise ValueError(f"{plan} has no {meta_path(plan).name} beside it: give {' and '.join(missing)}")
    own_model = meta.model if meta is not None and model is None else get_model(str(model))
    own_cluster = meta.cluster if meta is not None and cluster is None else get_cluster(str(cluster))
    same = meta is not None and (own_model.name, own_cluster.n_gpus) == (meta.model.name, meta.cluster.n_gpus)
    return own_model, own_cluster, meta if same else None
