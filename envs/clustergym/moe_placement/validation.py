"""Compares a policy in training with other planners: on validation streams, and on held-out streams at the end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn

from clustergym.common.statistics import ci95
from clustergym.moe_placement.batch import PlacementBatch
from clustergym.moe_placement.evaluation import Protocol, Result, evaluate_planner
from clustergym.moe_placement.planner_registry import make_planner
from clustergym.moe_placement.planners.base import Planner
from clustergym.moe_placement.policy.export import FILE_NAME, save_policy
from clustergym.moe_placement.policy.inputs import PER_CENT, policy_inputs, same_node_weights, similar_experts
from clustergym.moe_placement.policy.network import PolicyNetwork
from clustergym.moe_placement.policy.planner import Policy
from clustergym.moe_placement.policy.task import Task
from clustergym.traces.token_trace import TokenTrace

EPLB_NAMES = ("eplb-once", "eplb", "eplb-ema", "eplb-threshold")


@dataclass
class EvaluationArgs:
    """Flags of the trainer that describe the comparison after training."""

    eval_streams: int = 4
    """Number of held-out streams after training, 0 for no evaluation."""
    eval_intervals: int = 4
    """Number of intervals per held-out stream."""
    eval_planners: tuple[str, ...] = ("static", *EPLB_NAMES, "bottleneck-8", "anneal")
    """Planners in the final table, next to the untrained, the supervised and the trained policy."""


class Validator:
    """Streams on which a policy and other planners are compared.

    Args:
        task: The task of the policy.
        network: Options of the policy's network.
        intervals, seed: Of the validation streams.

    Attributes:
        stages: Weights of the policy at several times of its training, by name.
        curve: Results of :meth:`validate`: rows of (step, % saved vs static, % saved vs EPLB).
    """

    def __init__(self, task: Task, network: Mapping[str, Any], intervals: int, seed: int) -> None:
        self.task, self.network = task, network
        self.protocol = Protocol(task.traffic, intervals=intervals, streams=2, seed=seed)
        self.stages: dict[str, dict[str, Tensor]] = {}
        self.curve: list[list[float]] = []

    @cached_property
    def reference_us(self) -> dict[str, float]:
        """Times of static placement and EPLB on the validation streams."""
        planners = {name: make_planner(name, self.task.simulator) for name in ("static", "eplb")}
        return {
            name: self._run(name, planner, self.protocol, self.task.validation).total_us
            for name, planner in planners.items()
        }

    def _run(self, name: str, planner: Planner, protocol: Protocol, trace: TokenTrace) -> Result:
        return evaluate_planner(planner, name, self.task.train, trace, protocol)

    def policy(self, weights: Mapping[str, Tensor]) -> Policy:
        """The planner that uses the exported network."""
        network = PolicyNetwork.from_state(self.network, weights)
        return Policy(self.task.simulator, policy=(network, self.task.settings))

    def keep_stage(self, name: str, agent: nn.Module) -> None:
        """Keep a copy of the weights for :meth:`compare`."""
        self.stages[name] = {key: tensor.detach().cpu().clone() for key, tensor in agent.state_dict().items()}

    def validate(self, step: int, weights: Mapping[str, Tensor]) -> dict[str, float]:
        """Time of the policy on the validation streams, and what it saves compared with static placement and EPLB."""
        total_us = self._run("policy", self.policy(weights), self.protocol, self.task.validation).total_us
        saved = {name: 100 * (1 - total_us / us) for name, us in self.reference_us.items()}
        self.curve.append([step, saved["static"], saved["eplb"]])
        return {"validation/total_us": total_us} | {f"validation/saved_vs_{name}": x for name, x in saved.items()}

    def compare(self, args: EvaluationArgs) -> dict[str, Result]:
        """Results of the planners and of all stages of the policy on the test trace. Empty without streams."""
        if not args.eval_streams:
            return {}
        protocol = Protocol(self.task.traffic, intervals=args.eval_intervals, streams=args.eval_streams)
        planners: dict[str, Planner] = {name: make_planner(name, self.task.simulator) for name in args.eval_planners}
        planners |= {name: self.policy(weights) for name, weights in self.stages.items()}
        return {name: self._run(name, planner, protocol, self.task.test) for name, planner in planners.items()}

    @torch.no_grad()
    def record(self, weights: Mapping[str, Tensor], options: Mapping[str, Any], seed: int, folder: Path) -> None:
        """Record a video of an episode on the validation trace, with the most likely choices of the policy.

        ``options`` are those of the registered environment.
        """
        network = self.policy(weights).network
        made = dict(options) | {"trace": self.task.validation, "render_mode": "rgb_array"}
        env = gymnasium.make("MoEPlacement-v0", disable_env_checker=True, **made)
        batch: PlacementBatch = env.unwrapped.batch  # type: ignore[attr-defined]
        env = gymnasium.wrappers.RecordVideo(env, str(folder), episode_trigger=lambda _: True, disable_logger=True)
        env.reset(seed=seed)
        same_node, done = same_node_weights(batch.cluster), False
        while not done:
            inputs = policy_inputs(batch.obs, similar_experts(batch.obs["affinity"]), same_node)
            encoded = network.encode(inputs)
            expert = network.expert_logits(inputs, encoded).argmax(-1)
            parts, legal = batch.lookahead(expert[:, None])[:, 0] * PER_CENT, batch.obs["joint_mask"][0, expert].bool()
            node = network.node_logits(inputs, encoded, expert, parts, legal).argmax(-1)
            _, _, done, _, _ = env.step(np.array([int(expert), int(node)]))
        env.close()  # type: ignore[no-untyped-call]

    def export(self, weights: Mapping[str, Tensor], about: Mapping[str, Any], folder: Path) -> Path:
        """Write the policy to the folder, and the supervised one to a folder in it. Returns the file of the policy."""
        file, supervised = folder / FILE_NAME, folder / "supervised" / FILE_NAME
        save_policy(file, self.network, weights, self.task.settings, about)
        save_policy(supervised, self.network, self.stages["supervised"], self.task.settings, {**about, "steps": 0})
        return file

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps. The stage "untrained" follows from the seed."""
        return {"curve": self.curve, "supervised": self.stages["supervised"]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.curve, self.stages["supervised"] = state["curve"], state["supervised"]


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
