"""Compares a policy in training with other planners: on validation streams, and on held-out streams at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from clustergym.common.statistics import ci95
from clustergym.moe_placement.evaluation import Protocol, Result, evaluate_planner
from clustergym.moe_placement.planner_registry import make_planner
from clustergym.moe_placement.planners.base import Planner
from clustergym.moe_placement.policy.export import PolicySettings
from clustergym.moe_placement.policy.network import PolicyNetwork
from clustergym.moe_placement.policy.planner import Policy
from clustergym.moe_placement.simulator import Simulator
from clustergym.moe_placement.streams import Traffic
from clustergym.traces.token_trace import TokenTrace

EPLB_NAMES = ("eplb-once", "eplb", "eplb-ema", "eplb-threshold")


class Validator:
    """Streams on which a policy and other planners are compared.

    Args:
        simulator, traffic: the task.
        train, validation, test: traces that share no sequence.
        settings: options of the policy.
        intervals, seed: of the validation streams.
    """

    def __init__(
        self,
        simulator: Simulator,
        traffic: Traffic,
        train: TokenTrace,
        validation: TokenTrace,
        test: TokenTrace,
        settings: PolicySettings,
        intervals: int,
        seed: int,
    ) -> None:
        self.simulator, self.traffic, self.settings = simulator, traffic, settings
        self.train, self.validation, self.test = train, validation, test
        self.protocol = Protocol(traffic, intervals=intervals, streams=2, seed=seed)
        self.reference_us = {
            name: self._run(name, make_planner(name, simulator), self.protocol, validation).total_us
            for name in ("static", "eplb")
        }

    def _run(self, name: str, planner: Planner, protocol: Protocol, trace: TokenTrace) -> Result:
        return evaluate_planner(planner, name, self.train, trace, protocol)

    def policy(self, network: Mapping[str, Any], weights: Mapping[str, Tensor]) -> Policy:
        """The planner that uses the exported network."""
        return Policy(self.simulator, policy=(PolicyNetwork.from_state(network, weights), self.settings))

    def validate(self, network: Mapping[str, Any], weights: Mapping[str, Tensor]) -> dict[str, float]:
        """Time of the policy on the validation streams, and what it saves compared with static placement and EPLB."""
        total_us = self._run("policy", self.policy(network, weights), self.protocol, self.validation).total_us
        saved = {f"validation/saved_vs_{name}": 100 * (1 - total_us / us) for name, us in self.reference_us.items()}
        return {"validation/total_us": total_us} | saved

    def compare(
        self,
        names: Sequence[str],
        network: Mapping[str, Any],
        stages: Mapping[str, Mapping[str, Tensor]],
        intervals: int,
        streams: int,
    ) -> dict[str, Result]:
        """Results of the planners and of all stages of the policy on streams that share no sequence with training."""
        protocol = Protocol(self.traffic, intervals=intervals, streams=streams)
        planners: dict[str, Planner] = {name: make_planner(name, self.simulator) for name in names}
        planners |= {name: self.policy(network, weights) for name, weights in stages.items()}
        return {name: self._run(name, planner, protocol, self.test) for name, planner in planners.items()}


def summary(results: Mapping[str, Result]) -> dict[str, Any]:
    """Fields of the result line: the policy compared with the best EPLB, and with EPLB in every interval by stream."""
    found: dict[str, Any] = {"total_us": {name: result.total_us for name, result in results.items()}}
    ours = results.get("policy") or results.get("supervised")
    best_eplb_us = min((results[name].total_us for name in EPLB_NAMES if name in results), default=float("nan"))
    ratio = None if ours is None else ours.total_us / best_eplb_us
    ratios = []
    if ours is not None and "eplb" in results:
        ratios = list(np.divide(ours.stream_totals_us, results["eplb"].stream_totals_us))
    return found | {
        "mean_return": None if ratio is None else 1 - ratio,
        "vs_best_eplb": ratio,
        "vs_eplb": float(np.mean(ratios)) if ratios else None,
        "vs_eplb_ci95": ci95(ratios) if ratios else None,
    }
