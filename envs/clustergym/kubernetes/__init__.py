"""Kubernetes admission webhook that right-sizes GPU pods. It imports neither torch nor numba."""

from clustergym.kubernetes.decisions import Decision, admit_pod, plan_pod
from clustergym.kubernetes.names import BACKENDS, LABEL, MODES
from clustergym.kubernetes.requests import Bounds, GpuRequest

__all__ = ["BACKENDS", "LABEL", "MODES", "Bounds", "Decision", "GpuRequest", "admit_pod", "plan_pod"]
