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

from clustergym.plans.integrations.planners import answer, check_name
from clustergym.plans.integrations.settings import enabled, planner_name

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
        return torch.from_numpy(answer(loads, num_replicas, num_groups, num_nodes, num_ranks, old, phase_of_instance()))


def phase_of_instance() -> str | None:
    """prefill or decode, if this instance only produces or only consumes KV cache (disaggregated serving)."""
    try:
        from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
    except ImportError:
        return None
    config = getattr(get_kv_transfer_group(), "_kv_transfer_config", None) if has_kv_transfer_group() else None
    return {"kv_producer": "prefill", "kv_consumer": "decode"}.get(getattr(config, "kv_role", None) or "")


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
