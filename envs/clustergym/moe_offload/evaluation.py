"""One evaluator for rules, control, trained policies and bounds: the same sequences, the same simulator, paired."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium.vector import AutoresetMode, VectorEnv

from clustergym.moe_offload.kernels.state import GENERATED, HITS, LOADS, N_STATS, NEEDED, PREFETCHES, USEFUL
from clustergym.moe_offload.rules import CONTROL, RULES, Kind, Outcome, Rule, Vector, Workload, as_json, tune_all
from clustergym.moe_offload.simulator import build_task
from clustergym.moe_offload.specs import OffloadConfig
from clustergym.moe_offload.tables import Tables, clean, split_sequences, without
from clustergym.traces.token_trace import TokenTrace

if TYPE_CHECKING:
    from clustergym.moe_offload.predictor import Predictor

RESAMPLES = 2000
SERVED = ("trace", "split", "fit_on", "slots", "per_layer", "gpus", "batch", "link", "expert_mb", "max_tokens")
"""Options of an environment that say what is served. The others say what its agents see."""
Act = Callable[[dict[str, npt.NDArray[Any]]], npt.NDArray[np.integer[Any]]]
"""Observations of N environments → actions (N, 2)."""
Progress = Callable[[str, str], None]
"""Called with the step at hand and a note."""


@dataclass
class Row:
    """A policy on sequences."""

    policy: str
    kind: Kind
    slots: float
    """Share of all experts that fit into the slots"""
    stall_ms_per_token: float
    ci95: tuple[float, float]
    """Interval of ``stall_ms_per_token``, by resampling sequences"""
    tokens_per_s: float
    hit_rate: float
    """Share of the needed experts that were resident when the router chose them"""
    loads_per_token: float
    prefetches_per_token: float
    useful_prefetches_per_token: float
    belady_regret_ms: float | None = None
    """Stall per token beyond that of Belady without prefetching; prefetching can make it negative"""
    against_best_rule: float | None = None
    """Change of the stall against the best rule, on the same sequences"""
    against_best_rule_ci95: tuple[float, float] | None = None
    against_control: float | None = None
    """Change of the stall against the control with all its terms, on the same sequences"""
    against_control_ci95: tuple[float, float] | None = None
    parameters: dict[str, Any] = field(default_factory=dict)
    """Tuned parameters of a rule"""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def resampled(n: int, seed: int = 0) -> npt.NDArray[np.int64]:
    """(RESAMPLES, n) draws of n episodes with replacement. The same draws for all policies make them paired."""
    return np.random.default_rng(seed).integers(0, n, (RESAMPLES, n))


def interval(values: npt.NDArray[np.float64]) -> tuple[float, float]:
    low, high = np.percentile(values, [2.5, 97.5])
    return float(low), float(high)


def stall_interval(outcome: Outcome) -> tuple[float, float]:
    """95 % interval of the stall per token."""
    draws = resampled(len(outcome.tokens))
    return interval(outcome.stall_ms[draws].sum(1) / outcome.tokens[draws].sum(1))


def change(outcome: Outcome, reference: Outcome) -> tuple[float, tuple[float, float]]:
    """Relative change of the stall against another policy on the same episodes, and its 95 % interval."""
    draws = resampled(len(outcome.tokens))
    own, other = outcome.stall_ms[draws].sum(1), reference.stall_ms[draws].sum(1)
    total = max(float(reference.stall_ms.sum()), 1e-12)
    return float(outcome.stall_ms.sum()) / total - 1, interval(own / np.maximum(other, 1e-12) - 1)


def row_of(policy: str, kind: Kind, slots: float, outcome: Outcome, parameters: Mapping[str, Any] = {}) -> Row:
    """The figures of one policy."""
    tokens, stats = int(outcome.tokens.sum()), outcome.stats.sum(0)
    served_ms = float(outcome.stall_ms.sum() + outcome.compute_ms.sum())
    return Row(
        policy=policy,
        kind=kind,
        slots=slots,
        stall_ms_per_token=outcome.stall_ms_per_token,
        ci95=stall_interval(outcome),
        tokens_per_s=1e3 * outcome.generated / max(served_ms, 1e-9),
        hit_rate=float(stats[HITS] / max(1, stats[NEEDED])),
        loads_per_token=float(stats[LOADS] / tokens),
        prefetches_per_token=float(stats[PREFETCHES] / tokens),
        useful_prefetches_per_token=float(stats[USEFUL] / tokens),
        parameters=dict(parameters),
    )


def compare(
    workload: Workload,
    tuned: Mapping[str, tuple[Rule, Vector]],
    slots: float,
    played: Mapping[str, tuple[Kind, Outcome]] | None = None,
) -> list[Row]:
    """Rows of tuned rules and of the outcomes of networks on the same episodes."""
    outcomes = dict(zip(tuned, workload.run_all(list(tuned.values())), strict=True))
    rows = [row_of(name, rule.kind, slots, outcomes[name], as_json(rule, z)) for name, (rule, z) in tuned.items()]
    for name, (kind, outcome) in (played or {}).items():
        outcomes[name] = outcome
        rows.append(row_of(name, kind, slots, outcome))
    belady = outcomes.get("belady") or workload.run(*tune_all(workload, ["belady"])["belady"])
    ordinary = [row for row in rows if row.kind == "rule"]
    best = min(ordinary, key=lambda row: row.stall_ms_per_token).policy if ordinary else None
    for row in rows:
        row.belady_regret_ms = row.stall_ms_per_token - belady.stall_ms_per_token
        if best is not None:
            row.against_best_rule, row.against_best_rule_ci95 = change(outcomes[row.policy], outcomes[best])
        if CONTROL in outcomes:
            row.against_control, row.against_control_ci95 = change(outcomes[row.policy], outcomes[CONTROL])
    return rows


@dataclass(frozen=True)
class Player:
    """Networks that act in the environment."""

    kind: Kind
    acts: Callable[[VectorEnv[Any, Any, Any]], Sequence[Act]]
    """The networks for an environment. Of several, the means are shown."""
    env_id: str = "MoEOffload-v0"
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of the environment that they were trained in."""
    trained_for: Mapping[str, Any] = field(default_factory=dict)
    """Slots and link, if the policy is for particular ones."""

    @classmethod
    def of(cls, policy: Any) -> Player:
        """A trained policy: ``policy.act`` and, in ``policy.about``, where it was trained."""
        about = policy.about
        trained_for = {name: about[name] for name in ("slots", "link") if name in about}
        return cls("trained", lambda env: [policy.act], about["env_id"], about["env_args"], trained_for)


def play_networks(
    player: Player, config: OffloadConfig, workload: Workload, num_envs: int = 64, progress: Progress | None = None
) -> Outcome:
    """Play networks on all episodes of a workload, in the environment that they know, with what ``config`` serves."""
    options = {name: value for name, value in player.options.items() if name in OffloadConfig.__dataclass_fields__}
    if options.get("predictor"):
        if workload.predictor is None:
            raise ValueError("the policy reads the columns of a predictor: give --predictor")
        options["predictor"] = workload.predictor
    options |= {name: getattr(config, name) for name in SERVED}
    env = make_environment(player.env_id, min(num_envs, len(workload.task.groups)), **options)
    try:
        return Outcome.mean([play(env, act, workload, progress) for act in player.acts(env)])
    finally:
        env.close()


@dataclass
class Comparison:
    """Policies on the same sequences, with the same slots and link."""

    rows: list[Row]
    test: Workload
    tuned: dict[str, tuple[Rule, Vector]]

    def levels(self, episodes: npt.NDArray[np.integer[Any]]) -> dict[str, float]:
        """Stall per token on some episodes of LRU, decayed LFU, Belady, the best rule and the best control."""
        shown = {"lru", "decayed-lfu", "belady"} & set(self.tuned)
        for kind in ("rule", "control"):
            own = [row for row in self.rows if row.kind == kind]
            shown |= {row.policy for row in sorted(own, key=lambda row: row.stall_ms_per_token)[:1]}
        tokens, names = self.test.lengths[episodes].sum(), sorted(shown)
        outcomes = self.test.run_all([self.tuned[name] for name in names])
        return {name: float(o.stall_ms[episodes].sum() / tokens) for name, o in zip(names, outcomes, strict=True)}


def evaluate(
    names: list[str],
    players: Mapping[str, Player],
    config: OffloadConfig,
    tuning: TokenTrace,
    tables: Tables,
    predictor: Predictor | None = None,
    evaluations: int = 20,
    seed: int = 0,
    num_envs: int = 64,
    progress: Progress | None = None,
) -> Comparison:
    """Tune rules, then play them and networks.

    Args:
        names: of rules.
        players: networks by name.
        config: its ``trace`` is served, all of it.
        tuning: sequences to tune on.
        tables, predictor: what rules know.
        evaluations: trials per parameter of a rule.
        seed: of the search.
        num_envs: environments that networks are played in.
        progress: told what is going on.
    """
    tell = progress or (lambda step, note: None)
    train = Workload(build_task(replace(config, trace=tuning), tables), tuning, tables, predictor, reuse=True)
    tuned = tune_all(train, names, evaluations, seed, lambda name, done, total: tell(f"tune {name}", ""))
    del train
    assert isinstance(config.trace, TokenTrace)
    test = Workload(build_task(config, tables), config.trace, tables, predictor)
    played: dict[str, tuple[Kind, Outcome]] = {}
    for name, player in players.items():
        note = lambda step, note, name=name: tell(f"play {name}", note)  # noqa: E731
        played[name] = player.kind, play_networks(player, config, test, num_envs, note)
    tell("play rules", "")
    return Comparison(compare(test, tuned, config.slots, played), test, tuned)


def parts_to_serve(
    trace: TokenTrace, source: TokenTrace, split: str | None, seed: int = 0, new_domains: Sequence[str] = ()
) -> tuple[TokenTrace, dict[str, TokenTrace]]:
    """The sequences of ``trace`` to serve, and the parts of ``source`` to fit and tune on: never the same sequences.

    By default, the part ``test`` is served, or all of another trace than ``source``.
    """
    parts = served = split_sequences(source, seed, new_domains)
    if source is trace:
        if split == "all":
            raise ValueError("--split all would serve the sequences that rules are tuned on: give --fit-on TRACE")
        split = split or "test"
    else:
        others = without(clean(trace), [parts["fit"], parts["train"]])
        if split in (None, "all"):
            return others, parts
        served = split_sequences(others, seed, new_domains)
    if split not in served:
        raise ValueError(f"--split {split}: the parts of {trace.name} are {', '.join(served)}")
    return served[split], parts


def make_environment(env_id: str, num_envs: int, **arguments: Any) -> VectorEnv[Any, Any, Any]:
    """The registered vector environment for :func:`play`. ``arguments`` are those of the task."""
    return gymnasium.make_vec(env_id, num_envs=num_envs, autoreset_mode=AutoresetMode.DISABLED, **arguments)


def play(
    env: VectorEnv[Any, Any, Any],
    act: Act,
    workload: Workload,
    progress: Progress | None = None,
) -> Outcome:
    """Play a policy on all episodes of a workload.

    Args:
        env: of :func:`make_environment`, for the workload's trace, slots and link.
        act: the policy.
        workload: its ``task.groups`` are the episodes.
        progress: told when an episode ends.
    """
    n, groups = env.num_envs, len(workload.task.groups)
    # Long episodes first. Environments that find none left repeat the shortest one, and nobody counts it.
    order = np.argsort(-workload.lengths, kind="stable").tolist()
    shortest = order[-1]
    waiting = iter(order)
    current = np.array([next(waiting, -1) for _ in range(n)])
    outcome = Outcome(workload.lengths, np.zeros(groups), np.zeros(groups), np.zeros((groups, N_STATS), np.int64))
    done = 0
    obs, _ = env.reset(seed=0, options={"group": np.where(current < 0, shortest, current)})
    while done < groups:
        obs, _, terminated, truncated, infos = env.step(act(obs))
        ended = terminated | truncated
        if not ended.any():
            continue
        for i in np.flatnonzero(ended).tolist():
            if current[i] >= 0:
                _store(outcome, int(current[i]), i, infos)
                done += 1
                if progress is not None:
                    progress("play", f"{done}/{groups} episodes")
            current[i] = next(waiting, -1)
        if done < groups:
            where = {"reset_mask": ended, "group": np.where(current < 0, shortest, current)}
            obs, _ = env.reset(options=where)
    return outcome


def _store(outcome: Outcome, episode: int, i: int, infos: Mapping[str, Any]) -> None:
    """Take the sums of environment i, whose episode is over."""
    tokens = int(infos["tokens"][i])
    outcome.stall_ms[episode] = infos["stall_ms"][i]
    outcome.compute_ms[episode] = 1e3 * tokens / infos["tokens_per_s"][i] - infos["stall_ms"][i]
    stats = outcome.stats[episode]
    stats[LOADS], stats[PREFETCHES] = infos["loads"][i], infos["prefetches"][i]
    stats[USEFUL] = infos["useful_prefetches"][i]
    # The environment gives the hit rate: loads are what was needed and missing.
    missing = 1 - float(infos["hit_rate"][i])
    stats[NEEDED] = round(stats[LOADS] / missing) if missing > 0 else 0
    stats[HITS] = stats[NEEDED] - stats[LOADS]
    stats[GENERATED] = tokens


def policy_names(wanted: Sequence[str], with_predictor: bool) -> tuple[list[str], list[str]]:
    """(names of rules, other words) of a list like ``rules control bounds lru runs/x``."""
    groups = {
        "rules": [name for name, rule in RULES.items() if rule.kind in ("rule", "random")],
        "control": [name for name, rule in RULES.items() if rule.kind == "control"],
        "bounds": [name for name, rule in RULES.items() if rule.kind == "bound"],
    }
    names: list[str] = []
    others: list[str] = []
    for word in wanted:
        if word in groups:
            names += groups[word]
        elif word in RULES:
            names.append(word)
        else:
            others.append(word)
    if not with_predictor and any(RULES[name].kind == "control" for name in names):
        raise ValueError("the control needs a predictor: run clustergym offload fit, and give --predictor")
    return list(dict.fromkeys(names)), others
