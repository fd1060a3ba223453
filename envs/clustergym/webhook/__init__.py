"""Kubernetes admission webhooks that right-size GPU pods. They import neither torch nor numba."""

from clustergym.webhook.decisions import Decision, GpuRequest, Grant, admit_pod, grant_decision, managed_request
from clustergym.webhook.names import BACKENDS, LABEL

__all__ = ["BACKENDS", "LABEL", "Decision", "GpuRequest", "Grant", "admit_pod", "grant_decision", "managed_request"]
