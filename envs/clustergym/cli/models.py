"""``clustergym models``: list the models, or explain one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from clustergym.moe_placement.presets.model_spec import ModelSpec
from clustergym.moe_placement.presets.models import MODELS, get_model


@dataclass
class Command:
    """List the model presets, or show the sizes of one model.

    Every --model takes the name of a preset, a config.json of Hugging Face (or its folder), or a YAML file whose keys
    are the fields of ModelSpec: name, n_layers, n_experts, top_k, hidden, intermediate, weight_bytes, n_dense, …
    """

    model: Annotated[tyro.conf.Positional[str | None], tyro.conf.arg(metavar="[MODEL]")] = None
    """A preset, a config.json or a YAML file. Default: list the presets."""


def layers_of(model: ModelSpec) -> str:
    """The MoE layers in one phrase: 3–60, or every second layer 1–47."""
    first, last = model.layer_ids[0], model.layer_ids[-1]
    gaps = {b - a for a, b in zip(model.layer_ids, model.layer_ids[1:], strict=False)}
    if len(gaps) > 1:
        return f"{len(model.layer_ids)} of {first}–{last}"
    return f"{first}–{last}" + (f", every {gaps.pop()}" if gaps - {1} else "")


def fields(model: ModelSpec) -> dict[str, str]:
    """Name → value, for people."""
    groups = f"{model.n_groups}, a token uses at most {model.group_limit}" if model.group_limit else str(model.n_groups)
    return {
        "MoE layers": f"{model.n_layers} ({layers_of(model)}) of {model.total_layers}",
        "MTP layers": str(model.n_mtp or "none"),
        "routed experts": f"{model.n_experts}, a token uses {model.top_k}",
        "shared experts": str(model.n_shared or "none"),
        "expert groups": groups,
        "hidden and expert width": f"{model.hidden}, {model.intermediate}",
        "bytes per weight": f"{model.weight_bytes:g}",
        "bytes per element sent and returned": f"{model.dispatch_bytes:g}, {model.combine_bytes:g}",
        "one expert": f"{model.expert_bytes / 1e6:.1f} MB per layer",
        "KV cache": f"{model.kv_bytes / 1e3:.1f} kB per token" if model.kv_bytes else "unknown",
        "class": model.architecture or "unknown",
        "source": model.source or "unknown",
    }


def run(args: Command, console: Console, line: str) -> None:
    if args.model is not None:
        model = get_model(args.model)
        table = Table("", escape(model.name), box=None)
        for name, value in fields(model).items():
            table.add_row(name, escape(value))
        console.print(table)
        return
    table = Table("model", "MoE layers", "experts", "top-k", "hidden", "width", "bytes", "groups", "MTP", box=None)
    for m in MODELS.values():
        limit = f"{m.group_limit} of {m.n_groups}" if m.group_limit else ""
        cells = (
            m.n_layers,
            m.n_experts,
            m.top_k,
            m.hidden,
            m.intermediate,
            f"{m.weight_bytes:g}",
            limit,
            m.n_mtp or "",
        )
        table.add_row(m.name, *map(str, cells))
    console.print(table)
    console.print(
        "any other model: --model config.json of Hugging Face, or a YAML file; clustergym models MODEL explains"
    )
