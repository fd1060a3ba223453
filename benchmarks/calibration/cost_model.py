"""Fit the cost model to measured kernels and transports, and print the error on rows that were held out.

    python benchmarks/calibration/cost_model.py                       # all kernels, 2 minutes; needs pandas and pyarrow
    python benchmarks/calibration/cost_model.py --json out.json
    python benchmarks/calibration/cost_model.py --constants              # the new fits, in the format of costs.py

The tables are the H100 measurements of NVIDIA's aiconfigurator (Apache-2.0): fused MoE kernels of SGLang and vLLM for
many models, expert-parallel sizes and load distributions; the grouped kernels behind DeepEP ("wideep"); DeepEP and NCCL
transports.

**Kernel.** The time of a GPU's expert kernel is

    max(floor, start + token · received tokens + Σ (expert + block · ⌈m / B⌉ + pair · m))

with the sum over experts with m > 0 tokens. Engines choose another tile B for small passes than for large ones. The
rules of :data:`KERNELS` are theirs, and every tile has its own constants.

**Loads.** A row of a table gives the time for a number of tokens, an expert-parallel size and a load distribution, and
measures the first GPU. Its loads follow from how the measurement was made:

- Power-law loads are random. The measurement is the mean of five draws; we draw from the same law and use the mean of
  the features. The GPU with the highest load is the first one.
- SGLang and vLLM route DeepSeek-V3 with its limit of 4 of 8 expert groups. The router's input has only two values, so
  the limit moves pairs to the experts with the lowest indices, which are on the first GPU.
- SGLang's rows of Mixtral have only the tokens that visit the GPU, and compute all their pairs. The pairs of other GPUs
  run on the first expert.

**Held-out rows.** Rows are sorted by expert-parallel size, loads and tokens. Each third of them is held out in turn, so
every row is predicted once by a fit that has not seen it. A cell is an expert-parallel size with a load distribution.
For comparison: a table that interpolates between the rows that were not held out; the constants in the package, and
constants that follow from the sizes of a model, both on all rows and on those of usual passes (16 or 32 GPUs, 512 to
4096 tokens).

The last columns ask what matters for placement: how much slower is the kernel with skewed loads (power law 1.2 against
balanced), measured and predicted?

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

from clustergym.moe_placement.costs import KernelCosts, Tile, choose_tile, costs_from_sizes, measured_tiles
from clustergym.moe_placement.specs import get_model

sys.path.append(str(Path(__file__).resolve().parents[1]))
from public_data import data_file

Array = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]
SGLANG = "hw/h100_sxm__moe__sglang__0.5.14__moe_perf.parquet"
VLLM = "hw/h100_sxm__moe__vllm__0.24.0__moe_perf.parquet"
PREFILL = "hw/h100_sxm__moe__sglang__0.5.10__wideep_context_moe_perf.parquet"
DECODE = "hw/h100_sxm__moe__sglang__0.5.10__wideep_generation_moe_perf.parquet"
FOLDS = 3
BAR = 0.15
"""Cells with a larger median error are counted."""
WORST = 10
MEASURED_DRAWS = 5
"""Draws of random loads in a measurement."""


@dataclass(frozen=True)
class Rule:
    """Use tiles of ``block_tokens`` rows in passes up to these sizes. The first rule that fits counts."""

    block_tokens: int
    tokens: float = np.inf
    """Tokens of the pass."""
    tokens_per_expert: float = np.inf
    """Tokens of the pass, divided by the experts that the GPU holds."""
    local_experts: int = 0
    """Only if the GPU holds so many experts: engines have tuned settings for some numbers. 0: any."""


# Triton kernels for bf16 weights: the defaults of SGLang 0.5.14 and vLLM 0.24.0 (get_default_config), after their tuned
# settings for 64 experts per GPU, which are here rounded to three tiles.
SGLANG_BF16 = (Rule(16, tokens_per_expert=1), Rule(64))
SGLANG_TUNED = (Rule(16, 192, local_experts=64), Rule(64, 768, local_experts=64), Rule(128, local_experts=64))
VLLM_BF16 = (Rule(16, 32), Rule(32, 96), Rule(64, 512), Rule(128))
VLLM_TUNED = (Rule(16, 80, local_experts=64), Rule(64, 384, local_experts=64), Rule(128, local_experts=64))
# OpenAI's Triton kernel: the pairs of a pass per expert, rounded up to a power of two. gpt-oss has four per token.
VLLM_MXFP4 = (Rule(16, tokens_per_expert=4), Rule(32, tokens_per_expert=8), Rule(64, tokens_per_expert=16), Rule(128))


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
    rules: tuple[Rule, ...] = (Rule(64),)
    groups: int = 0
    """Expert groups of the router. 0: the measurement does not limit groups."""
    group_limit: int = 0
    visitors_only: bool = False
    """The measurement has only the tokens that visit the GPU, and the pairs of other GPUs run on the first expert."""


DEEPSEEK, KIMI = (7168, 2048, 8, 256, "fp8_block"), (7168, 2048, 8, 384, "fp8_block")
QWEN_30B, QWEN_235B = (2048, 768, 8, 128, "bfloat16"), (4096, 1536, 8, 128, "bfloat16")
GPT_20B, GPT_120B = (2880, 2880, 4, 32, "w4a16_mxfp4"), (2880, 2880, 4, 128, "w4a16_mxfp4")
MIXTRAL = (4096, 14336, 2, 8, "bfloat16")
KERNELS = (
    # DeepEP's contiguous layout pads the rows of an expert to 128.
    Kernel("deepep-prefill deepseek-v3", PREFILL, *DEEPSEEK, (Rule(128),)),
    Kernel("deepep-decode deepseek-v3", DECODE, *DEEPSEEK),
    Kernel("sglang qwen3-30b-a3b", SGLANG, *QWEN_30B, SGLANG_TUNED + SGLANG_BF16),
    Kernel("sglang qwen3-235b-a22b", SGLANG, *QWEN_235B, SGLANG_TUNED + SGLANG_BF16),
    Kernel("sglang gpt-oss-20b", SGLANG, *GPT_20B, SGLANG_BF16),
    Kernel("sglang gpt-oss-120b", SGLANG, *GPT_120B, SGLANG_BF16),
    Kernel("sglang mixtral-8x7b", SGLANG, *MIXTRAL, SGLANG_BF16, visitors_only=True),
    Kernel("sglang deepseek-v3", SGLANG, *DEEPSEEK, groups=8, group_limit=4),
    Kernel("sglang kimi-k2", SGLANG, *KIMI),
    Kernel("vllm qwen3-30b-a3b", VLLM, *QWEN_30B, VLLM_BF16),
    Kernel("vllm qwen3-235b-a22b", VLLM, *QWEN_235B, VLLM_TUNED + VLLM_BF16),
    Kernel("vllm gpt-oss-20b", VLLM, *GPT_20B, VLLM_MXFP4),
    Kernel("vllm gpt-oss-120b", VLLM, *GPT_120B, VLLM_MXFP4),
    Kernel("vllm mixtral-8x7b", VLLM, *MIXTRAL, VLLM_BF16),
    Kernel("vllm deepseek-v3", VLLM, *DEEPSEEK, groups=8, group_limit=4),
    Kernel("vllm kimi-k2", VLLM, *KIMI),
)


# Loads behind a row


def add_to_smallest(loads: Counts, tokens: int) -> Counts:
    """The loads after ``tokens`` single tokens, each of which goes to the smallest load at that moment."""
    order = np.argsort(loads, kind="stable")
    ascending = loads[order]
    sums = np.cumsum(ascending)
    # Raising the first i + 1 loads to the (i + 1)th costs this much.
    needed = ascending * np.arange(1, len(loads) + 1) - sums
    raised = int(np.searchsorted(needed, tokens, side="right"))
    level, rest = divmod(tokens + int(sums[raised - 1]), raised)
    ascending[:raised] = level
    ascending[:rest] += 1
    result = np.empty_like(loads)
    result[order] = ascending
    return result


def deal(by_rank: Counts, tokens: int, most: int) -> None:
    """Deal tokens over the ranks in turn. On its rank, a token goes to the smallest load.

    ``tokens`` < 0 takes away from the largest loads instead. Loads end between 0 and ``most``.
    """
    left, sign = abs(tokens), 1 if tokens > 0 else -1
    while left:
        room = (most - by_rank if sign > 0 else by_rank).sum(1)
        open_to = np.flatnonzero(room > 0)
        if len(open_to) == 0:
            return
        # Whole rounds until a rank is full; the last tokens go to the first ranks.
        rounds = max(1, min(left // len(open_to), int(room[open_to].min())))
        for rank in open_to[:left]:
            by_rank[rank] = sign * add_to_smallest(sign * by_rank[rank], rounds)
            left -= rounds


def power_law_loads(
    tokens: int, experts: int, top_k: int, ranks: int, alpha: float, rng: np.random.Generator
) -> Counts:
    """Tokens of every expert, for loads that follow a power law. The most loaded rank comes first."""
    low, high = (1.0, tokens * 0.8) if tokens * top_k > experts else (0.01, 2.0)
    power = 1 - alpha
    drawn = ((high**power - low**power) * rng.random(experts) + low**power) ** (1 / power)
    wanted = np.round(drawn / drawn.sum() * tokens * top_k).astype(np.int64)
    by_rank = np.minimum(wanted, tokens).reshape(ranks, -1)
    deal(by_rank, int((wanted - by_rank.ravel()).sum()), tokens)
    deal(by_rank, tokens * top_k - int(by_rank.sum()), tokens)
    busiest = by_rank.sum(1).argmax()
    by_rank[[0, busiest]] = by_rank[[busiest, 0]]
    return by_rank.ravel()


def choices_of(loads: Counts, tokens: int, top_k: int) -> Counts:
    """(tokens, top_k) distinct experts of each token with these loads."""
    order = np.argsort(-loads, kind="stable")
    return np.repeat(order, loads[order]).reshape(top_k, tokens).T


def balanced_choices(tokens: int, experts: int, top_k: int) -> Counts:
    """(tokens, top_k) experts of each token, spread evenly."""
    stride = -(-experts // top_k)
    token, choice = np.arange(tokens)[:, None], np.arange(top_k)[None]
    first = token if tokens >= stride else token * stride / tokens
    return ((first + choice * stride) % experts).astype(np.int64)


def group_limited_loads(choices: Counts, experts: int, groups: int, limit: int) -> Counts:
    """Tokens of every expert if the router may use ``limit`` of the groups.

    The router's score is high for the wanted experts and low for all others. A group counts with its two best experts;
    on a tie the lower index wins. What the limit refuses goes to the lowest indices of the allowed groups.
    """
    n_tokens, top_k = choices.shape
    size, token = experts // groups, np.arange(n_tokens)[:, None]
    wanted = np.zeros((n_tokens, experts), bool)
    wanted[token, choices] = True
    score = np.minimum(wanted.reshape(n_tokens, groups, size).sum(2), 2)
    allowed = np.zeros((n_tokens, groups), bool)
    allowed[token, np.argsort(-score, axis=1, kind="stable")[:, :limit]] = True
    kept = wanted & np.repeat(allowed, size, axis=1)
    # The first allowed group is large enough for all that is missing.
    first = allowed.argmax(1)[:, None] * size + np.arange(size)
    free = ~wanted[token, first]
    missing = top_k - kept.sum(1)[:, None]
    filled = first[free & (np.cumsum(free, axis=1) <= missing)]
    return kept.sum(0) + np.bincount(filled, minlength=experts)


def row_loads(kernel: Kernel, row: Any, rng: np.random.Generator, samples: int) -> list[tuple[int, Counts]]:
    """(tokens, loads of the measured rank's experts): one for an even distribution, several draws for a random one."""
    tokens, ranks, experts, top_k = int(row.num_tokens), int(row.moe_ep_size), kernel.experts, kernel.top_k
    local = experts // ranks
    if row.distribution == "uniform":
        each = tokens * top_k // experts
        even = np.full(local, each)
        if each == 0:
            even[: tokens * top_k // ranks] = 1
        return [(tokens, even)]
    random, found = row.distribution.startswith("power_law"), []
    for _ in range(samples if random else 1):
        if random:
            alpha = float(row.distribution.split("_")[-1])
            loads = power_law_loads(tokens, experts, top_k, ranks, alpha, rng)
            choices = choices_of(loads, tokens, top_k) if kernel.groups or kernel.visitors_only else None
        else:
            choices = balanced_choices(tokens, experts, top_k)
            loads = np.bincount(choices.ravel(), minlength=experts)
        entering = tokens
        if kernel.groups and choices is not None:
            loads = group_limited_loads(choices, experts, kernel.groups, kernel.group_limit)
        mine = loads[:local].astype(np.int64)
        if kernel.visitors_only and choices is not None:
            entering = int((choices < local).any(1).sum())
            mine[0] += entering * top_k - int(mine.sum())
        found.append((entering, mine))
    return found


def features(loads: list[tuple[int, Counts]], block_tokens: int) -> Array:
    """(draws, 4): received tokens, active experts, blocks and pairs."""
    return np.array([[tokens, (m > 0).sum(), (-(-m // block_tokens)).sum(), m.sum()] for tokens, m in loads], float)


# Fit


def kernel_us(costs: KernelCosts, x: Array) -> Array:
    """The model. ``x`` (..., 4) are features."""
    rates = np.array([costs.token_us, costs.expert_us, costs.block_us, costs.pair_us])
    return np.maximum(costs.floor_us, costs.start_us + x @ rates)


def fit_kernel(x: Array, measured_us: Array, kernel: Kernel, block_tokens: int, least_us: float) -> KernelCosts:
    """Constants with the least robust error of log time. ``least_us`` is the kernel's shortest time in all passes.

    All are positive. A weak pull towards what the sizes suggest decides where the rows do not: in small passes every
    active expert has one block, so the rows only know the sum of both constants.
    """
    weight_bytes = {"bfloat16": 2.0, "fp8_block": 1.0, "w4a16_mxfp4": 0.53}[kernel.dtype]
    expert = 3 * kernel.hidden * kernel.intermediate * weight_bytes / 2.9e6
    pair = 6 * kernel.hidden * kernel.intermediate / 4.5e8
    usual = np.log([least_us, least_us, kernel.hidden / 5e5, expert, pair * block_tokens / 2, pair / 2])
    # A floor below all rows would have no gradient.
    begin = np.append([usual[0], np.log(measured_us.min())], usual[2:])

    def constants(logs: Array) -> KernelCosts:
        start, floor, token, each, block, one = np.exp(logs)
        return KernelCosts(start, floor, token, each, block, block_tokens, one)

    def error(logs: Array) -> Array:
        return np.append(np.log(kernel_us(constants(logs), x) / measured_us), 0.02 * (logs - usual))

    return constants(least_squares(error, begin, loss="soft_l1", f_scale=0.1).x)


class Rows:
    """The rows of a kernel with their features, sorted by ranks, loads and tokens."""

    def __init__(self, kernel: Kernel, table: Any, samples: int) -> None:
        rows = table[
            (table.hidden_size == kernel.hidden) & (table.inter_size == kernel.intermediate)
            & (table.topk == kernel.top_k) & (table.num_experts == kernel.experts)
            & (table.moe_dtype == kernel.dtype) & (table.moe_tp_size == 1) & (table.moe_ep_size >= 2)
        ]  # fmt: skip
        if kernel.table == PREFILL:
            # The even rows were measured without padding, which the engine always has.
            rows = rows[rows.distribution != "uniform"]
        rows = rows.sort_values(["moe_ep_size", "distribution", "num_tokens"]).reset_index(drop=True)
        rng = np.random.default_rng(0)
        self.kernel, self.n = kernel, len(rows)
        self.measured = rows.latency.to_numpy() * 1000.0
        self.tokens, self.ranks = rows.num_tokens.to_numpy(), rows.moe_ep_size.to_numpy()
        self.distribution = rows.distribution.to_numpy()
        self.loads = [row_loads(kernel, row, rng, samples) for row in rows.itertuples()]
        self.fold = np.arange(self.n) % FOLDS

    def sizes(self, i: int) -> tuple[float, int]:
        """Tokens that the kernel sees, and experts on the GPU."""
        return max(tokens for tokens, _ in self.loads[i]), self.kernel.experts // int(self.ranks[i])

    def tile_of(self, tiles: tuple[Tile, ...]) -> list[int]:
        return [tiles.index(choose_tile(tiles, *self.sizes(i))) for i in range(self.n)]

    def predict(self, tiles: tuple[Tile, ...]) -> Array:
        chosen = self.tile_of(tiles)
        return np.array([self.draws_us(i, tiles[t].costs).mean() for i, t in enumerate(chosen)])

    def draws_us(self, i: int, costs: KernelCosts) -> Array:
        return kernel_us(costs, features(self.loads[i], costs.block_tokens))

    def fit(self, use: npt.NDArray[np.bool_]) -> tuple[Tile, ...]:
        """Constants of every tile from the rows in ``use``."""
        nothing = KernelCosts(0, 0, 0, 0, 0, 1, 0)
        rules = self.kernel.rules
        tiles = tuple(Tile(nothing, rule.tokens, rule.tokens_per_expert, rule.local_experts) for rule in rules)
        chosen, fitted = np.array(self.tile_of(tiles)), []
        for t, (tile, rule) in enumerate(zip(tiles, rules, strict=True)):
            own = np.flatnonzero((chosen == t) & use)
            x = np.array([features(self.loads[i], rule.block_tokens).mean(0) for i in own])
            costs = fit_kernel(x, self.measured[own], self.kernel, rule.block_tokens, self.measured.min())
            fitted.append(tile._replace(costs=costs))
        return tuple(fitted)

    def interpolated(self) -> Array:
        """Time of each row from the other thirds, at the same ranks and loads: linear in log tokens and log time."""
        found = np.empty(self.n)
        for i in range(self.n):
            known = (self.ranks == self.ranks[i]) & (self.distribution == self.distribution[i])
            known &= self.fold != self.fold[i]
            at, us = np.log(self.tokens[known]), np.log(self.measured[known])
            found[i] = np.exp(np.interp(np.log(self.tokens[i]), at, us))
        return found

    def usual_error(self, predicted: Array) -> float | None:
        """Median error in the passes of the placement tables: 16 or 32 GPUs, 512 to 4096 tokens. None without rows."""
        usual = np.isin(self.ranks, (16, 32)) & (self.tokens >= 512) & (self.tokens <= 4096)
        return float(np.median(np.abs(predicted / self.measured - 1)[usual])) if usual.any() else None

    def cells(self, predicted: Array) -> dict[str, float]:
        """Median error of each expert-parallel size with each distribution, largest first."""
        error = np.abs(predicted / self.measured - 1)
        keys = sorted({(int(r), str(d)) for r, d in zip(self.ranks, self.distribution, strict=True)})
        found = {f"{r}, {d}": np.median(error[(self.ranks == r) & (self.distribution == d)]) for r, d in keys}
        return {key: float(value) for key, value in sorted(found.items(), key=lambda item: -item[1])}


def error_by(error: Array, labels: Any) -> dict[str, float]:
    return {str(label): float(np.median(error[labels == label])) for label in sorted(set(labels))}


def study_kernel(rows: Rows) -> dict[str, Any]:
    """Fit one kernel. Errors are of rows that the fit has not seen."""
    predicted = np.empty(rows.n)
    for fold in range(FOLDS):
        held_out = rows.fold == fold
        predicted[held_out] = rows.predict(rows.fit(~held_out))[held_out]
    tiles, error = rows.fit(np.ones(rows.n, bool)), np.abs(predicted / rows.measured - 1)
    engine, model = rows.kernel.name.split()
    package, table = rows.predict(measured_tiles(engine, model)), rows.interpolated()
    sizes = rows.predict((Tile(costs_from_sizes(get_model(model))),))
    draws = [rows.draws_us(i, tiles[t].costs) for i, t in enumerate(rows.tile_of(tiles)) if len(rows.loads[i]) > 1]
    # Half of the measurements are further than 0.674 standard deviations from the mean of all draws.
    noise = [0.674 * one.std(ddof=1) / one.mean() / MEASURED_DRAWS**0.5 for one in draws if len(one) > 1]
    return {
        "kernel": rows.kernel.name, "rows": rows.n,
        "tiles": [format_tile(tile) for tile in tiles],
        "median_error": float(np.median(error)), "p90_error": float(np.quantile(error, 0.9)),
        "by_distribution": error_by(error, rows.distribution), "by_ranks": error_by(error, rows.ranks),
        "cells": rows.cells(predicted), "interpolated_cells": rows.cells(table),
        "interpolated_error": float(np.median(np.abs(table / rows.measured - 1))),
        "noise_of_draws": float(np.median(noise)) if noise else 0.0,
        "package_error": float(np.median(np.abs(package / rows.measured - 1))), "package_cells": rows.cells(package),
        "sizes_error": float(np.median(np.abs(sizes / rows.measured - 1))),
        "package_usual": rows.usual_error(package), "sizes_usual": rows.usual_error(sizes),
        "skew": skew_cost(rows, predicted),
    }  # fmt: skip


def skew_cost(rows: Rows, predicted: Array) -> dict[str, float]:
    """How much slower skewed loads are than even ones at equal tokens and ranks: measured, predicted, median error."""
    even = "uniform" if "uniform" in set(rows.distribution) else "balanced"
    place = {key: i for i, key in enumerate(zip(rows.tokens, rows.ranks, rows.distribution, strict=True))}
    pairs = [
        (i, place[key])
        for (tokens, ranks, distribution), i in place.items()
        # Below one token per expert there is no load to skew.
        if distribution == "power_law_1.2" and (key := (tokens, ranks, even)) in place and tokens >= 512
    ]
    if not pairs:
        return {}
    skewed, flat = np.array(pairs).T
    truth, model = rows.measured[skewed] / rows.measured[flat], predicted[skewed] / predicted[flat]
    return {
        "measured": float(np.median(truth)),
        "predicted": float(np.median(model)),
        "error": float(np.median(np.abs(model / truth - 1))),
    }


# Transport


def fit_line(x: Array, measured_us: Array) -> tuple[float, float, Array]:
    """(start, µs per unit, error of each row that was held out, NaN for the others) of start + rate · x."""
    held_out = np.arange(len(x)) % 3 == 0
    found = least_squares(
        lambda p: np.log((np.exp(p[0]) + np.exp(p[1]) * x[~held_out]) / measured_us[~held_out]),
        [np.log(measured_us.min()), np.log(measured_us.max() / x.max())], loss="soft_l1", f_scale=0.1,
    )  # fmt: skip
    start, rate = np.exp(found.x)
    error = np.abs((start + rate * x) / measured_us - 1)
    return float(start), float(rate), np.where(held_out, error, np.nan)


def study_transport(pandas: Any) -> list[dict[str, Any]]:
    found = []
    normal = pandas.read_parquet(data_file("hw/h100_sxm__comm__sglang__0.5.12__wideep_deepep_normal_perf.parquet"))
    normal = normal[normal.dispatch_sms == 20]
    # Tokens go to distinct GPUs: with random experts, 8·(1 − (7/8)^k) of 8, of which 7 in 8 are other GPUs.
    copies = normal.num_token * 7 * (1 - (7 / 8) ** normal.num_topk)
    low = pandas.read_parquet(data_file("hw/h100_sxm__comm__sglang__0.5.12__wideep_deepep_ll_perf.parquet"))
    each = low.num_token * low.num_topk * 7 / 8
    for name, rows, count, columns in (
        ("DeepEP normal", normal, copies, ("dispatch_transmit_us", "combine_transmit_us")),
        ("DeepEP low latency", low, each, ("dispatch_avg_t_us", "combine_avg_t_us")),
    ):
        for column, bytes_per_value in zip(columns, (1, 2), strict=True):
            kilobytes = (count * rows.hidden_size * bytes_per_value).to_numpy(float) / 1e3
            start, rate, error = fit_line(kilobytes, rows[column].to_numpy(float))
            hidden = rows.hidden_size.to_numpy()
            by_hidden = {int(h): float(np.nanmedian(error[hidden == h])) for h in sorted(set(hidden))}
            found.append(
                {
                    "transport": f"{name} {column.split('_')[0]}", "rows": len(rows), "start_us": start,
                    "gb_per_s": 1 / rate, "median_error": float(np.nanmedian(error)), "by_hidden": by_hidden,
                }
            )  # fmt: skip
    nccl = pandas.read_parquet(data_file("hw/h100_sxm__comm__nccl__2.29.2__nccl_perf.parquet"))
    for operation in ("all_gather", "reduce_scatter"):
        rows = nccl[(nccl.op_name == operation) & (nccl.nccl_dtype == "half") & (nccl.num_gpus == 8)]
        kilobytes = rows.message_size.to_numpy(float) * 2 * 7 / 8 / 1e3
        start, rate, error = fit_line(kilobytes, rows.latency.to_numpy(float) * 1000)
        found.append({"transport": f"NCCL {operation}, 8 GPUs", "start_us": start, "gb_per_s": 1 / rate,
                      "median_error": float(np.nanmedian(error)), "by_hidden": {}, "rows": len(rows)})  # fmt: skip
    return found


def format_tile(tile: Tile) -> str:
    """A tile as Python text with three digits."""
    values = ", ".join(f"{value:.3g}" if value >= 1e-4 else "0" for value in tile.costs)
    limits = [
        f"{name}={value:g}"
        for name, value, default in zip(Tile._fields[1:], tile[1:], (np.inf, np.inf, 0), strict=True)
        if value != default
    ]
    return f"Tile({', '.join([f'KernelCosts({values})', *limits])})"


def percent(error: float | None) -> str:
    return "-" if error is None else f"{error:.1%}"


def show(console: Console, results: list[dict[str, Any]], transports: list[dict[str, Any]]) -> None:
    summary = Table(title="Expert kernels on H100: error on held-out rows, and what skewed loads cost")
    columns = (
        "kernel", "rows", "tiles", "median", "p90", "worst cell", "cells > 15 %", "interpolated", "its worst cell",
        "noise of draws", "package", "its worst cell", "usual passes", "from sizes", "usual passes", "skew measured",
        "predicted",
    )  # fmt: skip
    for column in columns:
        summary.add_column(column, justify="left" if column == "kernel" else "right")
    for found in results:
        skew = found["skew"]
        worst, table, package = (
            next(iter(found[key].items())) for key in ("cells", "interpolated_cells", "package_cells")
        )
        above = sum(value > BAR for value in found["cells"].values())
        summary.add_row(
            found["kernel"], str(found["rows"]), str(len(found["tiles"])), f"{found['median_error']:.1%}",
            f"{found['p90_error']:.1%}", f"{worst[0]}: {worst[1]:.1%}", f"{above} of {len(found['cells'])}",
            f"{found['interpolated_error']:.1%}", f"{table[0]}: {table[1]:.1%}", f"{found['noise_of_draws']:.1%}",
            f"{found['package_error']:.1%}", f"{package[0]}: {package[1]:.1%}", percent(found["package_usual"]),
            f"{found['sizes_error']:.1%}", percent(found["sizes_usual"]),
            f"{skew['measured']:.2f}" if skew else "-", f"{skew['predicted']:.2f}" if skew else "-",
        )  # fmt: skip
    console.print(summary)
    cells = Table(title=f"The {WORST} cells with the largest median error")
    for column in ("kernel", "EP size, loads", "error", "interpolated table"):
        cells.add_column(column, justify="right" if column in ("error", "interpolated table") else "left")
    every = [(error, found, cell) for found in results for cell, error in found["cells"].items()]
    for error, found, cell in sorted(every, key=lambda item: -item[0])[:WORST]:
        cells.add_row(found["kernel"], cell, f"{error:.1%}", f"{found['interpolated_cells'][cell]:.1%}")
    console.print(cells)
    wires = Table(title="Transports inside a node of 8 H100")
    for column in ("transport", "rows", "start µs", "GB/s per GPU", "median error", "worst hidden size"):
        wires.add_column(column, justify="left" if column == "transport" else "right")
    for one in transports:
        worst = max(one["by_hidden"].items(), key=lambda item: item[1], default=None)
        wires.add_row(one["transport"], str(one["rows"]), f"{one['start_us']:.1f}", f"{one['gb_per_s']:.0f}",
                      f"{one['median_error']:.1%}", f"{worst[0]}: {worst[1]:.1%}" if worst else "-")  # fmt: skip
    console.print(wires)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=16, help="draws of random loads per row")
    parser.add_argument("--only", default="", help="only kernels whose name contains this text")
    parser.add_argument("--constants", action="store_true", help="print the constants, fitted to all rows")
    parser.add_argument("--json", type=Path, help="write the constants and errors to this file")
    args = parser.parse_args()
    try:
        import pandas
        import pyarrow
    except ImportError as error:
        sys.exit(f"error: {error.name} is not installed: pip install pandas pyarrow")
    assert pyarrow
    tables = {name: pandas.read_parquet(data_file(name)) for name in (SGLANG, VLLM, PREFILL, DECODE)}
    console, results = Console(width=270), []
    for kernel in KERNELS:
        if args.only in kernel.name:
            results.append(study_kernel(Rows(kernel, tables[kernel.table], args.samples)))
            if args.constants:
                print(kernel.name, *results[-1]["tiles"], sep="\n    ")
    transports = study_transport(pandas)
    show(console, results, transports)
    if args.json:
        args.json.write_text(json.dumps({"kernels": results, "transports": transports}, indent=1))


if __name__ == "__main__":
    main()
