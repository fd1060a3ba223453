"""Slots for an engine from any planner that needs loads only, by its name."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from clustergym.moe_placement.simulator import Placement, Simulator
from clustergym.moe_placement.specs import ClusterSpec, ModelSpec
from clustergym.planners.base import Planner
from clustergym.planners.eplb import balance
from clustergym.planners.recorded import LoadInterval
from clustergym.planners.registry import make_planner, planners_on_loads
from clustergym.plans.integrations.eplb import Slots, check_sizes, fill, keep_in_place, plan_slots
from clustergym.plans.integrations.settings import fixed_plan, max_moves, planner_name

# Plans depend on loads only, so sizes that the engine does not report have no effect.
_HIDDEN, _WIDTH = 4096, 2048


def check_name(name: str) -> str:
    """The name itself, or a ValueError with the names of the planners that an engine can use."""
    names = [known for known in planners_on_loads() if known != "static"]
    if name not in names:
        raise ValueError(f"planner {name!r} cannot run inside an engine: give one of {', '.join(names)}")
    return name


def slots_of(
    name: str,
    loads: npt.NDArray[np.floating],
    n_physical: int,
    n_groups: int,
    n_nodes: int,
    n_gpus: int,
    old: Slots | None = None,
) -> Slots:
    """(L, P) slots for loads (L, E), or (T, L, E) if they are known step by step, after the ``old`` slots."""
    per_step = loads if loads.ndim == 3 else loads[None]
    n_layers, n_experts = per_step.shape[1:]
    if name == "eplb" or n_physical // max(n_gpus, 1) > n_experts:  # a planner never gives a GPU an expert twice
        return plan_slots(per_step.sum(0), n_physical, n_groups, n_nodes, n_gpus, old)
    check_sizes(n_experts, n_physical, n_groups, n_nodes, n_gpus)
    planner = _planner(name, n_layers, n_experts, n_physical // n_gpus, n_groups, n_nodes, n_gpus)
    counts = np.nan_to_num(per_step, nan=0.0, posinf=0.0).clip(min=0.0)
    interval = LoadInterval(counts.round().astype(np.int64), int(counts.sum() / len(counts) / n_layers) + 1)
    planned = planner.plan([interval], _start(planner.simulator, n_layers, old)).astype(np.int64)
    fill(planned, counts.sum(0), n_groups, n_nodes)
    slots = planned.reshape(n_layers, n_physical)
    if old is None or old.shape != slots.shape:
        return slots
    return keep_in_place(slots, old, n_gpus, n_gpus)  # slots are reordered, GPUs are not


def answer(
    loads: npt.NDArray[np.floating],
    n_physical: int,
    n_groups: int,
    n_nodes: int,
    n_gpus: int,
    old: Slots | None = None,
    phase: str | None = None,
) -> Slots:
    """(L, P) slots that the environment asks for: the plan file, or those of a planner; not too many moves at once.

    Args:
        loads: (L, E), or (T, L, E) if they are known step by step.
        old: (L, P) slots that are served now, if the engine tells.
        phase: that the instance serves, if the engine tells.
    """
    total = loads.sum(0) if loads.ndim == 3 else loads
    n_layers, n_experts = total.shape
    slots = fixed_plan(n_layers, n_physical, n_experts, n_gpus, phase)
    if slots is None:
        slots = slots_of(planner_name(), loads, n_physical, n_groups, n_nodes, n_gpus, old)
    if old is None or old.shape != slots.shape:
        return slots
    slots = keep_in_place(slots, old, n_gpus, n_gpus)  # slots are reordered, GPUs are not
    most = max_moves()
    return slots if most is None else _pace(slots, old, total, n_gpus, most)


def _pace(slots: Slots, old: Slots, loads: npt.NDArray[np.floating], n_gpus: int, most: int) -> Slots:
    """``slots`` for as many layers as ``most`` moves allow, but at least one, and ``old`` for the others.

    The layers whose busiest GPU is relieved most per move come first.
    """
    moves = (slots != old).sum(1)
    values = np.nan_to_num(loads, nan=0.0, posinf=0.0).clip(min=0.0).astype(np.float64)
    gain = np.subtract(
        *(1 / balance(values, each.reshape(len(each), n_gpus, -1).astype(np.int16)) for each in (old, slots))
    )
    changed = np.flatnonzero(moves)
    order = changed[np.argsort(-gain[changed] / moves[changed], kind="stable")]
    left, paced = most, old.copy()
    for i, layer in enumerate(order):
        if i == 0 or moves[layer] <= left:
            paced[layer] = slots[layer]
            left -= int(moves[layer])
    return paced


@lru_cache(maxsize=4)
def _planner(
    name: str, n_layers: int, n_experts: int, n_slots: int, n_groups: int, n_nodes: int, n_gpus: int
) -> Planner:
    """Kept between calls: some planners remember earlier loads."""
    model = ModelSpec("served", n_layers, n_experts, 1, _HIDDEN, _WIDTH, n_groups=n_groups)
    return make_planner(name, Simulator(model, ClusterSpec("engine", n_nodes, n_gpus // n_nodes, n_slots)))


def _start(simulator: Simulator, n_layers: int, old: Slots | None) -> Placement:
    """What is served now. An engine may start with an expert twice on a GPU, which planners do not know."""
    if old is not None and old.shape == (n_layers, simulator.n_gpus * simulator.n_slots):
        try:
            return simulator.check(old.reshape(n_layers, simulator.n_gpus, simulator.n_slots).astype(np.int16))
        except ValueError:
            pass
    return simulator.static(n_layers)
