"""Plan files of serving engines: checked against the rules, written atomically, read back. One module per format.

An engine describes the placement of a layer as a list of P = GPUs × slots logical experts; slot p is on GPU p // slots.
No engine accepts an empty slot. A missing layer, an expert twice on one GPU or an extra slot fails late or silently in
the engine, so all of them are checked here.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from clustergym.moe_placement.presets.model_spec import ModelSpec
from clustergym.moe_placement.profiles import EngineProfile, get_profile, profiles_of
from clustergym.plans.engines import sglang, tensorrt_llm, vllm, vllm_ascend
from clustergym.plans.engines.base import Engine, EnginePlan, Launch, check_layers, check_plan, read_json
from clustergym.plans.engines.changes import PlanChange, compare_plans
from clustergym.plans.engines.memory import MemoryUse, memory_use
from clustergym.traces.readers.slot_plans import PlanError, SlotRows

__all__ = [
    "ENGINES",
    "Engine",
    "EnginePlan",
    "Launch",
    "MemoryUse",
    "PlanChange",
    "PlanError",
    "check_layers",
    "check_path",
    "check_plan",
    "compare_plans",
    "detect_engine",
    "get_engine",
    "launch",
    "load_plan",
    "memory_use",
    "read_plan",
    "write_plan",
]

ENGINES: dict[str, Engine] = {module.ENGINE.name: module.ENGINE for module in (sglang, tensorrt_llm, vllm_ascend, vllm)}


def get_engine(name: str) -> Engine:
    if name not in ENGINES:
        raise ValueError(f"unknown engine {name!r}; the engines are: {', '.join(ENGINES)}")
    return ENGINES[name]


def check_path(path: Path, engine: str) -> None:
    """Raise a ValueError if the engine does not read files with this suffix."""
    suffixes = get_engine(engine).suffixes
    if path.suffix not in suffixes:
        raise ValueError(f"{engine} reads a plan from {' or '.join(suffixes)}, found {path.name!r}")


def write_plan(path: Path, plan: EnginePlan, engine: str) -> None:
    """Check every rule, then write the file atomically. A refused plan leaves no file."""
    check_path(path, engine)
    check_plan(plan)
    get_engine(engine).write(path, plan)


def read_plan(path: Path, engine: str) -> SlotRows:
    """The rows of a plan file, by layer as the file counts layers."""
    check_path(path, engine)
    if not path.is_file():
        raise ValueError(f"no plan at {path}")
    return get_engine(engine).read(path)


def load_plan(path: Path, engine: str, model: ModelSpec, n_gpus: int) -> EnginePlan:
    """A plan file as a plan for the model. Rows of dense layers are left out. The rules are not checked yet."""
    rows = read_plan(path, engine)
    if get_engine(engine).counts_dense:
        wanted = [layer for layer in (*model.layer_ids, *model.mtp_layer_ids) if layer in rows]
        unknown = [layer for layer in rows if layer >= model.total_layers + model.n_mtp or layer < 0]
        if unknown:
            raise PlanError(f"{path}: layer {unknown[0]}, but {model.name} has {model.total_layers} layers")
    else:
        if len(rows) != model.n_layers:
            raise PlanError(f"{path}: {len(rows)} layers, but {model.name} has {model.n_layers} MoE layers")
        rows = dict(zip(model.layer_ids, rows.values(), strict=True))
        wanted = list(model.layer_ids)
    slots = len(next(iter(rows.values())))
    if n_gpus < 1 or slots % n_gpus or not slots:
        raise PlanError(
            f"{path}: rule 'slots divide over GPUs': {slots} slots per layer do not divide over {n_gpus} GPUs"
        )
    placement = np.array([rows[layer] for layer in wanted], np.int16).reshape(len(wanted), n_gpus, -1)
    return EnginePlan(placement, np.array(wanted, np.int64), model)


def detect_engine(path: Path) -> str:
    """The engine that a plan file is for, by its suffix and keys."""
    if not path.is_file():
        raise ValueError(f"no plan at {path}")
    if path.suffix in (".yaml", ".yml"):
        return "tensorrt-llm"
    if path.suffix == ".pt":
        return "sglang"
    document = read_json(path)
    if isinstance(document, list):
        return "vllm"
    if isinstance(document, dict) and sglang.KEY in document:
        return "sglang"
    if isinstance(document, dict) and "layer_list" in document:
        return "vllm-ascend"
    raise PlanError(f"{path}: not a plan of {', '.join(ENGINES)}: name the engine with --engine")


def launch(
    path: Path,
    plan: EnginePlan,
    engine: str,
    profile: str | EngineProfile | None = None,
    n_nodes: int = 1,
    both_phases: bool = False,
) -> Launch:
    """How to start the engine so that it loads the plan and serves as the profile says."""
    names = [known.name for known in profiles_of(get_engine(engine).name)]
    chosen = get_profile(names[0] if profile is None else profile)
    if chosen.engine != get_engine(engine).name:
        raise ValueError(f"{engine} does not serve with profile {chosen.name!r}; its profiles are: {', '.join(names)}")
    if n_nodes < 1 or plan.n_gpus % n_nodes:
        raise ValueError(f"{plan.n_gpus} GPUs do not divide over {n_nodes} nodes")
    return get_engine(engine).launch(path, plan, chosen, n_nodes, both_phases)
