"""The shipped policy: the control, improved by trials of prefetches.

The control knows how likely an expert is used soon, but not what a prefetch does to the link. So at random moments of
training sequences the simulator tries several prefetches, and none, and lets the control go on for some tokens
(:mod:`.kernels.trials`). The trace is recorded, so the difference in stall is caused by the prefetch alone. A small
network learns it from the observation of ``MoEOffload-v0``; the policy prefetches what saves most. It evicts as the
control. This is one step of policy iteration.

The network sees one row of the table at a time, with the state of the link and a summary of the table. So it does not
depend on the numbers of layers and experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from clustergym.moe_offload.kernels.observation import (
    _DISTANCE,
    N_CONTEXT_FEATURES,
    N_EXPERT_FEATURES,
    NEAR,
    new_observation,
)
from clustergym.moe_offload.kernels.rules import DISTANCE, WEIGHT
from clustergym.moe_offload.kernels.state import new_state, table_rows
from clustergym.moe_offload.kernels.trials import EMPTY, NO_OP, Trials, try_prefetches
from clustergym.moe_offload.predictor import Predictor
from clustergym.moe_offload.rules import CONTROL, Vector, Workload, new_scratch, tune_all
from clustergym.moe_offload.scores import scores_of
from clustergym.moe_offload.simulator import Foresight, build_task
from clustergym.moe_offload.specs import OffloadConfig
from clustergym.moe_offload.tables import Tables, first_tokens
from clustergym.moe_offload.uses import HORIZON, WITHIN
from clustergym.traces.token_trace import TokenTrace

FORESIGHT = len(WITHIN) + HORIZON
ROW_INPUTS = N_EXPERT_FEATURES + 2 * FORESIGHT
GPU_COLUMNS = [3, 4, 5, 8, 9]
"""Of the observed GPU: backlog, window, free slots, residents of this and of the next layer."""
OTHER_INPUTS = len(GPU_COLUMNS) + N_CONTEXT_FEATURES + 2 * HORIZON
TABLE = {"low_rows": 96, "load_rows": 48}
"""Sizes of the tables that the policy chooses from. With those that the environment has by default, even the control
stalls 2.2 % more on gpt-oss-20b: what it would evict or load is not in the table."""
TRIALS = 6
TOKENS = 8
DISCOUNT = 0.8
HIDDEN = 32
CHUNK_TOKENS = 5000
MASKED = -1e8
TUNE_TOKENS = 8000
MAX_TOKENS = 60_000
"""Of longer traces, sequences with about so many tokens are used."""

Progress = Callable[[str, str], None]


class ImprovedPolicy(nn.Module):
    """Logits of both agents from observations (B, …) of ``MoEOffload-v0`` with a predictor's columns.

    Args:
        z: parameters of the tuned control, which evicts.
        hidden: width of the hidden layer.
    """

    keep_weights: Tensor
    keep_distance: Tensor

    def __init__(self, z: Vector, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.register_buffer("keep_weights", torch.tensor(z[WEIGHT:], dtype=torch.float32))
        # The column of the distance is already divided by the number of layers.
        self.register_buffer("keep_distance", torch.tensor(z[DISTANCE], dtype=torch.float32))
        self.row_mean, self.row_scale = nn.Buffer(torch.zeros(ROW_INPUTS)), nn.Buffer(torch.ones(ROW_INPUTS))
        self.other_mean, self.other_scale = nn.Buffer(torch.zeros(OTHER_INPUTS)), nn.Buffer(torch.ones(OTHER_INPUTS))
        self.row_hidden = nn.Linear(ROW_INPUTS, hidden)
        self.other_hidden = nn.Linear(OTHER_INPUTS, hidden, bias=False)
        self.row_out = nn.Linear(ROW_INPUTS, 1)
        self.other_out = nn.Linear(OTHER_INPUTS, 1, bias=False)
        self.out = nn.Linear(hidden, 1, bias=False)
        nn.init.zeros_(self.out.weight)

    def forward(self, obs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Logits of the rows (B, R), and of the nodes for each row (B, R, 3·G)."""
        experts, gpus, context, mask = obs["experts"], obs["gpus"], obs["context"], obs["action_mask"] > 0
        n_gpus = gpus.shape[1] // 3
        saved = torch.stack([self.saved(experts, gpus[:, g], context) for g in range(n_gpus)], -1)
        zero = torch.zeros_like(saved)
        keep = self.updated_chances(experts) @ self.keep_weights - self.keep_distance * experts[..., _DISTANCE]
        evicting = context[:, :1] > 0
        # A row with nothing to load, which some environments have, is not chosen because of what it would save.
        loads = mask[..., n_gpus : 2 * n_gpus]
        best = torch.where(loads, saved, MASKED).amax(-1)
        rows = torch.where(mask.any(-1), torch.where(evicting, -keep, best), MASKED)
        return rows, torch.where(mask, torch.cat([zero, saved, zero], -1), MASKED)

    @staticmethod
    def updated_chances(experts: Tensor) -> Tensor:
        """(B, R, W) chance of use within 1, 2, 4 … tokens.

        The predictor gave it when the layer was visited. For the next layers, it has said more since: the chance of use
        at the next visit is newer, and what it says about later tokens is kept.
        """
        near = experts[..., _DISTANCE + 1 : _DISTANCE + 1 + HORIZON]
        chance = torch.sigmoid(4 * experts[..., N_EXPERT_FEATURES : N_EXPERT_FEATURES + FORESIGHT])
        within, ahead = chance[..., : len(WITHIN)], (chance[..., len(WITHIN) :] * near).sum(-1, keepdim=True)
        later = (1 - within) / (1 - within[..., :1]).clamp(min=1e-3)
        return torch.where(near.sum(-1, keepdim=True) > 0, 1 - later * (1 - ahead), within)

    def saved(self, experts: Tensor, gpu: Tensor, context: Tensor) -> Tensor:
        """(B, R) stall that is saved by loading each row's expert into a GPU now, in loads. Nothing is 0."""
        row, other = self.inputs(experts, gpu, context)
        return self.saved_by(row, other)

    def saved_by(self, row: Tensor, other: Tensor) -> Tensor:
        row, other = (row - self.row_mean) / self.row_scale, (other - self.other_mean) / self.other_scale
        hidden = torch.relu(self.row_hidden(row) + self.other_hidden(other)[:, None])
        saved: Tensor = (self.out(hidden) + self.row_out(row))[..., 0] + self.other_out(other)
        return saved

    @staticmethod
    def inputs(experts: Tensor, gpu: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs of the rows (B, R, ROW_INPUTS) and the others (B, OTHER_INPUTS), which are the same for all rows."""
        near = experts[..., _DISTANCE + 1 : _DISTANCE + 1 + NEAR][..., :HORIZON]
        chance = torch.sigmoid(4 * experts[..., N_EXPERT_FEATURES:])
        ahead = chance[..., len(WITHIN) :] * near * experts[..., :1]
        row = torch.cat([experts, chance[..., : len(WITHIN)], ahead], -1)
        return row, torch.cat([gpu[:, GPU_COLUMNS], context, ahead.sum(1), ahead.amax(1)], -1)


def gather_trials(
    config: OffloadConfig,
    tables: Tables,
    predictor: Predictor,
    z: Vector,
    decisions: int,
    seed: int = 0,
    progress: Progress | None = None,
) -> Trials:
    """Trials on the sequences of ``config.trace``, all of them, with the control's parameters z."""
    trace = config.trace
    assert isinstance(trace, TokenTrace)
    chance = decisions / (0.8 * trace.n_tokens * trace.n_layers)
    chunk = (trace.seq_starts // CHUNK_TOKENS).astype(np.int64)
    parts: list[Trials] = []
    for c in np.unique(chunk):
        if progress is not None:
            progress("try prefetches", f"{c + 1}/{chunk.max() + 1}")
        part = trace.select(sequences=np.flatnonzero(chunk == c))
        own = replace(config, trace=part, split="all", predictor=predictor, gpus=1, batch=1,
                      load_rows=TABLE["load_rows"])  # fmt: skip
        task = build_task(own, tables)
        Foresight(own, task).prepare(np.arange(len(task.groups)))
        scores = scores_of("predictor", part, task.groups, tables, predictor)
        rows, room = table_rows(task), 1 + int(decisions * part.n_tokens / trace.n_tokens * 1.5)
        state, other = new_state(task, 1), new_state(task, 1)
        state.random[0] = seed * 1000 + c + 1
        o = new_observation(task, rows, 1)
        found = Trials(
            experts=np.zeros((room, rows, o.experts.shape[2]), np.float32),
            gpu=np.zeros((room, o.gpus.shape[2]), np.float32),
            context=np.zeros((room, o.context.shape[1]), np.float32),
            rows=np.full((room, TRIALS), EMPTY, np.int16),
            stall=np.zeros((room, TRIALS), np.float32),
            episode=np.zeros(room, np.int32),
        )
        n = try_prefetches(
            task, state, other, z.astype(np.float32), scores, new_scratch(task), new_scratch(task), o,
            min(chance, 1.0), TOKENS, DISCOUNT, np.zeros(rows, np.float32), found,
        )  # fmt: skip
        kept: list[Any] = [values[:n] for values in found]
        parts.append(Trials(*kept))
    columns: list[Any] = [np.concatenate(values) for values in zip(*parts, strict=True)]
    return Trials(*columns)


def learn(policy: ImprovedPolicy, trials: Trials, epochs: int = 12, rate: float = 3e-3, seed: int = 0) -> float:
    """Fit ``policy.saved`` to the trials. Returns the share of the differences that it explains.

    Only differences between the trials of one decision count, and the no-op saves nothing by definition.
    """
    rng = np.random.default_rng(seed)
    rows, stall = torch.from_numpy(trials.rows.astype(np.int64)), torch.from_numpy(trials.stall)
    inputs = [
        policy.inputs(*(torch.from_numpy(values[start : start + 4096]) for values in trials[:3]))
        for start in range(0, len(rows), 4096)
    ]
    tried = rows.clamp(min=0)[..., None]
    row = torch.cat([each for each, _ in inputs]).gather(1, tried.expand(-1, -1, ROW_INPUTS))
    other = torch.cat([each for _, each in inputs])
    loaded, known = (rows >= 0).float(), (rows != EMPTY).float()
    chosen = row[rows >= 0]
    policy.row_mean.copy_(chosen.mean(0))
    policy.row_scale.copy_(chosen.std(0) + 1e-3)
    policy.other_mean.copy_(other.mean(0))
    policy.other_scale.copy_(other.std(0) + 1e-3)
    assert bool((rows[:, 0] == NO_OP).all())

    def centered(values: Tensor, known: Tensor) -> Tensor:
        return (values - (values * known).sum(1, keepdim=True) / known.sum(1, keepdim=True)) * known

    def loss(i: Tensor) -> Tensor:
        error = -policy.saved_by(row[i], other[i]) * loaded[i] - stall[i]
        return centered(error, known[i]).square().sum(1).mean()

    batch = min(512, len(rows))
    steps = max(1, epochs * (len(rows) // batch))
    optimizer = torch.optim.AdamW(policy.parameters(), lr=rate, weight_decay=1e-4)
    order = torch.empty(0, dtype=torch.int64)
    for step in range(steps):
        if len(order) < batch:
            order = torch.from_numpy(rng.permutation(len(rows)))
        i, order = order[:batch], order[batch:]
        for group in optimizer.param_groups:
            group["lr"] = rate * max(0.03, 1 - step / steps)
        value = loss(i)
        optimizer.zero_grad(set_to_none=True)
        value.backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
    with torch.inference_mode():
        some = torch.arange(min(len(rows), 20_000))
        return 1 - float(loss(some)) / float(centered(stall[some], known[some]).square().sum(1).mean())


def improve(
    config: OffloadConfig,
    predictor: Predictor,
    decisions: int = 30_000,
    evaluations: int = 10,
    seed: int = 0,
    progress: Progress | None = None,
) -> tuple[ImprovedPolicy, float]:
    """Tune the control and improve it, on the sequences of ``config.trace``. Returns what :func:`learn` does, too.

    Args:
        config: what is served; ``fit_on`` are tables.
        predictor: fitted on other sequences.
        decisions: at which prefetches are tried, about.
        evaluations: trials per parameter of the control.
        seed: of everything random.
        progress: told what is going on.
    """
    tables = config.fit_on
    assert isinstance(tables, Tables)
    assert isinstance(config.trace, TokenTrace)
    trace = first_tokens(config.trace, MAX_TOKENS, seed)
    config = replace(config, trace=trace, split="all")
    if progress is not None:
        progress("tune the control", "")
    tuning = first_tokens(trace, TUNE_TOKENS, seed)
    workload = Workload(build_task(replace(config, trace=tuning), tables), tuning, tables, predictor, reuse=True)
    _, z = tune_all(workload, [CONTROL], evaluations, seed)[CONTROL]
    trials = gather_trials(config, tables, predictor, z, decisions, seed, progress)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        policy = ImprovedPolicy(z)
    if progress is not None:
        progress("learn from trials", "")
    return policy, learn(policy, trials, seed=seed)
