"""Planners that use a trained policy: directly, or to guide a search."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from clustergym.moe_placement.batch import PlacementBatch, PlacementConfig
from clustergym.moe_placement.planners.anneal import SHORTEST_SECONDS, Anneal
from clustergym.moe_placement.planners.base import Planner
from clustergym.moe_placement.planners.learned import LEARNED_SPREAD
from clustergym.moe_placement.planners.traffic_model import TrafficModel
from clustergym.moe_placement.policy.estimate import Estimate, Simulated
from clustergym.moe_placement.policy.export import PolicySettings, load_policy
from clustergym.moe_placement.policy.inputs import PER_CENT, gains, policy_inputs, same_node_weights, similar_experts
from clustergym.moe_placement.policy.network import PolicyNetwork
from clustergym.moe_placement.simulator import Placement
from clustergym.moe_placement.streams import Interval
from clustergym.traces.token_trace import TokenTrace

_EXPERTS_PER_CANDIDATE, _FEWEST_CANDIDATES, _ROUNDS = 8, 8, 5
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
    """Number of experts, the most likely ones, whose operations are tried. Those that can save most go to the GPU
    actor. By default an eighth of the experts, at least 8."""
    together: int | None = None
    """Operations per layer that the actors choose at once, on different experts; by default one per candidate."""
    operations: int | None = None
    """Operations per layer and interval; by default five times as many as are chosen at once (as many as in training
    without the estimate)."""
    mix_tokens: int = 4096
    """Plan on one pass with so many of the observed tokens, dealt over the ranks at random (see
    :meth:`Interval.mixed`). 0 plans on the passes as they were: then the look-ahead counts gains that are chance."""
    estimate: bool = True
    """Look ahead with the estimate of :mod:`.estimate`. False simulates the operations on the observed tokens, as in
    training: slow, only for one operation at a time, and without past traffic."""
    spread: float = LEARNED_SPREAD
    """See :class:`Search`; used with a model of the traffic."""
    policy: tuple[PolicyNetwork, PolicySettings] | None = None
    """(network, settings) instead of a checkpoint."""

    def __post_init__(self) -> None:
        for name in ("candidates", "together", "operations"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: expected at least 1")
        if self.mix_tokens < 0:
            raise ValueError(f"mix_tokens is {self.mix_tokens}: expected 0 or more")
        if not self.estimate and self.together != 1:
            raise ValueError(f"together is {self.together}: without the estimate, operations are made one at a time")
        n_experts = self.simulator.n_experts
        tried = self.candidates or max(_FEWEST_CANDIDATES, n_experts // _EXPERTS_PER_CANDIDATE)
        self.n_candidates = min(tried, n_experts)
        self.n_together = min(self.together or self.n_candidates, self.n_candidates)
        self.network, settings = self.policy if self.policy is not None else load_policy(self.checkpoint)
        if self.simulator.stay:
            raise ValueError(
                "with transport 'stay' a layer's tokens are where the previous layer left them, but the policy plans "
                "all layers at once: use a planner that searches"
            )
        usual = _ROUNDS * self.n_together if self.estimate else settings.operations
        self.settings = replace(settings, operations=self.operations or usual)
        self.traffic: TrafficModel | None = None
        self._batch: PlacementBatch | None = None
        self._experts: npt.NDArray[np.int16] | None = None

    def reset(self) -> None:
        if self._batch is not None:
            self._batch.episode["load_average"].fill_(-1.0)

    def learn(self, trace: TokenTrace) -> None:
        """Let the look-ahead know past traffic."""
        self.traffic = TrafficModel.learn(trace, self.simulator.n_experts, seed=self.seed)

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
                ops_per_layer=-(-self.settings.operations // self.n_together),
                lookahead_norm=self.settings.norm,
                memory=True,
                compare_eplb=False,
            )
            self._batch = PlacementBatch(config, interval.n_layers, observe_only=True)
            self._same_node = same_node_weights(self.simulator.cluster)
            self.estimator = Anneal(self._batch.simulator, self.seed)
        return self._batch

    def observe(self, interval: Interval) -> Interval:
        """What the policy sees of an interval."""
        return interval.mixed(self.mix_tokens, self.seed) if self.mix_tokens else interval

    def plan(self, history: Sequence[Interval], placement: Placement) -> Placement:
        return self.decode(history, placement)

    def look(self, history: Sequence[Interval], placement: Placement, batch: PlacementBatch) -> Estimate | Simulated:
        """What the actors see of the future of an operation."""
        if not self.estimate:
            return Simulated(batch)
        self.estimator.traffic = self.traffic
        self.estimator.spread = self.spread if self.traffic is not None else 0.0
        return Estimate(self.estimator, history, placement, batch)

    @torch.no_grad()
    def decode(self, history: Sequence[Interval], placement: Placement, until: float | None = None) -> Placement:
        """The policy's plan (L, G, S).

        At the time ``until`` (of ``time.perf_counter``) planning stops, but not before the first operation.
        """
        interval = self.observe(history[-1])
        if int(interval.experts.max()) < 0:  # no token uses any expert
            return placement.astype(np.int16)
        batch = self.environments(interval)
        batch.load_placement(placement, interval)
        look, similar = self.look(history, placement, batch), similar_experts(batch.obs["affinity"])
        left = self.settings.operations
        while left > 0:
            chosen = self.choose(batch, look, similar, min(self.n_together, left))
            if chosen is None:
                break
            left -= self.n_together
            if until is not None and time.perf_counter() >= until:
                left = 0
            self.operate(batch, look, chosen, last=left <= 0)
        found: Placement = batch.sim["slots"].numpy().copy()
        return found

    def choose(
        self, batch: PlacementBatch, look: Estimate | Simulated, similar: Tensor, n: int
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """``n`` operations per layer: experts, nodes and the spare replicas to delete first (−1: none), (n, L) each.

        None if no operation on the most likely experts saves anything.
        """
        network, n_gpus, layers = self.network, batch.n_gpus, torch.arange(batch.num_envs)
        inputs = policy_inputs(batch.obs, similar, self._same_node)
        encoded = network.encode(inputs)
        likely = network.expert_logits(inputs, encoded).topk(self.n_candidates, -1).indices
        parts, spares = look.look_ahead(likely)
        parts, legal = parts * PER_CENT, batch.obs["joint_mask"][layers[:, None], likely].bool()
        legal[..., n_gpus : 2 * n_gpus] |= spares >= 0
        worth = torch.where(legal, gains(parts), -torch.inf).amax(-1)
        if not (worth > 0).any():
            return None
        best, rows = worth.topk(n, -1).indices.flatten(), layers.repeat_interleave(n)
        expert, parts, legal, spares = (x[rows, best] for x in (likely, parts, legal, spares))
        node = network.node_logits(inputs, encoded, expert, parts, legal, rows).argmax(-1)
        adds = (node >= n_gpus) & (node < 2 * n_gpus)
        spare = torch.where(adds, spares.gather(1, (node % n_gpus)[:, None])[:, 0], -1)
        expert, node, spare = (x.view(-1, n).T.contiguous() for x in (expert, node, spare))
        return expert, node, spare

    def operate(
        self, batch: PlacementBatch, look: Estimate | Simulated, chosen: tuple[Tensor, Tensor, Tensor], last: bool
    ) -> None:
        """Make the operations, those that were worth most first. After the ``last`` ones nothing is observed."""
        for i, (expert, node, spare) in enumerate(zip(*chosen, strict=True)):
            # The others were chosen before the first one was made: it may have taken what they would save.
            look.operate(expert, node, spare, must_save=i > 0)
            if (spare >= 0).any():
                batch.finish_layer(spare, node + batch.n_gpus)
            if last or i + 1 < len(chosen[0]):
                # Each layer has its own environment: there is no next layer to observe.
                batch.finish_layer(expert, node)
            else:
                batch.step(expert, node)


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
        self.search.traffic, self.search.spread = self.traffic, self.spread

    def plan(self, history: Sequence[Interval], placement: Placement) -> Placement:
        began, starts, lead = time.perf_counter(), list[Placement](), math.inf
        if self.seconds is not None:
            lead = self.lead * self.seconds
        if lead >= _LEAD_S * len(placement) * self.simulator.n_experts * self.simulator.n_gpus:
            starts = [self.decode(history, placement, began + lead)]
        if self.seconds is not None:
            self.search.seconds = max(SHORTEST_SECONDS, self.seconds - (time.perf_counter() - began))
        return self.search.plan(history, placement, starts)
