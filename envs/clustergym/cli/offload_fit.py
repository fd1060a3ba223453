"""``clustergym offload fit``: fit the next-use predictor and a policy that uses it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from clustergym.cli.common import prepare_files
from clustergym.cli.offload_output import bar, save_policy, steps_of
from clustergym.common.extras import require
from clustergym.moe_offload.scores import recalls
from clustergym.moe_offload.simulator import load_once
from clustergym.moe_offload.specs import DEFAULT_TRACE, OffloadConfig, share
from clustergym.moe_offload.tables import Tables, first_tokens, split_sequences
from clustergym.traces.token_trace import TokenTrace

if TYPE_CHECKING:
    from clustergym.moe_offload.predictor import Predictor


@dataclass
class Fit:
    """Fit the next-use predictor, then a policy that uses it: the control, improved by trials of prefetches.

    The predictor and the policy are fitted on different sequences, and none of them is tested on. Takes 3 to 5 minutes.
    Example: clustergym offload fit tiny_decode -o predictor
    """

    trace: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="TRACE")] = DEFAULT_TRACE
    """A .npz or .npy file, or the name of a bundled trace."""
    output: Annotated[Path, tyro.conf.arg(aliases=["-o"])] = Path("predictor")
    """Folder to write predictor.* and policy.* to."""
    predictor: Path | None = None
    """Folder of a predictor of this trace and this seed: fit only a policy, for other slots or another link."""
    steps: int = 1500
    """Gradient steps."""
    hidden: int = 96
    """Width of the hidden layer."""
    slots: str = "37.5%"
    """Share of all experts that fit on the GPU, for the policy."""
    link: str = "pcie5"
    """Link to the host memory, for the policy: pcie4, pcie5, or GB/s."""
    decisions: int = 30_000
    """Decisions at which prefetches are tried. 0: no policy."""
    evaluations: int = 10
    """Trials per parameter of the search that tunes the control, from which the policy starts."""
    seed: int = 0
    """Seed of the split, the weights and the batches."""


def run(args: Fit, console: Console, line: str) -> None:
    require("torch", "train")
    from clustergym.moe_offload.improvement import improve
    from clustergym.moe_offload.predictor import Predictor

    trace, slots = load_once(args.trace), share(args.slots)
    parts = split_sequences(trace, args.seed)
    fit = parts["fit"]
    args.output.mkdir(parents=True, exist_ok=True)
    prepare_files(args.output / "predictor.json")
    console.print(escape(f"{trace.name}: fit on {fit.n_tokens} tokens of {fit.n_sequences} sequences"))
    if args.predictor is not None:
        predictor = Predictor.load(args.predictor)
        predictor.check(trace)
    else:
        predictor = fit_next_use(args, parts, console)
    predictor.save(args.output)
    table = Table("share of the used experts among the top-k", "1 layer ahead", "2", "3", box=None)
    for name, found in recalls(first_tokens(parts["test"], 6000), Tables.count(fit), predictor).items():
        table.add_row(name, *(f"{value:.3f}" for value in found))
    console.print(table)
    console.print(escape(f"predictor: {args.output}"))
    if args.decisions > 0:
        config = OffloadConfig(parts["train"], "all", fit_on=Tables.count(fit), slots=slots, link=args.link)
        with steps_of(console, 3) as tell:
            policy, explained = improve(config, predictor, args.decisions, args.evaluations, args.seed, tell)
            save_policy(policy, config, predictor, args.output)
        console.print(escape(f"policy: {args.output} (explains {explained:.1%} of what trials differ by)"))


def fit_next_use(args: Fit, parts: dict[str, TokenTrace], console: Console) -> Predictor:
    from clustergym.moe_offload.predictor import fit_predictor

    with bar(console) as progress:
        task = progress.add_task("fit", total=args.steps, note="")
        return fit_predictor(
            parts["fit"], parts.get("validation"), steps=args.steps, hidden=args.hidden, seed=args.seed,
            progress=lambda done, total, note: progress.update(task, completed=done, note=note),
        )  # fmt: skip
