"""Compares planners on held-out traffic: the numbers behind ``clustergym eval`` and the benchmarks.

Confidence intervals come from the sequences of the trace. A plan that is made once serves passes of resampled
sequences, see :mod:`clustergym.planners.heldout`. Planners that plan after every interval would have to plan
again for every resample. Instead the sequences are dealt into disjoint groups, as many as can each fill a stream
without serving a token twice, and each stream is drawn from one group. If there are more streams than groups, the
sequences are dealt again. See :func:`clustergym.common.statistics.ci95_of_deals`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt

from clustergym.common.choices import index_of_choice
from clustergym.common.statistics import ci95_of_deals
from clustergym.moe_placement.simulator import Placement, Served, Simulator
from clustergym.moe_placement.streams import Interval, IntervalStream, Traffic, sample_passes
from clustergym.planners.base import Planner
from clustergym.planners.eplb import EPLB
from clustergym.planners.heldout import PASSES_OF_A_PERMANENT_PLAN, Observed, Resampled, resamples_of, sample_tokens
from clustergym.planners.registry import make_planner
from clustergym.traces.splits import SAME_DOMAINS, SPLITS, split_trace
from clustergym.traces.token_trace import TokenTrace

Policy = Callable[[Any], Any]
"""From an observation to an action"""
LEARNS_FROM = {f"{name}{kind}": f"train{kind}" for kind in ("", SAME_DOMAINS) for name in ("validation", "test")}
"""Split → the one that a planner which is compared on it may learn from: they share no sequence."""


@dataclass(frozen=True)
class Protocol:
    """How planners are compared.

    With the ``stationary`` schedule, a planner sees passes of the planning part of the trace and plans once. That plan
    serves all intervals of the held-out part. It is loaded at startup, so there is no migration. With the other
    schedules, a planner sees the sampled passes of each interval after it was served, and may move experts before the
    next one. The first interval is only observed; all planners but ``static`` start from EPLB's placement for it.
    """

    traffic: Traffic = field(default_factory=lambda: Traffic(schedule="drift"))
    """Phase, sizes and schedule of the traffic."""
    intervals: int = 7
    """Intervals per stream that are served and counted."""
    streams: int = 1
    """Number of streams. Results are means over them. Two or more give a confidence interval; with the ``stationary``
    schedule one is enough."""
    seed: int = 0
    split: str = "all"
    """Part of the trace to use: ``train``, ``validation``, ``test`` or ``all``. See
    :func:`clustergym.traces.splits.split_trace`."""
    holdout: float = 0.5
    """Share of the tokens of each domain that is held out from planning with the ``stationary`` schedule."""
    plan_passes: int = 32
    """Passes of the planning part that planners on tokens see with the ``stationary`` schedule."""
    observe_tokens: int | None = None
    """Tokens that planners on tokens see of what they observe, drawn at random; by default all."""

    def __post_init__(self) -> None:
        index_of_choice(self.split, SPLITS, "split")
        for key in ("intervals", "streams", "plan_passes", "observe_tokens"):
            if getattr(self, key) is not None and getattr(self, key) < 1:
                raise ValueError(f"{key} is {getattr(self, key)}: expected at least 1")
        if not 0 < self.holdout < 1:
            raise ValueError(f"holdout is {self.holdout}: expected more than 0 and less than 1")

    @property
    def stationary(self) -> bool:
        return self.traffic.schedule == "stationary"

    @property
    def intervals_per_stream(self) -> int:
        """Intervals that a stream must be able to fill, the observed one included."""
        return self.intervals + (not self.stationary)

    def parts(self, trace: TokenTrace) -> tuple[TokenTrace, TokenTrace]:
        """(planning part, served part) of a trace. With the ``stationary`` schedule no sequence is in both; with the
        others both are the whole split."""
        chosen = split_trace(trace, self.split)
        return chosen.split(1 - self.holdout, seed=self.seed) if self.stationary else (chosen, chosen)


# Traffic


def deal_sequences(trace: TokenTrace, groups: int, seed: int) -> list[TokenTrace]:
    """Deal the sequences into disjoint groups at random, those of each domain evenly."""
    if groups == 1:
        return [trace]
    rng = np.random.default_rng(seed)
    # Domains in random order, because the last sequences of a domain may not reach every group.
    rank = rng.permutation(len(trace.domain_names))[np.searchsorted(trace.domain_names, trace.domains)]
    order = np.lexsort((rng.random(trace.n_sequences), rank))
    group = np.empty(trace.n_sequences, int)
    for start in range(0, trace.n_sequences, groups):
        block = order[start : start + groups]
        group[block] = rng.permutation(groups)[: len(block)]
    return [trace.select(sequences=np.flatnonzero(group == g)) for g in range(groups)]


@dataclass(frozen=True)
class Deals:
    """The sequences that each stream is drawn from."""

    parts: list[TokenTrace]
    """One trace per stream"""
    groups: int
    """Streams whose sequences are disjoint: the number of independent samples."""


@lru_cache(maxsize=4)
def deal_streams(trace: TokenTrace, n_gpus: int, protocol: Protocol) -> Deals:
    """Give each stream its sequences, in as many disjoint groups as can fill a stream without repeating a token.

    With ``allow_reuse`` there are at least two groups if there are several streams, and a stream repeats tokens.

    Raises:
        ValueError: the trace cannot fill two groups (or one, for a single stream).
    """
    traffic, streams, needed = protocol.traffic, protocol.streams, protocol.intervals_per_stream
    fewest = min(2, streams)
    most = min(streams, trace.n_sequences, traffic.capacity(trace, n_gpus) // needed)
    for groups in range(most, fewest - 1, -1):
        parts: list[TokenTrace] = []
        for deal in range(-(-streams // groups)):
            parts += deal_sequences(trace, groups, protocol.seed + deal)
        parts = parts[:streams]
        if all(traffic.capacity(part, n_gpus) >= needed for part in parts):
            return Deals(parts, groups)
    if traffic.allow_reuse and trace.n_sequences >= fewest:
        deals = [deal_sequences(trace, fewest, protocol.seed + deal) for deal in range(-(-streams // fewest))]
        return Deals([part for deal in deals for part in deal][:streams], fewest)
    traffic.check(trace, n_gpus, fewest * needed)
    raise ValueError(
        f"{trace.name}: {trace.n_sequences} sequences cannot be dealt into two groups that fill {needed} intervals "
        "each: give a longer trace, or serve tokens again with allow_reuse"
    )


def same_mixture(interval: Interval, trace: TokenTrace, traffic: Traffic, seed: int) -> Interval:
    """Other tokens of the interval's domains: what a planner would see that forecasts the mixture, but not the tokens.

    Pieces of the trace that the interval does not use are drawn from each domain, with repetition if there are few.
    """
    rng, pieces = np.random.default_rng(seed), traffic.cut(trace)
    n_domains = len(pieces.domain_start) - 1
    domain = np.empty(len(pieces.piece_row), int)
    domain[pieces.domain_pieces] = np.repeat(np.arange(n_domains), np.diff(pieces.domain_start))
    used = np.zeros(trace.n_tokens, bool)
    used[interval.rows] = True
    other = ~used[pieces.piece_row]
    sequence = np.searchsorted(trace.seq_starts, interval.rows.ravel(), side="right") - 1
    wanted = np.bincount(np.searchsorted(trace.domain_names, trace.domains)[sequence], minlength=n_domains)
    drawn = []
    for d in np.flatnonzero(wanted):
        candidates = np.flatnonzero(other & (domain == d))
        if not len(candidates):
            candidates = np.flatnonzero(other) if other.any() else np.flatnonzero(domain == d)
        candidates = rng.permutation(candidates)
        ends = np.cumsum(np.tile(pieces.piece_tokens[candidates], -(-wanted[d] // len(candidates))))
        drawn.append(np.resize(candidates, int(np.searchsorted(ends, wanted[d])) + 1))
    order = rng.permutation(np.concatenate(drawn))
    shape = interval.rows.shape
    if traffic.phase == "decode":
        rows = (pieces.piece_row[order][: shape[1]] + np.arange(shape[0])[:, None]).astype(np.int32)
    else:
        starts, tokens = pieces.piece_row[order], pieces.piece_tokens[order]
        ends = np.cumsum(tokens)
        rows = (np.repeat(starts - ends + tokens, tokens) + np.arange(ends[-1])).astype(np.int32)[: interval.rows.size]
    return Interval(interval.experts, rows.reshape(shape), interval.rank_start)


def reused_share(intervals: Sequence[Interval]) -> float:
    """Share of the tokens of a stream that it served before."""
    rows = np.concatenate([interval.rows.ravel() for interval in intervals])
    return 1 - len(np.unique(rows)) / len(rows)


# Results


@dataclass
class Result:
    """Results of one planner or policy: means over layers, intervals and streams.

    Times are µs per layer and forward pass. What a policy's environment does not tell is None.
    """

    planner: str
    served_us: float
    migration_us: float
    total_us: float
    total_ci95_us: float
    """Half width of the 95 % confidence interval of the total (0 for one stream, unless the plan is made once)."""
    decision_ms: float
    """Planning time per layer and interval."""
    groups: int
    """Disjoint groups of sequences that the streams are drawn from."""
    balancedness: float | None = None
    """Mean over maximum of the GPUs' token-expert pairs."""
    gpus_per_token: float | None = None
    inter_node_mb: float | None = None
    """MB dispatched between nodes per layer and pass."""
    moves: float | None = None
    """Replicas fetched per layer and interval."""
    reused: float = 0.0
    """Share of the tokens of a stream that it served before."""
    stream_totals_us: list[float] = field(default_factory=list)
    interval_totals_us: list[float] = field(default_factory=list)
    """Total of each interval, mean over layers and streams."""
    resampled: dict[str, Any] | None = None
    """Times of a plan that was made once on resampled sequences: the fields of
    :class:`clustergym.planners.heldout.Resampled`, as lists."""

    def versus(self, other: Result) -> tuple[float, float]:
        """(relative time difference to another planner, half width of its 95 % interval), paired by pass or stream."""
        if self.resampled is not None and other.resampled is not None:
            mine, theirs = _resampled(self.resampled), _resampled(other.resampled)
            intervals = len(self.stream_totals_us) * len(self.interval_totals_us)
            return self.total_us / other.total_us - 1, mine.ci95_of_ratio(theirs, intervals)
        relative = np.array(self.stream_totals_us) / np.array(other.stream_totals_us) - 1
        return float(relative.mean()), ci95_of_deals(relative.tolist(), self.groups)

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def _resampled(fields: dict[str, Any]) -> Resampled:
    return Resampled(np.array(fields["us"]), fields["sequences"], fields["pass_share"])


class _Run:
    """One planner on all streams of a protocol."""

    def __init__(self, planner: Planner, protocol: Protocol) -> None:
        self.planner, self.simulator, self.protocol = planner, planner.simulator, protocol
        self.served: list[list[Served]] = []
        """Of each stream, its intervals."""
        self.reused: list[float] = []
        self.decision_s: list[float] = []
        self.resampled: Resampled | None = None

    def observed(self, interval: Interval) -> Interval:
        """What the planner sees of an interval."""
        tokens = self.protocol.observe_tokens
        return sample_tokens(interval, tokens, self.protocol.seed) if tokens and self.planner.needs_tokens else interval

    def plan(self, history: Sequence[Interval], placement: Placement) -> Placement:
        """A timed and checked decision."""
        began = time.perf_counter()
        plan = self.planner.plan(history, placement)
        self.decision_s.append(time.perf_counter() - began)
        return self.simulator.check(plan)

    def plan_once(self, part: TokenTrace) -> Placement | None:
        """With the ``stationary`` schedule, the plan for all streams; None if the planner sees every interval ahead."""
        protocol, planner = self.protocol, self.planner
        if not protocol.stationary or planner.needs_future:
            return None
        planner.reset()
        seen = Observed(
            part, self.simulator, protocol.traffic, protocol.plan_passes, protocol.observe_tokens, protocol.seed
        )  # fmt: skip
        start = seen.static
        if planner.starts_from_eplb:
            start = EPLB(self.simulator).plan([seen.interval(planner)], start)
        return self.plan([seen.interval(planner)], start)

    def serve(self, stream: IntervalStream, part: TokenTrace, seed: int, plan: Placement | None) -> None:
        """Serve a stream on ``plan``, or plan before each interval. A plan for all streams does not migrate."""
        protocol, planner, served = self.protocol, self.planner, []
        intervals, history = stream.take(protocol.intervals_per_stream), []
        placement = self.simulator.static(part.n_layers)
        if not protocol.stationary:
            planner.reset()
            history.append(self.observed(intervals[0]))
            if not planner.keeps_placement:
                eplb = EPLB(self.simulator)
                placement = eplb.pack(eplb.loads(intervals[0]))
        for interval in intervals[len(history) :]:
            chosen, seen = plan, history
            if chosen is None:
                if planner.needs_mixture:
                    seen = [*history, same_mixture(interval, part, protocol.traffic, seed)]
                elif planner.needs_future:
                    seen = [*history, interval]
                chosen = self.plan(seen, placement)
            before = None if protocol.stationary else placement
            served.append(self.simulator.evaluate(interval, chosen, before, check=False))
            if not protocol.stationary:
                placement = chosen
                history.append(self.observed(interval))
        self.served.append(served)
        self.reused.append(reused_share(intervals))

    def result(self, name: str, groups: int) -> Result:
        def mean(pick: Callable[[Served], npt.NDArray[np.floating]]) -> float:
            return float(np.mean([pick(interval).mean() for stream in self.served for interval in stream]))

        totals = np.array([[s.total_us.mean() for s in stream] for stream in self.served])
        streams = [float(np.mean(intervals)) for intervals in totals]
        return Result(
            planner=name,
            served_us=mean(lambda s: s.time_us),
            migration_us=mean(lambda s: s.migration_us),
            total_us=float(np.mean(streams)),
            total_ci95_us=(
                ci95_of_deals(streams, groups)
                if self.resampled is None
                else self.resampled.ci95_us(float(np.mean(streams)), totals.size)
            ),
            balancedness=mean(lambda s: s.balancedness),
            gpus_per_token=mean(lambda s: s.gpus_per_token),
            inter_node_mb=mean(lambda s: s.inter_node_bytes) / 1e6,
            moves=mean(lambda s: s.moves.astype(float)),
            decision_ms=1e3 * float(np.mean(self.decision_s)) / len(self.served[0][0].time_us),
            reused=float(np.mean(self.reused)),
            groups=groups,
            stream_totals_us=streams,
            interval_totals_us=totals.mean(0).tolist(),
            resampled=(
                None
                if self.resampled is None
                else {
                    "us": self.resampled.us.tolist(),
                    "sequences": self.resampled.sequences,
                    "pass_share": self.resampled.pass_share,
                }
            ),
        )


def evaluate_planner(planner: Planner, name: str, train: TokenTrace, test: TokenTrace, protocol: Protocol) -> Result:
    """One planner on all streams of the protocol. ``name`` is the name in the result.

    ``train`` is planned on with the ``stationary`` schedule; streams are drawn from ``test``.
    """
    run, simulator = _Run(planner, protocol), planner.simulator
    if protocol.traffic.phase != simulator.profile.phase:
        raise ValueError(
            f"the traffic is {protocol.traffic.phase}, but profile {simulator.profile.name!r} serves the "
            f"{simulator.profile.phase} phase"
        )
    deals = deal_streams(test, simulator.n_gpus, protocol)
    plan = run.plan_once(train)
    for seed, part in enumerate(deals.parts, protocol.seed):
        run.serve(IntervalStream(part, simulator.n_gpus, protocol.traffic, seed), part, seed, plan)
    if plan is not None:
        run.resampled = resamples_of(test, simulator, protocol.traffic, protocol.seed).serve(plan)
    return run.result(name, deals.groups)


def evaluate_policy(
    make_policy: Callable[[gymnasium.Env[Any, Any]], Policy],
    name: str,
    simulator: Simulator,
    test: TokenTrace,
    protocol: Protocol,
    env_id: str = "MoEPlacement-v0",
    **options: Any,
) -> Result:
    """A policy that acts in an environment, on the streams that planners get with a schedule of several intervals.

    Args:
        make_policy: from the environment to a function from observations to actions.
        env_id: any registered form of the placement environment.
        options: more keyword arguments of the environment.
    """
    deals, seconds, infos = deal_streams(test, simulator.n_gpus, protocol), 0.0, []
    traffic = protocol.traffic
    passes, tokens = traffic.sizes
    for seed, part in enumerate(deals.parts, protocol.seed):
        env = gymnasium.make(
            env_id, trace=part, split="all", cluster=simulator.cluster, model=simulator.model,
            profile=simulator.profile, intervals=protocol.intervals, tokens_per_rank=tokens, sampled_passes=passes,
            passes_per_interval=simulator.passes_per_interval, schedule=traffic.schedule, drift_rate=traffic.rate,
            start="eplb", allow_reuse=traffic.allow_reuse, compare_eplb=False, **options,
        )  # fmt: skip
        policy = make_policy(env)
        obs, info = env.reset(seed=seed)
        ended = False
        while not ended:
            began = time.perf_counter()
            action = policy(obs)
            seconds += time.perf_counter() - began
            obs, _, terminated, truncated, info = env.step(action)
            ended = terminated or truncated
        infos.append(info)
        env.close()
    totals = [float(info["time_us"]) for info in infos]
    decisions = len(deals.parts) * protocol.intervals * test.n_layers
    return Result(
        planner=name,
        served_us=float(np.mean([info["served_us"] for info in infos])),
        migration_us=float(np.mean([info["migration_us"] for info in infos])),
        total_us=float(np.mean(totals)),
        total_ci95_us=ci95_of_deals(totals, deals.groups),
        decision_ms=1e3 * seconds / decisions,
        groups=deals.groups,
        stream_totals_us=totals,
    )


def learn_from_train_split(planner: Planner, trace: TokenTrace, protocol: Protocol) -> None:
    """Let a planner that can learn do so, from the train split of the trace, if no stream is drawn from that split."""
    if planner.learns and protocol.split in LEARNS_FROM:
        planner.learn(split_trace(trace, LEARNS_FROM[protocol.split]))


def compare(
    trace: TokenTrace,
    simulator: Simulator,
    names: Sequence[str],
    protocol: Protocol,
    progress: Callable[[str], None] = lambda name: None,
    options: dict[str, dict[str, object]] | None = None,
    done: Callable[[Result], None] = lambda result: None,
) -> list[Result]:
    """Evaluate every named planner on the same held-out streams.

    Args:
        progress: called with the name of each planner before it runs.
        done: called with the result of each planner after it has run.
        options: more options of some planners, by name.
    """
    train, test = protocol.parts(trace)
    if protocol.stationary:
        # There is no migration, so planners must not count it either.
        simulator = simulator.spread_migration(PASSES_OF_A_PERMANENT_PLAN)
    results = []
    for name in names:
        progress(name)
        planner = make_planner(name, simulator, **{"seed": protocol.seed, **(options or {}).get(name, {})})
        learn_from_train_split(planner, trace, protocol)
        # Decision times must not include compilation.
        planner.plan([compile_on(test, simulator)], simulator.static(test.n_layers))
        results.append(evaluate_planner(planner, name, train, test, protocol))
        done(results[-1])
    return results


def compile_on(trace: TokenTrace, simulator: Simulator) -> Interval:
    """One pass with one token per rank, to call a planner on before its time is taken."""
    traffic = Traffic(simulator.profile.phase, tokens_per_rank=1, sampled_passes=1)
    return sample_passes(trace, simulator.n_gpus, traffic, 1)
