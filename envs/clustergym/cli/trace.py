"""``clustergym trace``: inspect token traces, generate synthetic ones, import recordings of engines, record a model."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from clustergym.cli import trace_import, trace_record
from clustergym.cli.common import check_trace_output
from clustergym.traces import LoadTrace, SyntheticConfig, TokenTrace, load_any_trace, synthetic_trace


@dataclass
class Info:
    """Show the size, domains and statistics of a trace: load skew, co-activation, predictability, drift."""

    trace: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="TRACE")]
    """A .npz or .npy file, or the name of a bundled trace."""
    gpus: int = 16
    """Number of GPUs for the statistics that depend on it."""


@dataclass
class Synth:
    """Generate a synthetic trace with statistics like those of a real model.

    --model takes a preset, a config.json or a YAML file, and gives the trace its layers, experts, top-k and groups.
    """

    output: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="OUTPUT")]
    """The .npz file to write."""
    config: Annotated[SyntheticConfig, tyro.conf.arg(name="")] = field(default_factory=SyntheticConfig)
    seed: int = 0
    """Seed of the generator. The same seed and parameters give the same trace."""


def run_info(args: Info, console: Console, line: str) -> None:
    trace = load_any_trace(args.trace)
    console.print(trace)
    if isinstance(trace, LoadTrace):
        loads = trace.loads()
        console.print(f"load of the busiest expert over the mean, per layer: {(loads.max(1) / loads.mean(1)).round(2)}")
        return
    table = Table("statistic", "value", title=escape(f"{trace.name}, for {args.gpus} GPUs"))
    for name, value in trace.statistics(args.gpus).items():
        table.add_row(name, f"{value:.3f}")
    console.print(table)


def synth_config(config: SyntheticConfig, words: list[str]) -> SyntheticConfig:
    """``config`` with the sizes of the model that the command line names, except for sizes that it gives itself."""
    given = {word.removeprefix("--").split("=")[0].replace("-", "_") for word in words if word.startswith("--")}
    if "model" not in given:
        return config
    from clustergym.moe_placement.presets.models import get_model

    own = {f.name: getattr(config, f.name) for f in fields(config)}
    sizes = {"n_layers", "layers", "first_layer", "n_experts", "top_k", "n_groups", "group_limit", "model"}
    return SyntheticConfig.for_model(
        get_model(config.model), **{name: own[name] for name in own if name not in sizes or name in given - {"model"}}
    )


def run_synth(args: Synth, console: Console, line: str) -> None:
    check_trace_output(args.output)
    config = synth_config(args.config, shlex.split(line))
    path = synthetic_trace(config, seed=args.seed).save(args.output)
    console.print(escape(f"wrote {path}: {TokenTrace.load(path)}"))


RUN: dict[type, Callable[..., None]] = {
    Info: run_info,
    Synth: run_synth,
    trace_import.Import: trace_import.run,
    trace_record.Record: trace_record.run,
}
"""The function of each subcommand."""


@dataclass
class Command:
    """Inspect traces, generate synthetic ones, import recordings of engines, record a model."""

    command: Annotated[
        Annotated[Info, tyro.conf.subcommand("info", prefix_name=False)]
        | Annotated[Synth, tyro.conf.subcommand("synth", prefix_name=False)]
        | Annotated[trace_import.Import, tyro.conf.subcommand("import", prefix_name=False)]
        | Annotated[trace_record.Record, tyro.conf.subcommand("record", prefix_name=False)],
        tyro.conf.arg(name=""),
    ]


def run(args: Command, console: Console, line: str) -> None:
    RUN[type(args.command)](args.command, console, line)
