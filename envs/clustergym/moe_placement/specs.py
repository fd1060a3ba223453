"""Models and clusters by name or file."""

from __future__ import annotations

from clustergym.moe_placement.presets.cluster_spec import ClusterSpec
from clustergym.moe_placement.presets.clusters import CLUSTERS, get_cluster
from clustergym.moe_placement.presets.model_spec import ModelSpec
from clustergym.moe_placement.presets.models import MODELS, get_model
from clustergym.traces.token_trace import TokenTrace

__all__ = ["CLUSTERS", "MODELS", "ClusterSpec", "ModelSpec", "get_cluster", "get_model", "model_for"]


def model_for(trace: TokenTrace, model: str | ModelSpec | None) -> ModelSpec:
    """The model of a trace: the one given, or the one that the trace names; checked against the trace."""
    name = trace.model if model is None else model
    if name is None:
        shape = (trace.n_experts, trace.top_k)
        alike = [known for known, spec in MODELS.items() if (spec.n_experts, spec.top_k) == shape]
        hint = f"; {', '.join(alike)} has the trace's {shape[0]} experts and top-{shape[1]}" if alike else ""
        raise ValueError(
            f"{trace.name}: the trace does not say which model it is from: give a model (--model on the command line), "
            f"one of {', '.join(MODELS)}{hint}"
        )
    spec = get_model(name)
    if trace.n_experts > spec.n_experts or trace.top_k != spec.top_k:
        raise ValueError(
            f"{trace.name}: the trace is top-{trace.top_k} of {trace.n_experts} experts, but model {spec.name!r} is "
            f"top-{spec.top_k} of {spec.n_experts}"
        )
    if trace.n_layers > spec.n_layers + spec.n_mtp:
        raise ValueError(
            f"{trace.name}: the trace has {trace.n_layers} layers, but model {spec.name!r} has {spec.n_layers}"
        )
    return spec
