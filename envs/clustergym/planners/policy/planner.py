"""Planners that use a trained policy: directly, or to guide a search."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from clustergym.moe_placement.batch import PlacementBatch, PlacementConfig
from clustergym.moe_placement.simulator import Placement
from clustergym.moe_placement.streams import Interval
from clustergym.planners.anneal import SHORTEST_SECONDS, Anneal
from clustergym.planners.base import Planner
from clustergym.planners.learned import LEARNED_SPREAD
from clustergym.planners.policy.estimate import Estimate
from clustergym.planners.policy.export import PolicySettings, load_policy
from clustergym.planners.policy.inputs import PER_CENT, gains, policy_inputs, same_node_weights, similar_experts
from clustergym.planners.policy.network import MASKED_LOGIT, PolicyNetwork
from clustergym.traces.token_trace import TokenTrace

_EXPERTS_PER_CANDIDATE, _FEWEST_CANDIDATES, _ROUNDS = 8, 12, 5
_OPERATIONS_PER_EXPERT = 8
"""Operations that are tried again when it is the expert's turn, after those on the experts before it."""
_LITTLE = 0.005
"""Share of the time that a round must save, or there is no other."""
_SEEN_TOKENS, _SIMULATED_TOKENS = 1024, 4096
_LEAD_S = 2e-6
"""Time of the policy per layer, expert and GPU that a guided search must have, or it starts without."""


@dataclass(eq=False, kw_only=True)
class Policy(Planner):
    """A trained policy: its two actors choose a few operations on every layer."""

    starts_from_eplb = True
    takes_checkpoint = True
    layers_alone = True
    may_train = True

    checkpoint: str | Path = "pretrained"
    """A policy.pt, the folder of a training run, or ``pretrained``."""
    candidates: int | None = None
    """Number of experts, the most likely ones, whose operations are tried in one round. By default an eighth of the
    experts, at least 12."""
    operations: int | None = None
    """Most operations per layer and interval, at most one per candidate and round. By default five rounds; as many
    operations as in training without the estimate. Planning ends earlier if a round saves little."""
    mix_tokens: int | None = None
    """The actors see one pass with so many of the observed tokens, dealt over the ranks at random (see
    :meth:`Interval.mixed`). 0 shows them the passes as they were. By default 1024, and 4096 without the estimate."""
    estimate: bool = True
    """Look ahead with the estimate of :mod:`.estimate`. False simulates the operations on the observed tokens, as in
    training: slow, one operation at a time, and without past traffic."""
    spread: float = LEARNED_SPREAD
    """See :class:`Search`; used with a model of the traffic."""
    policy: tuple[PolicyNetwork, PolicySettings] | None = None
    """(network, settings) instead of a checkpoint."""

    def __post_init__(self) -> None:
        for name in ("candidates", "operations"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: expected at least 1")
        if self.mix_tokens is None:
            self.mix_tokens = _SEEN_TOKENS if self.estimate else _SIMULATED_TOKENS
        if self.mix_tokens < 0:
            raise ValueError(f"mix_tokens is {self.mix_tokens}: expected 0 or more")
        n_experts = self.simulator.n_experts
        tried = self.candidates or max(_FEWEST_CANDIDATES, n_experts // _EXPERTS_PER_CANDIDATE)
        self.n_candidates = min(tried, n_experts)
        self.network, settings = self.policy if self.policy is not None else load_policy(self.checkpoint)
        if self.simulator.stay:
            raise ValueError(
                "with transport 'stay' a layer's tokens are where the previous layer left them, but the policy plans "
                "all layers at once: use a planner that searches"
            )
        usual = _ROUNDS * self.n_candidates if self.estimate else settings.operations
        self.settings = replace(settings, operations=self.operations or usual)
        self.estimator = Anneal(self.simulator, self.seed)
        self._batch: PlacementBatch | None = None
        self._experts: npt.NDArray[np.int16] | None = None

    def reset(self) -> None:
        if self._batch is not None:
            self._batch.episode["load_average"].fill_(-1.0)

    def learn(self, trace: TokenTrace) -> None:
        """Let the look-ahead know past traffic, and the plan for it."""
        self.estimator.spread = self.spread
        self.estimator.learn(trace)

    def environments(self, interval: Interval) -> PlacementBatch:
        """One environment per layer, for the interval's trace and sizes."""
        sizes = (interval.n_passes, interval.n_tokens // self.simulator.n_gpus)
        if self._batch is None or self._experts is not interval.experts or self._batch.traffic.sizes != sizes:
            self._experts = interval.experts
            trace = np.ascontiguousarray(interval.experts.transpose(1, 0, 2))
            config = PlacementConfig(
                trace=TokenTrace(trace, n_experts=self.simulator.n_experts, model=None, name="observed"),
                split="all",
                cluster=self.simulator.cluster,
                model=self.simulator.model,
                profile=self.simulator.profile,
                sampled_passes=sizes[0],
                tokens_per_rank=sizes[1],
                passes_per_interval=self.settings.passes(self.simulator.passes_per_interval),
                ops_per_layer=self.settings.operations,
                lookahead_norm=self.settings.norm,
                memory=True,
                compare_eplb=False,
            )
            self._batch = PlacementBatch(config, interval.n_layers, observe_only=True)
            self._same_node = same_node_weights(self.simulator.cluster)
        return self._batch

    def observe(self, interval: Interval) -> Interval:
        """What the policy sees of an interval."""
        return interval.mixed(self.mix_tokens, self.seed) if self.mix_tokens else interval

    def plan(self, history: Sequence[Interval], placement: Placement) -> Placement:
        return self.decode(history, placement)

    @torch.no_grad()
    def decode(self, history: Sequence[Interval], placement: Placement, until: float = inf) -> Placement:
        """The policy's plan (L, G, S).

        At the time ``until`` (of ``time.perf_counter``) planning stops, but not before the first operation.
        """
        interval = self.observe(history[-1])
        if int(interval.experts.max()) < 0:  # no token uses any expert
            return placement.astype(np.int16)
        batch = self.environments(interval)
        if not self.estimate:
            return self.simulate(batch, interval, placement)
        estimate, left = Estimate(self.estimator, history, placement), self.settings.operations
        while left > 0:
            batch.load_placement(estimate.placement, interval)
            batch.buffers["memory"].copy_(estimate.memory)
            experts, scores = self.choose(batch, estimate, min(self.n_candidates, left))
            saved = estimate.operate(experts, scores, PER_CENT * float(self.network.look_scale))
            left -= self.n_candidates
            if saved < _LITTLE or time.perf_counter() >= until:
                break
        return estimate.placement

    def choose(self, batch: PlacementBatch, estimate: Estimate, n: int) -> tuple[Tensor, Tensor]:
        """The ``n`` most likely experts of each layer (L, n), and scores of the operations on them (L, n, 3·G).

        The experts that can save most come first. Scores are without what an operation saves. All but the best few
        operations on an expert are masked.
        """
        network, layers = self.network, torch.arange(batch.num_envs)[:, None]
        inputs = policy_inputs(batch.obs, similar_experts(batch.obs["affinity"]), self._same_node)
        encoded = network.encode(inputs)
        likely = network.expert_logits(inputs, encoded).topk(n, -1).indices
        parts, legal = estimate.look_ahead(likely)
        worth = gains(parts)
        order = torch.where(legal, worth, -torch.inf).amax(-1).argsort(-1, descending=True)
        likely, parts, legal, worth = (x[layers, order] for x in (likely, parts, legal, worth))
        expert, parts, legal, rows = (x.flatten(0, 1) for x in (likely, parts, legal, layers.expand_as(likely)))
        scores = network.node_logits(inputs, encoded, expert, parts * PER_CENT, legal, rows).view_as(worth)
        kept = scores.topk(min(_OPERATIONS_PER_EXPERT, scores.shape[-1]), -1).indices
        masked = torch.full_like(scores, MASKED_LOGIT)
        return likely, masked.scatter(-1, kept, (scores - network.look_scale * PER_CENT * worth).gather(-1, kept))

    def simulate(self, batch: PlacementBatch, interval: Interval, placement: Placement) -> Placement:
        """The plan that the actors make as in training: one operation at a time on simulated look-ahead."""
        batch.load_placement(placement, interval)
        network, layers, similar = self.network, torch.arange(batch.num_envs), similar_experts(batch.obs["affinity"])
        for left in reversed(range(self.settings.operations)):
            inputs = policy_inputs(batch.obs, similar, self._same_node)
            encoded = network.encode(inputs)
            likely = network.expert_logits(inputs, encoded).topk(self.n_candidates, -1).indices
            parts, legal = batch.lookahead(likely) * PER_CENT, batch.obs["joint_mask"][layers[:, None], likely].bool()
            worth = torch.where(legal, gains(parts), -torch.inf).amax(-1)
            if not (worth > 0).any():
                break
            best = worth.argmax(-1)
            expert, parts, legal = (x[layers, best] for x in (likely, parts, legal))
            node = network.node_logits(inputs, encoded, expert, parts, legal).argmax(-1)
            if left > 0:
                batch.step(expert, node)
            else:  # each layer has its own environment: there is no next layer to observe
                batch.finish_layer(expert, node)
        found: Placement = batch.sim["slots"].numpy().copy()
        return found


@dataclass(eq=False, kw_only=True)
class PolicyGuided(Policy):
    """Annealing that may start from the policy's plan."""

    takes_seconds = True

    seconds: float | None = None
    """Time budget for all layers together, including the policy's time; None uses ``iterations``."""
    iterations: int = 4000
    """Exact annealing steps per layer without a time budget."""
    lead: float = 0.2
    """Share of the time budget that the policy may use before the search. If that is too short, the search starts
    without it."""
    stop: Callable[[], bool] = lambda: False
    """See :class:`Anneal`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.lead <= 1:
            raise ValueError(f"lead is {self.lead}: expected 0 … 1")
        self.search = Anneal(
            self.simulator, self.seed, iterations=self.iterations, seconds=self.seconds, stop=self.stop
        )

    def reset(self) -> None:
        super().reset()
        self.search.reset()

    def learn(self, trace: TokenTrace) -> None:
        """Let the search plan with a model of the traffic, and for other mixtures of its topics."""
        super().learn(trace)
        self.search.traffic, self.search.spread = self.estimator.traffic, self.spread
        self.search.usual = self.estimator.usual

    def plan(self, history: Sequence[Interval], placement: Placement) -> Placement:
        began, starts, lead = time.perf_counter(), list[Placement](), inf
        if self.seconds is not None:
            lead = self.lead * self.seconds
        if lead >= _LEAD_S * len(placement) * self.simulator.n_experts * self.simulator.n_gpus:
            starts = [self.decode(history, placement, began + lead)]
        if self.seconds is not None:
            self.search.seconds = max(SHORTEST_SECONDS, self.seconds - (time.perf_counter() - began))
        return self.search.plan(history, placement, starts)
