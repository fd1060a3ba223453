"""Planners side by side on held-out traffic: the numbers behind ``clustergym eval`` and the benchmarks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np
import numpy.typing as npt

from clustergym.common.choices import one_of
from clustergym.common.statistics import ci95
from clustergym.moe_placement.planner_registry import make_planner
from clustergym.moe_placement.planners.base import Planner
from clustergym.moe_placement.planners.heuristics import EPLB
from clustergym.moe_placement.simulator import Placement, Served, Simulator, Stream, Window
from clustergym.moe_placement.stream import SCHEDULES
from clustergym.traces.token_trace import TokenTrace

# Forward passes over which a migration costs nothing that matters.
_FOREVER = 10**12


@dataclass(frozen=True)
class Protocol:
    """How planners are compared.

    On the ``stationary`` schedule a planner sees the planning part of the trace as one window, plans once, and serves windows
    from the held-out part with that plan, loaded at the start: no migration. On the others it sees each window of a
    stream from the held-out part after it was served and may move experts before the next; all but ``static`` begin
    with EPLB on the first window, which is observed and not counted.
    """

    schedule: str = "drift"
    windows: int = 7
    """Windows served and counted in each stream."""
    window_tokens: int = 2048
    rate: float = 0.5
    """Step of the mixture walk (drift), chance of another domain (switch)."""
    streams: int = 1
    """Independent streams; results are means over them."""
    seed: int = 0
    holdout: float = 0.5
    """Share of each domain's tokens that plans are never made on."""

    def __post_init__(self) -> None:
        one_of(self.schedule, SCHEDULES, "schedule")
        for key in ("windows", "window_tokens", "streams"):
            if getattr(self, key) < 1:
                raise ValueError(f"{key} is {getattr(self, key)}: expected at least 1")
        if not 0 < self.holdout < 1:
            raise ValueError(f"holdout is {self.holdout}: expected more than 0 and less than 1")

    def split(self, trace: TokenTrace) -> tuple[TokenTrace, TokenTrace]:
        """(planning part, held-out part) of a trace; no sequence is in both."""
        return trace.split(1 - self.holdout, seed=self.seed)


@dataclass
class Result:
    """One planner's figures: means over layers, windows and streams. Times are µs of a layer in one forward pass."""

    planner: str
    served_us: float
    migration_us: float
    total_us: float
    total_ci95_us: float
    """Half width of the 95 % interval of the total over streams (0 for a single one)."""
    balancedness: float
    """Mean over max of the GPUs' token-expert pairs."""
    gpus_per_token: float
    inter_node_mb: float
    """Dispatched between nodes in one layer and pass."""
    moves: float
    """Replicas fetched for one layer and window."""
    decision_ms: float
    """Planning time for one layer and window."""
    stream_totals_us: list[float] = field(default_factory=list)
    window_totals_us: list[float] = field(default_factory=list)
    """Total of each window, mean over layers and streams: how the planner does as traffic goes on."""

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


class _Tally:
    """Collects what windows cost."""

    def __init__(self) -> None:
        self.served: list[list[Served]] = []
        self.decision_s: list[float] = []

    def result(self, name: str, n_layers: int) -> Result:
        flat = [s for stream in self.served for s in stream]

        def mean(pick: Callable[[Served], npt.NDArray[np.floating]]) -> float:
            return float(np.mean([pick(s).mean() for s in flat]))

        totals = [float(np.mean([(s.time_us + s.migration_us).mean() for s in stream])) for stream in self.served]
        windows = np.array([[(s.time_us + s.migration_us).mean() for s in stream] for stream in self.served])
        return Result(
            planner=name,
            served_us=mean(lambda s: s.time_us),
            migration_us=mean(lambda s: s.migration_us),
            total_us=float(np.mean(totals)),
            total_ci95_us=ci95(totals),
            balancedness=mean(lambda s: s.balancedness),
            gpus_per_token=mean(lambda s: s.gpus_per_token),
            inter_node_mb=mean(lambda s: s.inter_node_bytes) / 1e6,
            moves=mean(lambda s: s.moves.astype(float)),
            decision_ms=1e3 * float(np.mean(self.decision_s)) / n_layers if self.decision_s else 0.0,
            stream_totals_us=totals,
            window_totals_us=[float(x) for x in windows.mean(0)],
        )


def _timed_plan(
    planner: Planner, history: Sequence[Window], placement: Placement, tokens: int, tally: _Tally
) -> Placement:
    began = time.perf_counter()
    plan = planner.plan(history, placement, tokens)
    tally.decision_s.append(time.perf_counter() - began)
    return planner.simulator.check(plan)


def evaluate_planner(planner: Planner, name: str, train: TokenTrace, test: TokenTrace, protocol: Protocol) -> Result:
    """One planner on all streams of the protocol."""
    sim, tally = planner.simulator, _Tally()
    stationary = protocol.schedule == "stationary"
    plan = None
    if stationary and not planner.sees_future:
        # One plan, whatever the stream: it is made before any of them begins.
        planner.reset()
        observed = Window.whole(train, sim.n_gpus)
        plan = _timed_plan(planner, [observed], sim.static(train.n_layers), protocol.window_tokens, tally)
    for i in range(protocol.streams):
        stream = Stream(
            test, sim.n_gpus, protocol.window_tokens, protocol.schedule, protocol.rate, seed=protocol.seed + i
        )
        if stationary:
            tally.served.append(_serve_stationary(planner, plan, stream, protocol, tally))
        else:
            planner.reset()
            tally.served.append(_serve_stream(planner, name, stream, protocol, tally))
    return tally.result(name, train.n_layers)


def _serve_stationary(
    planner: Planner, plan: Placement | None, stream: Stream, protocol: Protocol, tally: _Tally
) -> list[Served]:
    """Windows of the stream on the plan, or, without one, each on what the planner makes of it beforehand."""
    sim, served = planner.simulator, []
    for window in stream.take(protocol.windows):
        chosen = plan
        if chosen is None:
            chosen = _timed_plan(planner, [window], sim.static(window.n_layers), protocol.window_tokens, tally)
        served.append(sim.evaluate(window, chosen))
    return served


def _serve_stream(planner: Planner, name: str, stream: Stream, protocol: Protocol, tally: _Tally) -> list[Served]:
    sim, history = planner.simulator, [next(stream)]
    placement = sim.static(history[0].n_layers)
    if name != "static":
        eplb = EPLB(sim)
        placement = eplb.pack(eplb.loads(history[0]))
    served = []
    for _ in range(protocol.windows):
        window = next(stream)
        seen = [*history, window] if planner.sees_future else history
        plan = _timed_plan(planner, seen, placement, protocol.window_tokens, tally)
        served.append(sim.evaluate(window, plan, placement))
        placement = plan
        history.append(window)
    return served


def _warm_up(planner: Planner, trace: TokenTrace) -> None:
    """Have the kernels compiled, so that decision times are those of a planner at work."""
    whole = Window.whole(trace, planner.simulator.n_gpus)
    few = Window(whole.experts, whole.rows[:4], whole.home[:4])
    planner.plan([few], planner.simulator.static(trace.n_layers))


def compare(
    trace: TokenTrace,
    simulator: Simulator,
    names: Sequence[str],
    protocol: Protocol,
    progress: Callable[[str], None] | None = None,
    options: dict[str, dict[str, object]] | None = None,
) -> list[Result]:
    """Every named planner on the same held-out streams; ``progress`` hears a planner's name before its turn."""
    train, test = protocol.split(trace)
    if protocol.schedule == "stationary":
        # The plan is loaded at the start and serves on and on: planners must not weigh the way there either.
        simulator = Simulator(simulator.model, simulator.cluster, simulator.comm, passes_per_window=_FOREVER)
    results = []
    for name in names:
        if progress is not None:
            progress(name)
        planner = make_planner(name, simulator, **({"seed": protocol.seed} | (options or {}).get(name, {})))
        _warm_up(planner, test)
        results.append(evaluate_planner(planner, name, train, test, protocol))
    return results
