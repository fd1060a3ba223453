"""The task that a policy is trained on: its flags, its traces, and the options of the registered environment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from clustergym.moe_placement.profiles import DEFAULT_PROFILE, get_profile
from clustergym.moe_placement.simulator import Simulator
from clustergym.moe_placement.specs import get_cluster, model_for
from clustergym.moe_placement.streams import Traffic
from clustergym.planners.policy.export import PolicySettings
from clustergym.traces import TokenTrace, load_traces
from clustergym.traces.splits import split_trace

START = "eplb"
"""Placement at the start of an episode: the agents improve on EPLB."""


@dataclass
class TaskArgs:
    """Flags of the trainer that describe the task."""

    layers: int = 6
    """Number of evenly spaced layers of the trace to train and evaluate on, 0 for all."""
    profile: tuple[str, ...] = (DEFAULT_PROFILE,)
    """Engine profiles: sglang-prefill, sglang-decode, vllm, vllm-deepep, tensorrt-llm or vllm-ascend."""
    intervals: int = 4
    """Number of intervals per episode, and per stream of the evaluation."""
    tokens_per_rank: int | None = None
    """Number of tokens per GPU and pass. Default: 32 in decode, 128 in prefill."""
    ops_per_layer: int = 16
    """Number of operations per layer between two intervals."""
    norm: int = 4
    """p-norm over GPUs in the look-ahead and in the reward. 0: the true time, which only the busiest GPU decides."""
    horizon: float = 4.0
    """Number of intervals for which a move is expected to help: the cost of its migration is spread over them.
    Each visit to a layer is then an episode.
    0: the whole stream is an episode, and each interval adds what earlier operations still save."""

    @property
    def whole_stream(self) -> bool:
        """Whether a stream is one episode. Otherwise each visit to a layer is one."""
        return self.horizon == 0

    @property
    def settings(self) -> PolicySettings:
        """What a planner must know to use the policy."""
        return PolicySettings(self.norm, 1.0 if self.whole_stream else self.horizon, self.ops_per_layer)


@dataclass
class Task:
    """What follows from the flags before training starts. The three traces share no sequence."""

    train: TokenTrace
    validation: TokenTrace
    test: TokenTrace
    simulator: Simulator
    traffic: Traffic
    settings: PolicySettings

    @property
    def title(self) -> str:
        """Title of the comparison on held-out streams."""
        where = f"{self.simulator.cluster.name}, {self.simulator.profile.name}"
        return f"{self.test.name} on {where}, held out, {self.traffic.schedule}"


def load_tasks(
    args: TaskArgs, traces: Sequence[str], eval_traces: Sequence[str], model: str | None, clusters: Sequence[str]
) -> list[Task]:
    """One task per model, cluster and profile. Traces of one model are joined, and all traces are split.

    With ``eval_traces``, they are the test split.

    Raises:
        ValueError: a trace does not fit the model or the cluster, or a model has no trace to evaluate on.
    """
    tasks, tests = [], _by_model(eval_traces, args.layers)
    for kind, whole in _by_model(traces, args.layers).items():
        train, validation, test = (split_trace(whole, part) for part in ("train", "validation", "test"))
        if tests and kind not in tests:
            found = " and ".join(f"top-{k} of {e} experts" for e, k in tests)
            raise ValueError(
                f"--eval-trace is {found}, but --trace {train.name} is top-{train.top_k} of {train.n_experts}: "
                "expected traces of one model. Use clustergym eval --checkpoint to evaluate on another model"
            )
        for cluster, profile in product(clusters, args.profile):
            simulator = Simulator(model_for(train, model), get_cluster(cluster), profile)
            phase = get_profile(profile).phase
            traffic = Traffic(phase, args.tokens_per_rank, schedule="drift", allow_reuse=True)
            tasks.append(Task(train, validation, tests.get(kind, test), simulator, traffic, args.settings))
    return tasks


def _by_model(sources: Sequence[str], layers: int) -> dict[tuple[int, int], TokenTrace]:
    """The traces of each number of experts and top-k, joined."""
    grouped: dict[tuple[int, int], list[str]] = {}
    for source in sources:
        trace = TokenTrace.load(source)
        grouped.setdefault((trace.n_experts, trace.top_k), []).append(source)
    return {kind: _evenly_spaced(load_traces(names), layers) for kind, names in grouped.items()}


def _evenly_spaced(trace: TokenTrace, layers: int) -> TokenTrace:
    picked = np.unique(np.linspace(0, trace.n_layers - 1, min(layers or trace.n_layers, trace.n_layers)).round())
    return trace.select(layers=picked.astype(int).tolist())


def environment_options(args: TaskArgs, task: Task) -> dict[str, Any]:
    """Options of the registered environment ``MoEPlacement-v0`` that the agents are trained on."""
    simulator, traffic = task.simulator, task.traffic
    return {
        "trace": task.train,
        "split": "all",
        "model": simulator.model,
        "cluster": simulator.cluster,
        "profile": simulator.profile,
        "tokens_per_rank": traffic.tokens_per_rank,
        "sampled_passes": traffic.sampled_passes,
        "schedule": traffic.schedule,
        "drift_rate": traffic.rate,
        "allow_reuse": traffic.allow_reuse,
        "intervals": args.intervals,
        "ops_per_layer": args.ops_per_layer,
        "passes_per_interval": task.settings.passes(simulator.passes_per_interval),
        "lookahead_norm": args.norm,
        "reward_norm": args.norm,
        "start": START,
        "memory": True,
        # The planner ``policy`` also deals the tokens over the ranks at random.
        "mix_observed": True,
        "compare_eplb": False,
    }
