"""From arguments to the arrays of the simulator."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from clustergym.common.choices import one_of
from clustergym.moe_offload.kernels.state import DECAYS, MAX_AGE, N_LAGS, Task
from clustergym.moe_offload.specs import OffloadConfig
from clustergym.moe_offload.tables import Tables, split_sequences
from clustergym.traces.token_trace import TokenTrace, find_trace

BYTE_LOGIT = 16.0
"""Predicted probabilities are kept as bytes: their log-odds in steps of 1/16, from −8 to 8."""


@lru_cache(maxsize=4)
def _read_once(path: str, modified_ns: int) -> TokenTrace:
    return TokenTrace.load(path)


def load_once(source: str | Path | TokenTrace) -> TokenTrace:
    """The trace of a configuration. A file is read once for all environments."""
    if isinstance(source, TokenTrace):
        return source
    path = find_trace(source)
    return _read_once(str(path), path.stat().st_mtime_ns if path.is_file() else 0)


@lru_cache(maxsize=4)
def parts_of(trace: TokenTrace) -> dict[str, TokenTrace]:
    """The parts of a trace (:func:`~clustergym.moe_offload.tables.split_sequences`). ``train`` is for rules and policies:
    what the tables and the predictor were not fitted on."""
    return {"train" if name == "tune" else name: part for name, part in split_sequences(trace).items()}


@lru_cache(maxsize=4)
def tables_of(trace: TokenTrace) -> Tables:
    """Tables of the part ``fit`` of a trace."""
    return Tables.count(parts_of(trace)["fit"])


def served_part(config: OffloadConfig) -> TokenTrace:
    """The sequences that a configuration serves."""
    trace = load_once(config.trace)
    if config.split == "all":
        return trace
    parts = parts_of(trace)
    one_of(config.split, [*parts, "all"], "split")
    return parts[config.split]


def groups_of(lengths: npt.NDArray[np.int64], batch: int) -> npt.NDArray[np.int32]:
    """(episodes, batch) sequences that are served together: neighbours by length; −1 fills the last row."""
    order = np.arange(len(lengths)) if batch == 1 else np.argsort(lengths, kind="stable")
    rows = -(-len(order) // batch)
    groups = np.full(rows * batch, -1, np.int32)
    groups[: len(order)] = order
    return groups.reshape(rows, batch)


def warm_start(prior: npt.NDArray[np.float32], slots: int, gpus: int, per_layer: bool) -> npt.NDArray[np.int8]:
    """(L, E) the GPU of each expert at the start, −1 for none: the most popular ones fill the slots, GPU by GPU in turn.

    >>> warm_start(np.array([[.4, .1], [.2, .3]], np.float32), 2, 1, False).tolist()
    [[0, -1], [-1, 0]]
    """
    home = np.full(prior.shape, -1, np.int8)
    for part, scores in zip(home, prior, strict=True) if per_layer else [(home.reshape(-1), prior.reshape(-1))]:
        best = np.argsort(-scores, kind="stable")[: slots * gpus]
        part[best] = np.arange(len(best)) % gpus
    return home


def slots_of(config: OffloadConfig, layers: int, experts: int) -> int:
    """Slots of one GPU in one pool: the nearest whole number to the share, at least 1."""
    cells = experts if config.per_layer else layers * experts
    return max(1, int(config.slots * cells / config.gpus + 0.5))


def chances(tables: Tables) -> npt.NDArray[np.float32]:
    """(N_LAGS, L, E, E) the probabilities that ``tables.lifts`` stand for."""
    prior = tables.prior()
    odds = np.log(prior / (1 - prior))
    layers = np.arange(len(odds))
    lags = [*range(1, N_LAGS), 0]  # the last table is for the same layer
    to = odds[(layers[None] + np.array(lags)[:, None]) % len(odds)]
    return (1 / (1 + np.exp(-(tables.lifts + to[:, :, None])))).astype(np.float32)


def build_task(config: OffloadConfig, tables: Tables | None = None) -> Task:
    """The constant arrays of a configuration. Traces and tables are shared by all that use the same ones."""
    trace = served_part(config)
    if tables is None:
        tables = tables_of(load_once(config.trace if config.fit_on is None else config.fit_on))
    tables.check(trace)
    layers, experts = trace.n_layers, trace.n_experts
    prior = (1 - (1 - tables.popularity.astype(np.float64)) ** config.batch).astype(np.float32)
    slots, megabytes = slots_of(config, layers, experts), config.megabytes(trace)
    per_layer_and_gpu = slots if config.per_layer else -(-slots // layers)
    predictor: Any = None
    reuse, ahead = (0, 0) if predictor is None else (predictor.n_reuse, predictor.n_ahead)
    foresight = np.zeros((trace.n_tokens if reuse + ahead else 1, layers, experts, reuse + ahead), np.uint8)
    return Task(
        experts=np.ascontiguousarray(trace.experts),
        starts=trace.seq_starts,
        lengths=trace.seq_lens,
        groups=groups_of(trace.seq_lens, config.batch),
        max_tokens=2**31 - 1 if config.max_tokens is None else config.max_tokens,
        prior=prior,
        logit=np.log((tables.prior()) / (1 - tables.prior())).astype(np.float32),
        home=warm_start(prior, slots, config.gpus, config.per_layer),
        lift=tables.lifts,
        chance=chances(tables),
        decay=(np.array(DECAYS)[:, None] ** np.arange(MAX_AGE)).astype(np.float32),
        pools=layers if config.per_layer else 1,
        slots=slots,
        gpus=config.gpus,
        load_ms=megabytes / config.link_gb_s,
        peer_ms=megabytes / config.peer_gb_s,
        layer_ms=float(config.layer_ms),
        expert_ms=float(config.expert_ms),
        horizon=min(config.horizon, max(layers - 1, 1)),
        low_rows=config.low_rows,
        own_rows=min(2 * per_layer_and_gpu, experts),
        load_rows=config.load_rows,
        move_rows=8 if config.gpus > 1 else 0,
        context_rows=config.context_rows,
        foresight=foresight,
        reuse=reuse,
        byte_logit=((np.arange(256) - 128) / BYTE_LOGIT).astype(np.float32),
    )
