"""``clustergym verify``: check a plan file against the rules of its engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.markup import escape

from clustergym.moe_placement.presets.clusters import get_cluster
from clustergym.moe_placement.presets.models import get_model
from clustergym.plans.engines import check_plan, detect_engine, launch, load_plan, memory_use


@dataclass
class Command:
    """Check that an engine will load a plan file as it is meant: layers, slots, experts, memory. Exit code 2 if not.

    Example: clustergym verify plan.json --model deepseek-v3 --cluster h800-4x8
    """

    plan: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="PLAN")]
    """The plan file."""
    model: str
    """A preset, a config.json or a YAML file."""
    cluster: str
    """GPU-NODESxGPUS or a YAML file."""
    engine: str | None = None
    """sglang, tensorrt-llm, vllm-ascend or vllm; by default detected from the file."""
    profile: str | None = None
    """The profile that the engine will serve with; by default its first one."""


def run(args: Command, console: Console, line: str) -> None:
    model, cluster = get_model(args.model), get_cluster(args.cluster)
    engine = args.engine or detect_engine(args.plan)
    plan = load_plan(args.plan, engine, model, cluster.n_gpus)
    check_plan(plan)
    memory = memory_use(plan)
    if memory.experts_gb > cluster.memory_gb:
        raise ValueError(f"{memory.describe()}: more than the {cluster.memory_gb:g} GB of a GPU of {cluster.name}")
    start = launch(args.plan, plan, engine, args.profile, cluster.n_nodes)
    console.print(
        f"{args.plan} is a legal plan of {engine} for {model.name} on {cluster.name}: {len(plan.placement)} layers, "
        f"{plan.n_gpus} GPUs × {plan.n_slots} slots, {plan.n_redundant} redundant experts per layer",
        highlight=False,
        soft_wrap=True,
    )
    console.print(memory.describe(), highlight=False)
    console.print(escape(f"load it with: {start.command}"), highlight=False, soft_wrap=True)
    console.print(escape(f"profile: {start.profile.name} ({start.profile.about})"), highlight=False)
    missing = plan.unplanned_mtp_layers if engine == "tensorrt-llm" else []
    if missing:
        text = f"the file has no row for MTP layers {missing}: with speculative decoding the worker dies"
        console.print(f"[yellow]warning:[/] {escape(text)}", highlight=False, soft_wrap=True)
    for warning in start.warnings:
        console.print(f"[yellow]warning:[/] {escape(warning)}", highlight=False, soft_wrap=True)
