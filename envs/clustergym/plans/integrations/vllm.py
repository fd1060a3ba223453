"""A policy of vLLM's expert-parallel load balancer (``vllm.distributed.eplb.policy``).

To use it, install clustergym into vLLM's environment, set ``CLUSTERGYM_EPLB=1`` (or the name of a planner) and serve
with ``--enable-expert-parallel --enable-eplb``. vLLM calls :func:`register` in each of its processes (entry point
``vllm.general_plugins``).

With ``CLUSTERGYM_EPLB_PLAN=plan.json`` the policy returns a plan of ``clustergym plan --engine vllm`` instead. vLLM
asks for it after a quarter of ``step_interval`` for the first time, because its counter starts at three quarters; a
small one applies the plan early.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

from clustergym.plans.integrations.eplb import keep_in_place
from clustergym.plans.integrations.planners import check_name, slots_of
from clustergym.plans.integrations.settings import enabled, fixed_plan, planner_name

if TYPE_CHECKING:
    AbstractEplbPolicy = object
else:
    try:
        from vllm.distributed.eplb.policy.abstract import AbstractEplbPolicy
    except ImportError:
        AbstractEplbPolicy = object

logger = logging.getLogger(__name__)


class ClusterGymPolicy(AbstractEplbPolicy):
    """The planner that ``CLUSTERGYM_EPLB`` names. Our EPLB is never less balanced than vLLM's default, and moves fewer
    experts."""

    @classmethod
    def rebalance_experts(
        cls,
        weight: torch.Tensor,
        num_replicas: int,
        num_groups: int,
        num_nodes: int,
        num_ranks: int,
        old_global_expert_indices: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """(L, P) expert in each slot, from the (L, E) loads and the slots until now."""
        loads = weight.float().cpu().numpy()
        old = None if old_global_expert_indices is None else old_global_expert_indices.cpu().numpy()
        planned = fixed_plan(len(loads), num_replicas, loads.shape[1], num_ranks)
        if planned is None:
            planned = slots_of(planner_name(), loads, num_replicas, num_groups, num_nodes, num_ranks, old)
        elif old is not None and old.shape == planned.shape:
            planned = keep_in_place(planned, old, num_ranks, num_ranks)  # slots may be reordered, GPUs not
        return torch.from_numpy(planned)


def register() -> None:
    """Replace vLLM's default policy if the environment asks for it. Called by vLLM."""
    if not enabled():
        return
    from vllm.distributed.eplb import policy

    name = check_name(planner_name())
    install(policy.EPLB_POLICIES)
    logger.info("clustergym's planner %r is installed", name)


def install(policies: dict[str, Any]) -> None:
    """Put the policy under the name ``default``: vLLM's configuration accepts no other."""
    policies["default"] = ClusterGymPolicy
