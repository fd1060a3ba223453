"""``clustergym trace tiny-moe``: record millions of tokens of the small language model over many domains."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from clustergym.cli.common import check_trace_output


@dataclass
class TinyMoE:
    """Record the routing of the small language model on many kinds of text, made on demand and cached.

    The texts come with Python and the dependencies of clustergym, or are generated. The model is trained first, in
    about 10 minutes on one core, and kept in the cache: the next recording takes about 30 s per million tokens.
    An interrupted training is resumed.

    Example: clustergym trace tiny-moe --tokens 2000000 -o tiny_moe_2m.npz
    """

    tokens: int = 2_000_000
    """Tokens in the trace, divided evenly among the domains."""
    domains: list[str] | None = None
    """Kinds of text; by default all."""
    steps: int = 1000
    """Training steps of 4,096 tokens."""
    minutes: float = 30.0
    """Maximum time for training; then the model is used as it is."""
    seed: int = 0
    """Seed of texts, weights, batches and sequence lengths."""
    output: Annotated[Path | None, tyro.conf.arg(aliases=["-o"])] = None
    """Copy the trace to this .npz file. It is kept in the cache too ($CLUSTERGYM_CACHE or ~/.cache/clustergym)."""


def run(args: TinyMoE, console: Console, line: str) -> None:
    import torch

    from clustergym.traces.texts import DOMAINS
    from clustergym.traces.tiny_moe_domains import Recording, describe, make_trace
    from clustergym.traces.token_trace import TokenTrace

    torch.set_num_threads(1)
    if args.output is not None:
        check_trace_output(args.output)
    recording = Recording(args.tokens, tuple(args.domains or DOMAINS), args.steps, args.minutes, seed=args.seed)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        training = bar.add_task("training, steps", total=args.steps)
        tokens = bar.add_task("recording, tokens", total=args.tokens)
        path = make_trace(
            recording,
            on_step=lambda step, loss: bar.update(
                training, completed=step, description=f"training, {loss:.3f} nats/char"
            ),
            on_tokens=lambda n: bar.update(tokens, completed=n),
        )
    if args.output is not None:
        path = TokenTrace.load(path).save(args.output)
    console.print(escape(f"{path}: {TokenTrace.load(path)}"), soft_wrap=True)
    console.print(escape(f"tokens: {describe(path)}"), soft_wrap=True)
