"""The batched environment: B episodes in arrays on one device, stepped by one launch."""

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

from clustergym.common.choices import index_of_choice
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
    N_ROUNDS,
    N_SAVED_PARTS,
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
from clustergym.moe_placement.simulator import Simulator, zeros
from clustergym.moe_placement.specs import ClusterSpec, ModelSpec, get_cluster, model_for
from clustergym.moe_placement.streams import Interval, IntervalStream, Traffic, expert_sets, layer_first
from clustergym.traces.generated import GENERATED, generated_trace
from clustergym.traces.splits import split_trace
from clustergym.traces.token_trace import TokenTrace, bundled_traces

# A NumPy array on the CPU, a torch tensor on a CUDA device. The code here uses what both can do.
DeviceArray = Any

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
    renumber: bool = False
    """Give experts other numbers in every episode: an agent cannot learn by heart which ones are used. GPUs differ only
    by the experts that they hold at the start, so they are renumbered too."""
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
    """B placement episodes as arrays on one device; what every environment class stands on.

    Arrays are NumPy's on the CPU, and torch tensors on a CUDA device; :meth:`host` makes them NumPy's. ``obs`` (a dict
    of arrays with leading axis B) and ``reward`` are written in place by each call: copy what must survive the next.

    Args:
        config: the task.
        num_envs: B.
        device: ``"cpu"`` (numba, all cores) or a CUDA device (torch and numba-cuda, the extra ``clustergym[cuda]``).
    """

    def __init__(self, config: PlacementConfig, num_envs: int = 1, device: str = "cpu") -> None:
        if num_envs < 1:
            raise ValueError(f"num_envs is {num_envs}: expected at least 1")
        self.config, self.num_envs, self.device = config, num_envs, str(device)
        self.on_host = self.device == "cpu"
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
            start_eplb=index_of_choice(config.start, ("static", "eplb"), "start"),
            mix_observed=int(config.mix_observed),
            renumber=int(config.renumber),
        )
        self._allocate(n_passes, tokens_per_rank * self.n_gpus)

    def _pick_launcher(self) -> ModuleType:
        if self.on_host:
            from clustergym.moe_placement.launchers import cpu

            return cpu
        if self.device.partition(":")[0] != "cuda":
            raise ValueError(f"device {self.device} is not supported: expected 'cpu' or 'cuda'")
        try:
            from clustergym.moe_placement.launchers import cuda
        except ImportError as error:
            raise ImportError(
                "environments on a GPU need torch and numba-cuda: pip install 'clustergym[cuda]'"
            ) from error
        return cuda

    def static_layer_us(self, layer: int) -> float:
        """Mean µs of a layer under the static placement."""
        return float(self._static_times[layer])

    def _allocate(self, n_passes: int, n_tokens: int) -> None:
        batch, config = self.num_envs, self.config
        layers, gpus, slots, experts = self.n_layers, self.n_gpus, self.n_slots, self.n_experts

        def zeros_each(shape: tuple[int, ...], dtype: npt.DTypeLike) -> DeviceArray:
            return self._to_device(zeros((batch, *shape), dtype))

        blank = self.simulator.allocate(batch, 2 * n_passes, n_tokens)
        self.sim = {name: self._to_device(array) for name, array in blank.items()}
        placement = (layers, gpus, slots)
        self.episode = {
            "rows": zeros_each((config.intervals + 1, n_passes, n_tokens), np.int32),
            "rank_start": zeros_each((config.intervals + 1, n_passes, gpus + 1), np.int32),
            "slots": zeros_each(placement, np.int16),
            "first_slots": zeros_each(placement, np.int16),
            "future_us": zeros_each((layers, config.intervals), np.float64),
            "load_average": zeros_each((layers, experts), np.float32),
            "clock": zeros_each((N_CLOCKS,), np.int32),
            "last_operation": zeros_each((N_LAST,), np.int32),
            "times_us": zeros_each((N_TIMES,), np.float64),
            "int_scratch": zeros_each((3, experts), np.int32),
            "float_scratch": zeros_each((experts + gpus,), np.float64),
            "in_common": zeros_each((gpus, gpus), np.int32),
            "gpu_pairs": zeros_each((gpus,), np.int32),
            "gpu_load": zeros_each((gpus,), np.float32),
            "coldest": zeros_each((gpus,), np.int16),
            "exchange": zeros_each((gpus, gpus, 2), np.float32),
            "accepts": zeros_each((gpus + 1, gpus), np.int8),
            "load_features": zeros_each((experts, N_LOAD_FEATURES), np.float32),
            "used": zeros_each((experts,), np.float32),
            "group_coactivation": zeros_each((gpus, experts), np.float32),
            "hot_coactivation": zeros_each((experts,), np.float32),
            "names": zeros_each((experts,), np.int16),
        }
        self.episode["load_average"][:] = -1.0
        domains = len(self.trace.domain_names)
        self.stream = {
            "random": self._to_device(stream_keys(np.arange(batch, dtype=np.int64))),
            "position": zeros_each((2,), np.int32),
            "drawn": zeros_each((domains,), np.int32),
            "logits": zeros_each((domains,), np.float64),
            "weights": zeros_each((domains,), np.float64),
            "rank_piece": zeros_each((gpus, 2), np.int32),
            "orders": zeros_each((domains + 1, ORDER_ROUNDS + N_ROUNDS), np.int64),
        }
        pair_features = N_PAIR_FEATURES + (3 * N_SAVED_PARTS if config.lookahead else 0)
        self.obs = {
            "experts": zeros_each((experts, N_EXPERT_FEATURES), np.float32),
            "gpus": zeros_each((3 * gpus, N_GPU_FEATURES), np.float32),
            "pairs": zeros_each((experts, gpus, pair_features), np.float32),
            "expert_graph": zeros_each((experts, experts), np.float32),
            "gpu_graph": zeros_each((gpus, gpus), np.float32),
            "context": zeros_each((N_CONTEXT,), np.float32),
            "action_mask": zeros_each((experts, 3 * gpus), np.int8),
        }
        self._all_experts = self._for_launcher(np.tile(np.arange(experts), (batch, 1)))
        choices = config.candidates + 1
        features = config.candidates * N_CANDIDATE_FEATURES + gpus * N_COMPACT_GPU_FEATURES + N_CONTEXT
        self.candidates = {} if choices == 1 else {
            "operations": zeros_each((choices, 2), np.int64),
            "mask": zeros_each((choices,), np.int8),
            "score": zeros_each((choices + 2 * gpus,), np.float64),
            "compact": zeros_each((features,), np.float32),
        }  # fmt: skip
        self.illegal, self.reward = zeros_each((), np.int64), zeros_each((), np.float64)
        cut = self.traffic.cut(self.trace)._replace(expert_sets=expert_sets(self.trace))
        trace = TracePieces(*map(self._for_launcher, cut))
        sim = SimulationState(**{name: self._for_launcher(array) for name, array in self.sim.items()})
        episode = EpisodeState(**{name: self._for_launcher(array) for name, array in self.episode.items()})
        stream = StreamState(**{name: self._for_launcher(array) for name, array in self.stream.items()})
        topology = self.simulator.topology
        rules = self.rules_host._replace(topology=topology._replace(node_of=self._for_launcher(topology.node_of)))
        obs = Observation(**{name: self._for_launcher(array) for name, array in self.obs.items()})
        self._state = (episode, sim, stream, obs, trace, rules)

    def observe_into(self, arrays: dict[str, npt.NDArray[Any]]) -> None:
        """Write observations from now on into these arrays, in place of those of the same names. Only on the CPU.

        Each step writes all of them whole but ``expert_graph``, which it reads. That one is written when an environment
        reaches another layer.
        """
        self.obs |= arrays
        episode, sim, stream, obs, trace, rules = self._state
        self._state = (episode, sim, stream, obs._replace(**arrays), trace, rules)

    def host(self, array: DeviceArray) -> npt.NDArray[Any]:
        """The NumPy array of an array of this batch; on the CPU it is the same."""
        return array if self.on_host else array.cpu().numpy()  # type: ignore[no-any-return]

    def _to_device(self, array: Any) -> DeviceArray:
        """An array or tensor as an array of this batch."""
        if self.on_host:
            return np.ascontiguousarray(array)
        import torch

        return torch.as_tensor(array, device=self.device).contiguous()

    def _for_launcher(self, array: Any) -> Any:
        """An array or tensor as the launcher wants it. The memory is shared if it is on the device."""
        array = self._to_device(array)
        if self.on_host:
            return array
        from numba import cuda

        return cuda.as_cuda_array(array)

    @property
    def done(self) -> DeviceArray:
        """(B,) bool: the episode is over."""
        return self.episode["clock"][:, CLOCK_DONE] != 0

    def operations(self, choice: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Experts and nodes (B,) of the candidates ``choice`` (B,); −1 for a choice that does not exist."""
        n = self.config.candidates + 1
        chosen = self.host(self.candidates["operations"])[np.arange(self.num_envs), choice.clip(0, n - 1)]
        expert, node = np.where((choice >= 0) & (choice < n), chosen.T, -1)
        return expert, node

    @property
    def saved(self) -> DeviceArray:
        """(B,) float64: the time saved in the episode so far, as a share of the static placement's time."""
        return self.episode["times_us"][:, TIME_SAVED] / (self.rules_host.static_us * self.rules_host.n_intervals)

    @property
    def bytes_allocated(self) -> int:
        """Memory of all state and observation arrays."""
        arrays = [*self.sim.values(), *self.episode.values(), *self.stream.values(), *self.obs.values()]
        return sum(array.nbytes for array in arrays)

    def seed(self, seeds: npt.NDArray[np.int64], where: npt.NDArray[np.bool_] | None = None) -> None:
        """Give each environment (B,), or those where ``where`` is true, a seed; it takes effect at its next reset."""
        chosen = np.ones(self.num_envs, bool) if where is None else where
        keys = stream_keys(np.asarray(seeds, dtype=np.int64))[chosen]
        self.stream["random"][self._to_device(chosen)] = self._to_device(keys)

    def reset(self, where: npt.NDArray[np.bool_] | None = None) -> dict[str, DeviceArray]:
        """Begin new episodes, in all environments or where ``where`` (B,) is true."""
        if where is None:
            where = np.ones(self.num_envs, bool)
        begins = self._to_device(where)
        # The first reset compiles all that a step needs. The warning starts a thread, which takes longer than a reset.
        with nullcontext() if self._compiled else warn_while_compiling():
            self.launcher.reset(self._for_launcher(begins), self._state)
            self.illegal[begins] = 0
            self._look_around()
        self._compiled = True
        return self.obs

    def step(
        self, expert: npt.NDArray[np.int64], node: npt.NDArray[np.int64]
    ) -> tuple[dict[str, DeviceArray], DeviceArray, DeviceArray]:
        """Apply (B,) int64 choices of both agents. Returns (obs, reward (B,) float64, done (B,) bool); no autoreset."""
        choice = self._for_launcher(np.stack([expert, node]))
        self.launcher.step(choice, self._for_launcher(self.reward), self._state)
        self.illegal += self.episode["last_operation"][:, LAST_KIND] == OP_ILLEGAL
        self._look_around()
        return self.obs, self.reward, self.done

    def _look_around(self) -> None:
        """Fill the observation's look-ahead and the candidates. Few tasks ask for them, so the step is without."""
        if self.config.lookahead:
            self.launcher.look_ahead(self._all_experts, N_PAIR_FEATURES, self._state[3].pairs, self._state)
        if self.candidates:
            self.launcher.propose(*map(self._for_launcher, self.candidates.values()), self._state)

    def lookahead(self, experts: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """(B, M, 3·G, parts): what each operation on ``experts`` (B, M) would save on the observed interval.

        The parts are percent of the layer's time: saved in the smooth 8-norm over GPUs, truly saved, and migration
        (negative). Nothing changes by asking.
        """
        batch, chosen = experts.shape
        parts = self._to_device(np.zeros((batch, chosen, self.n_gpus, 3 * N_SAVED_PARTS), np.float32))
        with warn_while_compiling():
            self.launcher.look_ahead(self._for_launcher(experts), 0, self._for_launcher(parts), self._state)
        by_node = self.host(parts).reshape(batch, chosen, self.n_gpus, 3, N_SAVED_PARTS).swapaxes(2, 3)
        return by_node.reshape(batch, chosen, 3 * self.n_gpus, N_SAVED_PARTS)

    def noop_nodes(self) -> npt.NDArray[np.int64]:
        """(B,) nodes that change nothing for expert 0: PLACE on a GPU that holds it."""
        return self.host(self.sim["replicas"][:, 0, 0]).astype(np.int64)

    def _changing(self) -> dict[str, DeviceArray]:
        parts = {"sim": self.sim, "episode": self.episode, "stream": self.stream, "obs": self.obs}
        parts["candidates"] = self.candidates
        named = {f"{part}.{name}": x for part, arrays in parts.items() for name, x in arrays.items()}
        return named | {"reward": self.reward, "illegal": self.illegal}

    def eplb_us(self, index: int) -> float:
        """µs of a layer and pass in environment ``index``'s episode if EPLB plans again before every interval."""
        rows, starts = (self.host(self.episode[name][index]) for name in ("rows", "rank_start"))
        names = np.append(self.host(self.episode["names"][index]), -1)  # −1 stays: no expert
        experts = names[layer_first(self.trace)] if self.config.renumber else layer_first(self.trace)
        intervals = [Interval(experts, *parts) for parts in zip(rows, starts, strict=True)]
        before, total = self.host(self.episode["first_slots"][index]).copy(), 0.0
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
        return {name: self.host(array).copy() for name, array in self._changing().items()}

    def set_state(self, state: dict[str, npt.NDArray[Any]]) -> None:
        """Go back to a state that :meth:`get_state` of an equal batch returned."""
        changing = self._changing()
        for name, value in state.items():
            changing[name][...] = self._to_device(value)

    def __getstate__(self) -> dict[str, Any]:
        arguments = (self.config, self.num_envs, self.device)
        return {"arguments": arguments, "state": self.get_state()}

    def __setstate__(self, content: dict[str, Any]) -> None:
        self.__init__(*content["arguments"])  # type: ignore[misc]
        self.set_state(content["state"])

    def link_copies(self, index: int) -> npt.NDArray[np.float64]:
        """(G, G) copies that environment ``index`` dispatched from row to column per observed pass."""
        links = np.zeros((self.n_gpus, self.n_gpus))
        one = SimulationState(**{name: self.host(array[index : index + 1]) for name, array in self.sim.items()})
        for w in range(self.rules_host.n_passes):
            add_links(one, 0, w, self.rules_host.topology, links)
        return links / self.rules_host.n_passes
