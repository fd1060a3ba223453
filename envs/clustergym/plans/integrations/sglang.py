"""An algorithm of SGLang's EPLB manager (``sglang.srt.eplb.eplb_algorithms``).

To use it, install clustergym into SGLang's environment, set ``CLUSTERGYM_EPLB=1`` (or the name of a planner) and serve
with ``--enable-eplb``.
SGLang calls :func:`register` in each of its processes (entry point ``sglang.srt.plugins``).
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from clustergym.plans.integrations.eplb import invert
from clustergym.plans.integrations.planners import answer, check_name
from clustergym.plans.integrations.settings import enabled, planner_name

logger = logging.getLogger(__name__)


def _of_engine(**_: Any) -> Any:
    """SGLang's own function, which :func:`register` puts here."""
    raise RuntimeError("SGLang's own algorithm is needed, but clustergym's plugin is not registered")


def rebalance_experts(
    tokens_per_expert: torch.Tensor,
    num_physical_experts: int,
    num_local_physical_experts: int,
    num_groups: int | None,
    num_nodes: int,
    algorithm: Any,
    **others: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Physical to logical (L, P), logical to physical (L, E, X), copies (L, E), from counts (steps, L, E).

    SGLang calls it with keyword arguments. ``algorithm`` is what ``--eplb-algorithm`` chose; it tells whether the
    experts of a group stay on one node. SGLang's own function answers where ranks may be lost: elastic algorithms,
    and ``active_ranks`` that are not all active. Our planners do not know which GPUs are alive.
    """
    active = others.get("active_ranks")
    if "elastic" in getattr(algorithm, "name", "") or (active is not None and not bool(torch.as_tensor(active).all())):
        logger.warning("ranks may be lost: SGLang's own algorithm %s answers", getattr(algorithm, "name", algorithm))
        return _of_engine(  # type: ignore[no-any-return]
            tokens_per_expert=tokens_per_expert, num_physical_experts=num_physical_experts,
            num_local_physical_experts=num_local_physical_experts, num_groups=num_groups, num_nodes=num_nodes,
            algorithm=algorithm, **others,
        )  # fmt: skip
    loads = tokens_per_expert.double().cpu().numpy()
    n_experts, n_gpus = loads.shape[2], num_physical_experts // num_local_physical_experts
    hierarchical = num_groups is not None and "hierarchical" in getattr(algorithm, "name", "")
    groups, nodes = (num_groups, num_nodes) if hierarchical and num_groups else (1, 1)
    slots = answer(loads, num_physical_experts, groups, nodes, n_gpus, served_slots(), phase_of_instance())
    logical_to_physical, count = invert(slots, n_experts)
    return torch.from_numpy(slots), torch.from_numpy(logical_to_physical), torch.from_numpy(count)


def phase_of_instance() -> str | None:
    """prefill or decode, if the server was started with ``--disaggregation-mode``."""
    try:
        from sglang.srt.server_args import get_global_server_args

        mode = get_global_server_args().disaggregation_mode
    except (ImportError, AttributeError, ValueError):  # other versions, or no server yet
        return None
    return mode if mode in ("prefill", "decode") else None


def served_slots() -> npt.NDArray[np.int64] | None:
    """(L, P) slots that are served now."""
    try:
        from sglang.srt.eplb.expert_location import get_global_expert_location_metadata

        return get_global_expert_location_metadata().physical_to_logical_map.cpu().numpy().astype(np.int64)  # type: ignore[no-any-return]
    except (ImportError, AttributeError, AssertionError):
        return None


def register() -> None:
    """Replace SGLang's algorithms if the environment asks for it. Called by SGLang."""
    if not enabled():
        return
    from sglang.srt.eplb import eplb_algorithms

    name = check_name(planner_name())
    if eplb_algorithms.rebalance_experts is not rebalance_experts:
        globals()["_of_engine"] = eplb_algorithms.rebalance_experts
        eplb_algorithms.rebalance_experts = rebalance_experts
    logger.info("clustergym's planner %r is installed", name)
