"""Plans as serving engines load them: checked against the engine's rules, written whole, read back.

An engine knows a layer's placement as a list of P = GPUs × slots logical experts; slot p lies on GPU p // slots. None of them leaves a slot
empty, and what they do not check themselves (a missing layer, an expert twice on a GPU, a slot too many) fails late or
silently, so it is checked here.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from clustergym.common.files import atomic_file, write_atomically
from clustergym.moe_placement.simulator import Placement
from clustergym.moe_placement.specs import ModelSpec

Rows = dict[int, list[int]]
"""Layer, as the engine counts it → the logical expert in each slot."""


class PlanError(ValueError):
    """A plan that an engine would refuse or, worse, misread. Names the rule, the layer and the GPU."""


@dataclass(frozen=True)
class Engine:
    """How one engine wants its plan."""

    name: str
    suffixes: tuple[str, ...]
    write: Callable[[Path, EnginePlan], None]
    read: Callable[[Path], Rows]
    load: str
    """How the plan is handed to the engine."""


@dataclass(frozen=True)
class EnginePlan:
    """A placement of every MoE layer of a model.

    Args:
        placement: (L, G, S) logical experts.
        layer_ids: (L,) global index of each layer, dense ones counted.
        model: what the plan is for.
    """

    placement: Placement
    layer_ids: npt.NDArray[np.int64]
    model: ModelSpec

    @property
    def n_gpus(self) -> int:
        return int(self.placement.shape[1])

    @property
    def n_physical(self) -> int:
        """Slots of a layer on all GPUs together."""
        return int(self.placement.shape[1] * self.placement.shape[2])

    @property
    def n_redundant(self) -> int:
        return self.n_physical - self.model.n_experts

    def rows(self) -> Rows:
        """Global layer → the expert in each slot, GPU after GPU."""
        return {
            int(layer): [int(e) for e in slots.reshape(-1)]
            for layer, slots in zip(self.layer_ids, self.placement, strict=True)
        }


def check_plan(plan: EnginePlan, engine: str) -> None:
    """Every rule of the engine, or a :class:`PlanError` that names the first one broken, its layer and its GPU."""
    get_engine(engine)
    model, placement = plan.model, np.asarray(plan.placement)
    if placement.ndim != 3 or placement.dtype.kind not in "iu" or 0 in placement.shape:
        raise PlanError(
            f"rule 'slots divide over GPUs': the plan has shape {placement.shape} of {placement.dtype}: expected integers "
            "(layers, GPUs, slots), the same number of slots on every GPU"
        )
    if len(plan.layer_ids) != len(placement):
        raise PlanError(f"rule 'a row for each layer': {len(placement)} layers planned, {len(plan.layer_ids)} named")
    if plan.n_physical < model.n_experts:
        raise PlanError(
            f"rule 'room for every expert': {plan.n_physical} slots for the {model.n_experts} experts of {model.name}"
        )
    wanted = set(range(model.n_dense, model.n_dense + model.n_layers))
    given = [int(l) for l in plan.layer_ids]
    if missing := sorted(wanted - set(given)):
        raise PlanError(
            f"rule 'every MoE layer': layer {missing[0]} has no placement ({len(missing)} of {model.n_layers} layers of "
            f"{model.name} are missing): record all layers, because the engine loads all or none"
        )
    if foreign := sorted(set(given) - wanted) or [l for l in given if given.count(l) > 1]:
        raise PlanError(
            f"rule 'MoE layers only': layer {foreign[0]} is no MoE layer of {model.name} or comes twice: "
            f"its MoE layers are {model.n_dense} … {model.n_dense + model.n_layers - 1}"
        )
    for layer, gpus in zip(given, placement, strict=True):
        _check_layer(layer, gpus, model.n_experts)


def _check_layer(layer: int, gpus: npt.NDArray[Any], n_experts: int) -> None:
    for g, slots in enumerate(gpus):
        for s, e in enumerate(slots):
            where = f"layer {layer}, GPU {g}"
            if e == -1:
                raise PlanError(f"rule 'no empty slot': {where} has nothing in slot {s}: an engine fills every slot")
            if not 0 <= e < n_experts:
                raise PlanError(f"rule 'known experts': {where} holds expert {e}: ids are 0 … {n_experts - 1}")
        ids, times = np.unique(slots, return_counts=True)
        if (times > 1).any():
            raise PlanError(
                f"rule 'once a GPU': layer {layer}, GPU {g} holds expert {ids[times > 1][0]} twice: "
                "the engine would leave the second copy unloaded or unused"
            )
    lost = np.setdiff1d(np.arange(n_experts), gpus)
    if len(lost):
        raise PlanError(
            f"rule 'every expert somewhere': layer {layer}: expert {lost[0]} is on none of GPU 0 … {len(gpus) - 1}"
        )


# -- writers and readers ----------------------------------------------------------------------------------------


def _write_sglang(path: Path, plan: EnginePlan) -> None:
    """Rows for dense layers too, ``i % E``: the engine reads past them. Nothing else in the file: another key is a TypeError."""
    idle = [i % plan.model.n_experts for i in range(plan.n_physical)]
    rows = plan.rows()
    table = [rows.get(layer, idle) for layer in range(plan.model.n_dense + plan.model.n_layers)]
    if path.suffix == ".pt":
        import torch

        with atomic_file(path) as file:
            torch.save({"physical_to_logical_map": torch.tensor(table)}, file)
    else:
        write_atomically(path, json.dumps({"physical_to_logical_map": table}) + "\n")


def _read_sglang(path: Path) -> Rows:
    if path.suffix == ".pt":
        from clustergym.traces.readers.torch_files import load_tensors

        document = load_tensors(path)
        if isinstance(document, dict):
            document = {k: v.tolist() if hasattr(v, "tolist") else v for k, v in document.items()}
    else:
        document = _parse_json(path)
    if not isinstance(document, dict) or set(document) != {"physical_to_logical_map"}:
        raise PlanError(f"{path}: expected the key physical_to_logical_map and no other")
    return _rows(path, dict(enumerate(_listed(path, document["physical_to_logical_map"]))))


def _write_tensorrt(path: Path, plan: EnginePlan) -> None:
    """YAML, layers by global index; the engine takes these keys only."""
    lines = [f"num_slots: {plan.n_physical}", "layer_updates_per_iter: 0", "initial_global_assignments:"]
    lines += [f"  {layer}: {json.dumps(row)}" for layer, row in sorted(plan.rows().items())]
    write_atomically(path, "\n".join(lines) + "\n")


def _read_tensorrt(path: Path) -> Rows:
    import yaml

    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise PlanError(f"{path}: not valid YAML: {str(error).splitlines()[0]}") from error
    keys = {"num_slots", "layer_updates_per_iter", "initial_global_assignments"}
    if not isinstance(document, dict) or set(document) != keys:
        raise PlanError(f"{path}: expected the keys {', '.join(sorted(keys))} and no other")
    rows = _rows(path, document["initial_global_assignments"])
    wrong = [layer for layer, row in rows.items() if len(row) != document["num_slots"]]
    if wrong:
        raise PlanError(
            f"{path}: layer {wrong[0]} has {len(rows[wrong[0]])} slots, num_slots is {document['num_slots']}"
        )
    return rows


def _write_ascend(path: Path, plan: EnginePlan) -> None:
    """MoE layers by ordinal; each device with its experts."""
    layers = [
        {
            "layer_id": i,
            "device_count": plan.n_gpus,
            "device_list": [{"device_id": g, "device_expert": [int(e) for e in slots]} for g, slots in enumerate(gpus)],
        }
        for i, gpus in enumerate(plan.placement[np.argsort(plan.layer_ids)])
    ]
    write_atomically(path, json.dumps({"moe_layer_count": len(layers), "layer_list": layers}) + "\n")


def _read_ascend(path: Path) -> Rows:
    document = _parse_json(path)
    try:
        layers = document["layer_list"]
        rows = {
            i: [
                e
                for device in sorted(layer["device_list"], key=lambda d: d["device_id"])
                for e in device["device_expert"]
            ]
            for i, layer in enumerate(layers)
        }
        sizes = {len(device["device_expert"]) for layer in layers for device in layer["device_list"]}
        if document["moe_layer_count"] != len(layers) or len(sizes) != 1:
            raise PlanError(f"{path}: moe_layer_count or the devices' slots do not agree with the lists")
    except (KeyError, TypeError) as error:
        raise PlanError(f"{path}: not an expert map of vllm-ascend: {error!r}") from error
    return _rows(path, rows)


def _write_vllm(path: Path, plan: EnginePlan) -> None:
    """MoE layers by ordinal, a list of slots each."""
    ordered = plan.rows()
    write_atomically(path, json.dumps([ordered[layer] for layer in sorted(ordered)]) + "\n")


def _read_vllm(path: Path) -> Rows:
    return _rows(path, dict(enumerate(_listed(path, _parse_json(path)))))


def _parse_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{path}: not valid JSON: {error}") from error


def _listed(path: Path, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise PlanError(f"{path}: expected a list of layers, found {type(value).__name__}")
    return value


def _rows(path: Path, rows: Any) -> Rows:
    if not isinstance(rows, dict) or not rows:
        raise PlanError(f"{path}: no layers in it")
    for layer, row in rows.items():
        if isinstance(layer, bool) or not isinstance(layer, int) or not isinstance(row, list):
            raise PlanError(f"{path}: layer {layer!r}: expected a list of experts under an integer")
        if any(isinstance(e, bool) or not isinstance(e, int) for e in row):
            raise PlanError(f"{path}: layer {layer} holds something else than expert ids")
    if len({len(row) for row in rows.values()}) > 1:
        raise PlanError(f"{path}: layers have different numbers of slots")
    return rows


ENGINES: dict[str, Engine] = {
    engine.name: engine
    for engine in (
        Engine(
            "sglang", (".json", ".pt"), _write_sglang, _read_sglang,
            "--init-expert-location {path} --ep-num-redundant-experts {redundant} --ep-size {gpus}",
        ),
        Engine(
            "tensorrt-llm", (".yaml", ".yml"), _write_tensorrt, _read_tensorrt,
            "moe_config.load_balancer: {path} (moe_expert_parallel_size: {gpus})",
        ),
        Engine(
            "vllm-ascend", (".json",), _write_ascend, _read_ascend,
            "additional_config: eplb_config.expert_map_path = {path} ({gpus} devices, {redundant} redundant experts)",
        ),
        Engine(
            "vllm", (".json",), _write_vllm, _read_vllm,
            "upstream loads no placement file yet: return these rows from a policy's rebalance_experts; "
            '--eplb-config \'{{"num_redundant_experts": {redundant}}}\' on {gpus} ranks',
        ),
    )
}  # fmt: skip


def get_engine(name: str) -> Engine:
    if name not in ENGINES:
        raise ValueError(f"unknown engine {name!r}; the engines are: {', '.join(ENGINES)}")
    return ENGINES[name]


def check_path(path: Path, engine: str) -> None:
    """Refuse a file name that the engine would not read, before the work is done."""
    suffixes = get_engine(engine).suffixes
    if path.suffix not in suffixes:
        raise ValueError(f"{engine} reads a plan from {' or '.join(suffixes)}, found {path.name!r}")


def write_plan(path: Path, plan: EnginePlan, engine: str) -> None:
    """Check every rule, then write the file whole: a plan that the engine would refuse leaves nothing behind."""
    check_path(path, engine)
    check_plan(plan, engine)
    get_engine(engine).write(path, plan)


def read_plan(path: Path, engine: str) -> Rows:
    """The rows of a plan file, by layer as the file counts them."""
    check_path(path, engine)
    if not path.is_file():
        raise ValueError(f"no plan at {path}")
    return get_engine(engine).read(path)


def how_to_load(path: Path, plan: EnginePlan, engine: str) -> str:
    """The flags or settings with which the engine takes the plan."""
    return get_engine(engine).load.format(path=path, redundant=plan.n_redundant, gpus=plan.n_gpus)
