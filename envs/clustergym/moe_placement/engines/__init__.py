"""Plan files of serving engines: checked against the rules, written atomically, read back. One module per format.

An engine describes the placement of a layer as a list of P = GPUs × slots logical experts; slot p is on GPU p // slots.
No engine accepts an empty slot. A missing layer, an expert twice on one GPU or an extra slot fails late or silently in
the engine, so all of them are checked here.
"""

from __future__ import annotations

from pathlib import Path

from clustergym.moe_placement.engines import sglang, tensorrt_llm, vllm, vllm_ascend
from clustergym.moe_placement.engines.base import Engine, EnginePlan, check_layers, check_plan
from clustergym.traces.readers.slot_plans import PlanError, SlotRows

__all__ = [
    "ENGINES",
    "Engine",
    "EnginePlan",
    "PlanError",
    "check_layers",
    "check_path",
    "check_plan",
    "get_engine",
    "how_to_load",
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


def how_to_load(path: Path, plan: EnginePlan, engine: str) -> str:
    """The flags or settings that make the engine load the plan."""
    return get_engine(engine).usage.format(path=path, redundant=plan.n_redundant, gpus=plan.n_gpus)
