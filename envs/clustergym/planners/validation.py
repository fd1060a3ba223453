"""Compares a policy in training with other planners: on validation streams, and on held-out streams at the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from clustergym.common.statistics import ci95
from clustergym.moe_placement.batch import PlacementBatch
from clustergym.planners.base import Planner
from clustergym.planners.evaluation import Protocol, Result, evaluate_planner
from clustergym.planners.policy.export import FILE_NAME, save_policy
from clustergym.planners.policy.inputs import PER_CENT, policy_inputs, same_node_weights, similar_experts
from clustergym.planners.policy.network import PolicyNetwork
from clustergym.planners.policy.planner import Policy
from clustergym.planners.policy.task import Task
from clustergym.planners.registry import make_planner
from clustergym.traces.token_trace import TokenTrace

EPLB_NAMES = ("eplb-once", "eplb", "eplb-ema", "eplb-threshold")


@dataclass
class EvaluationArgs:
    """Flags of the trainer that describe the comparison after training."""

    eval_streams: int = 4
    """Number of held-out streams after training, 0 for no evaluation."""
    eval_planners: tuple[str, ...] = ("static", *EPLB_NAMES, "flashlb", "bottleneck-8", "anneal", "anneal-robust")
    """Planners in the final table, next to the untrained, the supervised and the trained agents."""


class Validator:
    """Streams on which a policy and other planners are compared.

    Args:
        tasks: The tasks of the policy.
        network: Options of the policy's network.
        intervals: Of each stream.
        seed: Of the validation streams.

    Attributes:
        stages: Weights of the policy at several times of its training, by name.
        curve: Results of :meth:`validate`: rows of (step, % saved vs static, % saved vs EPLB).
    """

    def __init__(self, tasks: Sequence[Task], network: Mapping[str, Any], intervals: int, seed: int) -> None:
        self.tasks, self.network, self.intervals = tasks, network, intervals
        self.protocols = [Protocol(task.traffic, intervals=intervals, streams=2, seed=seed) for task in tasks]
        self.stages: dict[str, dict[str, Tensor]] = {}
        self.curve: list[list[float]] = []

    def validation_us(self, planner: Callable[[Task], Planner]) -> npt.NDArray[np.float64]:
        """(tasks,) times on the validation streams."""
        pairs = zip(self.tasks, self.protocols, strict=True)
        return np.array([_run("", planner(task), task, protocol, task.validation).total_us for task, protocol in pairs])

    @cached_property
    def reference_us(self) -> dict[str, npt.NDArray[np.float64]]:
        """Times of static placement and EPLB on the validation streams of each task."""
        return {
            name: self.validation_us(lambda task, name=name: make_planner(name, task.simulator))  # type: ignore[misc]
            for name in ("static", "eplb")
        }

    def planner(self, weights: Mapping[str, Tensor], task: Task, **options: Any) -> Policy:
        """The planner ``policy`` with the exported network."""
        network = PolicyNetwork.from_state(self.network, weights)
        return Policy(task.simulator, policy=(network, task.settings), **options)

    def agents(self, weights: Mapping[str, Tensor], task: Task) -> Policy:
        """The agents alone, as in training: one expert at a time, whose operations are simulated."""
        return self.planner(weights, task, candidates=1, estimate=False)

    def keep_stage(self, name: str, agent: nn.Module) -> None:
        """Keep a copy of the weights for :meth:`compare`."""
        self.stages[name] = {key: tensor.detach().cpu().clone() for key, tensor in agent.state_dict().items()}

    def validate(self, step: int, weights: Mapping[str, Tensor]) -> dict[str, float]:
        """What the policy saves on the validation streams compared with static placement and EPLB, mean over tasks."""
        total_us = self.validation_us(lambda task: self.agents(weights, task))
        saved = {name: float(100 * (1 - total_us / us).mean()) for name, us in self.reference_us.items()}
        self.curve.append([step, saved["static"], saved["eplb"]])
        return {"validation/total_us": float(total_us.mean())} | {
            f"validation/saved_vs_{name}": value for name, value in saved.items()
        }

    def compare(self, args: EvaluationArgs) -> list[dict[str, Result]]:
        """For each task, results on the test trace: of planners, agents at all stages, and the policy planner."""
        if not args.eval_streams:
            return [{} for _ in self.tasks]
        found = []
        for task in self.tasks:
            protocol = Protocol(task.traffic, intervals=self.intervals, streams=args.eval_streams)
            planners: dict[str, Planner] = {name: make_planner(name, task.simulator) for name in args.eval_planners}
            planners |= {name: self.agents(weights, task) for name, weights in self.stages.items()}
            planners["policy planner"] = self.planner(list(self.stages.values())[-1], task)
            found.append({name: _run(name, planner, task, protocol, task.test) for name, planner in planners.items()})
        return found

    @torch.no_grad()
    def record(self, weights: Mapping[str, Tensor], options: Mapping[str, Any], seed: int, folder: Path) -> None:
        """Record a video of an episode of the first task on its validation trace, with the most likely choices.

        ``options`` are those of the registered environment.
        """
        task = self.tasks[0]
        network = self.planner(weights, task).network
        made = dict(options) | {"trace": task.validation, "render_mode": "rgb_array"}
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
        settings = self.tasks[0].settings
        save_policy(file, self.network, weights, settings, about)
        save_policy(supervised, self.network, self.stages["supervised"], settings, {**about, "steps": 0})
        return file

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps. The stage "untrained" follows from the seed."""
        return {"curve": self.curve, "supervised": self.stages["supervised"]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.curve, self.stages["supervised"] = state["curve"], state["supervised"]


def _run(name: str, planner: Planner, task: Task, protocol: Protocol, trace: TokenTrace) -> Result:
    return evaluate_planner(planner, name, task.train, trace, protocol)


def summary(results: Sequence[Mapping[str, Result]]) -> dict[str, Any]:
    """Fields of the result line: means over tasks of the time of each planner, and of the policy compared with EPLB."""
    names, best_ratios, ratios = results[0], [], []
    for found in results:
        ours = found.get("policy") or found.get("supervised")
        eplbs = [found[name].total_us for name in EPLB_NAMES if name in found]
        if ours is not None and eplbs:
            best_ratios.append(ours.total_us / min(eplbs))
        if ours is not None and "eplb" in found:
            ratios += list(np.divide(ours.stream_totals_us, found["eplb"].stream_totals_us))
    return {
        "total_us": {name: float(np.mean([found[name].total_us for found in results])) for name in names},
        "mean_return": 1 - float(np.mean(best_ratios)) if best_ratios else None,
        "vs_best_eplb": float(np.mean(best_ratios)) if best_ratios else None,
        "vs_eplb": float(np.mean(ratios)) if ratios else None,
        "vs_eplb_ci95": ci95(ratios) if ratios else None,
    }
