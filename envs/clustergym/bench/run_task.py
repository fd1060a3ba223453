"""Run one entry on one task: the scores of its runs, and what they are made of."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt

from clustergym.bench.budget import WithinBudget
from clustergym.bench.entries import RANDOM, SHIPPED, Entry, SubmittedPlanner, simulator_options, start_planner
from clustergym.bench.suites import (
    AllocationTask,
    BudgetedPlacementTask,
    OffloadTask,
    PlacementTask,
    Task,
    sha256_of,
)
from clustergym.bench.worker_function import CallFailed, WorkerFunction
from clustergym.gpu_allocation.batch import AllocationBatch
from clustergym.gpu_allocation.evaluation import play as play_streams
from clustergym.gpu_allocation.rules import RULES
from clustergym.gpu_allocation.state import SUM_REWARD, SUM_STEPS
from clustergym.moe_offload.evaluation import Act, Player, play_networks, row_of
from clustergym.moe_offload.rules import RULES as OFFLOAD_RULES
from clustergym.moe_offload.rules import Outcome, Workload, tune_all
from clustergym.moe_offload.simulator import build_task, load_predictor, parts_of
from clustergym.moe_offload.tables import Tables, first_tokens
from clustergym.planners.base import Planner
from clustergym.planners.evaluation import (
    Policy,
    Result,
    compile_on,
    evaluate_planner,
    evaluate_policy,
    learn_from_train_split,
)
from clustergym.planners.registry import make_planner
from clustergym.traces.token_trace import TokenTrace


@dataclass
class TaskResult:
    """Results of one entry on one task."""

    scores: list[float]
    """One per run, larger is better. Placement: share of the time saved compared with EPLB on the same stream.
    Allocation: position between the rule ``grant`` (0) and the oracle (1). Offloading: share of LRU's stall on the same
    sequence that is saved."""
    metrics: dict[str, float | None]
    """Means over the runs."""
    reference: dict[str, Any]
    """Raw results that the scores are computed from."""
    failures: list[str] = field(default_factory=list)
    """First messages of failed decisions."""
    specs_sha256: str = ""
    """Hash of the model, cluster and profile, or of the configuration, in this version of clustergym."""


def run_task(task: Task, entry: Entry) -> TaskResult:
    """Run an entry on a task. Raises a ValueError if the entry does not fit the task."""
    if isinstance(task, OffloadTask):
        return run_offload(task, entry)
    return run_placement(task, entry) if isinstance(task, PlacementTask) else run_allocation(task, entry)


# Agents


class SubmittedAgent:
    """Submitted code that acts: its failures become a fallback and are counted."""

    def __init__(self, entry: Entry, function: WorkerFunction) -> None:
        self.entry, self.function = entry, function
        self.failures: list[str] = []
        self.calls = 0
        try:
            function.start()
        except CallFailed as error:
            raise ValueError(f"agent {entry.name}: {error}") from error

    def act(self, obs: Any, space: gymnasium.Space[Any], fallback: Any) -> Any:
        """The action, or ``fallback`` if there is no valid one."""
        self.calls += 1
        try:
            action = self.function(obs if isinstance(obs, dict) else {"obs": np.asarray(obs)})
            if action.dtype.kind in "iuf" and action.size == np.prod(space.shape or ()):
                action = action.astype(space.dtype).reshape(space.shape or ())[()]
            if space.contains(action):
                return action
            failure = f"action {action!r} is not in {space}"
        except CallFailed as error:
            failure = str(error)
        self.failures.append(failure)
        if len(self.failures) > 10 and len(self.failures) > self.calls / 2:
            raise ValueError(f"agent {self.entry.name}: most actions fail, the last one: {failure}")
        return fallback


# Placement


def run_placement(task: PlacementTask, entry: Entry) -> TaskResult:
    simulator, protocol = task.simulator, task.protocol
    trace = task.load()
    train, test = protocol.parts(trace)
    warm_up, static = compile_on(test, simulator), simulator.static(test.n_layers)

    def run(planner: Planner) -> Result:
        learn_from_train_split(planner, trace, protocol)
        planner.plan([warm_up], static)
        if isinstance(planner, SubmittedPlanner):
            planner.failures.clear()
            planner.calls = 0
        if isinstance(task, BudgetedPlacementTask):
            planner = WithinBudget(simulator, planner=planner, operations=task.ops_per_layer)
        return evaluate_planner(planner, entry.name, train, test, protocol)

    eplb = run(make_planner("eplb", simulator))
    failures: list[str] = []
    calls = 1
    if entry.kind == "agent":
        with WorkerFunction(entry.target, "agent", simulator_options(simulator), task.limits) as function:
            agent = SubmittedAgent(entry, function)

            def policy_of(env: gymnasium.Env[Any, Any]) -> Policy:
                idle = env.unwrapped.noop_action  # type: ignore[attr-defined]
                return lambda obs: agent.act(obs, env.action_space, idle())

            budget = {"ops_per_layer": task.ops_per_layer}
            result = evaluate_policy(policy_of, entry.name, simulator, test, protocol, entry.env_id, **budget)
        failures, calls = agent.failures, agent.calls
    elif entry.kind == "planner":
        planner = start_planner(entry.target, simulator, task.limits)
        with planner.function:
            result = run(planner)
        failures, calls = planner.failures, planner.calls
    else:
        result = run(make_planner(entry.target, simulator, seed=task.seed))
    totals, reference = np.array(result.stream_totals_us), np.array(eplb.stream_totals_us)
    names = (
        "total_us", "served_us", "migration_us", "balancedness", "inter_node_mb", "moves", "decision_ms", "reused"
    )  # fmt: skip
    return TaskResult(
        scores=(1 - totals / reference).tolist(),
        metrics={name: getattr(result, name) for name in names} | {"failed": len(failures) / max(1, calls)},
        reference={"eplb_us": reference.tolist(), "entry_us": totals.tolist(), "groups": result.groups},
        failures=failures[:5],
        specs_sha256=sha256_of([repr(simulator.model), repr(simulator.cluster), repr(simulator.profile)]),
    )


# Allocation


def run_allocation(task: AllocationTask, entry: Entry) -> TaskResult:
    config = task.config
    batch = AllocationBatch(config, task.streams)

    def measured(act: Callable[[], npt.NDArray[np.float32]], learn: Callable[[], None] | None = None) -> Rewards:
        return _timed(batch, act, learn, task.seed)

    def rule(name: str) -> Rewards:
        made = RULES[name](batch)
        return measured(made.act, made.learn)

    grant, oracle = (float(rule(name)[0].mean()) for name in ("grant", "oracle"))
    failures: list[str] = []
    if entry.kind == "named":
        rewards, metrics = rule(entry.target)
    else:
        # A failed decision grants the request.
        space = gymnasium.spaces.Box(0.0, 1.0, (2,), np.float32)
        with WorkerFunction(entry.target, "agent", {"env_id": task.env_id}, task.limits) as function:
            agent = SubmittedAgent(entry, function)
            rewards, metrics = measured(lambda: np.stack([agent.act(row, space, space.high) for row in batch.obs]))
        failures = agent.failures
    return TaskResult(
        scores=((rewards - grant) / (oracle - grant)).tolist(),
        metrics=metrics | {"failed": len(failures) / (task.streams * config.arrivals)},
        reference={"grant": grant, "oracle": oracle, "rewards": rewards.tolist()},
        failures=failures[:5],
        specs_sha256=sha256_of(repr(asdict(config) | {"workload": batch.workload.name})),
    )


Rewards = tuple[npt.NDArray[np.float64], dict[str, float | None]]
"""(B,) mean reward per decision of each stream, and means over all of them"""


def _timed(
    batch: AllocationBatch, act: Callable[[], npt.NDArray[np.float32]], learn: Callable[[], None] | None, seed: int
) -> Rewards:
    seconds = 0.0

    def timed() -> npt.NDArray[np.float32]:
        nonlocal seconds
        began = time.perf_counter()
        action = act()
        seconds += time.perf_counter() - began
        return action

    result = play_streams(batch, timed, learn, seed)
    sums = batch.state.sums
    metrics: dict[str, float | None] = {
        name: float(result[name]) for name in ("reward", "qos", "efficiency", "oom", "monopoly", "wait_s")
    }
    metrics["decision_ms"] = 1e3 * seconds / (batch.num_envs * batch.config.arrivals)
    return sums[:, SUM_REWARD] / sums[:, SUM_STEPS], metrics


# Offloading

TUNE_TOKENS = 8000
"""Rules are tuned on sequences of the training split with about so many tokens, as by ``clustergym offload eval``."""


def run_offload(task: OffloadTask, entry: Entry) -> TaskResult:
    config = task.config
    assert isinstance(config.trace, TokenTrace)
    assert isinstance(config.fit_on, Tables)
    predictor = load_predictor(Path(entry.predictor) if entry.predictor else None)
    test = Workload(build_task(config), config.trace, config.fit_on, predictor)

    def rule(name: str) -> tuple[Outcome, float]:
        part = first_tokens(parts_of(task.load())["train"], TUNE_TOKENS)
        train = Workload(build_task(replace(config, trace=part)), part, test.tables, predictor, reuse=True)
        tuned = tune_all(train, [name], task.evaluations)[name]
        began = time.perf_counter()
        return test.run(*tuned), time.perf_counter() - began

    lru, failures, calls = rule("lru")[0], list[str](), 1
    if entry.kind == "named" and entry.target in OFFLOAD_RULES:
        outcome, seconds = rule(entry.target)
    else:
        seconds = 0.0

        def timed(act: Act) -> Act:
            def measured(obs: Any) -> Any:
                nonlocal seconds
                began = time.perf_counter()
                actions = act(obs)
                seconds += time.perf_counter() - began
                return actions

            return measured

        if entry.kind == "agent":
            with WorkerFunction(entry.target, "agent", {"env_id": entry.env_id}, task.limits) as function:
                agent = SubmittedAgent(entry, function)
                player = Player("trained", lambda env: [timed(_acting(agent, env))], entry.env_id)
                outcome = play_networks(player, config, test, 1)
            failures, calls = agent.failures, agent.calls
        else:
            known, acts = _network(entry), list[Act]()

            def timed_acts(env: Any) -> list[Act]:
                acts.extend(timed(act) for act in known.acts(env))
                return acts

            outcome = play_networks(replace(known, acts=timed_acts), config, test, 16)
            seconds /= len(acts)
    row = row_of(entry.name, "rule", config.slots, outcome)
    visits = int(outcome.tokens.sum()) * config.trace.n_layers
    names = ("stall_ms_per_token", "tokens_per_s", "hit_rate", "loads_per_token", "prefetches_per_token")
    return TaskResult(
        scores=(1 - outcome.stall_ms / lru.stall_ms).tolist(),
        metrics={name: getattr(row, name) for name in names}
        | {"decision_ms": 1e3 * seconds / visits, "failed": len(failures) / max(1, calls)},
        reference={"lru_ms": lru.stall_ms.tolist(), "entry_ms": outcome.stall_ms.tolist()},
        failures=failures[:5],
        specs_sha256=sha256_of([config.megabytes(config.trace), config.link_gb_s, config.layer_ms, config.expert_ms]),
    )


def _network(entry: Entry) -> Player:
    """The networks of an entry."""
    from clustergym.training.policies import Policy, random_networks

    if entry.target == RANDOM:
        return Player("random", random_networks, entry.env_id)
    return Player.of(Policy(Path(entry.predictor if entry.target == SHIPPED else entry.target)))


def _acting(agent: SubmittedAgent, env: Any) -> Act:
    """Submitted code in a vector of one environment.

    Instead of a decision that fails or is illegal, the visit ends or the first row is evicted: an eviction that is
    never made would never end.
    """

    def act(observations: Any) -> Any:
        obs = {name: x[0] for name, x in observations.items()} if isinstance(observations, dict) else observations[0]
        mask = env.unwrapped.action_masks()[0]
        first = int(mask.argmax())
        fallback = np.array(divmod(first, mask.shape[1])) if mask.ndim == 2 else np.int64(first)
        action = np.asarray(agent.act(obs, env.single_action_space, fallback))
        if not mask[tuple(action.ravel().tolist())]:
            agent.failures.append(f"action {action.tolist()} is illegal here: see the mask")
            action = np.asarray(fallback)
        return action[None]

    return act
