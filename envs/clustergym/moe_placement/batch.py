"""The batched environment: B episodes in torch tensors on one device, stepped by one launch."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from clustergym.common.choices import one_of
from clustergym.common.compiling import warn_while_compiling
from clustergym.moe_placement.kernels.candidates import N_CANDIDATE_FEATURES, N_COMPACT_GPU_FEATURES
from clustergym.moe_placement.kernels.cost import add_links
from clustergym.moe_placement.kernels.eplb import eplb_slots
from clustergym.moe_placement.kernels.lookahead import PERCENT
from clustergym.moe_placement.kernels.observation import (
    N_CONTEXT,
    N_EXPERT_FEATURES,
    N_GPU_FEATURES,
    N_LOAD_FEATURES,
    N_PAIR_FEATURES,
)
from clustergym.moe_placement.kernels.state import (
    CLOCK_DONE,
    LAST_KIND,
    N_CLOCKS,
    N_LAST,
    N_PARTS,
    N_ROUNDS,
    N_TIMES,
    OP_ILLEGAL,
    ORDER_ROUNDS,
    SCHEDULES,
    TIME_SAVED,
    EpisodeState,
    Observation,
    Rules,
    SimulationState,
    StreamState,
    TracePieces,
)
from clustergym.moe_placement.kernels.streams import stream_keys
from clustergym.moe_placement.profiles import DEFAULT_PROFILE, PHASES, EngineProfile, get_profile
from clustergym.moe_placement.simulator import Simulator, zeros_of
from clustergym.moe_placement.specs import ClusterSpec, ModelSpec, get_cluster, model_for
from clustergym.moe_placement.streams import Interval, IntervalStream, Traffic, expert_sets, layer_first
from clustergym.traces.generated import GENERATED, generated_trace
from clustergym.traces.splits import split_trace
from clustergym.traces.token_trace import TokenTrace, bundled_traces

# Intervals over which the time of the static placement, the unit of rewards, is averaged.
_STATIC_INTERVALS = 4


@dataclass(frozen=True)
class PlacementConfig:
    """Everything that makes one placement task; the environments take these as keyword arguments."""

    trace: str | TokenTrace = "tiny_moe_domains"
    """A :class:`~clustergym.TokenTrace`, a file, or the name of a bundled or generated trace."""
    split: str = "train"
    """Part of the trace, see ``clustergym.traces.splits``: ``train``, ``validation``, ``test`` or ``all``."""
    cluster: str | ClusterSpec = "h800-4x4"
    """A preset name or a spec."""
    slots_per_gpu: int | None = None
    """Experts that a GPU can hold, if not the cluster's own."""
    model: str | ModelSpec | None = None
    """A preset name or a spec; by default the one that the trace names."""
    profile: str | EngineProfile = DEFAULT_PROFILE
    """How the engine serves: phase, replica choice, transport. See ``clustergym.moe_placement.PROFILES``."""
    phase: str | None = None
    """``decode`` or ``prefill``, if not the profile's own."""
    intervals: int = 1
    """Intervals served in an episode. 1 is a single walk over the layers."""
    tokens_per_rank: int | None = None
    """Tokens that each GPU contributes to a pass; by default 32 in decode, 128 in prefill."""
    sampled_passes: int | None = None
    """Passes of an interval that are simulated and averaged; by default 4 in decode, 2 in prefill."""
    passes_per_interval: int = 1000
    """Forward passes between two placement decisions: moving an expert is paid once, serving that many times."""
    ops_per_layer: int = 16
    """Operations on each layer between two intervals."""
    schedule: str = "stationary"
    """How domains follow each other: ``stationary``, ``drift`` (mixture walk), ``switch``, ``replay``."""
    drift_rate: float = 0.5
    """Step of the mixture walk (drift), or the chance of another domain at each interval (switch)."""
    rank_imbalance: float = 0.0
    """Spread of the GPUs' shares of the tokens; 0 is balanced, as engines are."""
    allow_reuse: bool = False
    """Serve tokens again when the split is used up, instead of raising an error when the environment is made."""
    migration: str = "blocking"
    """``blocking``: serving stops while weights move. ``async``: they move in the background."""
    background_share: float = 0.1
    """Share of a background transfer's time by which it slows the passes down."""
    start: str = "static"
    """Placement at the start: ``static`` (experts in order) or ``eplb`` (EPLB on the first interval)."""
    illegal_penalty: float = 1.0
    """Price of an illegal action, in units of the reward: percent of a layer's time."""
    compare_eplb: bool = False
    """At the end of an episode, also serve it with EPLB's placement: ``info`` then has the time saved against it."""
    mix_observed: bool = False
    """Observe the tokens of an interval dealt over its passes and ranks at random. Which rank had a token is chance,
    and the look-ahead then does not count it. The next interval, which is rewarded, is served as it comes."""
    lookahead: bool = False
    """Nine more columns of ``pairs``: what PLACE, ADD and DELETE of every pair would save on the observed interval, in
    percent of the layer's time: in the smooth 8-norm over GPUs, in true time, and in migration. Exact, and slow."""
    candidates: int = 0
    """Propose so many operations at every step, tried exactly (``PlacementBatch.candidates``)."""

    @property
    def traffic(self) -> Traffic:
        """How passes are drawn from the trace."""
        phase = get_profile(self.profile).phase if self.phase is None else self.phase
        return Traffic(
            phase, self.tokens_per_rank, self.sampled_passes, self.schedule, self.drift_rate, self.rank_imbalance,
            self.allow_reuse,
        )  # fmt: skip


REMOVED_ARGUMENTS = {
    "observation": "wrap the environment in FlattenObservation, or use MoEPlacementFlat-v0",
    "memory": "a look-ahead writes nothing any more",
    "lookahead_norm": "the look-ahead shows the smooth 8-norm and the true time",
    "reward_norm": "rewards are in true time, and add up to the time saved",
    "conditional": "moe_placement_v0.env() always shows the chosen expert; parallel_env() lets both choose at once",
}
"""Arguments of earlier versions → what to use instead."""


@lru_cache(maxsize=8)
def _load_once(path: str, modified_ns: int) -> TokenTrace:
    return TokenTrace.load(path)


def load_cached(source: str) -> TokenTrace:
    """The trace, read once however many environments ask for it; read again when its file changes."""
    if source in GENERATED:
        return generated_trace(source)
    path = bundled_traces().get(source, Path(source))
    return _load_once(str(path), path.stat().st_mtime_ns) if path.is_file() else TokenTrace.load(source)


@lru_cache(maxsize=32)
def _static_times(trace: TokenTrace, simulator: Simulator, traffic: Traffic) -> npt.NDArray[np.float64]:
    """(L,) mean µs of each layer under the static placement, over a few intervals of the trace."""
    static = simulator.static(trace.n_layers)
    n = max(1, min(_STATIC_INTERVALS, traffic.capacity(trace, simulator.n_gpus)))
    intervals = IntervalStream(trace, simulator.n_gpus, traffic).take(n)
    times: npt.NDArray[np.float64] = np.mean([simulator.evaluate(i, static).time_us for i in intervals], axis=0)
    return times


class PlacementBatch:
    """B placement episodes as tensors on one device; what every environment class and trainer stands on.

    ``obs`` (a dict of tensors with leading axis B) and ``reward`` are written in place by each call: copy what must
    outlive the next one.

    Args:
        config: the task.
        num_envs: B.
        device: ``"cpu"`` (numba, all cores) or a CUDA device (numba-cuda, the extra ``clustergym[cuda]``).
    """

    def __init__(self, config: PlacementConfig, num_envs: int = 1, device: str | torch.device = "cpu") -> None:
        if num_envs < 1:
            raise ValueError(f"num_envs is {num_envs}: expected at least 1")
        self.config, self.num_envs, self.device = config, num_envs, torch.device(device)
        self._compiled = False
        whole = config.trace if isinstance(config.trace, TokenTrace) else load_cached(config.trace)
        self.trace = split_trace(whole, config.split)
        self.model, self.traffic = model_for(self.trace, config.model), config.traffic
        cluster = get_cluster(config.cluster)
        if config.slots_per_gpu is not None:
            cluster = get_cluster(cluster, slots_per_gpu=config.slots_per_gpu)
        self.simulator = Simulator(
            self.model, cluster, config.profile, config.passes_per_interval, config.migration,
            config.background_share,
        )  # fmt: skip
        self.cluster = self.simulator.cluster
        if self.cluster.link_gb_s:
            raise ValueError(
                f"cluster {self.cluster.name!r} has a bandwidth for every pair of GPUs (link_gb_s), which is only for "
                "evaluation and planning: leave it out for an environment"
            )
        if self.simulator.profile.dispatch == "lp":
            raise ValueError(
                f"profile {self.simulator.profile.name!r} splits tokens by a linear program, which is only for "
                "evaluation and planning: choose another profile for an environment"
            )
        self.n_experts, self.n_layers = self.model.n_experts, self.trace.n_layers
        self.n_gpus, self.n_slots = self.simulator.n_gpus, self.simulator.n_slots
        for key, least in (("intervals", 1), ("ops_per_layer", 1), ("candidates", 0)):
            if getattr(config, key) < least:
                raise ValueError(f"{key} is {getattr(config, key)}: expected at least {least}")
        self.launcher = self._pick_launcher()
        # The first interval of an episode is only observed.
        self.traffic.check(self.trace, self.n_gpus, config.intervals + 1)
        with warn_while_compiling():
            self._static_times = _static_times(self.trace, self.simulator, self.traffic)
        n_passes, tokens_per_rank = self.traffic.sizes
        self.rules_host = Rules(
            costs=self.simulator.costs(tokens_per_rank * self.n_gpus),
            topology=self.simulator.topology,
            static_us=float(self._static_times.sum()),
            reward_per_us=float(PERCENT / self._static_times.mean()),
            illegal_penalty=float(config.illegal_penalty),
            n_passes=n_passes,
            phase=PHASES.index(self.traffic.phase),
            schedule=SCHEDULES.index(self.traffic.schedule),
            rate=float(self.traffic.rate),
            rank_imbalance=float(self.traffic.rank_imbalance),
            n_intervals=config.intervals,
            ops_per_layer=config.ops_per_layer,
            start_eplb=one_of(config.start, ("static", "eplb"), "start"),
            mix_observed=int(config.mix_observed),
        )
        self._allocate(n_passes, tokens_per_rank * self.n_gpus)

    def _pick_launcher(self) -> ModuleType:
        if self.device.type == "cpu":
            from clustergym.moe_placement.launchers import cpu

            return cpu
        if self.device.type != "cuda":
            raise ValueError(f"device {self.device} is not supported: expected 'cpu' or 'cuda'")
        try:
            from clustergym.moe_placement.launchers import cuda
        except ImportError as error:
            raise ImportError("environments on a GPU need numba-cuda: pip install 'clustergym[cuda]'") from error
        return cuda

    def static_layer_us(self, layer: int) -> float:
        """Mean µs of a layer under the static placement."""
        return float(self._static_times[layer])

    def _allocate(self, n_passes: int, n_tokens: int) -> None:
        batch, config = self.num_envs, self.config
        layers, gpus, slots, experts = self.n_layers, self.n_gpus, self.n_slots, self.n_experts

        def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            return zeros_of((batch, *shape), dtype, self.device)

        self.sim = self.simulator.allocate(batch, 2 * n_passes, n_tokens, self.device)
        placement = (layers, gpus, slots)
        self.episode = {
            "rows": zeros((config.intervals + 1, n_passes, n_tokens), torch.int32),
            "rank_start": zeros((config.intervals + 1, n_passes, gpus + 1), torch.int32),
            "slots": zeros(placement, torch.int16),
            "first_slots": zeros(placement, torch.int16),
            "future_us": zeros((layers, config.intervals), torch.float64),
            "load_average": zeros((layers, experts), torch.float32),
            "clock": zeros((N_CLOCKS,), torch.int32),
            "last_operation": zeros((N_LAST,), torch.int32),
            "times_us": zeros((N_TIMES,), torch.float64),
            "int_scratch": zeros((3, experts), torch.int32),
            "float_scratch": zeros((experts + gpus,), torch.float64),
            "in_common": zeros((gpus, gpus), torch.int32),
            "gpu_pairs": zeros((gpus,), torch.int32),
            "gpu_load": zeros((gpus,), torch.float32),
            "coldest": zeros((gpus,), torch.int16),
            "exchange": zeros((gpus, gpus, 2), torch.float32),
            "accepts": zeros((gpus + 1, gpus), torch.int8),
            "load_features": zeros((experts, N_LOAD_FEATURES), torch.float32),
            "used": zeros((experts,), torch.float32),
            "group_coactivation": zeros((gpus, experts), torch.float32),
            "hot_coactivation": zeros((experts,), torch.float32),
        }
        self.episode["load_average"].fill_(-1.0)
        domains = len(self.trace.domain_names)
        self.stream = {
            "random": torch.from_numpy(stream_keys(np.arange(batch, dtype=np.int64))).to(self.device),
            "position": zeros((2,), torch.int32),
            "drawn": zeros((domains,), torch.int32),
            "logits": zeros((domains,), torch.float64),
            "weights": zeros((domains,), torch.float64),
            "rank_piece": zeros((gpus, 2), torch.int32),
            "orders": zeros((domains + 1, ORDER_ROUNDS + N_ROUNDS), torch.int64),
        }
        pair_features = N_PAIR_FEATURES + (3 * N_PARTS if config.lookahead else 0)
        self.obs = {
            "experts": zeros((experts, N_EXPERT_FEATURES), torch.float32),
            "gpus": zeros((3 * gpus, N_GPU_FEATURES), torch.float32),
            "pairs": zeros((experts, gpus, pair_features), torch.float32),
            "expert_graph": zeros((experts, experts), torch.float32),
            "gpu_graph": zeros((gpus, gpus), torch.float32),
            "context": zeros((N_CONTEXT,), torch.float32),
            "action_mask": zeros((experts, 3 * gpus), torch.int8),
        }
        self._all_experts = self._to_device(np.tile(np.arange(experts), (batch, 1)))
        choices = config.candidates + 1
        features = config.candidates * N_CANDIDATE_FEATURES + gpus * N_COMPACT_GPU_FEATURES + N_CONTEXT
        self.candidates = {} if choices == 1 else {
            "operations": zeros((choices, 2), torch.int64),
            "mask": zeros((choices,), torch.int8),
            "score": zeros((choices + 2 * gpus,), torch.float64),
            "compact": zeros((features,), torch.float32),
        }  # fmt: skip
        self.illegal = torch.zeros(batch, dtype=torch.int64, device=self.device)
        self.reward = torch.zeros(batch, dtype=torch.float64, device=self.device)
        cut = self.traffic.cut(self.trace)._replace(expert_sets=expert_sets(self.trace))
        trace = TracePieces(*map(self._to_device, cut))
        sim = SimulationState(**{name: self._array(tensor) for name, tensor in self.sim.items()})
        episode = EpisodeState(**{name: self._array(tensor) for name, tensor in self.episode.items()})
        stream = StreamState(**{name: self._array(tensor) for name, tensor in self.stream.items()})
        topology = self.simulator.topology
        rules = self.rules_host._replace(topology=topology._replace(node_of=self._to_device(topology.node_of)))
        obs = Observation(**{name: self._array(tensor) for name, tensor in self.obs.items()})
        self._state = (episode, sim, stream, obs, trace, rules)

    def observe_into(self, buffers: dict[str, tuple[Tensor, Any]]) -> None:
        """Write observations from now on into these tensors, in place of those of the same names.

        With each tensor comes its memory as the launcher wants it: to ask for it at every step would take longer.

        Each step writes all of them whole but ``expert_graph``, which it reads. That one is written when an environment
        reaches another layer.
        """
        self.obs |= {name: tensor for name, (tensor, _) in buffers.items()}
        episode, sim, stream, obs, trace, rules = self._state
        obs = obs._replace(**{name: array for name, (_, array) in buffers.items()})
        self._state = (episode, sim, stream, obs, trace, rules)

    def _to_device(self, array: npt.NDArray[Any]) -> Any:
        """A host array as the launcher wants it."""
        return self._array(torch.from_numpy(np.ascontiguousarray(array)).to(self.device))

    def _array(self, tensor: Tensor) -> Any:
        """The tensor's memory as the launcher wants it, shared and not copied."""
        if self.device.type == "cpu":
            return tensor.numpy()
        from numba import cuda

        return cuda.as_cuda_array(tensor)

    @property
    def done(self) -> Tensor:
        """(B,) bool: the episode is over."""
        return self.episode["clock"][:, CLOCK_DONE] != 0

    def operations(self, choice: Tensor) -> tuple[Tensor, Tensor]:
        """Experts and nodes (B,) of the candidates ``choice`` (B,); −1 for a choice that does not exist."""
        n, rows = self.config.candidates + 1, torch.arange(self.num_envs, device=self.device)
        chosen = self.candidates["operations"][rows, choice.clamp(0, n - 1)]
        expert, node = torch.where(((choice >= 0) & (choice < n))[:, None], chosen, -1).unbind(-1)
        return expert, node

    @property
    def saved(self) -> Tensor:
        """(B,) float64: the time saved in the episode so far, as a share of the static placement's time."""
        return self.episode["times_us"][:, TIME_SAVED] / (self.rules_host.static_us * self.rules_host.n_intervals)

    @property
    def bytes_allocated(self) -> int:
        """Memory of all state and observation tensors."""
        tensors = [*self.sim.values(), *self.episode.values(), *self.stream.values(), *self.obs.values()]
        return sum(t.numel() * t.element_size() for t in tensors)

    def seed(self, seeds: npt.NDArray[np.int64]) -> None:
        """Give each environment (B,) a seed; it takes effect at its next reset."""
        self.stream["random"].copy_(torch.from_numpy(stream_keys(np.asarray(seeds, dtype=np.int64))))

    def reset(self, where: Tensor | None = None) -> dict[str, Tensor]:
        """Begin new episodes, in all environments or where ``where`` (B,) is true."""
        if where is None:
            where = torch.ones(self.num_envs, dtype=torch.bool, device=self.device)
        # The first reset compiles all that a step needs. The warning starts a thread, which takes longer than a reset.
        with nullcontext() if self._compiled else warn_while_compiling():
            self.launcher.reset(self._array(where), self._state)
            self.illegal.masked_fill_(where, 0)
            self._look_around()
        self._compiled = True
        return self.obs

    def step(self, expert: Tensor, node: Tensor) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """Apply (B,) int64 choices of both agents. Returns (obs, reward (B,) float64, done (B,) bool); no autoreset."""
        self.launcher.step(self._array(torch.stack([expert, node])), self._array(self.reward), self._state)
        self.illegal += self.episode["last_operation"][:, LAST_KIND] == OP_ILLEGAL
        self._look_around()
        return self.obs, self.reward, self.done

    def _look_around(self) -> None:
        """Fill the observation's look-ahead and the candidates. Few tasks ask for them, so the step is without."""
        if self.config.lookahead:
            self.launcher.look_ahead(self._all_experts, N_PAIR_FEATURES, self._state[3].pairs, self._state)
        if self.candidates:
            self.launcher.propose(*map(self._array, self.candidates.values()), self._state)

    def lookahead(self, experts: Tensor) -> Tensor:
        """(B, M, 3·G, parts): what each operation on ``experts`` (B, M) would save on the observed interval.

        The parts are percent of the layer's time: saved in the smooth 8-norm over GPUs, truly saved, and migration
        (negative). Nothing changes by asking.
        """
        batch, chosen = experts.shape
        parts = torch.empty((batch, chosen, self.n_gpus, 3 * N_PARTS), device=self.device)
        with warn_while_compiling():
            self.launcher.look_ahead(self._array(experts.contiguous()), 0, self._array(parts), self._state)
        by_node = parts.reshape(batch, chosen, self.n_gpus, 3, N_PARTS).transpose(2, 3)
        return by_node.reshape(batch, chosen, 3 * self.n_gpus, N_PARTS)

    def noop_nodes(self) -> Tensor:
        """(B,) nodes that change nothing for expert 0: PLACE on a GPU that holds it."""
        return self.sim["replicas"][:, 0, 0].long()

    def _changing(self) -> dict[str, Tensor]:
        parts = {"sim": self.sim, "episode": self.episode, "stream": self.stream, "obs": self.obs}
        parts["candidates"] = self.candidates
        named = {f"{part}.{name}": x for part, tensors in parts.items() for name, x in tensors.items()}
        return named | {"reward": self.reward, "illegal": self.illegal}

    def eplb_us(self, index: int) -> float:
        """µs of a layer and pass in environment ``index``'s episode if EPLB plans again before every interval."""
        rows, starts = (self.episode[name][index].cpu().numpy() for name in ("rows", "rank_start"))
        intervals = [Interval(layer_first(self.trace), *parts) for parts in zip(rows, starts, strict=True)]
        before, total = self.episode["first_slots"][index].cpu().numpy().copy(), 0.0
        ints, floats = np.zeros((3, self.n_experts), np.int32), np.zeros(self.n_experts + self.n_gpus)
        for seen, served in pairwise(intervals):
            plan = np.zeros_like(before)
            for slots, load in zip(plan, seen.loads(self.n_experts).astype(np.float64), strict=True):
                eplb_slots(slots, load, 1, 0, ints, floats)
            total += float(self.simulator.evaluate(served, plan, before, check=False).total_us.mean())
            before = plan
        return total / self.config.intervals

    def get_state(self) -> dict[str, npt.NDArray[Any]]:
        """A copy of everything that changes. :meth:`set_state` continues from it bit for bit."""
        return {name: tensor.numpy(force=True).copy() for name, tensor in self._changing().items()}

    def set_state(self, state: dict[str, npt.NDArray[Any]]) -> None:
        """Go back to a state that :meth:`get_state` of an equal batch returned."""
        changing = self._changing()
        for name, value in state.items():
            changing[name].copy_(torch.from_numpy(value))

    def __getstate__(self) -> dict[str, Any]:
        arguments = (self.config, self.num_envs, str(self.device))
        return {"arguments": arguments, "state": self.get_state()}

    def __setstate__(self, content: dict[str, Any]) -> None:
        self.__init__(*content["arguments"])  # type: ignore[misc]
        self.set_state(content["state"])

    def link_copies(self, index: int) -> npt.NDArray[np.float64]:
        """(G, G) copies that environment ``index`` dispatched from row to column per observed pass."""
        links = np.zeros((self.n_gpus, self.n_gpus))
        one = SimulationState(**{name: tensor[index : index + 1].cpu().numpy() for name, tensor in self.sim.items()})
        for w in range(self.rules_host.n_passes):
            add_links(one, 0, w, self.rules_host.topology, links)
        return links / self.rules_host.n_passes
