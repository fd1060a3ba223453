"""Two more sections of the HTML page, for ``clustergym demo``: the traffic, and all planners over decision time."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from clustergym.planners.evaluation import Result
from clustergym.planners.registry import planner_class
from clustergym.traces import TokenTrace

_MAX_DOMAINS = 12


@dataclass(frozen=True)
class Story:
    """What the page shows besides a plan."""

    trace: TokenTrace
    results: Sequence[Result]
    """All planners on the same held-out traffic, EPLB among them."""
    n_gpus: int

    def traffic_section(self) -> str:
        """HTML of the section about the trace."""
        trace, figures = self.trace, self.trace.statistics(self.n_gpus)
        rows = [
            (
                "Load of the busiest expert / mean load", f"{figures['max_mean_load']:.2f}", "1 if routing were even",
                "Some experts are hot. The GPU that holds too many of them is the slowest one.",
            ),
            (
                "How often two experts of a token are used together / by chance", f"{figures['coactivation_lift']:.2f}",
                "1 if experts were independent",
                "Experts that are used together should be on one GPU: the token then travels once.",
            ),
            (
                "GPUs that a token visits", f"{figures['gpus_per_token']:.2f}",
                f"{figures['gpus_per_token_grouped']:.2f} if experts are grouped by use",
                f"With experts in their order on {self.n_gpus} GPUs. Every visit is traffic.",
            ),
            (
                "Difference of the loads between domains, bits", f"{figures['domain_divergence']:.3f}",
                f"{figures['domain_divergence_shuffled']:.3f} with shuffled labels",
                "Another kind of text uses other experts. A plan gets old when the mixture changes.",
            ),
            (
                "Experts of the next layer that this layer predicts", f"{figures['next_layer_predictability']:.0%}",
                f"{figures['next_layer_chance']:.0%} from the loads alone",
                "Routing is not random from layer to layer.",
            ),
        ]  # fmt: skip
        body = "".join(
            f"<tr><th scope=row>{name}</th><td>{value}</td><td>{other}</td><td class=text>{why}</td></tr>"
            for name, value, other, why in rows
        )
        about = (
            f"{trace.n_tokens:,} tokens in {trace.n_sequences} sequences of {len(trace.domain_names)} domains, "
            f"{trace.n_layers} layers, top-{trace.top_k} of {trace.n_experts} experts"
        )
        return (
            "<h2>What the traffic looks like</h2>"
            f"<p>The trace <b>{html.escape(trace.name)}</b> has the experts that every token of a model used: {about}."
            "</p>"
            '<div class="scroll"><table id="statistics"><thead><tr><th scope=col>statistic (mean over layers)</th>'
            "<th scope=col>value</th><th scope=col>compare with</th><th scope=col class=text>why it matters</th>"
            f"</tr></thead><tbody>{body}</tbody></table></div>"
            f'<h3>Load of each expert by domain, layer {self.trace.layer_ids[self._layer]}</h3>'
            '<p class="soft">One column per expert, the busiest first. Colour: load / mean load of the domain.</p>'
            '<div class="legend inline" id="legend-domains"></div><div class="scroll" id="domains"></div>'
        )  # fmt: skip

    def planners_section(self) -> str:
        """HTML of the section about all planners."""
        return (
            "<h2>Better plans take longer to find</h2>"
            '<p class="soft">Time saved compared with EPLB on held-out traffic, over the time of the decision. The '
            "line joins the planners that no other one beats in both. Grey: sees the future, so it is a bound. "
            'Vertical bars are 95 % intervals.</p><div class="scroll" id="pareto"></div>'
        )

    @property
    def _layer(self) -> int:
        return self.trace.n_layers // 2

    def data(self) -> dict[str, Any]:
        """What the script of the page draws."""
        eplb = next(r for r in self.results if r.planner == "eplb")
        points = []
        for result in self.results:
            relative, half = result.versus(eplb)
            kind = planner_class(result.planner)
            points.append({
                "name": result.planner, "ms": round(max(result.decision_ms, 0.01), 4),
                "saved": round(-100 * relative, 2) + 0.0, "half": round(100 * half, 2),
                "bound": kind.needs_future or kind.needs_mixture,
            })  # fmt: skip
        return {"domains": self._domains(), "pareto": points}

    def _domains(self) -> dict[str, Any]:
        trace, sizes = self.trace, {}
        for name in trace.domain_names:
            part = trace.select(domains=str(name))
            loads = part.loads()[self._layer].astype(float)
            sizes[str(name)] = (part.n_tokens, loads / max(loads.mean(), 1e-9))
        largest = sorted(sizes, key=lambda name: -sizes[name][0])[:_MAX_DOMAINS]
        order = np.argsort(-trace.loads()[self._layer], kind="stable")
        return {
            "experts": order.tolist(),
            "rows": [{"name": name, "loads": np.round(sizes[name][1][order], 2).tolist()} for name in sorted(largest)],
        }
