"""Planners that run a trained policy: alone, or as the guide of a search."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from clustergym.common.checkpoints import CheckpointError, load_checkpoint, save_checkpoint
from clustergym.common.choices import one_of
from clustergym.moe_placement.batch import PlacementBatch, PlacementConfig, doublings
from clustergym.moe_placement.dynamics import MODE_STAY
from clustergym.moe_placement.episode import N_EXPERT_FEATURES, N_GPU_FEATURES
from clustergym.moe_placement.planners.base import Planner
from clustergym.moe_placement.planners.search import HOMES, Anneal, evenly_dealt
from clustergym.moe_placement.policy.view import PolicyView, gains, trace_of
from clustergym.moe_placement.policy.view_kernels import N_PARTS
from clustergym.moe_placement.simulator import Placement, Simulator, Window
from clustergym.traces.token_trace import TokenTrace

if TYPE_CHECKING:
    from clustergym.moe_placement.policy.network import PlacementPolicy

KIND = "moe-policy"
FILE_NAME = "policy.pt"
PRETRAINED = Path(__file__).parent / "pretrained" / FILE_NAME
# Sizes of what the networks read; a checkpoint made for other features would be nonsense.
FEATURES = [N_EXPERT_FEATURES, N_GPU_FEATURES, N_PARTS]
# Counts changes after which the weights of an older file would mean something else.
NETWORK_VERSION = 2


@dataclass(frozen=True)
class ViewSettings:
    """How a policy looks at the world; it must be the same at work as in training."""

    homes: str = "even"
    norm: int = 4
    horizon: float = 4.0
    """Windows that a move is expected to be of use: a migration is spread over so many times the passes of a window."""
    operations: int = 16
    """On each layer between two windows."""

    def __post_init__(self) -> None:
        one_of(self.homes, HOMES, "homes")
        doublings(self.norm)
        if self.horizon <= 0 or self.operations < 1:
            raise ValueError(
                f"horizon is {self.horizon} and operations {self.operations}: expected more than 0 and at least 1"
            )

    def passes(self, passes_per_window: int) -> int:
        return max(1, round(passes_per_window * self.horizon))


def save_policy(path: Path, network: PlacementPolicy, view: ViewSettings, about: dict[str, Any]) -> None:
    """Write what a planner needs; ``about`` (plain data) says where it comes from."""
    content = {**network.as_state(), "view": asdict(view), "features": FEATURES, "about": about}
    save_checkpoint(path, KIND, content | {"network_version": NETWORK_VERSION})


def load_policy(source: str | Path = "pretrained") -> tuple[PlacementPolicy, ViewSettings, dict[str, Any]]:
    """(network, how it looks at the world, where it comes from) of a policy file, a run folder, or ``pretrained``."""
    try:
        from clustergym.moe_placement.policy.network import PlacementPolicy
    except ImportError as error:
        raise ImportError("the policy needs torch-geometric: pip install 'clustergym[train]'") from error
    path = PRETRAINED if str(source) == "pretrained" else Path(source)
    if path.is_dir():
        path = path / FILE_NAME
    state = load_checkpoint(path, KIND)
    if state.get("network_version") != NETWORK_VERSION:
        raise CheckpointError(f"{path} was written by an earlier clustergym, whose networks differ: train it again")
    if state["features"] != FEATURES:
        raise CheckpointError(
            f"{path} reads {state['features']} features an expert, GPU and look-ahead, this clustergym offers {FEATURES}: "
            "train it again"
        )
    return PlacementPolicy.from_state(state).eval(), ViewSettings(**state["view"]), state["about"]


class Policy(Planner):
    """A trained policy at work: on every layer, a few operations that its two actors choose.

    Args:
        checkpoint: a policy.pt, the folder of a training run, or ``pretrained``.
        operations: on a layer and window; by default as many as in training.
        samples: 1 takes the likeliest choices. k > 1 adds k − 1 sampled plans of every layer and keeps the one that saves most on
            the observed window.
        policy: (network, view settings) in place of a checkpoint.
    """

    starts_from_eplb = True
    takes_checkpoint = True
    layers_alone = True

    def __init__(
        self,
        simulator: Simulator,
        seed: int = 0,
        checkpoint: str | Path = "pretrained",
        operations: int | None = None,
        samples: int = 1,
        policy: tuple[PlacementPolicy, ViewSettings] | None = None,
    ) -> None:
        super().__init__(simulator, seed)
        if samples < 1 or (operations is not None and operations < 1):
            raise ValueError(f"samples is {samples} and operations {operations}: expected at least 1")
        self.network, view = policy if policy is not None else load_policy(checkpoint)[:2]
        if simulator.mode == MODE_STAY and view.homes != "even":
            raise ValueError(
                "with comm='stay' a layer's tokens are where the layer before left them, but the policy plans layers side by "
                "side: take one that was trained with --homes even"
            )
        self.settings = view if operations is None else ViewSettings(view.homes, view.norm, view.horizon, operations)
        self.samples = samples
        self.generator = torch.Generator()
        self._trace: tuple[Any, TokenTrace] | None = None
        self._view: PolicyView | None = None
        self.reset()

    def reset(self) -> None:
        self.generator.manual_seed(self.seed)
        if self._view is not None:
            self._view.batch.env["ema"].fill_(-1.0)

    def view_of(self, window: Window) -> PolicyView:
        """The view of the window's trace, made anew only where the trace or the window's size changed."""
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
            batch.env["ema"].fill_(-1.0)
            self._view = PolicyView(batch, self.settings.homes, self.settings.norm)
        return self._view

    def plan(self, history: Sequence[Window], placement: Placement, tokens: int | None = None) -> Placement:
        return self.decode(history[-1], placement)[0]

    @torch.no_grad()
    def decode(
        self, window: Window, placement: Placement, until: float | None = None
    ) -> tuple[Placement, npt.NDArray[np.float64]]:
        """The policy's plan (L, G, S), and how it weighed the experts of each layer (L, E) on the way.

        ``until`` (of ``time.perf_counter``) ends it before all operations are done, though not before the first.
        """
        layers = window.n_layers
        if int(window.experts.max()) < 0:  # no token uses any expert: there is nothing to do
            return placement.astype(np.int16), np.ones((layers, self.simulator.n_experts))
        view = self.view_of(window)
        view.seat(placement, window)
        network, same_node = self.network, view.same_node
        greedy = view.rows < layers  # the first copy of every layer; the others sample
        saved = torch.zeros(view.batch.num_envs)
        weighed = torch.zeros((layers, self.simulator.n_experts))
        for done in range(1, self.settings.operations + 1):
            inputs = view.inputs()
            encoded = network.encode(inputs, same_node)
            logits = network.expert_logits(inputs, encoded)
            weighed += logits[:layers].softmax(-1)
            expert = self._choose(logits, greedy)
            parts = view.look(expert)
            nodes = network.node_logits(inputs, encoded, same_node, expert, parts, view.legal(expert))
            node = self._choose(nodes, greedy)
            saved += gains(parts)[view.rows, node]
            if done == self.settings.operations or (until is not None and time.perf_counter() >= until):
                # No layer follows: each has an environment of its own.
                view.settle(expert, node)
                break
            view.step(expert, node)
        best = saved.view(self.samples, layers).argmax(0)
        at = torch.arange(layers)
        plans = view.batch.env["slots"].view(self.samples, layers, layers, *placement.shape[1:])
        return plans[best, at, at].numpy().copy(), weighed.numpy().astype(np.float64)

    def _choose(self, logits: Tensor, greedy: Tensor) -> Tensor:
        likeliest = logits.argmax(-1)
        if bool(greedy.all()):
            return likeliest
        drawn = torch.multinomial(logits.softmax(-1), 1, generator=self.generator).squeeze(-1)
        return torch.where(greedy, likeliest, drawn)


class PolicyGuided(Policy):
    """The policy proposes, the incremental simulator checks: its plan is where annealing starts, its experts are what it moves.

    Args:
        checkpoint, operations, samples, policy: see :class:`Policy`.
        seconds: for all layers together, the policy's own time included; None takes ``iterations`` a layer.
        iterations: annealing steps a layer where no time is given.
        guide: share of the steps that concern an expert drawn as the policy weighs them.
        lead: share of the time that the policy may take before the search, where a time is given.
        heat: temperatures of the annealing.
    """

    takes_seconds = True

    def __init__(
        self,
        simulator: Simulator,
        seed: int = 0,
        checkpoint: str | Path = "pretrained",
        operations: int | None = None,
        samples: int = 1,
        policy: tuple[PlacementPolicy, ViewSettings] | None = None,
        seconds: float | None = None,
        iterations: int = 3000,
        guide: float = 0.5,
        lead: float = 0.5,
        heat: tuple[float, float] = (3e-4, 1e-5),
    ) -> None:
        super().__init__(simulator, seed, checkpoint, operations, samples, policy)
        if not (0 <= guide <= 1 and 0 <= lead <= 1):
            raise ValueError(f"guide is {guide} and lead {lead}: expected 0 … 1")
        view = self.settings
        self.search = Anneal(
            simulator, seed, norm=view.norm, iterations=iterations, seconds=seconds, heat=heat,
            migration_weight=1.0 / view.horizon, homes=view.homes,
        )  # fmt: skip
        self.guide, self.lead = guide, lead

    def reset(self) -> None:
        super().reset()
        if hasattr(self, "search"):
            self.search.reset()

    def plan(self, history: Sequence[Window], placement: Placement, tokens: int | None = None) -> Placement:
        began = time.perf_counter()
        window = history[-1]
        seconds = self.search.seconds
        proposed, weighed = self.decode(window, placement, None if seconds is None else began + self.lead * seconds)
        if self.settings.homes == "even":
            window = evenly_dealt(window, self.simulator.n_gpus)
        sim = self.simulator.count(window, proposed, before=placement)
        if seconds is not None:
            seconds = max(1e-4, seconds - (time.perf_counter() - began))
        scale = (tokens or window.n_tokens) / window.n_tokens
        return self.search.refine(window, sim, scale, seconds, weighed, self.guide)
