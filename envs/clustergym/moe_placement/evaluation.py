"""Compares planners on held-out traffic: the numbers behind ``clustergym eval`` and the benchmarks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field

import numpy as np
import numpy.typing as npt

from clustergym.common.choices import one_of
from clustergym.common.statistics import ci95
from clustergym.moe_placement.kernels.state import SCHEDULES
from clustergym.moe_placement.planner_registry import make_planner
from clustergym.moe_placement.planners.base import Planner
from clustergym.moe_placement.planners.eplb import EPLB
from clustergym.moe_placement.simulator import Placement, Served, Simulator, Stream, Window
from clustergym.traces.token_trace import TokenTrace

PASSES_OF_A_PERMANENT_PLAN = 10**12
"""Forward passes served by a plan that is loaded at startup: so many that migration costs nothing."""


@dataclass(frozen=True)
class Protocol:
    """How planners are compared.

    With the ``stationary`` schedule, a planner sees the planning part of the trace as one window and plans once. That
    plan serves all windows of the held-out part. It is loaded at startup, so there is no migration. With the other
    schedules, a planner sees each window of a held-out stream after it was served, and may move experts before the next
    one. The first window is only observed; all planners but ``static`` start from EPLB's placement for it.
    """

    schedule: str = "drift"
    windows: int = 7
    """Number of windows per stream that are served and counted."""
    window_tokens: int = 2048
    rate: float = 0.5
    """Step of the mixture walk (drift) or probability of another domain (switch)."""
    streams: int = 1
    """Number of independent streams. Results are means over them."""
    seed: int = 0
    holdout: float = 0.5
    """Share of the tokens of each domain that is held out from planning."""

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
    """Results of one planner: means over layers, windows and streams. Times are µs per layer and forward pass."""

    planner: str
    served_us: float
    migration_us: float
    total_us: float
    total_ci95_us: float
    """Half width of the 95 % confidence interval of the total over streams (0 for one stream)."""
    balancedness: float
    """Mean over maximum of the GPUs' token-expert pairs."""
    gpus_per_token: float
    inter_node_mb: float
    """MB dispatched between nodes per layer and pass."""
    moves: float
    """Replicas fetched per layer and window."""
    decision_ms: float
    """Planning time per layer and window."""
    stream_totals_us: list[float] = field(default_factory=list)
    window_totals_us: list[float] = field(default_factory=list)
    """Total of each window, mean over layers and streams."""

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


class _Run:
    """One planner on all streams of a protocol."""

    def __init__(self, planner: Planner, protocol: Protocol) -> None:
        self.planner, self.simulator, self.protocol = planner, planner.simulator, protocol
        self.served: list[list[Served]] = []
        """Of each stream, its windows."""
        self.decision_s: list[float] = []

    def plan(self, history: Sequence[Window], placement: Placement) -> Placement:
        """A timed and checked decision."""
        began = time.perf_counter()
        plan = self.planner.plan(history, placement, self.protocol.window_tokens)
        self.decision_s.append(time.perf_counter() - began)
        return self.simulator.check(plan)

    def serve_stationary(self, stream: Stream, plan: Placement | None) -> None:
        """Serve each window on ``plan``. Without one, the planner sees each window in advance and plans for it."""
        served = []
        for window in stream.take(self.protocol.windows):
            chosen = self.plan([window], self.simulator.static(window.n_layers)) if plan is None else plan
            served.append(self.simulator.evaluate(window, chosen))
        self.served.append(served)

    def serve_stream(self, stream: Stream) -> None:
        """Plan again before each window, migration included."""
        history = [next(stream)]
        placement = self.simulator.static(history[0].n_layers)
        if not self.planner.keeps_placement:
            eplb = EPLB(self.simulator)
            placement = eplb.pack(eplb.loads(history[0]))
        served = []
        for _ in range(self.protocol.windows):
            window = next(stream)
            plan = self.plan([*history, window] if self.planner.needs_future else history, placement)
            served.append(self.simulator.evaluate(window, plan, placement))
            placement = plan
            history.append(window)
        self.served.append(served)

    def result(self, name: str, n_layers: int) -> Result:
        def mean(pick: Callable[[Served], npt.NDArray[np.floating]]) -> float:
            return float(np.mean([pick(window).mean() for stream in self.served for window in stream]))

        totals = np.array([[(s.time_us + s.migration_us).mean() for s in stream] for stream in self.served])
        streams = [float(np.mean(windows)) for windows in totals]
        return Result(
            planner=name,
            served_us=mean(lambda s: s.time_us),
            migration_us=mean(lambda s: s.migration_us),
            total_us=float(np.mean(streams)),
            total_ci95_us=ci95(streams),
            balancedness=mean(lambda s: s.balancedness),
            gpus_per_token=mean(lambda s: s.gpus_per_token),
            inter_node_mb=mean(lambda s: s.inter_node_bytes) / 1e6,
            moves=mean(lambda s: s.moves.astype(float)),
            decision_ms=1e3 * float(np.mean(self.decision_s)) / n_layers,
            stream_totals_us=streams,
            window_totals_us=totals.mean(0).tolist(),
        )


def evaluate_planner(planner: Planner, name: str, train: TokenTrace, test: TokenTrace, protocol: Protocol) -> Result:
    """One planner on all streams of the protocol. ``name`` is the name in the result."""
    run, simulator = _Run(planner, protocol), planner.simulator
    stationary, plan = protocol.schedule == "stationary", None
    if stationary and not planner.needs_future:
        # One plan for all streams, made before any of them begins.
        planner.reset()
        plan = run.plan([Window.whole(train, simulator.n_gpus)], simulator.static(train.n_layers))
    for seed in range(protocol.seed, protocol.seed + protocol.streams):
        stream = Stream(test, simulator.n_gpus, protocol.window_tokens, protocol.schedule, protocol.rate, seed)
        if stationary:
            run.serve_stationary(stream, plan)
        else:
            planner.reset()
            run.serve_stream(stream)
    return run.result(name, train.n_layers)


def first_tokens(window: Window, n: int) -> Window:
    """The first ``n`` tokens of a window."""
    return Window(window.experts, window.rows[:n], window.home[:n])


def compare(
    trace: TokenTrace,
    simulator: Simulator,
    names: Sequence[str],
    protocol: Protocol,
    progress: Callable[[str], None] = lambda name: None,
    options: dict[str, dict[str, object]] | None = None,
) -> list[Result]:
    """Evaluate every named planner on the same held-out streams.

    Args:
        progress: called with the name of each planner before it runs.
        options: more options of some planners, by name.
    """
    train, test = protocol.split(trace)
    if protocol.schedule == "stationary":
        # There is no migration, so planners must not count it either.
        simulator = Simulator(simulator.model, simulator.cluster, simulator.comm, PASSES_OF_A_PERMANENT_PLAN)
    results = []
    for name in names:
        progress(name)
        planner = make_planner(name, simulator, **{"seed": protocol.seed, **(options or {}).get(name, {})})
        # Decision times must not include compilation.
        planner.plan([first_tokens(Window.whole(test, simulator.n_gpus), 4)], simulator.static(test.n_layers))
        results.append(evaluate_planner(planner, name, train, test, protocol))
    return results
