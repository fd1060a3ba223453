"""Play one task with one entry: the scores of its runs, and what they are made of."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
import torch

from clustergym.bench.entries import Entry, checkpoints
from clustergym.bench.limited import CallFailed, LimitedFunction
from clustergym.bench.submitted import Submitted, simulator_options, submit
from clustergym.bench.suites import AllocationTask, PlacementTask, Task, sha256_of
from clustergym.gpu_allocation.batch import AllocationBatch
from clustergym.gpu_allocation.evaluation import play as play_streams
from clustergym.gpu_allocation.policy import AllocationPolicy
from clustergym.gpu_allocation.rules import RULES
from clustergym.gpu_allocation.state import SUM_REWARD, SUM_STEPS
from clustergym.moe_placement.simulator import Simulator
from clustergym.planners.base import Planner
from clustergym.planners.evaluation import Policy, Result, compile_on, evaluate_planner, evaluate_policy, teach
from clustergym.planners.registry import make_planner


@dataclass
class Played:
    """Results of one entry on one task."""

    scores: list[float]
    """One per run, larger is better. Placement: share of the time saved compared with EPLB on the same stream.
    Allocation: position between the rule ``grant`` (0) and the oracle (1)."""
    metrics: dict[str, float | None]
    """Means over the runs."""
    reference: dict[str, Any]
    """Raw results that the scores are computed from."""
    failures: list[str] = field(default_factory=list)
    """First messages of failed decisions."""
    specs_sha256: str = ""
    """Hash of the model, cluster and profile, or of the configuration, in this version of clustergym."""


def play(task: Task, entry: Entry) -> Played:
    """Play a task.

    Raises:
        ValueError: the entry cannot play this task.
    """
    torch.set_num_threads(1)
    return play_placement(task, entry) if isinstance(task, PlacementTask) else play_allocation(task, entry)


# Placement


def play_placement(task: PlacementTask, entry: Entry) -> Played:
    simulator, protocol = task.simulator, task.protocol
    trace = task.load()
    train, test = protocol.parts(trace)
    warm_up, static = compile_on(test, simulator), simulator.static(test.n_layers)

    def run(planner: Planner, name: str) -> Result:
        teach(planner, trace, protocol)
        planner.plan([warm_up], static)
        if isinstance(planner, Submitted):
            planner.failures.clear()
            planner.calls = 0
        return evaluate_planner(planner, name, train, test, protocol)

    eplb = run(make_planner("eplb", simulator), "eplb")
    failures: list[str] = []
    calls = 0
    if entry.kind == "agent":
        result, failures, calls = play_agent(task, entry, simulator)
    elif entry.kind == "function":
        planner = submit(entry.target, simulator, task.limits, task.seed)
        try:
            result = run(planner, entry.name)
        finally:
            planner.function.close()
        failures, calls = planner.failures, planner.calls
    else:
        result = run(_planner(entry, simulator, task.seed), entry.name)
    totals, reference = np.array(result.stream_totals_us), np.array(eplb.stream_totals_us)
    metrics: dict[str, float | None] = {
        "total_us": result.total_us,
        "served_us": result.served_us,
        "migration_us": result.migration_us,
        "balancedness": result.balancedness,
        "inter_node_mb": result.inter_node_mb,
        "moves": result.moves,
        "decision_ms": result.decision_ms,
        "reused": result.reused,
        "failed": len(failures) / max(1, calls),
    }
    return Played(
        scores=(1 - totals / reference).tolist(),
        metrics=metrics,
        reference={"eplb_us": reference.tolist(), "entry_us": totals.tolist(), "groups": result.groups},
        failures=failures[:5],
        specs_sha256=sha256_of([repr(simulator.model), repr(simulator.cluster), repr(simulator.profile)]),
    )


def _planner(entry: Entry, simulator: Simulator, seed: int) -> Planner:
    if entry.kind == "checkpoint":
        raise ValueError(f"{entry.target}: a placement policy acts in the environment: submit it with --agent")
    return make_planner(entry.target, simulator, seed=seed)


def play_agent(task: PlacementTask, entry: Entry, simulator: Simulator) -> tuple[Result, list[str], int]:
    """Let a ``predict(obs)`` function play the environment on the streams that planners get."""
    failures: list[str] = []
    calls = 0
    with LimitedFunction(entry.target, "agent", simulator_options(simulator), task.limits) as function:
        _start(function, entry)

        def policy_of(env: gymnasium.Env[Any, Any]) -> Policy:
            def act(obs: Any) -> Any:
                nonlocal calls
                action, failure = _predict(function, obs, env.action_space, env.unwrapped.noop_action())  # type: ignore[attr-defined]
                calls += 1
                if failure:
                    failures.append(failure)
                    if len(failures) > 10 and len(failures) > calls / 2:
                        raise ValueError(f"agent {entry.name}: most actions fail, the last one: {failure}")
                return action

            return act

        test = task.protocol.parts(task.load())[1]
        result = evaluate_policy(
            policy_of, entry.name, simulator, test, task.protocol, ops_per_layer=task.ops_per_layer
        )  # fmt: skip
    return result, failures, calls


def _start(function: LimitedFunction, entry: Entry) -> None:
    try:
        function.start()
    except CallFailed as error:
        raise ValueError(f"agent {entry.name}: {error}") from error


def _predict(function: LimitedFunction, obs: Any, space: gymnasium.Space[Any], fallback: Any) -> tuple[Any, str]:
    """The action of an agent and an empty string, or ``fallback`` and why there is no valid action."""
    try:
        action = function(obs if isinstance(obs, dict) else {"obs": np.asarray(obs)})
    except CallFailed as error:
        return fallback, str(error)
    action = action.astype(space.dtype) if action.dtype.kind in "iuf" else action
    if space.contains(action):
        return action, ""
    return fallback, f"action {action!r} is not in {space}"


# Allocation


def play_allocation(task: AllocationTask, entry: Entry) -> Played:
    config = task.config
    batch = AllocationBatch(config, task.streams)
    bounds = {name: _rule_rewards(batch, name, task.seed)[0].mean() for name in ("grant", "oracle")}
    failures: list[str] = []
    if entry.kind == "named":
        rewards, metrics = _rule_rewards(batch, entry.target, task.seed)
    elif entry.kind == "checkpoint":
        policies = {policy.n_features: policy for policy in map(AllocationPolicy.load, checkpoints(entry.target))}
        if batch.n_features not in policies:
            takes = " or ".join(map(str, policies))
            raise ValueError(f"{entry.target} takes {takes} numbers, but {task.env_id} has {batch.n_features}")
        policy = policies[batch.n_features]
        policy.reset()
        rewards, metrics = _timed(batch, lambda: policy.act(batch.obs), None, task.seed)
    elif entry.kind == "agent":
        with LimitedFunction(entry.target, "agent", {"env_id": task.env_id}, task.limits) as function:
            _start(function, entry)
            # A failed decision grants the request.
            space = gymnasium.spaces.Box(0.0, 1.0, (2,), np.float32)
            spent = [0.0]

            def act() -> torch.Tensor:
                actions = []
                for row in batch.obs.numpy():
                    action, failure = _predict(function, row, space, space.high)
                    spent[0] += function.seconds
                    actions.append(action)
                    if failure:
                        failures.append(failure)
                return torch.from_numpy(np.stack(actions))

            rewards, metrics = _timed(batch, act, None, task.seed)
            metrics["decision_ms"] = 1e3 * spent[0] / (task.streams * config.arrivals)
    else:
        raise ValueError(f"{entry.target}: a {entry.kind} cannot play an allocation task")
    metrics["failed"] = len(failures) / (task.streams * config.arrivals)
    return Played(
        scores=((rewards - bounds["grant"]) / (bounds["oracle"] - bounds["grant"])).tolist(),
        metrics=metrics,
        reference={"grant": float(bounds["grant"]), "oracle": float(bounds["oracle"]), "rewards": rewards.tolist()},
        failures=failures[:5],
        specs_sha256=sha256_of(repr(asdict(config) | {"workload": batch.workload.name})),
    )


def _rule_rewards(
    batch: AllocationBatch, name: str, seed: int
) -> tuple[npt.NDArray[np.float64], dict[str, float | None]]:
    rule = RULES[name](batch)
    return _timed(batch, rule.act, rule.learn, seed)


def _timed(
    batch: AllocationBatch, act: Callable[[], torch.Tensor], learn: Callable[[], None] | None, seed: int
) -> tuple[npt.NDArray[np.float64], dict[str, float | None]]:
    """(B,) mean reward per decision of each stream, and means over all of them."""
    spent = 0.0

    def timed() -> torch.Tensor:
        nonlocal spent
        began = time.perf_counter()
        action = act()
        spent += time.perf_counter() - began
        return action

    result = play_streams(batch, timed, learn, seed)
    sums = batch.final_sums.numpy()
    metrics: dict[str, float | None] = {
        name: float(result[name]) for name in ("reward", "qos", "efficiency", "oom", "monopoly", "wait_s")
    }
    metrics["decision_ms"] = 1e3 * spent / (batch.num_envs * batch.config.arrivals)
    return sums[:, SUM_REWARD] / sums[:, SUM_STEPS], metrics
