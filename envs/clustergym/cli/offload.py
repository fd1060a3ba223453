"""``clustergym offload``: which experts to keep on the GPU: fit a predictor, compare policies, export."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import tyro
from rich.console import Console

from clustergym.cli import offload_curve, offload_eval, offload_export, offload_fit

RUN: dict[type, Callable[..., None]] = {
    offload_fit.Fit: offload_fit.run,
    offload_eval.Eval: offload_eval.run,
    offload_curve.Curve: offload_curve.run,
    offload_export.Export: offload_export.run,
}
"""The function of each subcommand."""


@dataclass
class Command:
    """Keep the right experts on the GPU: fit a next-use predictor, compare policies, export what an engine needs."""

    command: Annotated[
        Annotated[offload_fit.Fit, tyro.conf.subcommand("fit", prefix_name=False)]
        | Annotated[offload_eval.Eval, tyro.conf.subcommand("eval", prefix_name=False)]
        | Annotated[offload_curve.Curve, tyro.conf.subcommand("curve", prefix_name=False)]
        | Annotated[offload_export.Export, tyro.conf.subcommand("export", prefix_name=False)],
        tyro.conf.arg(name=""),
    ]


def run(args: Command, console: Console, line: str) -> None:
    RUN[type(args.command)](args.command, console, line)
