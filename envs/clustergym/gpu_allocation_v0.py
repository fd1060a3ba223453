"""PettingZoo entry points of the allocation task: ``gpu_allocation_v0.parallel_env(n_nodes=N)``."""

from __future__ import annotations

from typing import Any

from pettingzoo import AECEnv
from pettingzoo.utils.conversions import parallel_to_aec
from pettingzoo.utils.wrappers import OrderEnforcingWrapper

from clustergym.gpu_allocation.parallel import GPUAllocationParallelEnv

__all__ = ["GPUAllocationParallelEnv", "env", "parallel_env", "raw_env"]


def parallel_env(**kwargs: Any) -> GPUAllocationParallelEnv:
    """N edge nodes with one agent each. See :class:`GPUAllocationParallelEnv` for the arguments."""
    return GPUAllocationParallelEnv(**kwargs)


def raw_env(**kwargs: Any) -> AECEnv[Any, Any, Any]:
    """The same task with the agent-environment-cycle (AEC) API: the nodes act in turn."""
    return parallel_to_aec(parallel_env(**kwargs))


def env(**kwargs: Any) -> AECEnv[Any, Any, Any]:
    """:func:`raw_env` with clear errors for calls in the wrong order."""
    return OrderEnforcingWrapper(raw_env(**kwargs))
