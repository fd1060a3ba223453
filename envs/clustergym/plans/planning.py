"""Plans for engines: choose a placement on one part of a trace, measure it on the rest, fill every slot."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from clustergym.moe_placement.profiles import STATES, EngineProfile, phases_of, profiles_of
from clustergym.moe_placement.simulator import Placement, Simulator
from clustergym.moe_placement.specs import MODELS, ClusterSpec, ModelSpec, get_model, model_for
from clustergym.moe_placement.streams import Interval, Traffic
from clustergym.planners import evaluation
from clustergym.planners.anneal import Anneal, OtherPhase
from clustergym.planners.eplb import balance
from clustergym.planners.greedy import Greedy
from clustergym.planners.heldout import (
    PASSES_OF_A_PERMANENT_PLAN,
    HeldOutCounts,
    HeldOutPasses,
    HeldOutPhases,
    Measured,
    Observed,
    Samples,
    evenly_spaced,
)
from clustergym.planners.registry import make_planner, planner_class, planners_on_loads
from clustergym.plans.links import fit_to_links
from clustergym.plans.transition import Limit, Transition
from clustergym.traces import LoadTrace, TokenTrace
from clustergym.traces.load_trace import MISSING
from clustergym.traces.match_loads import match_loads

DEFAULT_PLANNERS = {"sglang-lp": "affinity-groups", "vllm": "flashlb"}
"""The planner by profile if none is asked for and it is not ``anneal``: the best of
``python benchmarks/placement/placement.py --schedules stationary``, the mean over models. Of planners that are equally
good, the quickest."""

DECODE_SHARE = 0.2
"""Share of the served tokens that are decoded, if neither the user nor the trace says. In the public traces of Azure's
LLM services it is 15 % for conversations and 1 % for code."""
NULL_MARGINS = {"sglang": 0.035, "vllm": 0.01, "tensorrt-llm": 0.005, "vllm-ascend": 0.015}
"""By engine: how much more a plan may promise than the independent judge finds where routing is uniformly random, the
largest difference rounded up to half a percent; for SGLang the largest gain that was promised where the judge finds a
loss. Command: ``python benchmarks/placement/judge.py --null --engine vllm``."""
ROBUSTNESS = 1.4
"""Of annealing: a plan that is made once serves other mixtures of topics than it was made on. The value is the one with
which searches that know past traffic plan (:data:`clustergym.planners.search.LEARNED_ROBUSTNESS`)."""
FEWEST_SEQUENCES = 8
"""Held-out sequences that an interval needs."""
# To fill an empty slot, this many experts are tried (hottest first) on this many passes.
_FILL_CANDIDATES = 8
_FILL_PASSES = 4
# With a limit on moves, searches run this often to find out what a move should cost.
_LIMITED_RUNS = 5
# With a limit, a few greedy operations are often better than a search that moves nearly everything.
_GREEDY_OPERATIONS = 8
_TRANSITION_TOKENS = 16384
# Fitting to measured links tries hundreds of changes.
_LINK_TOKENS = 4096
# Layers, passes and draws for the other profiles of the engine: few, because some need a linear program per
# pass and layer.
_OTHER_PROFILES = (4, 8, 12)
_LP_PROFILE = (2, 4, 8)


@dataclass(frozen=True)
class Sizes:
    """How much traffic a plan is made and measured on."""

    share: float = 0.75
    """Share of the trace to plan on: sequences drawn at random, or the first steps of counts. The rest is held out."""
    plan_passes: int = 32
    """Most passes of the planning part for planners that look at tokens. Planners on loads use the whole part."""
    observe_tokens: int | None = None
    """Number of tokens that planners on tokens see, drawn from those passes; by default all."""
    passes: int = 20
    """Held-out passes to measure on."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.share < 1:
            raise ValueError(f"share is {self.share}: expected more than 0 and less than 1")
        for key in ("plan_passes", "observe_tokens", "passes"):
            if getattr(self, key) is not None and getattr(self, key) < 1:
                raise ValueError(f"{key} is {getattr(self, key)}: expected at least 1")


@dataclass(kw_only=True)
class Outcome(Measured):
    """One planner's placement on held-out traffic."""

    planner: str
    placement: Placement
    """(L, G, S), without empty slots"""
    decision_s: float
    filled: int
    """Number of slots that the planner left empty"""
    other_profiles: dict[str, Samples] = field(default_factory=dict)
    """Times under the other profiles of the engine, on a few layers"""


@dataclass
class Plan:
    """The chosen placement and the baselines, measured on the same held-out passes."""

    planner: str
    """The planner that was asked for"""
    outcomes: dict[str, Outcome]
    simulator: Simulator
    layer_ids: npt.NDArray[np.int64]
    trace: str
    planned_on: str
    held_out: str
    reused: float
    """Share of the tokens of the held-out passes that were served before, because the held-out part is too small"""
    exact: bool
    """False if only counts are known. Then the times are of compute alone, and replicas share the load evenly."""
    pass_tokens: int
    expert_pairs: npt.NDArray[np.float64]
    """(L, E) tokens of a pass that use each expert, from the planning part"""
    force: bool = False
    """Keep the planner's placement even if it shows no gain over the fallback."""
    stopped: bool = False
    """Planning was stopped early."""
    passes: tuple[int, int] = (0, 0)
    """Held-out passes that were served, and that were asked for"""
    domains: int = 0
    """Domains of the trace; 0 for counts"""
    sequences: int = 0
    """Held-out sequences; 0 for counts"""
    phases: Sequence[OtherPhase] = ()
    """Phases that the plan serves besides that of the simulator"""

    @property
    def model(self) -> ModelSpec:
        return self.simulator.model

    @property
    def baseline(self) -> str:
        """Which form of EPLB the plan is compared with: that of the engine."""
        form = "hierarchical" if baseline_options(self.simulator) else "flat"
        return f"EPLB ({form}, as {self.simulator.profile.engine} runs it here)"

    @property
    def served_as(self) -> str:
        """Profile that the plan is for; if it serves several phases, each with its share of the tokens."""
        first = self.simulator.profile.name
        if not self.phases:
            return first
        tokens = [self.pass_tokens, *(phase.tokens * phase.passes for phase in self.phases)]
        names = [first, *(phase.simulator.profile.name for phase in self.phases)]
        return " + ".join(f"{100 * n / sum(tokens):.0f} % {name}" for n, name in zip(tokens, names, strict=True))

    @property
    def reference(self) -> str:
        """What is served without a plan: the live placement if there is one, else the static one."""
        return "live" if "live" in self.outcomes else "static"

    @property
    def fallback(self) -> str:
        """The placement to keep if no gain over it is shown: the live one if there is one, else EPLB's."""
        return "live" if "live" in self.outcomes else "eplb"

    @property
    def chosen(self) -> str:
        """The planner whose placement is written."""
        return self.planner if self.force or self.gain_shown() else self.fallback

    @property
    def best(self) -> Outcome:
        return self.outcomes[self.chosen]

    @property
    def other_profiles(self) -> list[str]:
        """Phases that the plan serves, if there are several, and other profiles that it was measured under."""
        chosen = self.outcomes[self.planner]
        return [*chosen.phases, *chosen.other_profiles]

    @property
    def model_margin(self) -> float:
        """Error of the model itself, as measured where routing is uniformly random: see :data:`NULL_MARGINS`."""
        return NULL_MARGINS.get(self.simulator.profile.engine, 0.0) if self.exact else 0.0

    def gain_shown(self) -> bool:
        """Whether the whole confidence interval of the difference to the fallback is beyond the model's own error."""
        relative, half = self.versus(self.fallback)
        return half > 0 and relative + half < -self.model_margin

    def warnings(self) -> list[str]:
        """What a reader must know before using the plan: where it loses, and what the trace cannot show."""
        found = []
        for profile in self.other_profiles:
            relative, half = self.versus("eplb", self.chosen, profile)
            if relative > half:
                remedy = "plan for it with --profile, or a plan for each with --phase both"
                found.append(f"under {profile} this plan is {100 * relative:.1f} % slower than EPLB's: {remedy}")
        if self.domains == 1:
            found.append("the trace has one domain: on other traffic, the plan may be slower than EPLB's")
        if self.exact and self.sequences < FEWEST_SEQUENCES:
            found.append(
                f"only {self.sequences} sequence(s) are held out, too few for an interval: record at least "
                f"{4 * FEWEST_SEQUENCES}"
            )
        return found

    def versus(self, other: str, planner: str | None = None, profile: str | None = None) -> tuple[float, float]:
        """(relative time difference to another plan, half width of its 95 % interval), paired by pass.

        The half width is 0 if there is only one held-out sequence.
        """
        mine, theirs = self.outcomes[planner or self.planner], self.outcomes[other]
        if profile is None:
            return mine.samples.versus(theirs.samples)
        of_profile = (mine.phases | mine.other_profiles, theirs.phases | theirs.other_profiles)
        return of_profile[0][profile].versus(of_profile[1][profile])


def model_of(trace: TokenTrace | LoadTrace, model: str | ModelSpec | None) -> ModelSpec:
    """The model of a trace, checked against the sizes of the trace."""
    if isinstance(trace, TokenTrace):
        return model_for(trace, model)
    name = model or trace.model
    if name is None:
        raise ValueError(f"{trace.name}: the counts do not name their model: give --model: {', '.join(MODELS)}")
    spec = get_model(name)
    if trace.n_experts > spec.n_experts or trace.n_layers > spec.n_layers + spec.n_mtp:
        raise ValueError(
            f"{trace.name}: counts of {trace.n_layers} layers × {trace.n_experts} experts, but {spec.name} has "
            f"{spec.n_layers} × {spec.n_experts}"
        )
    return spec


def baseline_options(simulator: Simulator) -> dict[str, Any]:
    """Options of EPLB as the engine runs it: SGLang and vLLM keep expert groups on a node where they divide evenly."""
    groups, nodes = simulator.model.n_groups, simulator.cluster.n_nodes
    by_groups = simulator.profile.engine in ("sglang", "vllm") and nodes > 1 and groups > 1 and groups % nodes == 0
    return {"hierarchical": True} if by_groups else {}


def default_planner(profile: EngineProfile, trace: TokenTrace | LoadTrace) -> str:
    """The planner for a profile if none is asked for. Counts have nothing for planners on tokens."""
    name = DEFAULT_PLANNERS.get(profile.name, "anneal")
    return "eplb" if isinstance(trace, LoadTrace) and planner_class(name).needs_tokens else name


def decode_share(trace: TokenTrace | LoadTrace) -> float:
    """Share of the tokens that are decoded: that of a recording which tells the phases apart, else the default."""
    if not isinstance(trace, TokenTrace) or not {"prefill", "decode"} <= set(trace.domain_names):
        return DECODE_SHARE
    tokens = {name: int(trace.seq_lens[trace.domains == name].sum()) for name in ("prefill", "decode")}
    return min(0.99, max(0.01, tokens["decode"] / sum(tokens.values())))


def serve_both_phases(
    engine: str, model: ModelSpec, cluster: ClusterSpec, share: float, tokens_per_rank: int | None = None
) -> tuple[Simulator, Traffic, list[OtherPhase]]:
    """(simulator and traffic of the first phase, the other phase) of an engine that serves both from one plan.

    Args:
        share: share of the tokens that are decoded.
        tokens_per_rank: of a prefill pass; a decode pass has a quarter. By default 128 and 32.
    """
    if not 0 < share < 1:
        raise ValueError(f"the share of decoded tokens is {share}: expected more than 0 and less than 1")
    simulators = [Simulator(model, cluster, profile) for profile in phases_of(engine)]
    sizes = {"prefill": tokens_per_rank, "decode": tokens_per_rank and max(1, tokens_per_rank // 4)}
    traffic = [Traffic(one.profile.phase, sizes[one.profile.phase]) for one in simulators]
    shares = [share if one.profile.phase == "decode" else 1 - share for one in simulators]
    tokens = [one.sizes[1] * cluster.n_gpus for one in traffic]
    passes = [each / n for each, n in zip(shares, tokens, strict=True)]
    return simulators[0], traffic[0], [OtherPhase(simulators[1], tokens[1], passes[1] / passes[0])]


# Planning


def make_plan(
    trace: TokenTrace | LoadTrace,
    simulator: Simulator,
    planner: str,
    *,
    traffic: Traffic | None = None,
    other_phases: Sequence[OtherPhase] = (),
    sizes: Sizes | None = None,
    seconds: float = 30.0,
    iterations: int | None = None,
    force: bool = False,
    survive: str | None = None,
    live: Placement | None = None,
    limit: Limit | None = None,
    options: dict[str, Any] | None = None,
    compare_profiles: bool = True,
    loads: LoadTrace | None = None,
    progress: Callable[[str, float | None], None] = lambda step, seconds: None,
    stop: Callable[[], bool] = lambda: False,
) -> Plan:
    """Plan on one part of the trace, and serve passes of the rest. Baselines are static and EPLB.

    Args:
        simulator: model, cluster and profile. An engine loads a plan once, so migration costs nothing.
        traffic: pass sizes; by default those of the profile's phase.
        other_phases: phases that the same plan serves, see :func:`serve_both_phases`. Annealing plans for all of them,
            other planners for the first one; gains are those of all passes together. Counts do not tell them apart.
        sizes: how much to plan and to measure on.
        seconds: time budget of planners that take one.
        iterations: steps per layer of these planners instead. The plan then depends on the seed only.
        force: keep the planner's placement even if no gain over EPLB (or the live placement) is shown.
        survive: plan once more so that no expert is lost with a ``rank`` or a ``node``, and keep that plan whatever it
            costs. Only for annealing.
        live: (L, G, S) placement that is served now. It takes the place of the static one, and planners start from it.
        limit: what the change from the live placement may cost; by default anything.
        options: more options of the planner.
        loads: counts of much more traffic than the tokens of the trace. The plan is made for tokens drawn so that
            they have these loads.
        compare_profiles: measure the other profiles of the engine, too.
        progress: called before each step with its name and its duration in seconds, if known.
        stop: asked now and then. When it returns True, searches end with the best placement so far.
    """
    sizes = sizes or Sizes()
    if survive is not None and (planner_class(planner) is not Anneal or live is not None):
        raise ValueError("--survive needs the planner anneal, and a plan from scratch: leave out --planner and --from")
    simulator = simulator.spread_migration(PASSES_OF_A_PERMANENT_PLAN)
    traffic = replace(traffic or Traffic(simulator.profile.phase), schedule="stationary")
    if isinstance(trace, LoadTrace) and planner_class(planner).needs_tokens:
        raise ValueError(
            f"planner {planner!r} needs to know {MISSING}, but {trace.name} has counts only: plan with one of "
            f"{', '.join(planners_on_loads())}, or record tokens (SGLang per_token, routed experts, Megatron)"
        )
    before: TokenTrace | LoadTrace
    held_out: HeldOutPasses | HeldOutPhases | HeldOutCounts
    others: dict[str, HeldOutPasses] = {}
    sequences = 0
    if isinstance(trace, TokenTrace):
        # At random, because many traces have one domain after the other: a plan must see all of them.
        before, after = trace.split(sizes.share, seed=sizes.seed)
        said = [f"{part.n_tokens} tokens in {part.n_sequences} sequences" for part in (before, after)]
        if loads is not None:
            said[0] += f", with the loads of {loads.name}"
            before = match_loads(before, loads, seed=sizes.seed)
        if other_phases:
            served = [(simulator, traffic, 1.0)]
            for phase in other_phases:
                tokens = phase.tokens // simulator.n_gpus
                served.append((phase.simulator, Traffic(phase.simulator.profile.phase, tokens), phase.passes))
            held_out = HeldOutPhases(after, served, sizes.passes, sizes.seed)
        else:
            held_out = HeldOutPasses(after, simulator, traffic, sizes.passes, sizes.seed)
        if compare_profiles:
            others = _other_profiles(
                after, simulator, [phase.simulator.profile for phase in other_phases], traffic, sizes
            )
        sequences = after.n_sequences
    else:
        before, steps = trace.split(sizes.share)
        said = [f"{part.n_steps} steps of counts" for part in (before, steps)]
        held_out = HeldOutCounts(steps, simulator, traffic)
    observed = Observed(before, simulator, traffic, sizes.plan_passes, sizes.observe_tokens, sizes.seed)
    warm_up: Interval = observed.loads
    if isinstance(before, TokenTrace):
        warm_up = evaluation.compile_on(before.select(layers=[0]), simulator)
    outcomes: dict[str, Outcome] = {}

    def serve(name: str, placement: Placement, decision_s: float, empty: int) -> None:
        progress(f"serving held-out traffic on {name}", None)
        outcomes[name] = Outcome(
            **vars(held_out.measure(placement)),
            planner=name,
            placement=placement,
            decision_s=decision_s,
            filled=empty,
            other_profiles={
                other: passes.samples(placement[evenly_spaced(trace.n_layers, passes.n_layers)])
                for other, passes in others.items()
            },
        )

    def change(limit: Limit) -> Transition:
        return transition_from(first, limit, simulator, observed, other_phases)

    first = observed.static
    if live is not None:
        first = simulator.check(live)
        serve("live", first, 0.0, 0)
    names = list(dict.fromkeys([*(["static"] if live is None else []), "eplb", planner]))
    labels = {name: name for name in names}
    if survive is not None:
        asked, planner = planner, f"{planner}, no {survive} lost"
        labels[planner], force, seconds = asked, True, seconds / 2
    for label, name in labels.items():
        given: dict[str, Any] = {"seed": sizes.seed, **((options or {}) if label == planner else {})}
        if name == "eplb":
            given |= baseline_options(simulator)
        if planner_class(name) is Anneal:
            given = {"robustness": ROBUSTNESS, "other_phases": other_phases} | given
        if label != name:
            given["survive"] = survive
        if planner_class(name).takes_seconds:
            given |= {"seconds": seconds} if iterations is None else {"seconds": None, "iterations": iterations}
            given["stop"] = stop
        progress(f"compiling {name}", None)
        # Compilation is not part of the decision time. A search with a time budget would use all of it to compile.
        once = {"seconds": None, "iterations": 1} if "seconds" in given else {}
        make_planner(name, simulator, **{**given, **once}).plan([warm_up], observed.static[: warm_up.n_layers])
        if stop() and "eplb" in outcomes:
            if survive is not None:
                raise ValueError("stopped before there was a plan that survives: nothing is written")
            planner = "eplb"
            break
        made = make_planner(name, simulator, **given)
        start = outcomes["eplb"].placement if made.starts_from_eplb and live is None else first
        progress(name, seconds if made.takes_seconds and iterations is None else None)
        began = time.perf_counter()
        if live is not None and name == planner and made.takes_seconds and limit is not None:
            placement, empty = _search_within(name, given, change(limit), observed)
        else:
            placement, empty = _filled(made.plan([observed.interval(made)], start), simulator, observed)
            if live is not None and name == planner:
                placement = change(limit or Limit()).towards(placement)
        if simulator.cluster.link_gb_s and name == planner != "eplb" and live is None and survive is None:
            progress("fitting to the links", None)
            priced = transition_from(placement, Limit(), simulator, observed, other_phases, _LINK_TOKENS)
            placement = fit_to_links(placement, priced.times, sizes.seed, stop=stop)
        decision_s = time.perf_counter() - began
        serve(label, placement, decision_s, empty)
    totals, pass_tokens = observed.loads.loads(simulator.n_experts), traffic.sizes[1] * simulator.n_gpus
    return Plan(
        planner=planner,
        outcomes=outcomes,
        simulator=simulator,
        layer_ids=trace.layer_ids,
        trace=trace.name,
        planned_on=said[0],
        held_out=said[1],
        reused=held_out.reused,
        exact=isinstance(trace, TokenTrace),
        pass_tokens=pass_tokens,
        expert_pairs=totals / totals.sum(1, keepdims=True) * pass_tokens * simulator.model.top_k,
        force=force,
        stopped=stop(),
        domains=len(trace.domain_names) if isinstance(trace, TokenTrace) else 0,
        sequences=sequences,
        passes=(held_out.n_passes, held_out.n_passes if isinstance(held_out, HeldOutCounts) else sizes.passes),
        phases=other_phases,
    )


def _filled(placement: Placement, simulator: Simulator, observed: Observed) -> tuple[Placement, int]:
    """(a placement without empty slots, how many there were)"""
    placement = simulator.check(placement)
    empty = int((placement < 0).sum())
    return (fill_empty(simulator, observed, placement) if empty else placement), empty


def _search_within(name: str, given: dict[str, Any], change: Transition, observed: Observed) -> tuple[Placement, int]:
    """(the best placement that the limit allows, slots that were empty)

    A search that does not know the limit would move nearly everything, and a part of that is worth little. So moves
    cost time in the search, as much as it takes to stay within the limit. A few greedy operations compete with it.
    """
    empty, began = 0, time.perf_counter()
    greedy = Greedy(observed.simulator, operations=_GREEDY_OPERATIONS, restart=False)
    swapped = greedy.plan([observed.interval(greedy)], change.live)
    if given["seconds"] is not None:
        left = max(given["seconds"] - (time.perf_counter() - began), given["seconds"] / 2)
        given = given | {"seconds": left / _LIMITED_RUNS}

    def plan(passes: int) -> Placement:
        nonlocal empty
        simulator = observed.simulator.spread_migration(passes)
        made = make_planner(name, simulator, **given)
        placement, empty = _filled(made.plan([observed.interval(made)], change.live), simulator, observed)
        return placement

    return change.search(plan, _LIMITED_RUNS, [swapped]), empty


def transition_from(
    live: Placement,
    limit: Limit,
    simulator: Simulator,
    observed: Observed,
    other_phases: Sequence[OtherPhase] = (),
    tokens: int = _TRANSITION_TOKENS,
) -> Transition:
    """Changes of the live placement, priced on the traffic to plan on."""
    loads = observed.loads.loads(simulator.n_experts).astype(np.float64)
    # One large pass: with single passes, chance would decide which moves look good.
    mixed = None if observed.tokens is None else observed.tokens.mixed(tokens)

    def times(placement: Placement) -> npt.NDArray[np.float64]:
        if mixed is None:
            return 1 / balance(loads, placement)
        total = simulator.evaluate(mixed, placement, check=False).time_us
        for phase in other_phases:
            seen = replace(mixed, stands_for=phase.tokens)
            total = total + phase.passes * phase.simulator.evaluate(seen, placement, check=False).time_us
        return total

    return Transition(live, limit, loads, simulator.cluster, simulator.model, times)


def _other_profiles(
    part: TokenTrace, simulator: Simulator, phases: Sequence[EngineProfile], traffic: Traffic, sizes: Sizes
) -> dict[str, HeldOutPasses]:
    """Held-out passes under the other profiles of the engine, those of another phase with its default pass sizes.

    A plan that is loaded at the start is also measured as it will serve after a rebalancing.
    """
    found, engine = {}, simulator.profile.engine
    known = [*profiles_of(engine)]
    if simulator.profile.draws:
        known = [
            profile for profile in (*STATES.values(), *known) if profile.deals_one_node or profile.dispatch == "lp"
        ]
    for profile in known:
        if profile not in (simulator.profile, *phases):
            other = Simulator(simulator.model, simulator.cluster, profile, PASSES_OF_A_PERMANENT_PLAN)
            own = traffic if profile.phase == traffic.phase else Traffic(profile.phase)
            layers, n_passes, draws = _LP_PROFILE if profile.dispatch == "lp" else _OTHER_PROFILES
            some = part.select(layers=evenly_spaced(part.n_layers, layers))
            found[profile.name] = HeldOutPasses(some, other, own, min(sizes.passes, n_passes), sizes.seed, draws)
    return found


def fill_empty(simulator: Simulator, observed: Observed, placement: Placement) -> Placement:
    """Put a replica into every empty slot, because an engine needs all slots filled: the one that helps most.

    One slot per layer at a time, on the GPU with the lowest load. The hottest experts that this GPU does not hold are
    tried in the simulator, all layers at once. If only loads are known, the hottest expert is taken.
    """
    placement = placement.copy()
    loads = observed.loads.loads(simulator.n_experts).astype(float)
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
            ordered = np.argsort(-share, kind="stable")[:_FILL_CANDIDATES]
            candidates.append(ordered[share[ordered] >= 0])
        chosen = [int(experts[0]) for experts in candidates]
        if observed.tokens is not None:
            passes = replace(observed.tokens.first_passes(_FILL_PASSES), experts=observed.tokens.experts[layers])
            least = np.full(len(spots), np.inf)
            for i in range(min(len(experts) for experts in candidates)):
                trial = placement.copy()
                for spot, experts in zip(spots, candidates, strict=True):
                    trial[spot] = experts[i]
                times = simulator.pass_times(passes, trial[layers]).mean(1)
                for j in np.flatnonzero(times < least):
                    least[j], chosen[j] = times[j], int(candidates[j][i])
        for spot, expert in zip(spots, chosen, strict=True):
            placement[spot] = expert
    return placement
