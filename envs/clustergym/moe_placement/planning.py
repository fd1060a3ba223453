"""Plans for engines: choose a placement on the first part of a trace, measure it on the rest, fill every slot."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from clustergym.common.statistics import ci95
from clustergym.moe_placement.batch import model_for
from clustergym.moe_placement.evaluation import first_tokens
from clustergym.moe_placement.planner_registry import make_planner, planner_class, planners_on_loads
from clustergym.moe_placement.planners.base import Planner
from clustergym.moe_placement.simulator import Placement, Simulator, Stream, Window
from clustergym.moe_placement.specs import MODELS, ModelSpec, get_model
from clustergym.traces import LoadTrace, TokenTrace
from clustergym.traces.load_trace import MISSING

# To fill an empty slot, this many experts are tried (hottest first) on this many tokens.
_FILL_CANDIDATES = 8
_FILL_TOKENS = 2048


class LoadWindow(Window):
    """A window of which only the load of each expert is known. Planners that ask for its tokens get an error."""

    _loads: npt.NDArray[np.int64]
    _n_tokens: int

    def __init__(self, loads: npt.NDArray[np.int64], n_tokens: int) -> None:
        object.__setattr__(self, "_loads", loads)
        object.__setattr__(self, "_n_tokens", n_tokens)

    def __getattr__(self, name: str) -> NoReturn:
        """Called for the fields of :class:`Window` that this class does not set."""
        if name not in ("experts", "rows", "home"):
            raise AttributeError(name)
        raise ValueError(
            f"only the load of each expert is known, not {MISSING}: "
            f"planners that need only loads are {', '.join(planners_on_loads())}"
        )

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


@dataclass
class Outcome:
    """One planner's placement on held-out traffic."""

    planner: str
    placement: Placement
    """(L, G, S), without empty slots"""
    decision_s: float
    filled: int
    """Number of slots that the planner left empty"""
    window_us: list[float]
    """Time of each held-out window (or step of counts), mean over layers"""
    layer_us: npt.NDArray[np.float64]
    """(L, 3) dispatch, compute, combine, means over windows. Counts have only compute."""
    pairs: npt.NDArray[np.float64]
    """(L, G) token-expert pairs per GPU and window, mean over windows"""
    balancedness: float
    copies: npt.NDArray[np.float64] | None = None
    """(L, G, G) activations dispatched from row to column per window; None for counts"""
    gpus_per_token: float | None = None
    inter_node_mb: float | None = None

    @property
    def served_us(self) -> float:
        return float(np.mean(self.window_us))


@dataclass
class Plan:
    """The chosen placement and the baselines, measured on the same held-out windows."""

    chosen: str
    outcomes: dict[str, Outcome]
    simulator: Simulator
    layer_ids: npt.NDArray[np.int64]
    trace: str
    planned_on: str
    held_out: str
    exact: bool
    """False if only counts are known. Then the times are of compute alone, and replicas share the load evenly."""
    window_tokens: int
    expert_pairs: npt.NDArray[np.float64]
    """(L, E) tokens of a window that use each expert, from the planning part"""

    @property
    def model(self) -> ModelSpec:
        return self.simulator.model

    @property
    def best(self) -> Outcome:
        return self.outcomes[self.chosen]

    def versus(self, other: str) -> tuple[float, float]:
        """(relative time difference to another plan, half width of its 95 % interval), paired by window."""
        mine, theirs = np.array(self.best.window_us), np.array(self.outcomes[other].window_us)
        relative = (mine - theirs) / theirs.mean()
        return float(relative.mean()), ci95(relative.tolist())


def model_of(trace: TokenTrace | LoadTrace, model: str | ModelSpec | None) -> ModelSpec:
    """The model of a trace, checked against the sizes of the trace."""
    if isinstance(trace, TokenTrace):
        return model_for(trace, model)
    name = model or trace.model
    if name is None:
        raise ValueError(f"{trace.name}: the counts do not name their model: give --model: {', '.join(MODELS)}")
    spec = get_model(name)
    if trace.n_experts > spec.n_experts or trace.n_layers > spec.n_layers:
        raise ValueError(
            f"{trace.name}: counts of {trace.n_layers} layers × {trace.n_experts} experts, but {spec.name} has "
            f"{spec.n_layers} × {spec.n_experts}"
        )
    return spec


class Observed:
    """The traffic that planners may look at."""

    def __init__(
        self, part: TokenTrace | LoadTrace, simulator: Simulator, window_tokens: int, plan_tokens: int, seed: int
    ) -> None:
        self.static = simulator.static(part.n_layers)
        self.loads = LoadWindow(part.loads(), window_tokens)
        self.tokens: Window | None = None
        """At most ``plan_tokens`` tokens in sequences drawn by the seed; None for counts."""
        if isinstance(part, TokenTrace):
            if part.n_tokens <= plan_tokens:
                self.tokens = Window.whole(part, simulator.n_gpus)
            else:
                self.tokens = next(Stream(part, simulator.n_gpus, plan_tokens, "stationary", seed=seed))

    def window(self, planner: Planner, most: int | None = None) -> Window:
        """The window for a planner, cut to ``most`` tokens."""
        if not planner.needs_tokens or self.tokens is None:
            return self.loads
        return self.tokens if most is None else first_tokens(self.tokens, most)


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
    progress: Callable[[str, float | None], None] = lambda step, seconds: None,
) -> Plan:
    """Plan on the first ``share`` of the trace, serve ``windows`` windows of the rest. Baselines are static and EPLB.

    Args:
        simulator: model and cluster. An engine loads a plan once, so migration should cost nothing: set
            ``passes_per_window`` to :data:`~clustergym.moe_placement.evaluation.PASSES_OF_A_PERMANENT_PLAN`.
        plan_tokens: maximum number of tokens for planners that look at tokens. Planners on loads use the whole part.
        seconds: time budget of planners that take one.
        options: more options of the planner (``checkpoint`` …).
        progress: called before each step with its name and its duration in seconds, if known.
    """
    if not 0 < share < 1:
        raise ValueError(f"share is {share}: expected more than 0 and less than 1")
    if isinstance(trace, LoadTrace) and planner_class(planner).needs_tokens:
        raise ValueError(
            f"planner {planner!r} needs to know {MISSING}, but {trace.name} has counts only: plan with one of "
            f"{', '.join(planners_on_loads())}, or record tokens (SGLang per_token, routed experts, Megatron)"
        )
    before: TokenTrace | LoadTrace
    measure: Callable[[Placement], dict[str, Any]]
    if isinstance(trace, TokenTrace):
        before, after = trace.split(share, seed=None)
        held_out = f"{after.n_tokens} tokens in {after.n_sequences} sequences"
        planned_on = f"{before.n_tokens} tokens in {before.n_sequences} sequences"
        stream = Stream(after, simulator.n_gpus, window_tokens, "stationary", seed=seed)
        measure = partial(_measure_on_tokens, stream.take(windows), simulator)
    else:
        before, steps = trace.split(share)
        held_out, planned_on = (f"{part.n_steps} steps of counts" for part in (steps, before))
        measure = partial(_measure_on_counts, _pairs_per_step(steps, simulator, window_tokens), simulator)
    observed = Observed(before, simulator, window_tokens, plan_tokens, seed)
    outcomes: dict[str, Outcome] = {}
    for name in dict.fromkeys(["static", "eplb", planner]):
        kind = planner_class(name)
        given = {"seed": seed, **((options or {}) if name == planner else {})}
        # Compilation is not part of the decision time. A search with a time budget would use all of it to compile.
        progress(f"compiling {name}", None)
        once = make_planner(name, simulator, **given, **({"iterations": 1} if kind.takes_seconds else {}))
        once.plan([observed.window(once, most=4)], observed.static)
        budget = {"seconds": seconds} if kind.takes_seconds else {}
        made = make_planner(name, simulator, **given, **budget)
        start = outcomes["eplb"].placement if made.starts_from_eplb else observed.static
        progress(name, budget.get("seconds"))
        began = time.perf_counter()
        placement = made.plan([observed.window(made)], start, window_tokens)
        decision_s = time.perf_counter() - began
        placement = simulator.check(placement)
        empty = int((placement < 0).sum())
        if empty:
            progress(f"filling {empty} empty slots", None)
            placement = fill_empty(simulator, observed, placement)
        progress(f"serving held-out traffic on {name}", None)
        outcomes[name] = Outcome(name, placement, decision_s, empty, **measure(placement))
    loads = observed.loads.loads(simulator.n_experts)
    return Plan(
        chosen=planner,
        outcomes=outcomes,
        simulator=simulator,
        layer_ids=trace.layer_ids,
        trace=trace.name,
        planned_on=planned_on,
        held_out=held_out,
        exact=isinstance(trace, TokenTrace),
        window_tokens=window_tokens,
        expert_pairs=loads / loads.sum(1, keepdims=True) * window_tokens * simulator.model.top_k,
    )


def fill_empty(simulator: Simulator, observed: Observed, placement: Placement) -> Placement:
    """Put a replica into every empty slot, because an engine needs all slots filled: the one that helps most.

    One slot per layer at a time, on the GPU with the lowest load. The hottest experts that this GPU does not hold are
    tried in the simulator, all layers at once. If only loads are known, the hottest expert is taken.
    """
    placement = placement.copy()
    loads = observed.loads.loads(simulator.n_experts).astype(float)
    window = None if observed.tokens is None else first_tokens(observed.tokens, _FILL_TOKENS)
    while (layers := np.flatnonzero((placement < 0).any((1, 2)))).size:
        spots, candidates = [], []
        for l in layers:
            filled = placement[l] >= 0
            copies = np.bincount(placement[l][filled], minlength=simulator.n_experts)
            share = loads[l] / np.maximum(copies, 1)
            work = np.where(filled, share[placement[l]], 0.0).sum(1)
            work[filled.all(1)] = np.inf
            g = int(work.argmin())
            share[placement[l, g][filled[g]]] = -1.0
            spots.append((int(l), g, int(np.flatnonzero(~filled[g])[0])))
            candidates.append(np.argsort(-share, kind="stable")[:_FILL_CANDIDATES])
        chosen = [int(experts[0]) for experts in candidates]
        if window is not None:
            least = np.full(len(spots), np.inf)
            for i in range(min(len(experts) for experts in candidates)):
                trial = placement.copy()
                for spot, experts in zip(spots, candidates, strict=True):
                    trial[spot] = experts[i]
                times = simulator.evaluate(window, trial, check=False).time_us
                for j, (layer, _, _) in enumerate(spots):
                    if times[layer] < least[j]:
                        least[j], chosen[j] = times[layer], int(candidates[j][i])
        for spot, expert in zip(spots, chosen, strict=True):
            placement[spot] = expert
    return placement


def _measure_on_tokens(windows: list[Window], simulator: Simulator, placement: Placement) -> dict[str, Any]:
    """Fields of an Outcome."""
    served = [simulator.evaluate(window, placement, check=False) for window in windows]
    return {
        "window_us": [float(s.time_us.mean()) for s in served],
        "layer_us": np.mean([np.stack([s.dispatch_us, s.compute_us, s.combine_us], axis=1) for s in served], axis=0),
        "pairs": np.mean([s.pairs for s in served], axis=0),
        "balancedness": float(np.mean([s.balancedness.mean() for s in served])),
        "copies": np.mean([s.copies for s in served], axis=0),
        "gpus_per_token": float(np.mean([s.gpus_per_token.mean() for s in served])),
        "inter_node_mb": float(np.mean([s.inter_node_bytes.mean() for s in served])) / 1e6,
    }


def _pairs_per_step(part: LoadTrace, simulator: Simulator, window_tokens: int) -> npt.NDArray[np.float64]:
    """(W, L, E) token-expert pairs of each step, scaled to a window."""
    share = part.counts / np.maximum(part.counts.sum(2, keepdims=True), 1)
    pairs = np.zeros((part.n_steps, part.n_layers, simulator.n_experts))
    pairs[:, :, : part.n_experts] = share * window_tokens * simulator.model.top_k
    return pairs


def _measure_on_counts(
    expert_pairs: npt.NDArray[np.float64], simulator: Simulator, placement: Placement
) -> dict[str, Any]:
    """Fields of an Outcome. Without tokens, replicas share the load of an expert evenly, and only compute is known."""
    model, layers = simulator.model, np.arange(len(placement))[:, None, None]
    copies = np.zeros(expert_pairs.shape[1:])
    np.add.at(copies, (np.broadcast_to(layers, placement.shape), placement), 1)
    slot_pairs = (expert_pairs / copies)[:, layers, placement]  # (W, L, G, S)
    pairs, active = slot_pairs.sum(3), (slot_pairs > 0).sum(3)
    compute = model.kernel_start_us + (model.kernel_expert_us * active + model.kernel_pair_us * pairs).max(2)
    layer_us = np.zeros((len(placement), 3))
    layer_us[:, 1] = compute.mean(0)
    return {
        "window_us": compute.mean(1).tolist(),
        "layer_us": layer_us,
        "pairs": pairs.mean(0),
        "balancedness": float((pairs.mean(2) / np.maximum(pairs.max(2), 1e-12)).mean()),
    }
