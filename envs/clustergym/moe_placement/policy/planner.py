"""Planners that use a trained policy: directly, or to guide a search."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from clustergym.moe_placement.batch import PlacementBatch, PlacementConfig
from clustergym.moe_placement.kernels.state import MODE_STAY
from clustergym.moe_placement.planners.anneal import SHORTEST_SECONDS, Anneal
from clustergym.moe_placement.planners.base import Planner
from clustergym.moe_placement.planners.search import with_even_homes
from clustergym.moe_placement.policy.export import PolicySettings, load_policy
from clustergym.moe_placement.policy.network import PolicyNetwork
from clustergym.moe_placement.policy.view import PolicyView, gains, trace_of
from clustergym.moe_placement.simulator import Placement, Window
from clustergym.traces.token_trace import TokenTrace


@dataclass(eq=False, kw_only=True)
class Policy(Planner):
    """A trained policy: its two actors choose a few operations on every layer."""

    starts_from_eplb = True
    takes_checkpoint = True
    layers_alone = True

    checkpoint: str | Path = "pretrained"
    """A policy.pt, the folder of a training run, or ``pretrained``."""
    operations: int | None = None
    """Operations per layer and window; by default as many as in training."""
    samples: int = 1
    """1 takes the most likely choices. k > 1 also samples k − 1 plans per layer and keeps the one that saves most on
    the observed window."""
    policy: tuple[PolicyNetwork, PolicySettings] | None = None
    """(network, settings) instead of a checkpoint."""

    def __post_init__(self) -> None:
        if self.samples < 1 or (self.operations is not None and self.operations < 1):
            raise ValueError(f"samples is {self.samples} and operations {self.operations}: expected at least 1")
        self.network, settings = self.policy if self.policy is not None else load_policy(self.checkpoint)
        if self.simulator.mode == MODE_STAY and settings.homes != "even":
            raise ValueError(
                "with comm='stay' a layer's tokens are where the previous layer left them, but the policy plans all "
                "layers at once: use a policy that was trained with --homes even"
            )
        self.settings = settings if self.operations is None else replace(settings, operations=self.operations)
        self.generator = torch.Generator().manual_seed(self.seed)
        self._trace: tuple[Any, TokenTrace] | None = None
        self._view: PolicyView | None = None

    def reset(self) -> None:
        self.generator.manual_seed(self.seed)
        if self._view is not None:
            self._view.batch.episode["load_average"].fill_(-1.0)

    def view_of(self, window: Window) -> PolicyView:
        """The view of the window's trace; built again only if the trace or the window size changed."""
        if self._trace is None or self._trace[0] is not window.experts:
            trace = TokenTrace(trace_of(window), n_experts=self.simulator.n_experts, model=None, name="observed")
            self._trace, self._view = (window.experts, trace), None
        if self._view is None or self._view.batch.config.window_tokens != window.n_tokens:
            config = PlacementConfig(
                trace=self._trace[1],
                cluster=self.simulator.cluster,
                model=self.simulator.model,
                windows=1,
                window_tokens=window.n_tokens,
                ops_per_layer=self.settings.operations,
                passes_per_window=self.settings.passes(self.simulator.passes_per_window),
                comm=self.simulator.comm,
            )
            batch = PlacementBatch(config, window.n_layers * self.samples)
            batch.episode["load_average"].fill_(-1.0)
            self._view = PolicyView(batch, self.settings.homes, self.settings.norm)
        return self._view

    def plan(self, history: Sequence[Window], placement: Placement, tokens: int | None = None) -> Placement:
        return self.decode(history[-1], placement)[0]

    @torch.no_grad()
    def decode(
        self, window: Window, placement: Placement, until: float | None = None
    ) -> tuple[Placement, npt.NDArray[np.float64]]:
        """The policy's plan (L, G, S), and the summed probabilities of the experts of each layer (L, E).

        At the time ``until`` (of ``time.perf_counter``) planning stops, but not before the first operation.
        """
        layers = window.n_layers
        if int(window.experts.max()) < 0:  # no token uses any expert
            return placement.astype(np.int16), np.ones((layers, self.simulator.n_experts))
        view = self.view_of(window)
        view.seat(placement, window)
        network = self.network
        greedy = view.rows < layers  # the first copy of every layer; the other copies sample
        saved = torch.zeros(view.batch.num_envs)
        weighed = torch.zeros((layers, self.simulator.n_experts))
        for done in range(1, self.settings.operations + 1):
            inputs = view.inputs()
            encoded = network.encode(inputs)
            logits = network.expert_logits(inputs, encoded)
            weighed += logits[:layers].softmax(-1)
            expert = self._choose(logits, greedy)
            parts = view.look(expert)
            nodes = network.node_logits(inputs, encoded, expert, parts, view.legal(expert))
            node = self._choose(nodes, greedy)
            saved += gains(parts)[view.rows, node]
            if done == self.settings.operations or (until is not None and time.perf_counter() >= until):
                # Each layer has its own environment: there is no next layer to observe.
                view.settle(expert, node)
                break
            view.step(expert, node)
        best = saved.view(self.samples, layers).argmax(0)
        at = torch.arange(layers)
        plans = view.batch.episode["slots"].view(self.samples, layers, layers, *placement.shape[1:])
        return plans[best, at, at].numpy().copy(), weighed.numpy().astype(np.float64)

    def _choose(self, logits: Tensor, greedy: Tensor) -> Tensor:
        likeliest = logits.argmax(-1)
        if bool(greedy.all()):
            return likeliest
        drawn = torch.multinomial(logits.softmax(-1), 1, generator=self.generator).squeeze(-1)
        return torch.where(greedy, likeliest, drawn)


@dataclass(eq=False, kw_only=True)
class PolicyGuided(Policy):
    """Annealing that starts from the policy's plan and prefers to move the experts that the policy prefers."""

    takes_seconds = True

    seconds: float | None = None
    """Time budget for all layers together, including the policy's time; None uses ``iterations``."""
    iterations: int = 3000
    """Annealing steps per layer without a time budget."""
    guide: float = 0.5
    """Share of the steps that move an expert drawn from the policy's probabilities."""
    lead: float = 0.5
    """Share of the time budget that the policy may use before the search."""
    heat: tuple[float, float] = (3e-4, 1e-5)
    """First and last temperature of the annealing."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (0 <= self.guide <= 1 and 0 <= self.lead <= 1):
            raise ValueError(f"guide is {self.guide} and lead {self.lead}: expected 0 … 1")
        self.search = Anneal(
            self.simulator, self.seed, norm=self.settings.norm, iterations=self.iterations, seconds=self.seconds,
            heat=self.heat, migration_weight=1.0 / self.settings.horizon, homes=self.settings.homes,
        )  # fmt: skip

    def reset(self) -> None:
        super().reset()
        self.search.reset()

    def plan(self, history: Sequence[Window], placement: Placement, tokens: int | None = None) -> Placement:
        began = time.perf_counter()
        window = history[-1]
        seconds = self.seconds
        proposed, weighed = self.decode(window, placement, None if seconds is None else began + self.lead * seconds)
        if self.settings.homes == "even":
            window = with_even_homes(window, self.simulator.n_gpus)
        sim = self.simulator.count(window, proposed, before=placement)
        if seconds is not None:
            seconds = max(SHORTEST_SECONDS, seconds - (time.perf_counter() - began))
        scale = (tokens or window.n_tokens) / window.n_tokens
        return self.search.refine(window, sim, scale, seconds, weighed, self.guide)
