"""Tables for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table

from clustergym.planners.evaluation import Result
from clustergym.planners.registry import PLANNERS, planner_class
from clustergym.plans.engines import EnginePlan, MemoryUse, memory_use
from clustergym.plans.planning import Outcome, Plan


def _table(title: str, caption: str, columns: Sequence[str]) -> Table:
    table = Table(title=escape(title), caption=caption)
    table.add_column("planner", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _percent(relative: float, half: float = 0.0) -> str:
    digits = 2 if 0 < half < 0.0005 else 1  # "-0.0 ± 0.0 %" says nothing
    return f"{100 * relative:+.{digits}f}{f' ± {100 * half:.{digits}f}' if half else ''} %"


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def results_table(results: list[Result], title: str) -> Table:
    """A comparison, slowest first. The fastest planner that does not see the future is bold."""
    first = results[0]
    if first.resampled is not None:
        interval = "± 95 % interval from resampled sequences"
    elif first.groups > 1:
        interval = f"± 95 % interval from {first.groups} disjoint groups of sequences"
    else:
        interval = "one stream gives no interval"
    table = _table(
        title,
        f"µs per layer and forward pass; moves and decision per layer and interval; {len(first.stream_totals_us)} "
        f"stream(s), {interval}; {100 * first.reused:.0f} % of the tokens of a stream were served before",
        ("served", "migration", "total", "vs eplb", "balance", "GPUs\nper token", "inter-\nnode MB", "moves",
         "decision\nms"),
    )  # fmt: skip
    eplb = next((r for r in results if r.planner == "eplb"), None)
    kinds = {name: planner_class(name) for name in {r.planner for r in results} & set(PLANNERS)}
    sees_more = {name for name, kind in kinds.items() if kind.needs_future or kind.needs_mixture}
    fastest = min((r.total_us for r in results if r.planner not in sees_more), default=None)
    for r in sorted(results, key=lambda r: -r.total_us):
        interval = f" ± {r.total_ci95_us:.1f}" if r.total_ci95_us else ""
        table.add_row(
            r.planner, f"{r.served_us:.1f}", f"{r.migration_us:.1f}", f"{r.total_us:.1f}{interval}",
            "" if eplb is None else _percent(*r.versus(eplb)), _number(r.balancedness, 3),
            _number(r.gpus_per_token, 2), _number(r.inter_node_mb, 2), _number(r.moves, 1), f"{r.decision_ms:.2f}",
            style="bold green" if r.total_us == fastest else "dim" if r.planner in sees_more else None,
        )  # fmt: skip
    return table


def plan_table(plan: Plan) -> Table:
    """The plan and the baselines on held-out traffic. The fastest one is bold."""
    table = _table(
        f"{plan.trace} on {plan.simulator.cluster.name}, {plan.served_as}, held out: {plan.held_out}",
        (
            "µs per layer and forward pass; ± 95 % interval from resampled sequences (sampling only: the model itself "
            "may be off by more)"
            if plan.exact
            else "µs per layer and forward pass of the expert kernels alone: counts do not show the traffic between "
            "GPUs; ± 95 % interval from blocks of steps"
        )
        + f". eplb: {plan.baseline}. Every plan: {plan_memory(plan).describe()}",
        ("time", f"vs {plan.reference}", "vs eplb", "balance", "GPUs/token", "inter-node MB", "decision s"),
    )
    fastest = min(o.served_us for o in plan.outcomes.values())
    for name, outcome in plan.outcomes.items():
        style = "bold green" if outcome.served_us == fastest else None
        table.add_row(name, *plan_cells(plan, outcome), style=style)
    return table


def plan_memory(plan: Plan) -> MemoryUse:
    """Memory per GPU, the same for all placements."""
    return memory_use(EnginePlan(plan.best.placement, plan.layer_ids, plan.model))


def plan_cells(plan: Plan, outcome: Outcome) -> list[str]:
    """The row of one planner: time, vs static or live, vs EPLB, balance, GPUs per token, inter-node MB, decision s."""
    return [
        f"{outcome.served_us:.1f}",
        *(_percent(*plan.versus(other, outcome.planner)) for other in (plan.reference, "eplb")),
        f"{outcome.balancedness:.3f}",
        _number(outcome.gpus_per_token, 2),
        _number(outcome.inter_node_mb, 2),
        f"{outcome.decision_s:.3f}",
    ]


def profiles_table(plan: Plan) -> Table:
    """The same placements in each phase and under the other profiles of the engine."""
    table = _table(
        f"the same plans under each profile (planned for {plan.served_as})",
        "difference to EPLB's plan; profiles that the plan is not for on a few layers",
        (),
    )
    for other in profile_columns(plan):
        table.add_column(other, justify="right")
    for name in plan.outcomes:
        table.add_row(name, *profile_cells(plan, name))
    return table


def profile_columns(plan: Plan) -> list[str]:
    """What the plan is for, then each phase of it and the other profiles."""
    return ["all passes" if plan.phases else plan.simulator.profile.name, *plan.other_profiles]


def profile_cells(plan: Plan, planner: str) -> list[str]:
    """Difference of one planner to EPLB under each profile: the one planned for, then the others."""
    return [_percent(*plan.versus("eplb", planner, profile)) for profile in (None, *plan.other_profiles)]


def gain_sentence(plan: Plan) -> str:
    """What the planner's plan is worth."""
    other = {"eplb": plan.baseline, "live": "the live plan"}[plan.fallback]
    return f"{plan.planner} against {other} on held-out traffic: {_percent(*plan.versus(plan.fallback))} time (sampling only)"
