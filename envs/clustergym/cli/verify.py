"""``clustergym verify``: check a plan file against the rules of its engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.markup import escape

from clustergym.plans.engines import check_plan, detect_engine, launch, load_plan, memory_use
from clustergym.plans.meta import model_and_cluster


@dataclass
class Command:
    """Check that an engine will load a plan file as it is meant: layers, slots, experts, memory. Exit code 2 if not.

    Example: clustergym verify plan.json
    """

    plan: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="PLAN")]
    """The plan file."""
    model: str | None = None
    """A preset, a config.json or a YAML file; by default what the file beside the plan says (plan.json.meta.json)."""
    cluster: str | None = None
    """GPU-NODESxGPUS or a YAML file; by default what the file beside the plan says."""
    engine: str | None = None
    """sglang, tensorrt-llm, vllm-ascend or vllm; by default detected from the file."""
    profile: str | None = None
    """The profile that the engine will serve with; by default what the file beside the plan says, else its first
    one."""


def run(args: Command, console: Console, line: str) -> None:
    model, cluster, meta = model_and_cluster(args.plan, args.model, args.cluster)
    engine = args.engine or (meta.engine if meta else detect_engine(args.plan))
    plan = load_plan(args.plan, engine, model, cluster.n_gpus)
    check_plan(plan)
    memory = memory_use(plan)
    if memory.experts_gb > cluster.memory_gb:
        raise ValueError(f"{memory.describe()}: more than the {cluster.memory_gb:g} GB of a GPU of {cluster.name}")
    made_for = meta.profile.split(" (")[0] if meta and meta.engine == engine and args.profile is None else args.profile
    both = meta is not None and meta.both_phases and args.profile is None
    start = launch(args.plan, plan, engine, made_for, cluster.n_nodes, both)
    console.print(
        f"{args.plan} is a legal plan of {engine} for {model.name} on {cluster.name}: {len(plan.placement)} layers, "
        f"{plan.n_gpus} GPUs × {plan.n_slots} slots, {plan.n_redundant} redundant experts per layer",
        highlight=False,
        soft_wrap=True,
    )
    console.print(memory.describe(), highlight=False)
    console.print(escape(f"load it with: {start.command}"), highlight=False, soft_wrap=True)
    known = f"{start.profile.name} ({start.profile.about})"
    console.print(escape(f"profile: {meta.served_as if meta and both else known}"), highlight=False)
    missing = plan.unplanned_mtp_layers if engine == "tensorrt-llm" else []
    if missing:
        text = f"the file has no row for MTP layers {missing}: with speculative decoding the worker dies"
        console.print(f"[yellow]warning:[/] {escape(text)}", highlight=False, soft_wrap=True)
    for warning in start.warnings:
        console.print(f"[yellow]warning:[/] {escape(warning)}", highlight=False, soft_wrap=True)
