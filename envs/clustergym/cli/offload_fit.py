"""``clustergym offload fit``: fit the next-use predictor."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from clustergym.cli.common import prepare_files
from clustergym.cli.offload_output import bar
from clustergym.common.extras import require
from clustergym.moe_offload.scores import recalls
from clustergym.moe_offload.simulator import load_once
from clustergym.moe_offload.specs import DEFAULT_TRACE
from clustergym.moe_offload.tables import Tables, first_tokens, split_sequences


@dataclass
class Fit:
    """Fit the next-use predictor on the sequences of a trace that no policy is trained, tuned or tested on.

    Takes 2 to 3 minutes. Example: clustergym offload fit tiny_decode -o predictor
    """

    trace: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="TRACE")] = DEFAULT_TRACE
    """A .npz or .npy file, or the name of a bundled trace."""
    output: Annotated[Path, tyro.conf.arg(aliases=["-o"])] = Path("predictor")
    """Folder to write predictor.safetensors and predictor.json to."""
    steps: int = 1500
    """Gradient steps."""
    hidden: int = 96
    """Width of the hidden layer."""
    seed: int = 0
    """Seed of the split, the weights and the batches."""


def run(args: Fit, console: Console, line: str) -> None:
    require("torch", "train")
    from clustergym.moe_offload.predictor import fit_predictor

    trace = load_once(args.trace)
    parts = split_sequences(trace, args.seed)
    fit = parts["fit"]
    args.output.mkdir(parents=True, exist_ok=True)
    prepare_files(args.output / "predictor.json")
    console.print(escape(f"{trace.name}: fit on {fit.n_tokens} tokens of {fit.n_sequences} sequences"))
    with bar(console) as progress:
        task = progress.add_task("fit", total=args.steps, note="")
        predictor = fit_predictor(
            fit, parts.get("validation"), steps=args.steps, hidden=args.hidden, seed=args.seed,
            progress=lambda done, total, note: progress.update(task, completed=done, note=note),
        )  # fmt: skip
    predictor.save(args.output)
    table = Table("share of the used experts among the top-k", "1 layer ahead", "2", "3", box=None)
    for name, found in recalls(first_tokens(parts["test"], 6000), Tables.count(fit), predictor).items():
        table.add_row(name, *(f"{value:.3f}" for value in found))
    console.print(table)
    console.print(escape(f"predictor: {args.output}"))
