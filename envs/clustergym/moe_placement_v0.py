"""PettingZoo API for the placement task: ``moe_placement_v0.parallel_env(**kwargs)``."""

from __future__ import annotations

from typing import Any

from pettingzoo import AECEnv
from pettingzoo.utils.conversions import parallel_to_aec
from pettingzoo.utils.wrappers import OrderEnforcingWrapper

from clustergym.moe_placement.aec import MoEPlacementAECEnv
from clustergym.moe_placement.parallel import MoEPlacementParallelEnv

__all__ = ["MoEPlacementAECEnv", "MoEPlacementParallelEnv", "env", "parallel_env", "raw_env"]


def parallel_env(**kwargs: Any) -> MoEPlacementParallelEnv:
    """The two-agent environment; see :class:`MoEPlacementParallelEnv` for the task and its arguments."""
    return MoEPlacementParallelEnv(**kwargs)


def raw_env(conditional: bool = False, **kwargs: Any) -> AECEnv[Any, Any, Any]:
    """The same task as an agent-environment-cycle environment: `expert` acts, then `gpu`.

    With ``conditional``, `gpu` sees the expert that was chosen, and its mask is exact: :class:`MoEPlacementAECEnv`.
    """
    return MoEPlacementAECEnv(**kwargs) if conditional else parallel_to_aec(parallel_env(**kwargs))


def env(**kwargs: Any) -> AECEnv[Any, Any, Any]:
    """:func:`raw_env`, with errors that explain a wrong order of calls."""
    return OrderEnforcingWrapper(raw_env(**kwargs))
