"""PettingZoo API for the placement task: ``moe_placement_v0.parallel_env(**kwargs)``."""

from __future__ import annotations

from typing import Any

from pettingzoo import AECEnv
from pettingzoo.utils.wrappers import OrderEnforcingWrapper

from clustergym.moe_placement.aec import MoEPlacementAECEnv
from clustergym.moe_placement.parallel import MoEPlacementParallelEnv

__all__ = ["MoEPlacementAECEnv", "MoEPlacementParallelEnv", "env", "parallel_env", "raw_env"]


def parallel_env(**kwargs: Any) -> MoEPlacementParallelEnv:
    """Two agents that act at the same time; see :class:`MoEPlacementParallelEnv`."""
    return MoEPlacementParallelEnv(**kwargs)


def raw_env(**kwargs: Any) -> MoEPlacementAECEnv:
    """Two agents in turn: `gpu` sees the expert that was chosen; see :class:`MoEPlacementAECEnv`."""
    return MoEPlacementAECEnv(**kwargs)


def env(**kwargs: Any) -> AECEnv[Any, Any, Any]:
    """:func:`raw_env`, with errors that explain a wrong order of calls."""
    return OrderEnforcingWrapper(raw_env(**kwargs))
