"""From a trace to a plan that an engine can load: choose on the first part, measure on the rest, leave no slot empty."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from clustergym.common.statistics import ci95
from clustergym.moe_placement.batch import model_for
from clustergym.moe_placement.planner_registry import PLANNERS, make_planner
from clustergym.moe_placement.planners.base import Planner
from clustergym.moe_placement.planners.heuristics import EPLB, Static
from clustergym.moe_placement.planners.search import Anneal
from clustergym.moe_placement.simulator import Placement, Simulator, Stream, Window
from clustergym.moe_placement.specs import MODELS, ModelSpec, get_model
from clustergym.traces import LoadTrace, TokenTrace
from clustergym.traces.load_trace import MISSING

FOREVER = 10**12
"""Passes that a plan serves: it is loaded at the start, so that the way there costs nothing that matters."""
# Replicas tried for an empty slot, hottest first.
_CANDIDATES = 8
# Tokens on which they are tried.
_FILL_TOKENS = 2048


class LoadWindow(Window):
    """A window of which only the experts' loads are known. Planners that ask for more hear what is missing."""

    _loads: npt.NDArray[np.int64]
    _n_tokens: int

    def __init__(self, loads: npt.NDArray[np.int64], n_tokens: int) -> None:
        object.__setattr__(self, "_loads", loads)
        object.__setattr__(self, "_n_tokens", n_tokens)

    def _refuse(self) -> NoReturn:
        raise ValueError(
            f"only the experts' loads are known here, not {MISSING}: planners that need no more are {', '.join(loads_only())}"
        )

    @property
    def experts(self) -> npt.NDArray[np.int16]:
        self._refuse()

    @property
    def rows(self) -> npt.NDArray[np.int32]:
        self._refuse()

    @property
    def home(self) -> npt.NDArray[np.int16]:
        self._refuse()

    @property
    def n_tokens(self) -> int:
        return self._n_tokens

    @property
    def n_layers(self) -> int:
        return len(self._loads)

    def loads(self, n_experts: int) -> npt.NDArray[np.int64]:
        padded = np.zeros((self.n_layers, n_experts), np.int64)
        padded[:, : self._loads.shape[1]] = self._loads
        return padded


def needs_only_loads(planner: Planner) -> bool:
    return isinstance(planner, (Static, EPLB))


def loads_only() -> list[str]:
    """Names of the planners that need only loads."""
    simulator = Simulator("mixtral-8x7b", "h800-1x8")
    names = [name for name in PLANNERS if not name.startswith("policy")]
    return [name for name in names if needs_only_loads(make_planner(name, simulator))]


@dataclass
class Outcome:
    """What one planner's placement does on held-out traffic."""

    planner: str
    placement: Placement
    """(L, G, S), no slot empty"""
    decision_s: float
    window_us: list[float]
    """Time of each held-out window (of each step of counts), mean over layers"""
    layer_us: npt.NDArray[np.float64]
    """(L, 3) dispatch, compute, combine, means over windows; of counts only compute is known"""
    pairs: npt.NDArray[np.float64]
    """(L, G) token-expert pairs of a GPU in a window, mean over windows"""
    balancedness: float
    filled: int = 0
    """Slots that the planner had left empty"""
    copies: npt.NDArray[np.float64] | None = None
    """(L, G, G) activations dispatched from row to column in a window; None for counts"""
    gpus_per_token: float | None = None
    inter_node_mb: float | None = None

    @property
    def served_us(self) -> float:
        return float(np.mean(self.window_us))


@dataclass
class Plan:
    """The chosen placement beside the ones it has to beat, on the same held-out windows."""

    chosen: str
    outcomes: dict[str, Outcome]
    model: ModelSpec
    simulator: Simulator
    layer_ids: npt.NDArray[np.int64]
    trace: str
    planned_on: str
    held_out: str
    exact: bool
    """False where only counts are known: compute alone, replicas sharing evenly"""
    window_tokens: int
    expert_pairs: npt.NDArray[np.float64]
    """(L, E) tokens of a window that use each expert, from the part planned on"""

    @property
    def best(self) -> Outcome:
        return self.outcomes[self.chosen]

    def versus(self, other: str) -> tuple[float, float]:
        """(relative difference of the chosen plan's time to another's, half width of its 95 % interval), paired by window."""
        mine, theirs = np.array(self.best.window_us), np.array(self.outcomes[other].window_us)
        relative = (mine - theirs) / theirs.mean()
        return float(relative.mean()), ci95(relative.tolist())


def model_of(trace: TokenTrace | LoadTrace, model: str | ModelSpec | None) -> ModelSpec:
    """The model that a trace is of, checked against it."""
    if isinstance(trace, TokenTrace):
        return model_for(trace, model)
    name = model or trace.model
    if name is None:
        raise ValueError(
            f"{trace.name}: the counts do not say of which model they are: give --model: {', '.join(MODELS)}"
        )
    spec = get_model(name)
    if trace.n_experts > spec.n_experts or trace.n_layers > spec.n_layers:
        raise ValueError(
            f"{trace.name}: counts of {trace.n_layers} layers × {trace.n_experts} experts, but {spec.name} has "
            f"{spec.n_layers} × {spec.n_experts}"
        )
    return spec


def make_plan(
    trace: TokenTrace | LoadTrace,
    simulator: Simulator,
    planner: str,
    *,
    share: float = 0.5,
    window_tokens: int = 2048,
    windows: int = 8,
    plan_tokens: int = 8192,
    seconds: float = 30.0,
    seed: int = 0,
    options: dict[str, Any] | None = None,
    announce: Callable[[str, float | None], None] = lambda what, seconds: None,
) -> Plan:
    """Plan on the first ``share`` of the trace and serve ``windows`` windows of the rest, beside static and EPLB.

    Args:
        plan_tokens: planners that look at tokens plan on a window of at most this many; those on loads use them all.
        seconds: time that annealing takes, on its own or guided by a policy.
        options: more arguments of the planner (``checkpoint`` …).
        announce: hears what begins, and how many seconds it will take where that is known.
    """
    simulator = Simulator(simulator.model, simulator.cluster, simulator.comm, passes_per_window=FOREVER)
    if not 0 < share < 1:
        raise ValueError(f"share is {share}: expected more than 0 and less than 1")
    before, after = trace.split(share, seed=None) if isinstance(trace, TokenTrace) else trace.split(share)
    names = list(dict.fromkeys(["static", "eplb", planner]))
    serve = _server(after, simulator, window_tokens, windows, seed)
    observed = _Observed(before, simulator, window_tokens, plan_tokens, seed)
    outcomes: dict[str, Outcome] = {}
    for name in names:
        given: dict[str, Any] = {"seed": seed} | ((options or {}) if name == planner else {})
        budget = seconds if name.startswith("anneal") or name == "policy-guided" else None
        limits = ({}, {}) if budget is None else ({"seconds": budget}, {"iterations": 1})
        made, twin = (make_planner(name, simulator, **(given | limit)) for limit in limits)
        if isinstance(trace, LoadTrace) and not needs_only_loads(made):
            raise ValueError(
                f"planner {name!r} needs to know {MISSING}, and {trace.name} has counts only: plan with one of "
                f"{', '.join(loads_only())}, or record tokens (SGLang per_token, routed experts, Megatron)"
            )
        # Compiling is not deciding, and a search with a time budget would take all of it.
        announce(f"compiling {name}", None)
        observed.warm_up(twin)
        announce(name, budget)
        began = time.perf_counter()
        placement = made.plan([observed.window(made)], start_of(made, observed.static, outcomes), window_tokens)
        taken = time.perf_counter() - began
        simulator.check(placement)
        empty = int((placement < 0).sum())
        if empty:
            announce(f"filling {empty} empty slots", None)
            placement = fill_empty(simulator, observed, placement)
        announce(f"serving held-out traffic on {name}", None)
        outcomes[name] = serve(name, placement, taken, empty)
    return Plan(
        chosen=planner,
        outcomes=outcomes,
        model=simulator.model,
        simulator=simulator,
        layer_ids=trace.layer_ids,
        trace=trace.name,
        planned_on=_size(before),
        held_out=_size(after),
        exact=isinstance(trace, TokenTrace),
        window_tokens=window_tokens,
        expert_pairs=_expert_pairs(observed, simulator, window_tokens),
    )


def start_of(planner: Planner, static: Placement, outcomes: dict[str, Outcome]) -> Placement:
    """Where a planner starts. One that makes a few operations improves on EPLB; annealing goes far from wherever it starts."""
    few = not needs_only_loads(planner) and not isinstance(planner, Anneal)
    return outcomes["eplb"].placement if few else static


def _expert_pairs(observed: _Observed, simulator: Simulator, window_tokens: int) -> npt.NDArray[np.float64]:
    loads = observed.loads.loads(simulator.n_experts)
    share: npt.NDArray[np.float64] = loads / loads.sum(1, keepdims=True)
    return share * window_tokens * simulator.model.top_k


def _size(part: TokenTrace | LoadTrace) -> str:
    if isinstance(part, LoadTrace):
        return f"{part.n_steps} steps of counts"
    return f"{part.n_tokens} tokens in {part.n_sequences} sequences"


class _Observed:
    """The traffic that may be planned on."""

    def __init__(
        self, part: TokenTrace | LoadTrace, simulator: Simulator, window_tokens: int, plan_tokens: int, seed: int
    ) -> None:
        self.part, self.simulator = part, simulator
        self.static = simulator.static(part.n_layers)
        self.loads = LoadWindow(part.loads(), window_tokens)
        self.plan_tokens, self.seed = plan_tokens, seed
        self._tokens: Window | None = None

    def window(self, planner: Planner) -> Window:
        return self.loads if needs_only_loads(planner) else self.tokens(self.plan_tokens)

    def tokens(self, most: int) -> Window:
        """A window of whole sequences, in an order drawn by the seed; the whole part where it is no larger."""
        part, gpus = self.part, self.simulator.n_gpus
        assert isinstance(part, TokenTrace)
        if self._tokens is None:
            if part.n_tokens <= self.plan_tokens:
                self._tokens = Window.whole(part, gpus)
            else:
                self._tokens = next(Stream(part, gpus, self.plan_tokens, "stationary", seed=self.seed))
        window = self._tokens
        return Window(window.experts, window.rows[:most], window.home[:most]) if most < window.n_tokens else window

    def warm_up(self, planner: Planner) -> None:
        """Have the kernels compiled: a few tokens will do."""
        planner.plan([self.loads if needs_only_loads(planner) else self.tokens(4)], self.static)


def fill_empty(simulator: Simulator, observed: _Observed, placement: Placement) -> Placement:
    """The placement with every empty slot given the replica that helps most (or harms least: an engine fills them all).

    In turn for one slot a layer, on the GPU with the least to do: the hottest experts that it does not hold are tried in the simulator,
    all layers at once. Where only loads are known the hottest is taken.
    """
    placement = placement.copy()
    loads = observed.loads.loads(simulator.n_experts).astype(float)
    window = observed.tokens(_FILL_TOKENS) if isinstance(observed.part, TokenTrace) else None
    while (open_layers := np.flatnonzero((placement < 0).any((1, 2)))).size:
        spots, candidates = [], []
        for l in open_layers:
            copies = np.bincount(placement[l][placement[l] >= 0], minlength=simulator.n_experts)
            share = loads[l] / np.maximum(copies, 1)
            work = np.where(placement[l] >= 0, share[placement[l]], 0.0).sum(1)
            work[~(placement[l] < 0).any(1)] = np.inf
            g = int(work.argmin())
            share[placement[l, g][placement[l, g] >= 0]] = -1.0
            spots.append((int(l), g, int(np.flatnonzero(placement[l, g] < 0)[0])))
            candidates.append(np.argsort(-share, kind="stable")[:_CANDIDATES])
        chosen = [int(those[0]) for those in candidates]
        if window is not None:
            least = np.full(len(spots), np.inf)
            for i in range(min(len(those) for those in candidates)):
                trial = placement.copy()
                for spot, those in zip(spots, candidates, strict=True):
                    trial[spot] = those[i]
                times = simulator.evaluate(window, trial, check=False).time_us
                for j, spot in enumerate(spots):
                    if times[spot[0]] < least[j]:
                        least[j], chosen[j] = times[spot[0]], int(candidates[j][i])
        for spot, expert in zip(spots, chosen, strict=True):
            placement[spot] = expert
    return simulator.check(placement)


Serve = Callable[[str, Placement, float, int], Outcome]


def _server(part: TokenTrace | LoadTrace, simulator: Simulator, window_tokens: int, windows: int, seed: int) -> Serve:
    if isinstance(part, LoadTrace):
        return _serve_counts(part, simulator, window_tokens)
    return _serve_tokens(
        Stream(part, simulator.n_gpus, window_tokens, "stationary", seed=seed).take(windows), simulator
    )


def _serve_tokens(windows: Sequence[Window], simulator: Simulator) -> Serve:
    def serve(name: str, placement: Placement, decision_s: float, filled: int) -> Outcome:
        served = [simulator.evaluate(window, placement) for window in windows]
        return Outcome(
            name,
            placement,
            decision_s,
            [float(s.time_us.mean()) for s in served],
            np.mean([np.stack([s.dispatch_us, s.compute_us, s.combine_us], axis=1) for s in served], axis=0),
            np.mean([s.pairs for s in served], axis=0),
            float(np.mean([s.balancedness.mean() for s in served])),
            filled,
            np.mean([s.copies for s in served], axis=0),
            float(np.mean([s.gpus_per_token.mean() for s in served])),
            float(np.mean([s.inter_node_bytes.mean() for s in served])) / 1e6,
        )

    return serve


def _serve_counts(part: LoadTrace, simulator: Simulator, window_tokens: int) -> Serve:
    """Without tokens, replicas share an expert's load evenly and only the kernels' time is known."""
    model = simulator.model
    share = part.counts / np.maximum(part.counts.sum(2, keepdims=True), 1)
    counts = np.zeros((part.n_steps, part.n_layers, simulator.n_experts))
    counts[:, :, : part.n_experts] = share * window_tokens * model.top_k

    def serve(name: str, placement: Placement, decision_s: float, filled: int) -> Outcome:
        layers = np.arange(part.n_layers)[:, None, None]
        copies = np.zeros((part.n_layers, simulator.n_experts))
        np.add.at(copies, (np.broadcast_to(layers, placement.shape), placement), 1)
        each = (counts / copies)[:, layers, placement]  # (W, L, G, S)
        pairs, active = each.sum(3), (each > 0).sum(3)
        compute = model.kernel_start_us + (model.kernel_expert_us * active + model.kernel_pair_us * pairs).max(2)
        layer_us = np.zeros((part.n_layers, 3))
        layer_us[:, 1] = compute.mean(0)
        balance = pairs.mean(2) / np.maximum(pairs.max(2), 1e-12)
        return Outcome(
            name,
            placement,
            decision_s,
            compute.mean(1).tolist(),
            layer_us,
            pairs.mean(0),
            float(balance.mean()),
            filled,
        )

    return serve
