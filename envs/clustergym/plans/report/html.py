"""A plan as one self-contained HTML page that opens in any browser, without a network."""

from __future__ import annotations

import html
import json
import re
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from clustergym.common.files import write_atomically
from clustergym.plans.engines import PlanChange
from clustergym.plans.planning import Outcome, Plan
from clustergym.plans.report.slot_curve import slot_section
from clustergym.plans.report.story import Story
from clustergym.plans.report.tables import plan_cells, plan_memory, profile_cells, profile_columns
from clustergym.plans.slots import SlotCurve

MOST_GPUS_DRAWN = 64
"""With more GPUs, loads and traffic are drawn by node, and placements of one node at a time."""


def write_report(
    path: Path,
    plan: Plan,
    engine: str,
    load: str,
    command: str,
    change: PlanChange | None = None,
    story: Story | None = None,
    slots: SlotCurve | None = None,
) -> None:
    """Write the report atomically."""
    write_atomically(path, render(plan, engine, load, command, change, story, slots))


def render(
    plan: Plan,
    engine: str,
    load: str,
    command: str,
    change: PlanChange | None = None,
    story: Story | None = None,
    slots: SlotCurve | None = None,
) -> str:
    """The page, with its data, styles and script."""
    folder = resources.files(__package__)
    template, script = (folder.joinpath(name).read_text(encoding="utf-8") for name in ("template.html", "script.js"))
    data = _data(plan) | ({} if story is None else story.data())
    fields = {
        "TITLE": html.escape(f"{plan.model.name} on {plan.simulator.cluster.name}"),
        "HEADLINE": html.escape(_headline(plan)),
        "FACTS": "".join(
            f"<div><dt>{html.escape(k)}</dt><dd>{html.escape(v)}</dd></div>" for k, v in _facts(plan, engine, change)
        ),
        "REFERENCE": plan.reference,
        "TRAFFIC": "" if story is None else story.traffic_section(),
        "SLOTS": "" if slots is None else slot_section(slots),
        "TABLE": _table(plan),
        "PARETO": "" if story is None else story.planners_section(),
        "PROFILES": _profiles(plan),
        "LOAD": html.escape(load),
        "COMMAND": html.escape(command),
        "SCRIPT": script,
        # "</script>" in a string would end the script.
        "DATA": json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),
    }
    # One pass, because a value may itself look like a mark.
    return re.sub(r"@@([A-Z]+)@@", lambda mark: fields[mark[1]], template)


def _headline(plan: Plan) -> str:
    labels = {"eplb": "EPLB", "live": "the live plan", "static": "the static placement"}
    other = plan.fallback if plan.planner != plan.fallback else plan.reference
    label = labels[other]
    relative, half = plan.versus(other)
    word = "less" if relative < 0 else "more"
    interval = f" (± {100 * half:.1f})" if half else ""
    what = "time" if plan.exact else "expert-kernel time"
    where = f"on held-out traffic, {plan.served_as}"
    said = f"{plan.planner}: {100 * abs(relative):.1f} %{interval} {word} {what} than {label} {where}"
    if plan.planner == plan.fallback or plan.gain_shown():
        return said
    kept = {"eplb": "the plan of EPLB is written", "live": "the live plan is kept"}[plan.fallback]
    return f"{said}. No gain is shown: {'written anyway' if plan.force else kept}"


def _facts(plan: Plan, engine: str, change: PlanChange | None) -> list[tuple[str, str]]:
    cluster, simulator = plan.simulator.cluster, plan.simulator
    return [
        ("trace", plan.trace),
        ("planned on", plan.planned_on),
        ("held out", plan.held_out),
        (
            "cluster",
            f"{cluster.n_nodes} nodes × {cluster.gpus_per_node} GPUs, {simulator.n_slots} slots per GPU and layer",
        ),
        ("model", f"{len(plan.layer_ids)} MoE layers, top-{plan.model.top_k} of {plan.model.n_experts} experts"),
        (
            "passes",
            f"{plan.pass_tokens} tokens; {100 * plan.reused:.0f} % of the tokens of all passes were served before",
        ),
        ("engine", engine),
        ("profile", plan.served_as if plan.phases else f"{simulator.profile.name}: {simulator.profile.about}"),
        ("memory", plan_memory(plan).describe()),
        *([] if change is None else [("change from the live plan", change.describe())]),
    ]


def _table(plan: Plan) -> str:
    rows = []
    for name, outcome in plan.outcomes.items():
        chosen, mark = (' class="chosen"', " ◆") if name == plan.chosen else ("", "")
        body = "".join(f"<td>{cell}</td>" for cell in plan_cells(plan, outcome))
        rows.append(f"<tr{chosen}><th scope=row>{html.escape(name)}{mark}</th>{body}</tr>")
    return "".join(rows)


def _profiles(plan: Plan) -> str:
    """The placements under the other profiles of the engine, as a section; empty if there are none."""
    if not plan.other_profiles:
        return ""
    profiles = profile_columns(plan)
    head = "".join(f"<th scope=col>{html.escape(profile)}</th>" for profile in profiles)
    rows = "".join(
        f"<tr><th scope=row>{html.escape(name)}</th>{''.join(f'<td>{c}</td>' for c in profile_cells(plan, name))}</tr>"
        for name in plan.outcomes
    )
    return (
        "<h2>The same plans in each phase</h2>"
        f'<p class="soft">Difference to the time of EPLB. The plan is made for {html.escape(plan.served_as)}: its gain '
        "need not hold where the engine sends tokens in another way.</p>"
        f'<div class="scroll"><table id="profiles"><thead><tr><th scope=col>planner</th>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _data(plan: Plan) -> dict[str, Any]:
    cluster = plan.simulator.cluster
    return {
        "chosen": plan.chosen,
        "baseline": plan.fallback
        if plan.chosen != plan.fallback
        else "static"
        if plan.reference == "static"
        else "eplb",
        "exact": plan.exact,
        "layers": [int(l) for l in plan.layer_ids],
        "gpus": plan.simulator.n_gpus,
        "perNode": cluster.gpus_per_node,
        "byNode": plan.simulator.n_gpus > MOST_GPUS_DRAWN,
        "planners": {name: _drawn(o, cluster.gpus_per_node) for name, o in plan.outcomes.items()},
        "loads": np.round(plan.expert_pairs, 1).tolist(),
        "tokenKB": plan.model.hidden * plan.model.dispatch_bytes / 1e3,
    }


def _drawn(outcome: Outcome, gpus_per_node: int) -> dict[str, Any]:
    copies = outcome.copies
    if copies is not None and copies.shape[1] > MOST_GPUS_DRAWN:
        layers, nodes = len(copies), copies.shape[1] // gpus_per_node
        copies = copies.reshape(layers, nodes, gpus_per_node, nodes, gpus_per_node).sum((2, 4))
    return {
        "pairs": np.round(outcome.pairs).astype(int).tolist(),
        "peak": np.round(outcome.peak_pairs, 1).tolist(),
        "us": np.round(outcome.layer_us, 1).tolist(),
        "slots": outcome.placement.tolist(),
        "copies": None if copies is None else np.round(copies).astype(int).tolist(),
    }
