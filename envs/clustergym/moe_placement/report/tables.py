"""Tables for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table

from clustergym.moe_placement.evaluation import Result
from clustergym.moe_placement.planner_registry import PLANNERS
from clustergym.moe_placement.planning import Outcome, Plan


def _table(title: str, caption: str, columns: Sequence[str]) -> Table:
    table = Table(title=escape(title), caption=caption)
    table.add_column("planner")
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _percent(us: float, reference_us: float) -> str:
    return f"{100 * (us / reference_us - 1):+.1f} %"


def results_table(results: list[Result], title: str) -> Table:
    """A comparison, slowest first. The fastest planner that does not see the future is bold."""
    table = _table(
        title,
        "µs per layer and forward pass; moves and decision per layer and window",
        ("served", "migration", "total", "vs eplb", "balance", "GPUs/token", "inter-node MB", "moves", "decision ms"),
    )
    reference = next((r.total_us for r in results if r.planner == "eplb"), None)
    needs_future = {name for name, entry in PLANNERS.items() if entry.planner.needs_future}
    fastest = min((r.total_us for r in results if r.planner not in needs_future), default=None)
    for r in sorted(results, key=lambda r: -r.total_us):
        interval = f" ± {r.total_ci95_us:.1f}" if r.total_ci95_us else ""
        table.add_row(
            r.planner, f"{r.served_us:.1f}", f"{r.migration_us:.1f}", f"{r.total_us:.1f}{interval}",
            "" if reference is None else _percent(r.total_us, reference), f"{r.balancedness:.3f}",
            f"{r.gpus_per_token:.2f}", f"{r.inter_node_mb:.2f}", f"{r.moves:.1f}", f"{r.decision_ms:.2f}",
            style="bold green" if r.total_us == fastest else "dim" if r.planner in needs_future else None,
        )  # fmt: skip
    return table


def plan_table(plan: Plan) -> Table:
    """The chosen plan and the baselines on held-out traffic. The fastest one is bold."""
    table = _table(
        f"{plan.trace} on {plan.simulator.cluster.name}, held out: {plan.held_out}",
        "µs per layer and forward pass"
        if plan.exact
        else "µs per layer and forward pass of the expert kernels alone: counts do not show the traffic between GPUs",
        ("time", "vs static", "vs eplb", "balance", "GPUs/token", "inter-node MB", "decision s"),
    )
    fastest = min(o.served_us for o in plan.outcomes.values())
    for name, outcome in plan.outcomes.items():
        style = "bold green" if outcome.served_us == fastest else None
        table.add_row(name, *plan_cells(plan, outcome), style=style)
    return table


def plan_cells(plan: Plan, outcome: Outcome) -> list[str]:
    """The row of one planner: time, vs static, vs EPLB, balance, GPUs per token, inter-node MB, decision s."""
    return [
        f"{outcome.served_us:.1f}",
        *(_percent(outcome.served_us, plan.outcomes[other].served_us) for other in ("static", "eplb")),
        f"{outcome.balancedness:.3f}",
        "–" if outcome.gpus_per_token is None else f"{outcome.gpus_per_token:.2f}",
        "–" if outcome.inter_node_mb is None else f"{outcome.inter_node_mb:.2f}",
        f"{outcome.decision_s:.3f}",
    ]
