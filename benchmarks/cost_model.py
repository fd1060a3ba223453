"""Fit the cost model to measured kernels and transports, and print the error on rows that were held out.

    python benchmarks/cost_model.py                          # all kernels; needs pandas and pyarrow
    python benchmarks/cost_model.py --tables DIR --json out.json

The tables are the H100 measurements of NVIDIA's aiconfigurator (Apache-2.0): fused MoE kernels of SGLang and vLLM for
many models, expert-parallel sizes and load distributions; the grouped kernels behind DeepEP ("wideep"); DeepEP and NCCL
transports.

**Kernel.** The time of a GPU's expert kernel is

    max(floor, start + token · received tokens + Σ (expert + block · ⌈m / B⌉ + pair · m))

with the sum over experts with m > 0 tokens. A row of a table gives the time for a number of tokens, an expert-parallel
size and a load distribution, and measures the GPU with the highest load. The loads of the power-law rows were random,
so we draw loads from the same law and use the mean of the features. Every third row is held out. The last columns ask
what matters for placement: how much slower is the kernel with skewed loads (power law 1.2 against balanced), measured
and predicted?

**Transport.** DeepEP inside a node: start + bytes of the copies that leave a GPU / bandwidth. NCCL all-gather and
reduce-scatter: start + bytes received / bandwidth.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table
from scipy.optimize import least_squares

Array = npt.NDArray[np.float64]
TABLES = Path(__file__).resolve().parents[2] / "shared" / "data" / "hw"
SGLANG = "h100_sxm__moe__sglang__0.5.14__moe_perf.parquet"
VLLM = "h100_sxm__moe__vllm__0.24.0__moe_perf.parquet"
PREFILL = "h100_sxm__moe__sglang__0.5.10__wideep_context_moe_perf.parquet"
DECODE = "h100_sxm__moe__sglang__0.5.10__wideep_generation_moe_perf.parquet"
NAMES = ("start", "floor", "token", "expert", "block", "pair")


@dataclass(frozen=True)
class Kernel:
    """Rows of one table that belong to one kernel and model."""

    name: str
    table: str
    hidden: int
    intermediate: int
    top_k: int
    experts: int
    dtype: str
    block_tokens: int = 64
    """B: the rows of an expert are padded to a multiple of this (128 in DeepEP's contiguous layout)."""


KERNELS = (
    Kernel("deepep-prefill deepseek-v3", PREFILL, 7168, 2048, 8, 256, "fp8_block", 128),
    Kernel("deepep-decode deepseek-v3", DECODE, 7168, 2048, 8, 256, "fp8_block"),
    *(
        Kernel(f"{engine} {model}", table, *sizes)
        for engine, table in (("sglang", SGLANG), ("vllm", VLLM))
        for model, *sizes in (
            ("qwen3-30b-a3b", 2048, 768, 8, 128, "bfloat16"),
            ("qwen3-235b-a22b", 4096, 1536, 8, 128, "bfloat16"),
            ("gpt-oss-20b", 2880, 2880, 4, 32, "w4a16_mxfp4"),
            ("gpt-oss-120b", 2880, 2880, 4, 128, "w4a16_mxfp4"),
            ("mixtral-8x7b", 4096, 14336, 2, 8, "bfloat16"),
            ("deepseek-v3", 7168, 2048, 8, 256, "fp8_block"),
            ("kimi-k2", 7168, 2048, 8, 384, "fp8_block"),
        )
    ),
)


# Loads behind a row


def power_law_loads(tokens: int, experts: int, top_k: int, ranks: int, alpha: float, rng: np.random.Generator) -> Array:
    """Tokens of each expert on the most loaded rank, for loads that follow a power law."""
    low, high = (1.0, tokens * 0.8) if tokens * top_k > experts else (0.01, 2.0)
    power = 1 - alpha
    drawn = ((max(high, low + 1e-6) ** power - low**power) * rng.random(experts) + low**power) ** (1 / power)
    loads = np.minimum(np.round(drawn / drawn.sum() * tokens * top_k), tokens)
    # Rounding leaves a few tokens over or short: the smallest experts get them, the largest give them.
    while (short := int(tokens * top_k - loads.sum())) != 0:
        open_to = np.flatnonzero(loads < tokens) if short > 0 else np.flatnonzero(loads > 0)
        if len(open_to) == 0:
            break
        order = open_to[np.argsort(np.sign(short) * loads[open_to], kind="stable")][: abs(short)]
        loads[order] += np.sign(short)
    by_rank = loads.reshape(ranks, -1)
    return by_rank[by_rank.sum(1).argmax()]


def row_loads(row: Any, rng: np.random.Generator, samples: int) -> list[Array]:
    """Loads of the experts on the measured rank: one for an even distribution, several draws for a random one."""
    tokens, experts, top_k, ranks = (int(x) for x in (row.num_tokens, row.num_experts, row.topk, row.moe_ep_size))
    if row.distribution.startswith("power_law"):
        alpha = float(row.distribution.split("_")[-1])
        return [power_law_loads(tokens, experts, top_k, ranks, alpha, rng) for _ in range(samples)]
    if row.distribution == "uniform":
        each = tokens * top_k // experts
        loads = np.full(experts // ranks, float(each))
        if each == 0:
            loads[: tokens * top_k // ranks] = 1
        return [loads]
    stride = -(-experts // top_k)
    token, choice = np.arange(tokens)[:, None], np.arange(top_k)[None]
    first = token if tokens >= stride else token * stride / tokens
    chosen = ((first + choice * stride) % experts).astype(int)
    return [np.bincount(chosen.ravel(), minlength=experts)[: experts // ranks].astype(float)]


def features(row: Any, block_tokens: int, rng: np.random.Generator, samples: int) -> Array:
    """Received tokens, active experts, blocks and pairs; the mean over draws."""
    return np.mean(
        [
            [row.num_tokens, (m > 0).sum(), np.ceil(m / block_tokens).sum(), m.sum()]
            for m in row_loads(row, rng, samples)
        ],
        axis=0,
    )


# Fit


def kernel_us(constants: Array, x: Array) -> Array:
    """The model: ``constants`` in the order of NAMES, ``x`` (rows, 4)."""
    start, floor, *rates = constants
    return np.maximum(floor, start + x @ np.array(rates))


def fit_kernel(x: Array, measured_us: Array) -> Array:
    """Constants with the least robust error of log time. All are positive; one that does not help ends near 0."""
    best = None
    for expert in (1.0, 10.0):
        begin = np.log([measured_us.min(), measured_us.min(), 0.01, expert, 0.1, 0.05])
        found = least_squares(
            lambda p: np.log(kernel_us(np.exp(p), x) / measured_us), begin, loss="soft_l1", f_scale=0.1
        )
        if best is None or found.cost < best.cost:
            best = found
    assert best is not None
    return np.exp(best.x)


def error_by(error: Array, labels: Any) -> dict[str, float]:
    return {str(label): round(float(np.median(error[labels == label])), 3) for label in sorted(set(labels))}


def study_kernel(kernel: Kernel, rows: Any, samples: int) -> dict[str, Any]:
    """Fit one kernel; errors are of rows that the fit has not seen."""
    rng = np.random.default_rng(0)
    x = np.array([features(row, kernel.block_tokens, rng, samples) for row in rows.itertuples()])
    measured = rows.latency.to_numpy() * 1000.0
    held_out = np.arange(len(rows)) % 3 == 0
    constants = fit_kernel(x[~held_out], measured[~held_out])
    predicted = kernel_us(constants, x)
    error = np.abs(predicted / measured - 1)[held_out]
    seen = rows[held_out]
    return {
        "kernel": kernel.name, "rows": len(rows), "held_out": int(held_out.sum()), "block_tokens": kernel.block_tokens,
        "constants_us": {name: float(f"{value:.4g}") for name, value in zip(NAMES, constants, strict=True)},
        "median_error": float(np.median(error)), "p90_error": float(np.quantile(error, 0.9)),
        "by_distribution": error_by(error, seen.distribution.to_numpy()),
        "by_ranks": error_by(error, seen.moe_ep_size.to_numpy()),
        "skew": skew_cost(rows, measured, predicted),
    }  # fmt: skip


def skew_cost(rows: Any, measured: Array, predicted: Array) -> dict[str, float]:
    """How much slower skewed loads are than even ones at equal tokens and ranks: measured, predicted, median error."""
    even = "uniform" if "uniform" in set(rows.distribution) else "balanced"
    place = {
        (row.num_tokens, row.moe_ep_size, row.distribution): i for i, row in enumerate(rows.itertuples(index=False))
    }
    pairs = [
        (i, place[key])
        for (tokens, ranks, distribution), i in place.items()
        # Below one token per expert there is no load to skew.
        if distribution == "power_law_1.2" and (key := (tokens, ranks, even)) in place and tokens >= 512
    ]
    if not pairs:
        return {}
    skewed, flat = np.array(pairs).T
    truth, model = measured[skewed] / measured[flat], predicted[skewed] / predicted[flat]
    return {
        "measured": float(np.median(truth)),
        "predicted": float(np.median(model)),
        "error": float(np.median(np.abs(model / truth - 1))),
    }


# Transport


def fit_line(x: Array, measured_us: Array) -> tuple[float, float, float]:
    """(start, µs per unit, median error on held-out rows) of start + rate · x."""
    held_out = np.arange(len(x)) % 3 == 0
    found = least_squares(
        lambda p: np.log((np.exp(p[0]) + np.exp(p[1]) * x[~held_out]) / measured_us[~held_out]),
        [np.log(measured_us.min()), np.log(measured_us.max() / x.max())], loss="soft_l1", f_scale=0.1,
    )  # fmt: skip
    start, rate = np.exp(found.x)
    error = np.abs((start + rate * x) / measured_us - 1)[held_out]
    return float(start), float(rate), float(np.median(error))


def study_transport(folder: Path, pandas: Any) -> list[dict[str, Any]]:
    found = []
    normal = pandas.read_parquet(folder / "h100_sxm__comm__sglang__0.5.12__wideep_deepep_normal_perf.parquet")
    normal = normal[normal.dispatch_sms == 20]
    # Tokens go to distinct GPUs: with random experts, 8·(1 − (7/8)^k) of 8, of which 7 in 8 are other GPUs.
    copies = normal.num_token * 7 * (1 - (7 / 8) ** normal.num_topk)
    low = pandas.read_parquet(folder / "h100_sxm__comm__sglang__0.5.12__wideep_deepep_ll_perf.parquet")
    each = low.num_token * low.num_topk * 7 / 8
    for name, rows, count, columns in (
        ("DeepEP normal", normal, copies, ("dispatch_transmit_us", "combine_transmit_us")),
        ("DeepEP low latency", low, each, ("dispatch_avg_t_us", "combine_avg_t_us")),
    ):
        for column, bytes_per_value in zip(columns, (1, 2), strict=True):
            kilobytes = (count * rows.hidden_size * bytes_per_value).to_numpy(float) / 1e3
            start, rate, error = fit_line(kilobytes, rows[column].to_numpy(float))
            found.append({"transport": f"{name} {column.split('_')[0]}", "start_us": start, "gb_per_s": 1 / rate,
                          "median_error": error, "rows": len(rows)})  # fmt: skip
    nccl = pandas.read_parquet(folder / "h100_sxm__comm__nccl__2.29.2__nccl_perf.parquet")
    for operation in ("all_gather", "reduce_scatter"):
        rows = nccl[(nccl.op_name == operation) & (nccl.nccl_dtype == "half") & (nccl.num_gpus == 8)]
        kilobytes = rows.message_size.to_numpy(float) * 2 * 7 / 8 / 1e3
        start, rate, error = fit_line(kilobytes, rows.latency.to_numpy(float) * 1000)
        found.append({"transport": f"NCCL {operation}, 8 GPUs", "start_us": start, "gb_per_s": 1 / rate,
                      "median_error": error, "rows": len(rows)})  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=Path, default=TABLES, help="folder of the measured tables (.parquet)")
    parser.add_argument("--samples", type=int, default=8, help="draws of random loads per row")
    parser.add_argument("--json", type=Path, help="write the constants and errors to this file")
    args = parser.parse_args()
    try:
        import pandas
        import pyarrow
    except ImportError as error:
        sys.exit(f"error: {error.name} is not installed: pip install pandas pyarrow")
    assert pyarrow
    if not (args.tables / PREFILL).is_file():
        sys.exit(f"error: {args.tables} has no {PREFILL}: give the folder of the measured tables with --tables")
    tables = {name: pandas.read_parquet(args.tables / name) for name in (SGLANG, VLLM, PREFILL, DECODE)}
    console, results = Console(width=180), []
    summary = Table(title="Expert kernels on H100: error on held-out rows, and what skewed loads cost")
    for column in (
        "kernel",
        "rows",
        "median",
        "p90",
        "worst ranks",
        "worst loads",
        "skew measured",
        "predicted",
        *NAMES,
    ):
        summary.add_column(column, justify="left" if column == "kernel" else "right")
    for kernel in KERNELS:
        table = tables[kernel.table]
        rows = table[
            (table.hidden_size == kernel.hidden) & (table.inter_size == kernel.intermediate)
            & (table.topk == kernel.top_k) & (table.num_experts == kernel.experts)
            & (table.moe_dtype == kernel.dtype) & (table.moe_tp_size == 1) & (table.moe_ep_size >= 2)
        ].reset_index(drop=True)  # fmt: skip
        if kernel.table == PREFILL:
            # The even rows were measured without padding, which the engine always has.
            rows = rows[rows.distribution != "uniform"].reset_index(drop=True)
        found = study_kernel(kernel, rows, args.samples)
        results.append(found)
        worst_ranks = max(found["by_ranks"].items(), key=lambda item: item[1])
        worst_loads = max(found["by_distribution"].items(), key=lambda item: item[1])
        skew = found["skew"]
        summary.add_row(
            kernel.name, str(found["rows"]), f"{found['median_error']:.1%}", f"{found['p90_error']:.1%}",
            f"{worst_ranks[0]}: {worst_ranks[1]:.1%}", f"{worst_loads[0]}: {worst_loads[1]:.1%}",
            f"{skew['measured']:.2f}" if skew else "-", f"{skew['predicted']:.2f}" if skew else "-",
            *(f"{found['constants_us'][name]:.3g}" for name in NAMES),
        )  # fmt: skip
    console.print(summary)
    transports = study_transport(args.tables, pandas)
    wires = Table(title="Transports inside a node of 8 H100")
    for column in ("transport", "rows", "start µs", "GB/s per GPU", "median error"):
        wires.add_column(column, justify="left" if column == "transport" else "right")
    for one in transports:
        wires.add_row(one["transport"], str(one["rows"]), f"{one['start_us']:.1f}", f"{one['gb_per_s']:.0f}",
                      f"{one['median_error']:.1%}")  # fmt: skip
    console.print(wires)
    if args.json:
        args.json.write_text(json.dumps({"kernels": results, "transports": transports}, indent=1))


if __name__ == "__main__":
    main()
