"""``clustergym trace record``: record the routing of a Hugging Face Transformers model on text files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from clustergym.cli.common import check_trace_output
from clustergym.common.extras import require
from clustergym.traces import TokenTrace


@dataclass
class Record:
    """Record a trace of a Hugging Face Transformers model on text files, one domain per file (extra: record).

    Example: clustergym trace record --model allenai/OLMoE-1B-7B-0924 --text law.txt code.txt -o olmoe.npz
    """

    model: str
    """A local folder written by save_pretrained, or the name of a model on the hub."""
    text: list[Path]
    """Text files. The file name without suffix is the domain."""
    output: Annotated[Path, tyro.conf.arg(aliases=["-o"])]
    """The .npz file to write."""
    tokenizer: str | None = None
    """Folder or hub name of the tokenizer; by default that of the model."""
    max_tokens: int | None = None
    """Maximum number of tokens in the trace, divided evenly among the files; by default the whole text."""
    sequence_length: int = 512
    """Tokens per sequence."""
    batch_size: int = 4
    """Sequences per forward pass."""
    preset: str | None = None
    """Model preset to write into the trace; by default the only preset with these layers, experts and top-k, if any."""
    device: str = "cpu"
    """Device to run the model on: cpu, cuda, cuda:1 …"""
    dtype: str = "auto"
    """Data type of the weights: auto (as saved), float32, bfloat16 …"""


def matching_preset(trace: TokenTrace) -> str | None:
    """The only preset with the layers, experts and top-k of the trace, or None."""
    from clustergym.moe_placement.specs import MODELS

    shape = (trace.n_layers, trace.n_experts, trace.top_k)
    matches = [name for name, spec in MODELS.items() if (spec.n_layers, spec.n_experts, spec.top_k) == shape]
    return matches[0] if len(matches) == 1 else None


def read_domains(files: Sequence[Path]) -> dict[str, str]:
    """Domain → text, one domain per file."""
    texts: dict[str, str] = {}
    for file in files:
        if file.stem in texts:
            raise ValueError(
                f"two text files are called {file.stem!r}: each names a domain, so give them different names"
            )
        texts[file.stem] = file.read_text(encoding="utf-8", errors="replace")
        if not texts[file.stem].strip():
            raise ValueError(f"{file} holds no text")
    return texts


def tokenise(tokenizer: Any, texts: Mapping[str, str]) -> dict[str, list[int]]:
    # The text is cut into sequences later, so the tokenizer's warning about long inputs does not apply.
    return {name: tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] for name, text in texts.items()}


def run(args: Record, console: Console, line: str) -> None:
    transformers = require("transformers", "record")
    import torch

    from clustergym.moe_placement.specs import get_model
    from clustergym.traces.record import record, text_batches

    check_trace_output(args.output)
    if args.preset is not None:
        get_model(args.preset)
    dtype = args.dtype if args.dtype == "auto" else getattr(torch, args.dtype, None)
    if not isinstance(dtype, str | torch.dtype):
        raise ValueError(f"unknown dtype {args.dtype!r}: give auto, float32, bfloat16 or float16")
    texts = read_domains(args.text)
    token_ids = tokenise(transformers.AutoTokenizer.from_pretrained(args.tokenizer or args.model), texts)
    # Without the output head: routing does not need it, and it has the largest activation.
    model = transformers.AutoModel.from_pretrained(args.model, dtype=dtype).to(args.device)
    batches = list(text_batches(token_ids, args.sequence_length, args.batch_size, args.max_tokens))
    columns = (TextColumn("recording"), BarColumn(), MofNCompleteColumn(), TextColumn("tokens"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=sum(int(batch["attention_mask"].sum()) for batch in batches))
        trace = record(
            model,
            batches,
            max_tokens=args.max_tokens,
            preset=args.preset,
            name=args.output.stem,
            on_batch=lambda n: progress.update(task, completed=n),
        )
    if args.preset is None:
        trace = replace(trace, model=matching_preset(trace))
    path = trace.save(args.output)
    console.print(escape(f"wrote {path}: {TokenTrace.load(path)}"))
