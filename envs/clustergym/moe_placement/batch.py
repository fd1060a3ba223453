"""The batched environment: B episodes in torch tensors on one device, stepped by one launch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from clustergym.common.choices import one_of
from clustergym.common.compiling import warn_while_compiling
from clustergym.moe_placement.kernels.cost import link_copies
from clustergym.moe_placement.kernels.index import token_index
from clustergym.moe_placement.kernels.observation import (
    N_EXPERT_FEATURES,
    N_GPU_FEATURES,
    N_LOAD_FEATURES,
    N_PROGRESS,
)
from clustergym.moe_placement.kernels.state import (
    CLOCK_DONE,
    MODE_STAY,
    N_CLOCKS,
    N_LAST,
    N_POSITIONS,
    N_TIMES,
    SCHEDULES,
    TIME_SAVED,
    EpisodeState,
    Observation,
    Rules,
    SimulationState,
    StreamState,
    TraceTables,
)
from clustergym.moe_placement.kernels.streams import stream_keys, trace_tables
from clustergym.moe_placement.simulator import Simulator, Window, allocate_simulation, norm_log2, zeros_of
from clustergym.moe_placement.specs import MODELS, ClusterSpec, ModelSpec, get_model
from clustergym.traces.token_trace import TokenTrace, bundled_traces

DEFAULT_TRACE = "tiny_moe"


@dataclass(frozen=True)
class PlacementConfig:
    """Everything that makes one placement task; the environments take these as keyword arguments."""

    trace: str | TokenTrace = DEFAULT_TRACE
    """A :class:`~clustergym.TokenTrace`, a file, or the name of a bundled trace."""
    cluster: str | ClusterSpec = "h800-4x4"
    """A preset name or a spec."""
    model: str | ModelSpec | None = None
    """A preset name or a spec; by default the one that the trace names."""
    windows: int = 1
    """Windows served in an episode. 1 is a single walk over the layers."""
    window_tokens: int = 2048
    """Tokens in a window: what the cluster serves in one pass."""
    ops_per_layer: int = 8
    """Operations on each layer between two windows."""
    schedule: str = "stationary"
    """How sequences are drawn: ``stationary``, ``drift`` (mixture walk over domains), ``switch``, ``replay``."""
    drift_rate: float = 0.5
    """Step of the mixture walk (drift), or the chance of another domain at each window (switch)."""
    passes_per_window: int = 100
    """Forward passes that a window stands for: moving an expert is paid once, serving that many times."""
    start: str = "static"
    """Placement at the start: ``static`` (experts in order) or ``eplb`` (EPLB on the first window)."""
    comm: str = "dedup"
    """``dedup``: one copy a GPU and node (DeepEP normal); ``per-expert``: one copy an expert (low latency);
    ``stay``: deduplicated, and a token stays where its first expert ran (ExFlow), so that layers depend on each other."""
    lookahead: bool = False
    """Observe what each of the E × 3·G operations would save on the observed window. Exact, and slow."""
    lookahead_norm: int = 0
    """0: look-ahead in true time (the busiest GPU); p = 2, 4, 8, 16, 32: in the smooth p-norm over GPUs."""
    reward_window: str = "next"
    """``next``: operations are rewarded by what they save on the window to come; ``observed``: on the one seen."""
    reward_norm: int = 0
    """As ``lookahead_norm``, for the reward."""
    credit: str = "operation"
    """``operation``: the reward is what the operation saves on one window; ``stream``: each window boundary adds what
    earlier operations still save there, so that the return is the time saved over the whole stream."""


def model_for(trace: TokenTrace, model: str | ModelSpec | None) -> ModelSpec:
    """The model of a trace: the one given, or the one that the trace names; checked against the trace."""
    name = trace.model if model is None else model
    if name is None:
        shape = (trace.n_experts, trace.top_k)
        alike = [known for known, spec in MODELS.items() if (spec.n_experts, spec.top_k) == shape]
        hint = f"; {', '.join(alike)} has the trace's {shape[0]} experts and top-{shape[1]}" if alike else ""
        raise ValueError(
            f"{trace.name}: the trace does not say which model it is from: give a model (--model on the command line), "
            f"one of {', '.join(MODELS)}{hint}"
        )
    spec = get_model(name)
    if trace.n_experts > spec.n_experts or trace.top_k != spec.top_k:
        raise ValueError(
            f"{trace.name}: the trace is top-{trace.top_k} of {trace.n_experts} experts, but model {spec.name!r} is "
            f"top-{spec.top_k} of {spec.n_experts}"
        )
    if trace.n_layers > spec.n_layers:
        raise ValueError(
            f"{trace.name}: the trace has {trace.n_layers} layers, but model {spec.name!r} has {spec.n_layers}"
        )
    return spec


@lru_cache(maxsize=8)
def _load_once(path: str, modified_ns: int) -> TokenTrace:
    return TokenTrace.load(path)


def load_cached(source: str) -> TokenTrace:
    """The trace, read once however many environments ask for it; read again when its file changes."""
    path = bundled_traces().get(source, Path(source))
    return _load_once(str(path), path.stat().st_mtime_ns) if path.is_file() else TokenTrace.load(source)


@lru_cache(maxsize=32)
def _static_times(trace: TokenTrace, simulator: Simulator, window_tokens: int) -> npt.NDArray[np.float64]:
    """(L,) mean µs of each layer under the static placement, over up to eight windows of the trace in its order."""
    whole = Window.whole(trace, simulator.n_gpus)
    n_windows = max(1, min(8, trace.n_tokens // window_tokens))
    parts = np.resize(np.arange(trace.n_tokens), (n_windows, window_tokens))
    static = simulator.static(trace.n_layers)
    windows = [Window(whole.experts, whole.rows[part], whole.home[part]) for part in parts]
    return np.mean([simulator.evaluate(window, static).time_us for window in windows], axis=0)


class PlacementBatch:
    """B placement episodes as tensors on one device; what every environment class and trainer stands on.

    ``obs`` (a dict of tensors with leading axis B), ``reward``, ``done`` and ``info`` tensors are written in place by each
    call: copy what must outlive the next one.

    Args:
        config: the task.
        num_envs: B.
        device: ``"cpu"`` (numba, all cores) or a CUDA device (numba-cuda, the extra ``clustergym[cuda]``).
    """

    def __init__(self, config: PlacementConfig, num_envs: int = 1, device: str | torch.device = "cpu") -> None:
        if num_envs < 1:
            raise ValueError(f"num_envs is {num_envs}: expected at least 1")
        self.config, self.num_envs, self.device = config, num_envs, torch.device(device)
        self.trace = config.trace if isinstance(config.trace, TokenTrace) else load_cached(config.trace)
        self.model = model_for(self.trace, config.model)
        self.simulator = Simulator(self.model, config.cluster, config.comm, config.passes_per_window)
        self.cluster = self.simulator.cluster
        self.n_experts, self.n_layers = self.model.n_experts, self.trace.n_layers
        self.n_gpus, self.n_slots = self.simulator.n_gpus, self.simulator.n_slots
        for key in ("windows", "window_tokens", "ops_per_layer"):
            if getattr(config, key) < 1:
                raise ValueError(f"{key} is {getattr(config, key)}: expected at least 1")
        if not 0 <= config.drift_rate <= 1:
            raise ValueError(f"drift_rate is {config.drift_rate}: expected 0 … 1")
        self.launcher = self._pick_launcher()
        with warn_while_compiling():
            self._static_times = _static_times(self.trace, self.simulator, config.window_tokens)
        self.rules_host = Rules(
            costs=self.simulator.costs,
            network=self.simulator.network,
            static_us=float(self._static_times.sum()),
            norm_log2=norm_log2(config.lookahead_norm),
            schedule=one_of(config.schedule, SCHEDULES, "schedule"),
            rate=float(config.drift_rate),
            n_windows=config.windows,
            ops_per_layer=config.ops_per_layer,
            start_eplb=one_of(config.start, ("static", "eplb"), "start"),
            stream_credit=one_of(config.credit, ("operation", "stream"), "credit"),
            reward_observed=one_of(config.reward_window, ("next", "observed"), "reward_window"),
            reward_norm_log2=norm_log2(config.reward_norm),
        )
        self._allocate()

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

    def _allocate(self) -> None:
        batch, config = self.num_envs, self.config
        layers, gpus, slots, experts = self.n_layers, self.n_gpus, self.n_slots, self.n_experts
        stay = self.simulator.mode == MODE_STAY

        def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            return zeros_of((batch, *shape), dtype, self.device)

        self.sim = allocate_simulation(
            batch, 2, config.window_tokens, experts=experts, top_k=self.trace.top_k, slots=slots,
            network=self.simulator.network, index=token_index(self.trace, self.n_experts), device=self.device,
        )  # fmt: skip
        self.episode = {
            "slots": zeros((layers, gpus, slots), torch.int16),
            "first_slots": zeros((layers, gpus, slots), torch.int16),
            "home": zeros((2, config.window_tokens if stay else 1), torch.uint8),
            "load_average": zeros((layers, experts), torch.float32),
            "next_window_us": zeros((layers,), torch.float64),
            "clock": zeros((N_CLOCKS,), torch.int32),
            "last_operation": zeros((N_LAST,), torch.int32),
            "times_us": zeros((N_TIMES,), torch.float64),
            "int_scratch": zeros((3, experts), torch.int32),
            "float_scratch": zeros((experts + gpus,), torch.float64),
            "in_common": zeros((gpus + 1, gpus), torch.int32),
            "accepts": zeros((gpus + 1, gpus), torch.int8),
            "load_features": zeros((experts, N_LOAD_FEATURES), torch.float32),
            "local_coactivation": zeros((experts,), torch.float64),
            "hot_coactivation": zeros((experts,), torch.float32),
        }
        domains = len(self.trace.domain_names)
        self.stream = {
            "random": torch.from_numpy(stream_keys(np.arange(batch, dtype=np.int64))).to(self.device),
            "position": zeros((N_POSITIONS,), torch.int32),
            "drawn": zeros((domains,), torch.int32),
            "logits": zeros((domains,), torch.float64),
        }
        ahead = (experts, 3 * gpus) if config.lookahead else (1, 1)
        self.buffers = {
            "experts": zeros((experts, N_EXPERT_FEATURES), torch.float32),
            "coactivation": zeros((experts, experts), torch.float32),
            "affinity": zeros((experts, experts), torch.float32),
            "gpus": zeros((3 * gpus, N_GPU_FEATURES), torch.float32),
            "traffic": zeros((gpus, gpus), torch.float32),
            "placement": zeros((experts, gpus), torch.float32),
            "progress": zeros((N_PROGRESS,), torch.float32),
            "expert_mask": zeros((experts,), torch.int8),
            "gpu_mask": zeros((3 * gpus,), torch.int8),
            "joint_mask": zeros((experts, 3 * gpus), torch.int8),
            "lookahead": zeros(ahead, torch.float32),
        }
        self.obs = {name: tensor for name, tensor in self.buffers.items() if name != "lookahead" or config.lookahead}
        self.reward = torch.zeros(batch, dtype=torch.float64, device=self.device)
        self._ahead = torch.zeros((batch, 3 * gpus), dtype=torch.float32, device=self.device)
        self._trace = TraceTables(*map(self._to_device, trace_tables(self.trace)))
        self._sim = SimulationState(**{name: self._array(tensor) for name, tensor in self.sim.items()})
        self._episode = EpisodeState(**{name: self._array(tensor) for name, tensor in self.episode.items()})
        self._stream = StreamState(**{name: self._array(tensor) for name, tensor in self.stream.items()})
        self.observe_into({})
        network = self.simulator.network
        tables = {name: self._to_device(x) for name, x in network._asdict().items() if isinstance(x, np.ndarray)}
        self._rules = self.rules_host._replace(network=network._replace(**tables))

    def observe_into(self, buffers: dict[str, torch.Tensor]) -> None:
        """Write observations from now on into these tensors, in place of those of the same names.

        All but ``coactivation`` and ``affinity`` are written whole by each step; those two only when an environment reaches
        another layer, and the first is also read.
        """
        self.buffers |= buffers
        self.obs |= {name: tensor for name, tensor in buffers.items() if name in self.obs}
        self._obs = Observation(**{name: self._array(tensor) for name, tensor in self.buffers.items()})

    def _to_device(self, array: npt.NDArray[Any]) -> Any:
        """A host array as the launcher wants it."""
        return self._array(torch.from_numpy(array).to(self.device))

    def _array(self, tensor: torch.Tensor) -> Any:
        """The tensor's memory as the launcher wants it, shared and not copied."""
        if self.device.type == "cpu":
            return tensor.numpy()
        from numba import cuda

        return cuda.as_cuda_array(tensor)

    @property
    def done(self) -> torch.Tensor:
        """(B,) bool: the episode is over."""
        return self.episode["clock"][:, CLOCK_DONE] != 0

    @property
    def homes(self) -> torch.Tensor:
        """(B, 2, T) uint8: GPU on which each token of the observed and of the next window lives."""
        return self.episode["home"] if self.simulator.mode == MODE_STAY else self.sim["origin"]

    @property
    def saved(self) -> torch.Tensor:
        """(B,) float64: time saved in the episode so far, as a multiple of a window's time under the static placement."""
        return self.episode["times_us"][:, TIME_SAVED] / self.rules_host.static_us

    @property
    def bytes_allocated(self) -> int:
        """Memory of all state and observation tensors."""
        tensors = [*self.sim.values(), *self.episode.values(), *self.stream.values(), *self.buffers.values()]
        return sum(t.numel() * t.element_size() for t in tensors)

    def seed(self, seeds: npt.NDArray[np.int64]) -> None:
        """Give each environment (B,) a seed; it takes effect at its next reset."""
        self.stream["random"].copy_(torch.from_numpy(stream_keys(np.asarray(seeds, dtype=np.int64))))

    def reset(self, where: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        """Begin new episodes, in all environments or where ``where`` (B,) is true."""
        if where is None:
            where = torch.ones(self.num_envs, dtype=torch.bool, device=self.device)
        with warn_while_compiling():
            self.launcher.reset(
                self._array(where), self._episode, self._sim, self._stream, self._obs, self._trace, self._rules
            )
            self._look_at_all()
        return self.obs

    def step(
        self, expert: torch.Tensor, node: torch.Tensor
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
        """Apply (B,) int64 choices of both agents. Returns (obs, reward (B,) float64, done (B,) bool); no autoreset."""
        self.launcher.step(
            self._array(expert), self._array(node), self._array(self.reward),
            self._episode, self._sim, self._stream, self._obs, self._trace, self._rules,
        )  # fmt: skip
        self._look_at_all()
        return self.obs, self.reward, self.done

    def _look_at_all(self) -> None:
        """Fill the observation's look-ahead. Apart from the step, because few tasks ask for it and it takes long to compile."""
        if self.config.lookahead:
            self.launcher.look_ahead_all(self._obs.lookahead, self._episode, self._sim, self._rules)

    def link_copies(self, index: int) -> npt.NDArray[np.int64]:
        """(G, G) copies that environment ``index`` dispatched from row to column in the observed window and layer."""
        links = np.zeros((self.n_gpus, self.n_gpus), np.int64)
        visits, node_visits = (self.sim[name][index, 0].cpu().numpy() for name in ("visits", "node_visits"))
        link_copies(visits, node_visits, self.rules_host.network, links)
        return links

    def lookahead(self, expert: torch.Tensor) -> torch.Tensor:
        """(B, 3·G): what each operation on ``expert`` (B,) would save on the observed window, relative to its time."""
        self.launcher.look_ahead(self._array(expert), self._array(self._ahead), self._episode, self._sim, self._rules)
        return self._ahead
