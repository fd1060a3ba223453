"""From arguments to the arrays of the simulator."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from clustergym.common.choices import index_of_choice
from clustergym.common.extras import require
from clustergym.moe_offload.kernels.state import DECAYS, LOG_STEPS, MAX_AGE, N_LAGS, Task
from clustergym.moe_offload.specs import OffloadConfig
from clustergym.moe_offload.tables import Tables, split_sequences
from clustergym.moe_offload.uses import HORIZON, WITHIN
from clustergym.traces.token_trace import TokenTrace, find_trace

if TYPE_CHECKING:
    from clustergym.moe_offload.predictor import Predictor

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
    """The parts of a trace (:func:`~clustergym.moe_offload.tables.split_sequences`).

    Rules are tuned and policies are trained on ``train``. Tables and predictor are made of ``fit``.
    """
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
    index_of_choice(config.split, [*parts, "all"], "split")
    return parts[config.split]


def groups_of(lengths: npt.NDArray[np.int64], batch: int) -> npt.NDArray[np.int32]:
    """(episodes, batch) sequences that are served together: neighbours by length; −1 fills the last row."""
    order = np.arange(len(lengths)) if batch == 1 else np.argsort(lengths, kind="stable")
    rows = -(-len(order) // batch)
    groups = np.full(rows * batch, -1, np.int32)
    groups[: len(order)] = order
    return groups.reshape(rows, batch)


def warm_start(prior: npt.NDArray[np.float32], slots: int, gpus: int, per_layer: bool) -> npt.NDArray[np.int8]:
    """(L, E) the GPU of each expert at the start, −1 for none: the most popular ones are dealt to the GPUs' slots.

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
    return np.asarray(1 / (1 + np.exp(-(tables.lifts + to[:, :, None]))), np.float32)


def build_task(config: OffloadConfig, tables: Tables | None = None) -> Task:
    """The constant arrays of a configuration. Traces and tables are shared by all that use the same ones."""
    trace = served_part(config)
    if tables is None:
        source = config.trace if config.fit_on is None else config.fit_on
        tables = source if isinstance(source, Tables) else tables_of(load_once(source))
    tables.check(trace)
    layers, experts = trace.n_layers, trace.n_experts
    prior = (1 - (1 - tables.popularity.astype(np.float64)) ** config.batch).astype(np.float32)
    slots, megabytes = slots_of(config, layers, experts), config.megabytes(trace)
    per_layer_and_gpu = slots if config.per_layer else -(-slots // layers)
    predicted = config.predictor is not None
    shape = (trace.n_tokens, layers, experts, len(WITHIN) + HORIZON) if predicted else (1, 1, 1, 0)
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
        foresight=np.zeros(shape, np.uint8),
        reuse=len(WITHIN),
        logs=(0.5 * np.log(np.arange(LOG_STEPS + 2) / LOG_STEPS + 0.02) + 1).astype(np.float32),
        byte_logit=((np.arange(256) - 128) / BYTE_LOGIT).astype(np.float32),
    )


def load_predictor(source: str | Path | Predictor | None) -> Predictor | None:
    """A predictor by its folder, or as it is given."""
    if not isinstance(source, str | Path):
        return source
    require("torch", "train")
    from clustergym.moe_offload.predictor import Predictor

    return Predictor.load(source)


class Foresight:
    """Fills ``task.foresight`` with what a predictor says about a sequence, when the sequence is first served."""

    def __init__(self, config: OffloadConfig, task: Task) -> None:
        self.trace, self.task = served_part(config), task
        self.predictor = load_predictor(config.predictor)
        if self.predictor is not None:
            self.predictor.check(self.trace)
        self._known = np.zeros(self.trace.n_sequences, bool)

    def prepare(self, groups: npt.NDArray[np.integer[Any]]) -> None:
        """Predict for the sequences of these groups, as far as it was not done before."""
        if self.predictor is None:
            return
        sequences = np.unique(self.task.groups[groups])
        new = [q for q in sequences[sequences >= 0].tolist() if not self._known[q]]
        for sequence in new:
            found = self.predictor.predict(self.trace.select(sequences=[sequence]))
            first = self.trace.seq_starts[sequence]
            part = self.task.foresight[first : first + self.trace.seq_lens[sequence]]
            part[..., : len(WITHIN)] = to_bytes(found.keep)
            part[..., len(WITHIN) :] = to_bytes(np.moveaxis(found.ahead, 0, -1))
            self._known[sequence] = True


def to_bytes(probabilities: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """Probabilities as bytes of ``Task.byte_logit``."""
    sure = np.clip(probabilities, 1e-6, 1 - 1e-6)
    logit = np.log(sure / (1 - sure))
    return np.asarray(np.clip(np.round(logit * BYTE_LOGIT) + 128, 0, 255), np.uint8)


def stream_keys(seeds: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """First states of random number generators: hashed, because similar states would give similar numbers."""
    z = seeds.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
