"""PettingZoo entry points of the offloading task: ``moe_offload_v0.parallel_env(**kwargs)``."""

from __future__ import annotations

from typing import Any

from pettingzoo import AECEnv
from pettingzoo.utils.wrappers import OrderEnforcingWrapper

from clustergym.moe_offload.aec import MoEOffloadAECEnv
from clustergym.moe_offload.parallel import MoEOffloadParallelEnv

__all__ = ["MoEOffloadAECEnv", "MoEOffloadParallelEnv", "env", "parallel_env", "raw_env"]


def parallel_env(**kwargs: Any) -> MoEOffloadParallelEnv:
    """Two agents that act at the same time; see :class:`MoEOffloadParallelEnv` for the task and its arguments."""
    return MoEOffloadParallelEnv(**kwargs)


def raw_env(**kwargs: Any) -> MoEOffloadAECEnv:
    """The same task with two agents in turn: `gpu` sees the row that `expert` has picked."""
    return MoEOffloadAECEnv(**kwargs)


def env(**kwargs: Any) -> AECEnv[Any, Any, Any]:
    """:func:`raw_env`, with errors that explain a wrong order of calls."""
    return OrderEnforcingWrapper(raw_env(**kwargs))
