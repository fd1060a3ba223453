"""Rules, the control and the bounds, and the search that tunes them.

A rule is data: a keep score, what it prefetches by, and which of its parameters are tuned. One compiled loop
(:mod:`.kernels.rules`) plays them all in the simulator of the environment. Rules and control are tuned by the same
continuous search on the same sequences: on a coarse grid, a rule would look worse than it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from clustergym.moe_offload.kernels.rules import (
    BACKLOG,
    CLAIRVOYANT,
    COUNTS,
    DECAY,
    DISTANCE,
    FIXED,
    GAIN,
    GIVEN,
    LIKELY,
    N_AHEAD,
    N_PARAMETERS,
    NO_PREFETCH,
    PRIOR,
    RECENCY,
    RECENT,
    THRESHOLD,
    WEIGHT,
    Scores,
    Scratch,
    play,
)  # fmt: skip
from clustergym.moe_offload.kernels.state import GENERATED, N_STATS, Task, new_state
from clustergym.moe_offload.scores import own_shares, scores_of
from clustergym.moe_offload.tables import Tables
from clustergym.traces.token_trace import TokenTrace

if TYPE_CHECKING:
    from clustergym.moe_offload.predictor import Predictor

Kind = Literal["rule", "control", "trained", "random", "bound"]
Vector = npt.NDArray[np.float64]

OFF = 2.0
"""A threshold that no probability reaches."""
CHUNK_TOKENS = 6000
"""Scores are computed for so many tokens at a time, which takes about 200 MB for 24 layers of 32 experts."""
CLAIRVOYANT_TOKENS = 10
"""How far the clairvoyant bound looks ahead, which is farther than the link gets."""


@dataclass(frozen=True)
class Rule:
    """A way to decide what to evict and what to prefetch."""

    name: str
    about: str
    kind: Kind = "rule"
    keep: int = GIVEN
    """Keep score: FIXED, RECENT, COUNTS or GIVEN."""
    keep_source: str = "none"
    """Of GIVEN: see :data:`.scores.SOURCES`."""
    ahead_source: str = "none"
    """What it prefetches by. ``none``: it does not."""
    free: tuple[str, ...] = ()
    """Parameters that are tuned."""
    base: str | None = None
    """The rule whose tuned parameters it starts from."""
    shares: bool = False
    """Whether slots are allocated to layers."""
    fixed: tuple[tuple[str, float], ...] = ()
    """Parameters that differ from those of the base and are not tuned."""
    clairvoyant: bool = False

    @property
    def sources(self) -> tuple[str, str]:
        return self.keep_source, self.ahead_source

    @property
    def mode(self) -> int:
        return CLAIRVOYANT if self.clairvoyant else NO_PREFETCH if self.ahead_source == "none" else LIKELY


PREFETCHING = ("thresholds", "gain", "distance", "backlog")
_UNIT = {FIXED: 1.0, RECENT: 5000.0, COUNTS: 10.0, GIVEN: 1.0}
"""What a keep score is about: GAIN and DISTANCE are in the same unit."""

_RULES = (
    Rule("random", "evicts a random expert", "random", keep_source="random"),
    Rule("static-popular", "keeps what the training sequences use most", keep=FIXED),
    Rule("lru", "evicts what was not used for longest", keep=RECENT),
    Rule("lfu", "evicts what this sequence used least", keep=COUNTS, fixed=(("decay", 1.0), ("prior", 0.1))),
    Rule("decayed-lfu", "the same with counts that decay, popularity and recency", keep=COUNTS,
         free=("decay", "prior", "recency", "distance")),
    Rule("decayed-lfu-shares", "the same with slots allocated to layers by their miss curves", keep=COUNTS,
         base="decayed-lfu", free=("decay", "prior", "recency"), shares=True),
    Rule("lru+transitions", "LRU, prefetches by transition tables", keep=RECENT, ahead_source="transitions",
         base="lru", free=("thresholds", "gain", "backlog")),
    Rule("decayed-lfu+transitions", "decayed LFU, prefetches by transition tables", keep=COUNTS,
         ahead_source="transitions", base="decayed-lfu", free=PREFETCHING),
    Rule("frequency+transitions", "decayed LFU, prefetches by frequency × transition", keep=COUNTS,
         ahead_source="frequency-transitions", base="decayed-lfu", free=PREFETCHING),
    Rule("nearest-sequence", "keeps and prefetches what the most similar past sequence used (MoE-Infinity)",
         keep_source="nearest", ahead_source="nearest", free=PREFETCHING, fixed=(("weights", 1.0),)),
    Rule("next-use-evict", "evicts by predicted next use", "control", keep_source="predictor",
         free=("weights", "distance")),
    Rule("next-use", "the same, prefetches what is predicted above a threshold", "control", keep_source="predictor",
         ahead_source="predictor", base="next-use-evict", free=("thresholds", "gain", "distance", "weights")),
    Rule("next-use+backlog", "the same with a threshold that rises with the backlog of the link", "control",
         keep_source="predictor", ahead_source="predictor", base="next-use", free=(*PREFETCHING, "weights")),
    Rule("belady", "evicts what is needed last; no prefetching", "bound", keep_source="next-visit",
         fixed=(("weights", 1.0),)),
    Rule("next-layer", "evicts as the control or decayed LFU, knows the next layer", "bound", ahead_source="truth",
         base="control", fixed=(("threshold-1", 0.5), ("gain", 5.0))),
    Rule("next-3-layers", "the same, knows the next three layers", "bound", ahead_source="truth", base="control",
         fixed=(("threshold-1", 0.5), ("threshold-2", 0.5), ("threshold-3", 0.5), ("gain", 5.0))),
    Rule("clairvoyant", "knows everything; feasible, and no proven optimum", "bound", keep_source="next-visit",
         clairvoyant=True, fixed=(("weights", 1.0),)),
)  # fmt: skip
RULES = {rule.name: rule for rule in _RULES}
CONTROL = "next-use+backlog"
"""The control with all its terms."""


@dataclass(frozen=True)
class _Parameter:
    index: int
    start: float
    step: float
    low: float
    high: float
    scaled: bool = False
    """Whether start, step and limits are in units of the keep score."""


_SPACE: dict[str, tuple[_Parameter, ...]] = {
    "decay": (_Parameter(DECAY, 0.96, 0.015, 0.5, 0.9995),),
    "prior": (_Parameter(PRIOR, 8.0, 3.0, 0.0, 60.0),),
    "recency": (_Parameter(RECENCY, 1.0, 0.5, 0.0, 20.0),),
    "distance": (_Parameter(DISTANCE, 0.0, 0.06, -1.0, 2.0, scaled=True),),
    "thresholds": tuple(_Parameter(THRESHOLD + h, 0.4, 0.1, 0.0, 1.0) for h in range(N_AHEAD)),
    "gain": (_Parameter(GAIN, 1.0, 0.5, 0.0, 50.0, scaled=True),),
    "backlog": (_Parameter(BACKLOG, 0.0, 0.15, 0.0, 5.0),),
    "weights": tuple(_Parameter(WEIGHT + w, (0.25, 0.25, 0.25, 0.25, 0.0, 0.0)[w], 0.1, -2.0, 2.0) for w in range(6)),
}


def start_values(rule: Rule, base: Vector | None = None) -> Vector:
    """Parameters before tuning: those of the tuned base, or defaults."""
    z = np.zeros(N_PARAMETERS)
    for name, group in _SPACE.items():
        for parameter in group:
            z[parameter.index] = parameter.start * (_UNIT[rule.keep] if parameter.scaled else 1.0)
            if name == "thresholds" and "thresholds" not in rule.free:
                z[parameter.index] = OFF
    if base is not None:
        started = [p.index for name in ("thresholds", "gain") if name in rule.free for p in _SPACE[name]]
        z[[i for i in range(N_PARAMETERS) if i not in started]] = np.delete(base, started)
        if rule.base is not None and RULES.get(rule.base, rule).mode == LIKELY:
            z = base.copy()
    for name, value in rule.fixed:
        if name.startswith("threshold-"):
            z[THRESHOLD + int(name[-1]) - 1] = value
        elif name == "weights":
            z[WEIGHT:] = 0.0
            z[WEIGHT] = value
        else:
            scale = _UNIT[rule.keep] if name == "gain" else 1.0
            z[_SPACE[name][0].index] = value * scale
    return z


@dataclass
class Outcome:
    """What a policy cost, by episode. An episode is a sequence, or a batch of sequences that are served together."""

    tokens: npt.NDArray[np.int64]
    """(episodes,) tokens of the longest sequence: steps of the model"""
    stall_ms: Vector
    compute_ms: Vector
    stats: npt.NDArray[np.int64]
    """(episodes, N_STATS): see :mod:`.kernels.state`"""

    @property
    def stall_ms_per_token(self) -> float:
        return float(self.stall_ms.sum() / self.tokens.sum())

    @property
    def generated(self) -> int:
        """Tokens of all sequences."""
        return int(self.stats[:, GENERATED].sum())

    @classmethod
    def join(cls, parts: list[Outcome]) -> Outcome:
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in cls.__dataclass_fields__))

    @classmethod
    def mean(cls, outcomes: list[Outcome]) -> Outcome:
        """Of several policies on the same episodes; numbers of events are rounded."""
        stall_ms, compute_ms, stats = (
            np.mean([getattr(outcome, name) for outcome in outcomes], 0) for name in ("stall_ms", "compute_ms", "stats")
        )
        return cls(outcomes[0].tokens, stall_ms, compute_ms, np.rint(stats).astype(np.int64))


def new_scratch(task: Task) -> Scratch:
    """Memory of a rule that plays a task."""
    return Scratch(
        score=np.zeros(task.prior.shape, np.float32),
        counts=np.zeros(task.prior.shape, np.float32),
        last=np.zeros(task.prior.shape, np.int32),
        lowest=np.zeros((task.gpus, len(task.prior)), np.float32),
        worst=np.zeros((task.gpus, len(task.prior)), np.int32),
    )


@dataclass
class Workload:
    """Sequences that rules are played on.

    Args:
        task: of the simulator, for ``trace``.
        trace: all sequences that the task serves.
        tables, predictor: what rules know.
        reuse: keep the scores of all sequences in memory, for tuning.
    """

    task: Task
    trace: TokenTrace
    tables: Tables
    predictor: Predictor | None = None
    reuse: bool = False
    _scores: dict[tuple[int, str], Scores] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self._state = new_state(self.task, 1)
        self._scratch = new_scratch(self.task)
        groups = self.task.groups
        steps = np.where(groups >= 0, self.trace.seq_lens[groups], 0).max(1)
        self.lengths = np.minimum(steps, self.task.max_tokens)
        chunk = (np.cumsum(steps) - steps) // CHUNK_TOKENS
        self.chunks = [np.flatnonzero(chunk == c) for c in np.unique(chunk)]

    def _source(self, chunk: int, source: str) -> Scores:
        if (found := self._scores.get((chunk, source))) is not None:
            return found
        groups = self.task.groups[self.chunks[chunk]]
        members = np.unique(groups[groups >= 0])
        local = np.where(groups >= 0, np.searchsorted(members, groups), -1)
        scores = scores_of(source, self.trace.select(sequences=members), local, self.tables, self.predictor)
        # Of a chunk, the scores of one source are used by many rules in a row, or again and again while tuning.
        if not self.reuse:
            for key in [key for key in self._scores if key[0] != chunk]:
                del self._scores[key]
        self._scores[chunk, source] = scores
        return scores

    def run(self, rule: Rule, z: Vector) -> Outcome:
        """Play a rule on all episodes."""
        return self.run_all([(rule, z)])[0]

    def run_all(self, rules: list[tuple[Rule, Vector]]) -> list[Outcome]:
        """Play several rules. Scores are computed once for all of them."""
        parts: list[list[Outcome]] = [[] for _ in rules]
        for c, episodes in enumerate(self.chunks):
            for (rule, z), found in zip(rules, parts, strict=True):
                found.append(self._play(rule, z, c, episodes))
        return [Outcome.join(found) for found in parts]

    def _play(self, rule: Rule, z: Vector, chunk: int, episodes: npt.NDArray[np.int64]) -> Outcome:
        task, (keep, ahead) = self.task, rule.sources
        source = self._source(chunk, keep)
        scores = Scores(source.first, source.keep, self._source(chunk, ahead).ahead)
        n = len(episodes)
        stall_ms, compute_ms, stats = np.zeros(n), np.zeros(n), np.zeros((n, N_STATS), np.int64)
        if rule.shares:
            task = task._replace(home=self.shares_home())
        play(
            task, self._state, episodes, rule.keep, task.pools > 1 or rule.shares, rule.mode,
            CLAIRVOYANT_TOKENS * self.trace.n_layers, z.astype(np.float32), scores, self._scratch, stall_ms, compute_ms,
            stats,
        )  # fmt: skip
        return Outcome(self.lengths[episodes], stall_ms, compute_ms, stats)

    def shares_home(self) -> npt.NDArray[np.int8]:
        """(L, E) the GPU of each expert at the start, if slots are allocated to layers by :func:`allocate_slots`."""
        task = self.task
        if task.pools > 1:
            return task.home
        if not hasattr(self, "_home"):
            quota = allocate_slots(miss_curves(self.trace, self.tables), task.slots * task.gpus)
            self._home = np.full_like(task.home, -1)
            turn = 0
            for l, n in enumerate(quota):
                for e in np.argsort(-task.prior[l], kind="stable")[:n]:
                    self._home[l, e] = turn % task.gpus
                    turn += 1
        return self._home


def miss_curves(trace: TokenTrace, tables: Tables) -> npt.NDArray[np.float64]:
    """(L, E + 1) uses of a layer that miss if it has 0 … E slots and keeps what its sequence used most lately.

    An expert hits if it is among the first so many of its layer, in order of the decayed counts before the token.
    """
    shares = own_shares(trace, tables)
    row = np.arange(trace.n_tokens) + np.repeat(np.arange(trace.n_sequences), trace.seq_lens)
    n_layers, n_experts = tables.shape
    curves = np.zeros((n_layers, n_experts + 1))
    for l in range(n_layers):
        rank = np.argsort(np.argsort(-shares[row, l], axis=1, kind="stable"), axis=1)
        experts = trace.experts[:, l]
        used = experts >= 0
        ranks = np.take_along_axis(rank, np.maximum(experts, 0).astype(np.int64), 1)[used]
        curves[l] = used.sum() - np.concatenate([[0], np.cumsum(np.bincount(ranks, minlength=n_experts))])
    return curves


def allocate_slots(curves: npt.NDArray[np.float64], slots: int) -> npt.NDArray[np.int64]:
    """(L,) slots of each layer: one after the other to the layer whose next slot saves most misses."""
    quota = np.zeros(len(curves), np.int64)
    # A curve may save more with its second slot than with its first: take its lower convex hull.
    gains = np.sort(curves[:, :-1] - curves[:, 1:], axis=1)[:, ::-1]
    for _ in range(min(slots, gains.size)):
        left = quota < gains.shape[1]
        gain = np.where(left, np.take_along_axis(gains, np.minimum(quota, gains.shape[1] - 1)[:, None], 1)[:, 0], -1.0)
        quota[int(np.argmax(gain))] += 1
    return quota


def search(
    cost: Callable[[Vector], float], start: Vector, step: Vector, low: Vector, high: Vector, evaluations: int, seed: int
) -> tuple[Vector, float]:
    """Minimise a cost that is flat in places: change some coordinates at random, keep what is better.

    The changes grow after a success and shrink after a failure. When they have become small, they start large again.
    """
    rng = np.random.default_rng(seed)
    best, least, scale = np.clip(start, low, high), np.inf, 1.0
    least = cost(best)
    for _ in range(evaluations):
        changed = rng.random(len(best)) < max(0.4, 1.5 / len(best))
        changed[rng.integers(len(best))] = True
        candidate = np.clip(best + scale * step * changed * rng.standard_normal(len(best)), low, high)
        value = cost(candidate)
        if value < least:
            best, least, scale = candidate, value, min(1.5, scale * 1.5)
        else:
            scale *= 0.96
            if scale < 0.05:
                scale = 1.0
    return best, least


def tune(workload: Workload, rule: Rule, base: Vector | None = None, evaluations: int = 20, seed: int = 0) -> Vector:
    """Parameters with which a rule stalls least on a workload. ``evaluations`` are trials per parameter."""
    z = start_values(rule, base)
    parameters = [p for name in rule.free for p in _SPACE[name]]
    if not parameters:
        return z
    index = np.array([p.index for p in parameters])
    scale = np.array([_UNIT[rule.keep] if p.scaled else 1.0 for p in parameters])
    step, low, high = (scale * np.array([getattr(p, name) for p in parameters]) for name in ("step", "low", "high"))

    def cost(values: Vector) -> float:
        candidate = z.copy()
        candidate[index] = values
        return workload.run(rule, candidate).stall_ms_per_token

    starts = [z[index]]
    if "thresholds" in rule.free and not (rule.base and RULES[rule.base].mode == LIKELY):
        thresholds = np.isin(index, range(THRESHOLD, THRESHOLD + N_AHEAD))
        starts = [np.where(thresholds, value, z[index]) for value in (0.15, 0.25, 0.35, 0.45, 0.6, 0.75)]
    start = min(starts, key=cost)
    z[index] = search(cost, start, step, low, high, evaluations * len(index), seed)[0]
    return z


def tune_all(
    workload: Workload,
    names: list[str],
    evaluations: int = 20,
    seed: int = 0,
    progress: Callable[[str, int, int], None] | None = None,
) -> dict[str, tuple[Rule, Vector]]:
    """Tuned rules by name. Rules that others start from are tuned, too, but not returned unless they are named."""
    done: dict[str, tuple[Rule, Vector]] = {}

    def get(name: str) -> tuple[Rule, Vector]:
        if name in done:
            return done[name]
        rule = RULES[name]
        if rule.base == "control":
            parent = "decayed-lfu" if workload.predictor is None else "next-use-evict"
            rule = replace(rule, base=parent, keep=RULES[parent].keep, keep_source=RULES[parent].keep_source)
        base = None if rule.base is None else get(rule.base)[1]
        done[name] = rule, tune(workload, rule, base, evaluations, seed)
        return done[name]

    for i, name in enumerate(names):
        if progress is not None:
            progress(name, i, len(names))
        get(name)
    return {name: done[name] for name in names}


def as_json(rule: Rule, z: Vector, every: bool = False) -> dict[str, Any]:
    """Parameters by name: those that were tuned, or every one."""
    names = _SPACE if every else rule.free
    return {name: [round(float(z[p.index]), 4) for p in _SPACE[name]] for name in names}
