"""Gymnasium API of the placement task."""

from __future__ import annotations

from collections import UserDict
from copy import deepcopy
from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from clustergym.common.choices import config_from
from clustergym.moe_placement.batch import REMOVED_ARGUMENTS, PlacementBatch, PlacementConfig
from clustergym.moe_placement.kernels.lookahead import MOST_PERCENT
from clustergym.moe_placement.kernels.observation import (
    EXPERT_FEATURES,
    FIRST_OF_SOURCE,
    GPU_FEATURES,
    LAST_OF_SOURCE,
    MOST_RATIO,
    N_PAIR_FEATURES,
)
from clustergym.moe_placement.kernels.state import (
    CLOCK_DONE,
    CLOCK_INTERVAL,
    CLOCK_LAYER,
    CLOCK_OPERATION,
    CLOCK_REUSE,
    LAST_EXPERT,
    LAST_FROM,
    LAST_KIND,
    LAST_LAYER,
    LAST_NODE,
    LAST_VICTIM,
    OP_ILLEGAL,
    OP_NOTHING,
    TIME_MIGRATED,
    TIME_OBSERVED,
    TIME_OBSERVED_START,
    TIME_SAVED,
    TIME_SERVED,
    TIME_START,
)
from clustergym.moe_placement.viewer import KINDS, Frame, Operation, draw, open_window

ObsDict = dict[str, npt.NDArray[Any]]

# Kinds in the order of state.OP_*, as words.
OPERATIONS = ("nothing", "illegal", "place", "swap", "add", "delete")
assert set(OPERATIONS) == set(KINDS)
# The observation that changes only when the agents walk to another layer.
LAYER_KEY = "expert_graph"
# Keys of the info of every step.
STEP_INFO = ("no_op", "expert", "elapsed", "operation", "legal", "illegal_actions", "layer_time_us")


def observation_bounds(batch: PlacementBatch) -> dict[str, tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]]:
    """Lowest and highest value of each column of the observations that are not masks."""
    n_experts, n_gpus, top_k = float(batch.n_experts), float(batch.n_gpus), float(batch.trace.top_k)
    costs = batch.rules_host.costs
    gpu = dict.fromkeys(GPU_FEATURES, (0.0, 1.0)) | {
        "load": (0.0, n_gpus), "node_load": (0.0, n_gpus), "coldest_load": (0.0, n_gpus),
        "hot_coactivation": (0.0, top_k),
        "bandwidth_ratio": (0.0, max(1.0, costs.dispatch_intra_us / costs.dispatch_inter_us)),
    }  # fmt: skip
    expert = dict.fromkeys(EXPERT_FEATURES, (0.0, 1.0)) | {
        "load": (0.0, n_experts), "load_average": (0.0, n_experts), "load_change": (-n_experts, n_experts),
        "to_fetch": (0.0, n_gpus), "local_coactivation": (0.0, top_k),
    }  # fmt: skip
    expert |= {f"source_{name}": gpu[name] for name in GPU_FEATURES[FIRST_OF_SOURCE : LAST_OF_SOURCE + 1]}
    near, load = (-top_k, top_k), (-n_gpus, n_gpus)
    more = batch.obs["pairs"].shape[-1] - N_PAIR_FEATURES
    columns: dict[str, list[tuple[float, float]]] = {
        "experts": list(expert.values()),
        "gpus": list(gpu.values()),
        "pairs": [(0, 1), near, (0, 1), load, load, near, load, load, *[(-MOST_PERCENT, MOST_PERCENT)] * more],
        "expert_graph": [(0, 1)],
        "gpu_graph": [(0, 1)],
        "context": [(0, 1), (0, 1), (0, 1), (0, MOST_RATIO), (0, 1), (0, MOST_RATIO)],
    }
    bounds = {}
    for name, pairs in columns.items():
        low, high = np.array(pairs, np.float32).T
        bounds[name] = (low.copy(), high.copy())
    return bounds


def observation_spaces(batch: PlacementBatch) -> dict[str, spaces.Space[Any]]:
    """The space of each array of one environment's observation."""
    found: dict[str, spaces.Space[Any]] = {}
    for name, (low, high) in observation_bounds(batch).items():
        shape = tuple(batch.obs[name].shape[1:])
        found[name] = spaces.Box(np.broadcast_to(low, shape).copy(), np.broadcast_to(high, shape).copy(), shape)
    return found | {"action_mask": spaces.Box(0, 1, tuple(batch.obs["action_mask"].shape[1:]), np.int8)}


def product_masks(mask: npt.NDArray[np.int8]) -> npt.NDArray[np.bool_]:
    """(…, E + 3·G) masks of the two components of an action, of which every combination is legal.

    A pair of masks cannot say "this node only for that expert". So nodes that are illegal for some expert are left out:
    in general ADD and DELETE. The flat environment and PettingZoo's have exact masks.
    """
    experts, nodes = mask.any(-1), mask.all(-2)
    # Nothing is legal for all: allow no-ops and illegal actions, which change nothing, over an empty mask.
    nodes |= ~nodes.any(-1, keepdims=True)
    return np.concatenate([experts, nodes], axis=-1)


def frame_of(batch: PlacementBatch, saved: list[float], index: int = 0) -> Frame:
    """What a picture of environment ``index`` shows."""
    sim = {
        name: batch.host(batch.sim[name][index]) for name in ("slots", "slot_pairs", "held_before", "load", "kernel_us")
    }
    clock = batch.episode["clock"][index].tolist()
    last_operation = batch.episode["last_operation"][index].tolist()
    kind, expert, node = last_operation[LAST_KIND], last_operation[LAST_EXPERT], last_operation[LAST_NODE]
    source, victim = last_operation[LAST_FROM], last_operation[LAST_VICTIM]
    times = batch.host(batch.episode["times_us"][index])
    slots, n_passes, costs = sim["slots"], batch.rules_host.n_passes, batch.rules_host.costs
    pairs = np.where(slots >= 0, sim["slot_pairs"][:n_passes], 0).mean(0)
    fresh = np.take_along_axis(sim["held_before"].T, np.maximum(slots, 0).astype(np.int64), axis=1) == 0
    last = None
    # An action may name an expert or node that does not exist: there is nothing to draw.
    if kind >= 0 and 0 <= expert < batch.n_experts and 0 <= node < 3 * batch.n_gpus:
        last = Operation(OPERATIONS[kind], expert, node % batch.n_gpus, source, victim)
    layer = clock[CLOCK_LAYER]
    return Frame(
        slots=slots,
        expert_load=sim["load"][:n_passes].mean(0),
        gpu_pairs=pairs.sum(1),
        gpu_compute_us=np.maximum(costs.kernel_floor_us, costs.kernel_us + sim["kernel_us"][:n_passes]).mean(0),
        traffic_bytes=batch.link_copies(index) * np.float64(batch.model.hidden * batch.model.dispatch_bytes),
        gpus_per_node=batch.cluster.gpus_per_node,
        layer=layer,
        n_layers=batch.n_layers,
        layer_id=int(batch.trace.layer_ids[layer]),
        interval=min(clock[CLOCK_INTERVAL], batch.config.intervals - 1),
        n_intervals=batch.config.intervals,
        op=clock[CLOCK_OPERATION],
        ops_per_layer=batch.config.ops_per_layer,
        layer_time_us=float(times[TIME_OBSERVED]),
        start_time_us=float(times[TIME_OBSERVED_START]),
        static_time_us=batch.static_layer_us(layer),
        migrated=fresh & (slots >= 0),
        last_op=last,
        saved=saved,
    )


def episode_steps(batch: PlacementBatch) -> int:
    """Steps of an episode."""
    return batch.config.intervals * batch.n_layers * batch.config.ops_per_layer


class FinalInfo(UserDict[str, Any]):
    """Return and length of an episode where CleanRL's ``ppo.py`` looks for them: ``infos["final_info"][i]["episode"]``.

    Gymnasium 1 no longer writes this key. It would take a dictionary apart, and keeps this object whole.
    """


class PlacementTask:
    """What the Gymnasium and the PettingZoo environments share: one environment of a batch, and its picture."""

    render_mode: str | None
    batch: PlacementBatch
    _screen: Any = None
    _saved: list[float]

    def _begin(self, render_mode: str | None, options: dict[str, Any]) -> None:
        if render_mode not in (None, "human", "rgb_array"):
            raise ValueError(f"unknown render_mode {render_mode!r}; expected None, 'human' or 'rgb_array'")
        self.render_mode = render_mode
        self.batch = PlacementBatch(config_from(PlacementConfig, options, REMOVED_ARGUMENTS), 1)
        self._look()
        self._saved = []
        self._seeded = False

    def _look(self) -> None:
        self._views = {name: array[0] for name, array in self.batch.obs.items()}

    def _reset(self, seed: int) -> None:
        if seed >= 0:
            self.batch.seed(np.array([seed]))
        self._seeded = True
        self.batch.reset()
        self._saved = []
        if self.render_mode == "human":
            self._render()

    def _act(self, expert: int, node: int) -> tuple[float, bool, dict[str, Any]]:
        """Apply one action; returns (reward, done, info)."""
        _, reward, _ = self.batch.step(np.array([expert]), np.array([node]))
        # The picture shows what each served interval saved.
        if int(self.batch.episode["clock"][0, CLOCK_INTERVAL]) > len(self._saved):
            self._saved.append(float(self.batch.saved[0]) * self.batch.config.intervals - sum(self._saved))
        done = bool(self.batch.episode["clock"][0, CLOCK_DONE])
        info: dict[str, Any] = {name: values[0].item() for name, values in step_info(self.batch).items()}
        if done:
            info |= {name: float(values[0]) for name, values in episode_info(self.batch).items()}
        if self.render_mode == "human":
            self._render()
        return float(reward[0]), done, info

    def noop_action(self) -> npt.NDArray[np.int64]:
        """An action that changes nothing: (expert, node)."""
        action: npt.NDArray[np.int64] = noop_actions(self.batch)[0]
        return action

    def lookahead(self, expert: int) -> npt.NDArray[np.float32]:
        """(3·G, 3) what each operation on ``expert`` would save on the observed interval, in percent of its time.

        Columns: in the smooth 8-norm over GPUs, in true time, migration (negative). Nothing changes by asking.
        """
        found: npt.NDArray[np.float32] = self.batch.lookahead(np.array([[expert]]))[0, 0]
        return found

    def get_state(self) -> dict[str, Any]:
        """Everything that changes, as arrays and lists."""
        return self.batch.get_state() | {"saved": list(self._saved)}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go back to a state of :meth:`get_state`: the environment continues bit for bit."""
        self.batch.set_state({name: array for name, array in state.items() if name != "saved"})
        self._saved = list(state["saved"])

    def __getstate__(self) -> dict[str, Any]:
        # Views are made again from the copied arrays; a window stays with the original.
        return {name: value for name, value in self.__dict__.items() if name not in ("_views", "_screen")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._look()

    def _render(self) -> npt.NDArray[np.uint8] | None:
        if self.render_mode is None:
            gymnasium.logger.warn(
                "render() does nothing without a render_mode: make the environment with render_mode='rgb_array'"
            )
            return None
        frame = frame_of(self.batch, self._saved)
        if self.render_mode == "rgb_array":
            return draw(frame)
        if self._screen is None:
            self._screen = open_window()
        self._screen.show(frame)
        return None

    def _close(self) -> None:
        if self._screen is not None:
            self._screen.close()
            self._screen = None


def noop_actions(batch: PlacementBatch) -> npt.NDArray[np.int64]:
    """(B, 2) actions that change nothing: PLACE expert 0 on a GPU that holds it."""
    nodes = batch.noop_nodes()
    return np.stack([np.zeros_like(nodes), nodes], axis=1)


def step_info(batch: PlacementBatch) -> dict[str, npt.NDArray[Any]]:
    """Arrays (B,) about the last operations."""
    last = batch.host(batch.episode["last_operation"])
    kind, expert, layer = last[:, LAST_KIND].copy(), last[:, LAST_EXPERT], last[:, LAST_LAYER]
    exists = (expert >= 0) & (expert < batch.n_experts)
    return {
        "no_op": kind == OP_NOTHING,
        "expert": np.where(exists, layer.astype(np.int64) * batch.n_experts + expert, -1),
        "elapsed": np.ones(len(last)),
        "operation": kind,
        "legal": kind != OP_ILLEGAL,
        "illegal_actions": batch.host(batch.illegal).copy(),
        "layer_time_us": batch.host(batch.episode["times_us"][:, TIME_OBSERVED]).copy(),
    }


def episode_info(batch: PlacementBatch) -> dict[str, npt.NDArray[np.float64]]:
    """Finished episodes (B,) in numbers. Times are µs of a layer and pass, means over layers and intervals."""
    mean_us = batch.host(batch.episode["times_us"]).T / (batch.n_layers * batch.config.intervals)
    unit = batch.rules_host.static_us / batch.n_layers
    time_us = mean_us[TIME_SERVED] + mean_us[TIME_MIGRATED]
    info = {
        "time_us": time_us,
        "served_us": mean_us[TIME_SERVED],
        "migration_us": mean_us[TIME_MIGRATED],
        "start_us": mean_us[TIME_START],
        "saved_vs_start": (mean_us[TIME_START] - time_us) / unit,
        "reused": batch.host(batch.episode["clock"])[:, CLOCK_REUSE].astype(np.float64),
    }
    if batch.config.compare_eplb:
        done = batch.done.tolist()
        eplb_us = np.array([batch.eplb_us(i) if over else 0.0 for i, over in enumerate(done)])
        info |= {"eplb_us": eplb_us, "saved_vs_eplb": np.where(done, eplb_us - time_us, 0.0) / unit}
    return info


class MoEPlacementEnv(PlacementTask, gymnasium.Env[Any, Any]):
    """
    ## Description
    A mixture-of-experts model is served on a cluster. Every GPU holds some experts of each layer and runs its own
    requests. In a forward pass, every GPU contributes the same number of tokens, tokens travel to the experts that the
    router chose for them, and the slowest GPU sets the pace. Traffic comes from a token trace. Between two intervals of
    traffic the agents walk through the layers and change which GPU holds which expert, so that the NEXT interval is
    served faster. They see sampled passes of the interval that just ended, never those to come.

    `profile` says how the engine serves: phase (decode or prefill), which replica serves a token, and the transport.

    `MoEPlacement-v0` is one walk over the layers (`intervals=1`, starting from the static placement, stationary
    traffic). `MoEPlacementDrift-v0` serves eight intervals whose mix of domains drifts, starting from EPLB.

    The time of a layer is dispatch + compute + combine of a pass, counted exactly for every token and averaged over the
    sampled passes: the busiest link sets dispatch and combine, the slowest expert kernel sets compute. Receiving an
    expert's weights costs time too: `migration="blocking"` spreads the pause over `passes_per_interval`,
    `migration="async"` serves with the old placement until the weights have arrived.

    ## Action Space
    `MultiDiscrete([E, 3·G])`: an expert, and one of 3·G nodes. With g = node mod G:

    | node | operation |
    | --- | --- |
    | 0 … G−1 | PLACE the expert on GPU g |
    | G … 2G−1 | ADD a replica on GPU g, which needs a free slot |
    | 2G … 3G−1 | DELETE the replica on GPU g, unless it is the last |

    PLACE moves the expert's replica on the busiest GPU. A full GPU gives its replica with fewest tokens in exchange. If
    g holds the expert already, nothing happens: this is the no-op (`noop_action()`).
    An illegal action does nothing; it never raises. It is marked in `info["legal"]`, counted in
    `info["illegal_actions"]`, and costs `illegal_penalty`. An action may also be one number, expert · 3·G + node:
    TorchRL, which finds the joint mask, acts so.

    The observation's `action_mask` is exact. `action_masks()`, for sb3-contrib, returns a mask per component, of which
    every combination is legal. Such a pair of masks leaves out ADD and DELETE.

    ## Observation Space
    A `Dict` of arrays about the interval that just ended and the layer that the agents work on. Counts and times are
    means over the sampled passes. All bounds are finite.

    | key | shape | content |
    | --- | --- | --- |
    | `experts` | (E, 17) | features of each expert |
    | `gpus` | (3·G, 17) | features of each node |
    | `pairs` | (E, G, 8) | features of each expert on each GPU; with `lookahead=True` nine more |
    | `expert_graph` | (E, E) | P(column also used \\| row used) by one token; from at most 1024 tokens |
    | `gpu_graph` | (G, G) | time of the link from row to column, relative to the layer's |
    | `context` | (6,) | where the agents are, and times of the layer |
    | `action_mask` | (E, 3·G) | 1 where the pair is legal |

    * Columns of `experts`: load share × E, its moving average, change against that average, replicas / G, share of
      tokens on its busiest replica, replicas to receive, co-active experts on the same GPU, is on the slowest GPU.
      Then of the GPU whose replica PLACE moves: load / mean, compute time, free slots, sent and received inside the
      node and between nodes (4), load of its node / mean, is the slowest.
    * Columns of `gpus`: the node's kind (3), the nine columns above, active experts, co-activation with the hottest
      experts, replicas to receive, load of its coldest replica (0 with a free slot), inter/intra bandwidth.
    * Columns of `pairs`, loads in units of the mean load of a GPU: the GPU holds a copy; co-activation with the experts
      there less that on the source; source and GPU are on one node; load of the GPU after PLACE, and of the source,
      both less the load of the busiest GPU now; how much closer the expert that is given in exchange comes to its
      partners; how much PLACE lowers the higher load of source and GPU; the same for ADD or, where the GPU holds a
      copy, for DELETE. Where it holds a copy, the columns about PLACE are 0. They estimate: the loads are those of the
      observed passes, and replicas are taken to share tokens equally.
    * With `lookahead=True`, for PLACE, ADD and DELETE: what the operation would save on the OBSERVED interval, tried
      exactly, in percent of the layer's time: in the smooth 8-norm over GPUs, in true time, and in migration.
    * Entries of `context`: layer, operation, interval (each as a fraction), layer time now / at the start, slowest
      kernel and migration / layer time.

    ## Rewards
    An operation earns what it saves on the next interval (served time and migration). Its effect lives on until the
    layer is visited again, and longer where it is left alone. So the last operation of a visit also earns what the
    visit saves on the later intervals of the episode, as if the layer stayed as it is. The visits that change it are
    paid for the difference. Nothing is paid for what earlier visits did: a visit's rewards are its own.

    The unit is one percent of the mean time of a layer under the static placement: rewards are about 1. The rewards of
    an episode, without `illegal_penalty`, add up to exactly 100 · layers · `intervals` · `saved_vs_start`, the time
    saved against serving with the start placement.

    ## Starting State
    A stream begins at a random place of the trace; the first interval has been served on the start placement (`start`).
    An episode serves no token twice. If the split is too short for that, making the environment is an error that says
    how many intervals it can fill.

    ## Episode End
    Terminates after `intervals` intervals: intervals × layers × `ops_per_layer` steps, which is the spec's
    `max_episode_steps`. `info` then holds means per layer and pass: `time_us` (= `served_us` + `migration_us`),
    `start_us` (start placement), `saved_vs_start` (a share of the static placement's time), and `reused` (1 if the
    split was used up and tokens were served again, which only `allow_reuse=True` permits). With `compare_eplb=True`
    also `eplb_us` (EPLB planned again before every interval, migration included) and `saved_vs_eplb`.

    ## Info
    Every step has `no_op` (the pair changed nothing, by choice), `expert` (layer × E + expert; -1 for an expert that
    does not exist), `elapsed` (1: steps in which a discount counts), `operation`, `legal`, `illegal_actions` and
    `layer_time_us`.

    ## Arguments
    The fields of `clustergym.moe_placement.PlacementConfig` and `render_mode` (`"rgb_array"`, `"human"`).

    ```python
    >>> import gymnasium
    >>> env = gymnasium.make("clustergym:MoEPlacement-v0", cluster="h800-2x8", profile="sglang-decode")
    >>> obs, info = env.reset(seed=1)
    >>> obs, reward, terminated, truncated, info = env.step(env.action_space.sample())

    ```

    ## Version History
    * v0: initial version. Since 0.2.0: passes and intervals on balanced ranks; rewards add up to the time saved.
    """

    metadata = {"render_modes": ["human", "rgb_array"], "render_fps": 4}
    _spec: Any = None

    def __init__(self, render_mode: str | None = None, **options: Any) -> None:
        self._begin(render_mode, options)
        self.observation_space, self.action_space = self._spaces()

    @property
    def spec(self) -> Any:
        """Gymnasium's spec. Its ``max_episode_steps`` is the length of an episode with this environment's options."""
        return self._spec

    @spec.setter
    def spec(self, spec: Any) -> None:
        self._spec = deepcopy(spec)
        if spec is not None and spec.max_episode_steps is None:
            self._spec.max_episode_steps = episode_steps(self.batch)

    def _spaces(self) -> tuple[spaces.Space[Any], spaces.Space[Any]]:
        action = spaces.MultiDiscrete([self.batch.n_experts, 3 * self.batch.n_gpus])
        return spaces.Dict(observation_spaces(self.batch)), action

    def _observe(self) -> Any:
        return {name: view.copy() for name, view in self._views.items()}

    def _operation(self, action: Any) -> tuple[int, int]:
        """The expert and the node that an action stands for."""
        if np.ndim(action) == 0:
            action = divmod(int(action), 3 * self.batch.n_gpus)
        return int(action[0]), int(action[1])

    def _mask_info(self) -> dict[str, Any]:
        """What `info` has about the next action."""
        return {}

    def action_masks(self) -> npt.NDArray[np.bool_]:
        """(E + 3·G,) for sb3-contrib: what each component may be; see :func:`product_masks`."""
        return product_masks(self._views["action_mask"])

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is None:
            seed = -1 if self._seeded else int(self.np_random.integers(2**62))
        self._reset(seed)
        return self._observe(), self._mask_info()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        reward, done, info = self._act(*self._operation(action))
        if done:
            batch = self.batch
            total = batch.episode["times_us"][0, TIME_SAVED] * batch.rules_host.reward_per_us
            total -= batch.config.illegal_penalty * info["illegal_actions"]
            info["final_info"] = FinalInfo(episode={"r": float(total), "l": episode_steps(batch)})
        return self._observe(), reward, done, False, info | self._mask_info()

    def render(self) -> npt.NDArray[np.uint8] | None:
        return self._render()

    def close(self) -> None:
        self._close()
