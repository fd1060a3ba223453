"""Kubernetes admission webhooks that right-size GPU pods. They import neither torch nor numba."""

from clustergym.kubernetes.decisions import Decision, Grant, admit_pod, grant_decision, plan_binding, plan_pod
from clustergym.kubernetes.names import BACKENDS, LABEL, MODES
from clustergym.kubernetes.requests import Bounds, GpuRequest

__all__ = [
    "BACKENDS", "LABEL", "MODES", "Bounds", "Decision", "GpuRequest", "Grant", "admit_pod", "grant_decision",
    "plan_binding", "plan_pod",
]  # fmt: skip
