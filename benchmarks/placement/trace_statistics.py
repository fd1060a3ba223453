"""Statistics of synthetic token traces next to those of the real traces that they imitate.

    python benchmarks/placement/trace_statistics.py
    python benchmarks/placement/trace_statistics.py --markdown table.md --json table.json

The columns of the real traces need the files ``deepseek_v2_lite_{intent,law}.npz`` (from the expert scores of ESFT) and
``gpt_oss_20b_decode.npz`` (from GPT-OSS-MoE-ExpertFingerprinting) in the folder ``moe`` of CLUSTERGYM_DATA. Without
them, only the synthetic columns are shown.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from clustergym.traces import SyntheticConfig, TokenTrace, synthetic_trace

sys.path.append(str(Path(__file__).resolve().parents[1]))
from public_data import find_data

COMMAND = "python benchmarks/placement/trace_statistics.py"


@dataclass
class Args:
    seeds: int = 5
    """Number of synthetic traces per preset, with seeds 0, 1, … The table has their mean and standard deviation."""
    n_gpus: int = 16
    """GPUs for the statistics on GPUs per token and on grouping."""
    json: Path | None = None
    """Write the numbers to this file."""
    markdown: Path | None = None
    """Write the table to this file, in Markdown."""


@dataclass
class Column:
    """One column of the table: the mean and standard deviation of each statistic over seeds."""

    title: str
    mean: dict[str, float]
    spread: dict[str, float]
    seeds: int

    def cell(self, key: str) -> str:
        digits = 3 if abs(self.mean[key]) >= 0.1 else 4
        text = f"{self.mean[key]:.{digits}f}"
        return f"{text} ± {self.spread[key]:.{digits}f}" if self.seeds > 1 else text


def real_column(title: str, pattern: str, args: Args) -> Column | None:
    files = find_data(pattern)
    if not files:
        return None
    traces = [TokenTrace.load(file) for file in files]
    trace = TokenTrace.concat(traces, [file.stem for file in files]) if len(traces) > 1 else traces[0]
    mean = trace.statistics(args.n_gpus)
    return Column(title, mean, dict.fromkeys(mean, 0.0), seeds=1)


def synthetic_column(title: str, config: SyntheticConfig, args: Args) -> Column:
    found = [synthetic_trace(config, seed=seed).statistics(args.n_gpus) for seed in range(args.seeds)]
    values = {key: [one[key] for one in found] for key in found[0]}
    mean = {key: float(np.mean(v)) for key, v in values.items()}
    spread = {key: float(np.std(v, ddof=1)) if len(v) > 1 else 0.0 for key, v in values.items()}
    return Column(title, mean, spread, args.seeds)


def markdown_table(columns: list[Column]) -> str:
    lines = ["| statistic | " + " | ".join(c.title for c in columns) + " |", "| --- |" + " ---: |" * len(columns)]
    lines += [f"| `{key}` | " + " | ".join(c.cell(key) for c in columns) + " |" for key in columns[0].mean]
    return "\n".join(lines) + "\n"


def main(args: Args) -> None:
    if args.seeds < 1:
        raise SystemExit(f"--seeds must be at least 1, found {args.seeds}")
    console = Console()
    maybe = [
        real_column("DeepSeek-V2-Lite, real", "moe/deepseek_v2_lite_*.npz", args),
        synthetic_column("DeepSeek-V2-Lite, synthetic", SyntheticConfig.deepseek_v2_lite(), args),
        real_column("gpt-oss-20b, real", "moe/gpt_oss_20b_decode.npz", args),
        synthetic_column("gpt-oss-20b, synthetic", SyntheticConfig.gpt_oss_20b(), args),
    ]
    columns = [column for column in maybe if column is not None]
    table = Table(title=f"Token traces, {args.n_gpus} GPUs; synthetic: mean ± sd of {args.seeds} seed(s)")
    table.add_column("statistic", no_wrap=True)
    for column in columns:
        table.add_column(column.title, justify="right")
    for key in columns[0].mean:
        table.add_row(key, *(column.cell(key) for column in columns))
    console.print(table)
    if args.json is not None:
        rows = {c.title: {"mean": c.mean, "sd": c.spread, "seeds": c.seeds} for c in columns}
        args.json.write_text(json.dumps({"command": COMMAND, "n_gpus": args.n_gpus, "columns": rows}, indent=2) + "\n")
    if args.markdown is not None:
        args.markdown.write_text(markdown_table(columns))


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
