"""Rules, control and bounds of expert offloading, against the figures of the study that the task was designed from.

    CLUSTERGYM_DATA=/folder/with/recordings python benchmarks/offload/reference.py

The folder has ``gpt_oss_20b_decode.npz`` (answers of gpt-oss-20b; ``traces/convert_public.py`` makes such files).
Everything is as in the study: sequences of at least 100 tokens, tables and predictor from the first 60 % of one half of
them, tuning on the next 25 %, and the other half for the test; 12 of 32 experts per layer; 0.26 ms (PCIe 5) or 0.53 ms
(PCIe 4) per expert; 0.12 + 0.02 ms per expert for the computation of a layer. The study tuned on coarser grids, so
tuned policies may stall less here. Bounds and untuned rules must agree within 3 %.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import tyro
from rich.console import Console
from rich.table import Table

from clustergym import TokenTrace
from clustergym.moe_offload.evaluation import compare
from clustergym.moe_offload.predictor import Predictor, fit_predictor
from clustergym.moe_offload.rules import RULES, Workload, tune_all
from clustergym.moe_offload.simulator import build_task
from clustergym.moe_offload.specs import OffloadConfig
from clustergym.moe_offload.tables import Tables, clean

LOAD_MS = {"pcie5": 0.26, "pcie4": 0.53}
EXPERT_MB = 13.0
STUDY: dict[tuple[str, str], dict[str, float]] = {
    ("per layer", "pcie5"): {
        "static-popular": 7.640, "lru": 4.856, "lfu": 4.485, "decayed-lfu": 4.030, "lru+transitions": 4.073,
        "decayed-lfu+transitions": 3.575, "next-use-evict": 3.570, "next-use": 2.723, "belady": 2.354,
        "next-layer": 1.600, "next-3-layers": 0.803, "clairvoyant": 0.042,
    },
    ("per layer", "pcie4"): {
        "static-popular": 15.574, "lru": 9.898, "lfu": 9.143, "decayed-lfu": 8.214, "lru+transitions": 9.567,
        "decayed-lfu+transitions": 8.043, "next-use-evict": 7.276, "next-use": 6.695, "belady": 4.799,
        "next-layer": 5.442, "next-3-layers": 4.083, "clairvoyant": 1.020,
    },
    ("pool", "pcie5"): {
        "decayed-lfu+transitions": 3.28, "next-use+backlog": 2.29, "belady": 2.00, "clairvoyant": 0.04,
    },
    ("pool", "pcie4"): {
        "decayed-lfu+transitions": 7.69, "next-use+backlog": 6.11, "belady": 4.08, "clairvoyant": 0.44,
    },
}  # fmt: skip
"""Stall in ms per token. ``pool``: the first 60 test sequences; ``per layer``: 149."""
UNTUNED = ("static-popular", "lru", "lfu", "belady", "clairvoyant")


@dataclass
class Args:
    forms: tuple[str, ...] = ("per layer", "pool")
    """Fixed shares of the slots, or one pool."""
    links: tuple[str, ...] = ("pcie5", "pcie4")
    """pcie5, pcie4 or both."""
    predictor: Path | None = None
    """Folder of a predictor that was fitted with these settings; it is fitted and saved if there is none."""
    evaluations: int = 30
    """Trials of the search per parameter of a rule."""
    tune_tokens: int = 12_000
    """Tokens to tune on."""
    json: Path | None = None
    """Write the rows to this file."""


def study_parts(trace: TokenTrace) -> dict[str, TokenTrace]:
    """The sequences as the study divided them."""
    trace = clean(trace, min_tokens=100, distinct=0.0)
    order = np.random.default_rng(0).permutation(trace.n_sequences)
    first, test = order[: len(order) // 2], order[len(order) // 2 :]
    a, b = int(len(first) * 0.6), int(len(first) * 0.85)
    parts = {"fit": first[:a], "train": first[a:b], "validation": first[b:], "test": test}
    return {name: trace.select(sequences=sequences) for name, sequences in parts.items()}


def main(args: Args) -> None:
    torch.set_num_threads(1)
    console = Console()
    source = Path(os.environ.get("CLUSTERGYM_DATA", ".")) / "gpt_oss_20b_decode.npz"
    if not source.is_file():
        raise SystemExit(f"no file {source}: set CLUSTERGYM_DATA to the folder of the recordings")
    parts = study_parts(TokenTrace.load(source))
    tables = Tables.count(parts["fit"])
    if args.predictor is not None and args.predictor.is_dir():
        predictor = Predictor.load(args.predictor)
    else:
        predictor = fit_predictor(parts["fit"], parts["validation"])
        if args.predictor is not None:
            predictor.save(args.predictor)
    console.print(f"recall of the experts 1, 2, 3 layers ahead: {predictor.recall(parts['test'])} (study: 0.757, …)")
    train = parts["train"]
    tuning = train.select(sequences=range(int(np.searchsorted(np.cumsum(train.seq_lens), args.tune_tokens)) + 1))
    document = []
    for form in args.forms:
        n = 60 if form == "pool" else 149
        test = parts["test"].select(sequences=range(min(n, parts["test"].n_sequences)))
        for link in args.links:
            started, per_layer = time.perf_counter(), form == "per layer"
            bandwidth = EXPERT_MB / LOAD_MS[link]
            config = OffloadConfig(tuning, "all", per_layer=per_layer, link=bandwidth, expert_mb=EXPERT_MB)
            train = Workload(build_task(config, tables), tuning, tables, predictor, reuse=True)
            tuned = tune_all(train, list(RULES), args.evaluations)
            task = build_task(replace(config, trace=test), tables)
            rows = compare(Workload(task, test, tables, predictor), tuned, 0.375)
            table = Table(
                "policy", "kind", "study", "here", "", "95 %", "vs best rule",
                title=f"{form}, {link}: ms per token, {test.n_tokens} tokens", title_justify="left", box=None,
            )  # fmt: skip
            for row in rows:
                expected = STUDY[form, link].get(row.policy)
                difference = None if expected is None else row.stall_ms_per_token / expected - 1
                # The study's figures are rounded.
                excess = row.stall_ms_per_token - (expected or row.stall_ms_per_token)
                close = (abs(excess) if row.policy in UNTUNED else excess) <= max(0.03 * (expected or 1), 0.005)
                table.add_row(
                    row.policy, row.kind, "" if expected is None else f"{expected:.3f}",
                    f"{row.stall_ms_per_token:.3f}",
                    "" if difference is None else f"{difference:+.1%}" + ("" if close else " !"),
                    "{:.3f} … {:.3f}".format(*row.ci95), f"{row.against_best_rule:+.1%}",
                )  # fmt: skip
                document.append({"form": form, "link": link, "study": expected, "within": close, **row.as_dict()})
            console.print(table)
            console.print(f"{time.perf_counter() - started:.0f} s\n")
            if args.json is not None:
                args.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
