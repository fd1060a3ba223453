"""Gymnasium API of the placement task."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
import torch
from gymnasium import spaces

from clustergym.common.choices import config_from, one_of
from clustergym.moe_placement.batch import PlacementBatch, PlacementConfig
from clustergym.moe_placement.kernels.observation import N_KINDS
from clustergym.moe_placement.kernels.state import (
    CLOCK_DONE,
    CLOCK_INTERVAL,
    CLOCK_LAYER,
    CLOCK_OPERATION,
    CLOCK_REUSE,
    LAST_KIND,
    OP_ILLEGAL,
    TIME_EPLB,
    TIME_MIGRATED,
    TIME_OBSERVED,
    TIME_OBSERVED_START,
    TIME_OPERATION,
    TIME_SERVED,
    TIME_START,
)
from clustergym.moe_placement.viewer import KINDS, Frame, Operation, draw, open_window

ObsDict = dict[str, npt.NDArray[Any]]

# Kinds in the order of state.OP_*, as words.
OPERATIONS = ("nothing", "illegal", "place", "swap", "add", "delete")
assert set(OPERATIONS) == set(KINDS)
# Observations that change only when the agents walk to another layer.
LAYER_KEYS = ("coactivation", "affinity")
# Keys of the info of every step.
STEP_INFO = ("operation", "legal", "illegal_actions", "layer_time_us", "operation_reward")
OBSERVATIONS = ("full", "compact")
# Upper bound of the observation space. Features are ratios and shares, so none comes near it.
LIMIT = 1e6


def observation_spaces(batch: PlacementBatch) -> dict[str, spaces.Space[Any]]:
    """The space of each array of one environment's observation."""
    return {
        name: spaces.Box(0, 1, tensor.shape[1:], np.int8)
        if tensor.dtype == torch.int8
        else spaces.Box(-LIMIT, LIMIT, tensor.shape[1:], np.float32)
        for name, tensor in batch.obs.items()
    }


def compact_observation(obs: ObsDict, n_gpus: int) -> npt.NDArray[np.float32]:
    """(…, 9·E + 13·G + 6): features of experts and GPUs, and the progress, in one vector."""
    parts = (obs["experts"], obs["gpus"][..., :n_gpus, N_KINDS:], obs["progress"])
    lead = obs["progress"].shape[:-1]
    return np.concatenate([part.reshape(*lead, -1) for part in parts], axis=-1)


def compact_space(size: int) -> spaces.Box:
    return spaces.Box(-LIMIT, LIMIT, (size,), np.float32)


def product_masks(joint: npt.NDArray[np.int8], expert: npt.NDArray[np.int8]) -> npt.NDArray[np.bool_]:
    """(…, E + 3·G) masks of the two components of an action, of which every combination is legal.

    A pair of masks cannot say "this node only for that expert". So nodes that are illegal for some expert of the mask
    are left out: in general ADD and DELETE. The flat and the conditional environment have exact masks.
    """
    experts = expert.astype(bool)
    nodes = (joint.astype(bool) | ~experts[..., None]).all(-2)
    # Nothing is legal for all: allow no-ops and illegal actions, which change nothing, over an empty mask.
    nodes |= ~nodes.any(-1, keepdims=True)
    return np.concatenate([experts, nodes], axis=-1)


def frame_of(batch: PlacementBatch, saved: list[float], index: int = 0) -> Frame:
    """What a picture of environment ``index`` shows."""
    sim = {
        name: batch.sim[name][index].cpu().numpy()
        for name in ("slots", "slot_pairs", "held_before", "load", "kernel_us")
    }
    clock = batch.episode["clock"][index].tolist()
    kind, expert, node, source, _, victim = batch.episode["last_operation"][index].tolist()
    times = batch.episode["times_us"][index].cpu().numpy()
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


class PlacementTask:
    """What the Gymnasium and the PettingZoo environment share: one environment of a batch, and its picture."""

    render_mode: str | None
    batch: PlacementBatch
    _screen: Any = None
    _saved: list[float]

    def _begin(self, render_mode: str | None, options: dict[str, Any], illegal_penalty: float = 0.0) -> None:
        if render_mode not in (None, "human", "rgb_array"):
            raise ValueError(f"unknown render_mode {render_mode!r}; expected None, 'human' or 'rgb_array'")
        self.render_mode, self.illegal_penalty = render_mode, illegal_penalty
        self.batch = PlacementBatch(config_from(PlacementConfig, options), 1)
        self._look()
        self._saved = []
        self._seeded = False

    def _look(self) -> None:
        self._views = {name: tensor[0].numpy() for name, tensor in self.batch.obs.items()}

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
        _, reward, _ = self.batch.step(torch.tensor([expert]), torch.tensor([node]))
        # The picture shows what each served interval saved.
        if int(self.batch.episode["clock"][0, CLOCK_INTERVAL]) > len(self._saved):
            self._saved.append(float(self.batch.saved[0]) * self.batch.config.intervals - sum(self._saved))
        done = bool(self.batch.episode["clock"][0, CLOCK_DONE])
        info: dict[str, Any] = {name: values[0].item() for name, values in step_info(self.batch).items()}
        if done:
            info |= {name: float(values[0]) for name, values in episode_info(self.batch).items()}
        if self.render_mode == "human":
            self._render()
        return float(reward[0]) - (0.0 if info["legal"] else self.illegal_penalty), done, info

    def noop_action(self) -> npt.NDArray[np.int64]:
        """An action that changes nothing: (expert, node)."""
        action: npt.NDArray[np.int64] = noop_actions(self.batch)[0]
        return action

    def lookahead(self, expert: int) -> npt.NDArray[np.float32]:
        """(3·G, 3) what each operation on ``expert`` would save on the observed interval, as shares of its time.

        Columns: in the smooth norm of ``lookahead_norm``, in true time, migration (negative).
        """
        return self.batch.lookahead(torch.tensor([[expert]]))[0, 0].numpy()

    def get_state(self) -> dict[str, Any]:
        """Everything that changes, as arrays and lists."""
        return self.batch.get_state() | {"saved": list(self._saved)}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go back to a state of :meth:`get_state`: the environment continues bit for bit."""
        self.batch.set_state({name: array for name, array in state.items() if name != "saved"})
        self._saved = list(state["saved"])

    def __getstate__(self) -> dict[str, Any]:
        # Views are made again from the copied tensors; a window stays with the original.
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
    nodes = batch.obs["placement"][:, 0].argmax(-1).cpu().numpy()
    return np.stack([np.zeros_like(nodes), nodes], axis=1)


def step_info(batch: PlacementBatch) -> dict[str, npt.NDArray[Any]]:
    """Arrays (B,) about the last operations."""
    kind = batch.episode["last_operation"][:, LAST_KIND].cpu().numpy()
    times = batch.episode["times_us"].cpu().numpy()
    unit = batch.rules_host.static_us * batch.rules_host.n_intervals
    return {
        "operation": kind.copy(),
        "legal": kind != OP_ILLEGAL,
        "illegal_actions": batch.illegal.cpu().numpy().copy(),
        "layer_time_us": times[:, TIME_OBSERVED].copy(),
        "operation_reward": times[:, TIME_OPERATION] / unit,
    }


def episode_info(batch: PlacementBatch) -> dict[str, npt.NDArray[np.float64]]:
    """Finished episodes (B,) in numbers. Times are µs of a layer and pass, means over layers and intervals."""
    mean_us = batch.episode["times_us"].cpu().numpy().T / (batch.n_layers * batch.config.intervals)
    unit = batch.rules_host.static_us / batch.n_layers
    time_us = mean_us[TIME_SERVED] + mean_us[TIME_MIGRATED]
    info = {
        "time_us": time_us,
        "served_us": mean_us[TIME_SERVED],
        "migration_us": mean_us[TIME_MIGRATED],
        "start_us": mean_us[TIME_START],
        "saved_vs_start": (mean_us[TIME_START] - time_us) / unit,
        "reused": batch.episode["clock"].cpu().numpy()[:, CLOCK_REUSE].astype(np.float64),
    }
    if batch.config.compare_eplb:
        info |= {"eplb_us": mean_us[TIME_EPLB], "saved_vs_eplb": (mean_us[TIME_EPLB] - time_us) / unit}
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
    `MoEPlacement-{size}-{profile}-{schedule}-v0` are the tasks of a ladder (`clustergym.ids`), with reference scores
    below.

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
    `info["illegal_actions"]`, and costs `illegal_penalty` (default 0; otherwise rewards no longer add up to the time
    saved).

    `action_masks()` returns a mask per component, of which every combination is legal. Such a pair cannot be exact: it
    leaves out ADD and DELETE. `MoEPlacementFlat-v0` and the conditional PettingZoo environment have exact masks.

    ## Observation Space
    A `Dict` of arrays about the interval that just ended and the layer that the agents work on. Counts and times are
    means over the sampled passes.

    | key | shape | content |
    | --- | --- | --- |
    | `experts` | (E, 9) | features of each expert |
    | `coactivation` | (E, E) | P(column also used \\| row used) by one token; from at most 1024 tokens |
    | `affinity` | (E, E) | P(column used in this layer \\| row used in the layer before); 0 in the first layer |
    | `gpus` | (3·G, 16) | features of each node |
    | `traffic` | (G, G) | time of the link from row to column, relative to the layer's |
    | `placement` | (E, G) | 1 where the GPU holds the expert |
    | `progress` | (6,) | where the agents are, and times of the layer |
    | `expert_mask`, `gpu_mask` | (E,), (3·G,) | choices with at least one operation that changes something / is legal |
    | `joint_mask` | (E, 3·G) | 1 where the pair is legal |
    | `memory` | (E, 2) | with `memory=True`: the best that `lookahead(e)` showed on this layer, whether it was called |
    | `lookahead` | (E, 3·G) | with `lookahead=True`: what each operation would save on the OBSERVED interval |

    * Columns of `experts`: load share × E, its moving average, change against that average, replicas / G, share of
      tokens on its busiest replica, load of its busiest GPU / mean, replicas to receive, co-active experts on the same
      GPU, is on the slowest GPU.
    * Columns of `gpus`: the node's kind (3), pairs / mean, compute time, free slots, sent and received inside the node
      and between nodes (4), active experts, co-activation with the hottest experts, is the slowest, load of its node /
      mean, replicas to receive, inter/intra bandwidth.
    * Entries of `progress`: layer, operation, interval (each as a fraction), layer time now / at the start, slowest
      kernel and migration / layer time.
    * `affinity` is from at most 256 tokens unless the transport is `stay`.

    With `observation="compact"` it is one vector of `experts`, the first G rows of `gpus` without their kind, and
    `progress`: 790 numbers instead of 14,006 with 64 experts on 16 GPUs.

    ## Rewards
    An operation earns what it saves on the next interval (served time and migration). When the agents reach a layer,
    what earlier operations save on it in the new interval is credited. So the rewards of an episode add up to exactly
    (`start_us` − `time_us`) / static time: the time saved per interval against serving with the start placement, in
    units of the static placement's mean time. `info["operation_reward"]` is the operation's own part.

    ## Starting State
    A stream begins at a random place of the trace; the first interval has been served on the start placement (`start`).
    An episode serves no token twice. If the split is too short for that, making the environment is an error that says
    how many intervals it can fill.

    ## Episode End
    Terminates after `intervals` intervals: intervals × layers × `ops_per_layer` steps. `info` then holds means per
    layer and pass: `time_us` (= `served_us` + `migration_us`), `start_us` (start placement), `eplb_us` (EPLB planned
    again before every interval, migration included), `saved_vs_start` (equals the return), `saved_vs_eplb`, and
    `reused` (1 if the split was used up and tokens were served again, which only `allow_reuse=True` permits).

    ## Arguments
    The fields of `clustergym.moe_placement.PlacementConfig`, `observation` (`"full"`, `"compact"`), `illegal_penalty`,
    and `render_mode` (`"rgb_array"`, `"human"`).

    ```python
    >>> import gymnasium
    >>> env = gymnasium.make("clustergym:MoEPlacement-v0", cluster="h800-2x8", profile="sglang-decode")
    >>> obs, info = env.reset(seed=1)
    >>> obs, reward, terminated, truncated, info = env.step(env.action_space.sample())

    ```

    ## Reference Scores
    Return in percent on the test split of `MoEPlacement-{task}-v0`; changing nothing (no-op) has 0. `random` plays
    legal operations, `random-flat` the candidates of `MoEPlacementFlat`. The best of seven planners is named. The bound
    is a search that sees the next interval, or where it says so the proven optimum for it. The search
    fills all slots; the policy may leave some empty, so it can be above. Means over two to four episodes:
    `clustergym.ids.REFERENCE_SCORES` names the file with all scores and their spread.

    | task | random | random-flat | EPLB | policy | best planner | bound |
    | --- | ---: | ---: | ---: | ---: | ---: | ---: |
    | `small-sglang-prefill-stationary` | -4.6 | 9.9 | 10.9 | 11.3 | 11.2 (`anneal`) | 12.1 (proven) |
    | `small-sglang-prefill-drift` | -16.2 | -2.0 | 0.5 | 0.9 | 0.9 (`bottleneck-8`) | 1.6 |
    | `small-sglang-prefill-switch` | -13.8 | -1.6 | 0.7 | 0.9 | 1.3 (`anneal`) | 2.9 |
    | `small-sglang-prefill-replay` | -13.8 | 0.1 | 2.0 | 2.3 | 2.3 (`anneal`) | 3.2 |
    | `small-sglang-decode-stationary` | -6.8 | 10.4 | 12.4 | 12.4 | 12.4 (`eplb`) | 12.9 (proven) |
    | `small-sglang-decode-drift` | -18.3 | -1.7 | 0.7 | 0.6 | 0.8 (`bottleneck-8`) | 1.2 |
    | `small-sglang-decode-switch` | -16.8 | -2.0 | -0.4 | -1.0 | 0.4 (`flashlb`) | 2.1 |
    | `small-sglang-decode-replay` | -16.8 | -0.2 | 2.4 | 2.5 | 2.6 (`bottleneck-8`) | 3.1 |
    | `small-vllm-stationary` | -4.8 | 7.0 | 8.8 | 8.8 | 8.9 (`flashlb`) | 9.2 (proven) |
    | `small-vllm-drift` | -13.3 | -2.3 | 0.5 | 0.6 | 0.6 (`bottleneck-8`) | 0.8 |
    | `small-vllm-switch` | -12.1 | -1.9 | -0.4 | -0.7 | 0.2 (`flashlb`) | 1.4 |
    | `small-vllm-replay` | -12.4 | -0.9 | 1.7 | 1.8 | 1.8 (`anneal-max`) | 2.1 |
    | `small-vllm-deepep-stationary` | -6.8 | 10.4 | 12.4 | 12.4 | 12.4 (`eplb`) | 12.9 (proven) |
    | `small-vllm-deepep-drift` | -18.3 | -1.7 | 0.7 | 0.6 | 0.8 (`bottleneck-8`) | 1.2 |
    | `small-vllm-deepep-switch` | -16.8 | -2.0 | -0.4 | -1.0 | 0.4 (`flashlb`) | 2.1 |
    | `small-vllm-deepep-replay` | -16.8 | -0.2 | 2.4 | 2.5 | 2.6 (`bottleneck-8`) | 3.1 |
    | `small-tensorrt-llm-stationary` | -5.0 | 7.6 | 9.0 | 9.4 | 9.4 (`anneal`) | 10.0 (proven) |
    | `small-tensorrt-llm-drift` | -13.4 | -1.7 | 0.5 | 0.7 | 0.7 (`bottleneck-8`) | 1.2 |
    | `small-tensorrt-llm-switch` | -12.2 | -1.8 | -0.3 | -0.7 | 0.2 (`flashlb`) | 1.9 |
    | `small-tensorrt-llm-replay` | -12.5 | -0.4 | 1.7 | 2.0 | 2.0 (`anneal`) | 2.5 |
    | `small-vllm-ascend-stationary` | -6.8 | 10.4 | 12.4 | 12.4 | 12.4 (`eplb`) | 12.9 (proven) |
    | `small-vllm-ascend-drift` | -18.3 | -1.7 | 0.7 | 0.6 | 0.8 (`bottleneck-8`) | 1.2 |
    | `small-vllm-ascend-switch` | -16.8 | -2.0 | -0.4 | -1.0 | 0.4 (`flashlb`) | 2.1 |
    | `small-vllm-ascend-replay` | -16.8 | -0.2 | 2.4 | 2.5 | 2.6 (`bottleneck-8`) | 3.1 |
    | `2x8-sglang-prefill-stationary` | 0.0 | 2.7 | 3.3 | 4.6 | 4.8 (`anneal`) | 9.2 |
    | `2x8-sglang-prefill-drift` | -1.0 | 0.8 | -0.4 | 1.3 | 1.1 (`anneal-max`) | 5.2 |
    | `2x8-sglang-prefill-switch` | -2.3 | 1.8 | 1.3 | 2.9 | 4.1 (`anneal-max`) | 10.1 |
    | `2x8-sglang-prefill-replay` | -0.8 | 4.3 | 4.9 | 7.9 | 8.9 (`anneal-max`) | 14.8 |
    | `2x8-sglang-decode-stationary` | 0.1 | 5.7 | 7.3 | 11.9 | 12.5 (`anneal`) | 14.0 |
    | `2x8-sglang-decode-drift` | -1.2 | 1.2 | 0.4 | 5.8 | 6.2 (`anneal`) | 8.4 |
    | `2x8-sglang-decode-switch` | -0.4 | 4.8 | 4.6 | 8.1 | 8.1 (`anneal`) | 19.5 |
    | `2x8-sglang-decode-replay` | -1.1 | 6.3 | 6.8 | 10.2 | 12.8 (`anneal`) | 19.9 |
    | `2x8-vllm-stationary` | -0.3 | 0.6 | 1.1 | 1.3 | 1.8 (`anneal`) | 4.9 |
    | `2x8-vllm-drift` | -0.8 | -0.2 | -0.5 | 0.2 | 0.3 (`bottleneck-8`) | 0.7 |
    | `2x8-vllm-switch` | -0.7 | 0.7 | 0.3 | 1.6 | 1.2 (`bottleneck-8`) | 3.9 |
    | `2x8-vllm-replay` | -0.8 | 1.6 | 0.6 | 2.5 | 1.8 (`bottleneck-8`) | 4.4 |
    | `2x8-vllm-deepep-stationary` | 0.0 | 6.0 | 8.4 | 8.7 | 8.9 (`anneal`) | 10.8 |
    | `2x8-vllm-deepep-drift` | -1.9 | 0.8 | 0.7 | 1.6 | 1.7 (`flashlb`) | 4.0 |
    | `2x8-vllm-deepep-switch` | -0.3 | 4.5 | 5.4 | 4.9 | 7.1 (`flashlb`) | 15.8 |
    | `2x8-vllm-deepep-replay` | -0.7 | 5.8 | 8.0 | 8.4 | 10.4 (`anneal-max`) | 16.2 |
    | `2x8-tensorrt-llm-stationary` | -0.2 | 1.8 | 3.0 | 3.3 | 3.7 (`anneal`) | 6.2 |
    | `2x8-tensorrt-llm-drift` | -1.1 | 0.0 | -0.2 | 0.0 | 0.4 (`anneal-max`) | 1.9 |
    | `2x8-tensorrt-llm-switch` | -0.9 | 1.1 | 1.3 | 1.5 | 2.1 (`flashlb`) | 6.7 |
    | `2x8-tensorrt-llm-replay` | -0.8 | 2.4 | 2.7 | 3.8 | 3.4 (`anneal-max`) | 7.4 |
    | `2x8-vllm-ascend-stationary` | -0.1 | 5.9 | 8.1 | 8.2 | 8.7 (`anneal`) | 10.6 |
    | `2x8-vllm-ascend-drift` | -2.1 | 0.7 | 0.6 | 1.5 | 1.4 (`bottleneck-8`) | 3.8 |
    | `2x8-vllm-ascend-switch` | -0.2 | 4.6 | 5.3 | 5.1 | 6.8 (`flashlb`) | 15.5 |
    | `2x8-vllm-ascend-replay` | -0.9 | 5.8 | 7.9 | 8.7 | 9.5 (`anneal-max`) | 15.8 |
    | `4x4-sglang-prefill-stationary` | 0.0 | 2.5 | 4.6 | 6.3 | 6.8 (`anneal`) | 11.9 |
    | `4x4-sglang-prefill-drift` | -1.0 | 0.1 | 0.0 | 1.9 | 2.4 (`anneal`) | 6.7 |
    | `4x4-sglang-prefill-switch` | -1.5 | 2.1 | 2.3 | 4.6 | 5.1 (`anneal-max`) | 11.8 |
    | `4x4-sglang-prefill-replay` | -0.3 | 3.7 | 5.8 | 8.3 | 10.4 (`anneal-max`) | 16.6 |
    | `4x4-sglang-decode-stationary` | 0.1 | 7.4 | 10.1 | 11.8 | 12.2 (`anneal`) | 14.4 |
    | `4x4-sglang-decode-drift` | -1.8 | 1.0 | 1.1 | 3.5 | 4.0 (`anneal`) | 6.6 |
    | `4x4-sglang-decode-switch` | -0.2 | 4.8 | 6.1 | 8.0 | 8.6 (`anneal`) | 20.6 |
    | `4x4-sglang-decode-replay` | -0.6 | 7.1 | 9.1 | 11.2 | 12.9 (`anneal`) | 20.4 |
    | `4x4-vllm-stationary` | -0.4 | 0.5 | 0.7 | 0.6 | 1.3 (`incremental`) | 4.0 |
    | `4x4-vllm-drift` | -0.7 | -0.1 | -0.6 | 0.1 | 0.2 (`bottleneck-8`) | 0.5 |
    | `4x4-vllm-switch` | -0.6 | 0.7 | 0.1 | 1.3 | 0.9 (`incremental`) | 3.3 |
    | `4x4-vllm-replay` | -0.8 | 1.4 | 0.4 | 2.1 | 1.4 (`bottleneck-8`) | 3.7 |
    | `4x4-vllm-deepep-stationary` | -0.1 | 6.5 | 10.0 | 10.2 | 10.4 (`incremental`) | 12.7 |
    | `4x4-vllm-deepep-drift` | -2.3 | 1.0 | 1.0 | 1.7 | 2.1 (`flashlb`) | 4.7 |
    | `4x4-vllm-deepep-switch` | -0.2 | 4.4 | 6.3 | 5.9 | 8.3 (`flashlb`) | 18.2 |
    | `4x4-vllm-deepep-replay` | -0.8 | 6.5 | 9.3 | 10.1 | 10.4 (`anneal-max`) | 17.8 |
    | `4x4-tensorrt-llm-stationary` | -0.2 | 1.6 | 3.1 | 4.3 | 5.1 (`anneal`) | 7.7 |
    | `4x4-tensorrt-llm-drift` | -1.1 | -0.1 | -0.2 | 1.0 | 1.6 (`anneal`) | 3.3 |
    | `4x4-tensorrt-llm-switch` | -0.9 | 0.9 | 1.3 | 2.0 | 2.1 (`flashlb`) | 7.9 |
    | `4x4-tensorrt-llm-replay` | -0.8 | 2.3 | 2.6 | 4.1 | 4.2 (`anneal-max`) | 8.7 |
    | `4x4-vllm-ascend-stationary` | -0.2 | 7.0 | 9.9 | 10.2 | 10.3 (`anneal-max`) | 12.6 |
    | `4x4-vllm-ascend-drift` | -2.4 | 1.0 | 1.0 | 1.9 | 1.9 (`flashlb`) | 4.6 |
    | `4x4-vllm-ascend-switch` | -0.1 | 3.9 | 6.2 | 6.8 | 8.3 (`flashlb`) | 18.0 |
    | `4x4-vllm-ascend-replay` | -1.0 | 7.2 | 9.2 | 10.3 | 10.1 (`anneal`) | 17.6 |
    | `4x8-sglang-prefill-stationary` | -0.5 | 2.8 | 4.7 | 5.5 | 6.4 (`anneal`) | 10.5 |
    | `4x8-sglang-prefill-drift` | -0.7 | 0.3 | 0.2 | 1.8 | 2.0 (`anneal`) | 5.5 |
    | `4x8-sglang-prefill-switch` | -0.9 | 2.6 | 5.6 | 8.7 | 9.2 (`anneal`) | 15.4 |
    | `4x8-sglang-prefill-replay` | -0.7 | 2.8 | 7.2 | 8.5 | 10.6 (`anneal-max`) | 16.5 |
    | `4x8-sglang-decode-stationary` | -0.2 | 5.9 | 10.0 | 11.8 | 12.4 (`anneal`) | 14.3 |
    | `4x8-sglang-decode-drift` | -1.8 | 1.0 | 0.7 | 2.9 | 4.1 (`anneal`) | 6.1 |
    | `4x8-sglang-decode-switch` | -4.7 | 2.1 | 5.2 | 6.5 | 6.5 (`flashlb`) | 20.4 |
    | `4x8-sglang-decode-replay` | -4.8 | 3.4 | 10.3 | 11.8 | 13.3 (`anneal`) | 21.2 |
    | `4x8-vllm-stationary` | -0.3 | 0.4 | 0.9 | 0.4 | 1.0 (`flashlb`) | 2.8 |
    | `4x8-vllm-drift` | -0.7 | -0.2 | -0.4 | 0.0 | 0.1 (`bottleneck-8`) | 0.3 |
    | `4x8-vllm-switch` | -1.4 | -0.1 | -0.1 | 0.2 | 0.3 (`bottleneck-8`) | 2.3 |
    | `4x8-vllm-replay` | -1.5 | 0.5 | 0.6 | 0.8 | 0.9 (`flashlb`) | 2.7 |
    | `4x8-vllm-deepep-stationary` | -0.3 | 5.9 | 10.2 | 10.2 | 10.2 (`flashlb`) | 12.6 |
    | `4x8-vllm-deepep-drift` | -2.6 | 0.7 | 0.3 | 0.9 | 1.2 (`flashlb`) | 4.1 |
    | `4x8-vllm-deepep-switch` | -4.8 | 2.1 | 5.0 | 4.9 | 6.3 (`flashlb`) | 18.1 |
    | `4x8-vllm-deepep-replay` | -5.3 | 3.4 | 10.1 | 10.1 | 10.6 (`anneal`) | 18.8 |
    | `4x8-tensorrt-llm-stationary` | -0.3 | 1.6 | 3.3 | 3.9 | 4.2 (`anneal`) | 5.3 |
    | `4x8-tensorrt-llm-drift` | -1.0 | 0.0 | -0.2 | 0.2 | 0.7 (`anneal-max`) | 2.1 |
    | `4x8-tensorrt-llm-switch` | -1.8 | 0.7 | 1.6 | 1.5 | 2.2 (`flashlb`) | 7.4 |
    | `4x8-tensorrt-llm-replay` | -1.7 | 1.2 | 3.5 | 3.7 | 3.8 (`anneal-max`) | 7.8 |
    | `4x8-vllm-ascend-stationary` | -0.3 | 5.8 | 10.1 | 10.2 | 10.3 (`flashlb`) | 12.4 |
    | `4x8-vllm-ascend-drift` | -2.4 | 0.3 | 0.6 | 0.9 | 1.4 (`flashlb`) | 3.9 |
    | `4x8-vllm-ascend-switch` | -4.6 | 1.8 | 5.6 | 5.5 | 6.4 (`flashlb`) | 18.0 |
    | `4x8-vllm-ascend-replay` | -4.3 | 3.0 | 10.8 | 10.8 | 11.0 (`anneal-max`) | 18.7 |
    | `deepseek-v3-sglang-prefill-stationary` | -0.4 | 0.1 | 0.1 | 2.3 | 3.5 (`anneal`) | 4.1 |
    | `deepseek-v3-sglang-prefill-drift` | -0.6 | -0.2 | -1.5 | 0.7 | 2.7 (`anneal`) | 3.0 |
    | `deepseek-v3-sglang-prefill-switch` | -0.5 | 0.0 | -1.1 | 1.2 | 2.4 (`anneal`) | 3.7 |
    | `deepseek-v3-sglang-prefill-replay` | -0.5 | -0.1 | -1.2 | 1.2 | 2.9 (`anneal`) | 3.5 |
    | `deepseek-v3-sglang-decode-stationary` | -0.6 | 4.3 | 9.7 | 12.9 | 13.8 (`anneal`) | 15.6 |
    | `deepseek-v3-sglang-decode-drift` | -1.1 | 0.0 | -1.7 | 2.5 | 3.5 (`anneal`) | 4.9 |
    | `deepseek-v3-sglang-decode-switch` | -1.6 | 0.2 | -2.6 | 2.8 | 1.9 (`flashlb`) | 6.0 |
    | `deepseek-v3-sglang-decode-replay` | -1.5 | 0.5 | -1.1 | 3.4 | 4.1 (`anneal`) | 5.8 |
    | `deepseek-v3-vllm-stationary` | -0.3 | 0.0 | -0.4 | 0.2 | 0.2 (`bottleneck-8`) | 3.6 |
    | `deepseek-v3-vllm-drift` | -0.5 | -0.4 | -2.0 | 0.0 | 0.0 (`bottleneck-8`) | 0.0 |
    | `deepseek-v3-vllm-switch` | -0.5 | -0.3 | -2.0 | 0.0 | 0.2 (`bottleneck-8`) | 0.2 |
    | `deepseek-v3-vllm-replay` | -0.5 | -0.3 | -1.8 | 0.0 | 0.1 (`bottleneck-8`) | 0.2 |
    | `deepseek-v3-vllm-deepep-stationary` | -0.6 | 4.8 | 9.5 | 9.8 | 10.2 (`anneal-max`) | 13.7 |
    | `deepseek-v3-vllm-deepep-drift` | -1.3 | 0.1 | -1.8 | 0.7 | 0.7 (`bottleneck-8`) | 2.7 |
    | `deepseek-v3-vllm-deepep-switch` | -1.9 | 0.2 | -2.6 | 0.4 | 1.4 (`incremental`) | 3.8 |
    | `deepseek-v3-vllm-deepep-replay` | -1.9 | 0.3 | -0.8 | 1.8 | 1.7 (`incremental`) | 4.0 |
    | `deepseek-v3-tensorrt-llm-stationary` | -0.4 | 0.2 | 1.2 | 2.2 | 3.9 (`anneal`) | 8.5 |
    | `deepseek-v3-tensorrt-llm-drift` | -0.8 | -0.5 | -2.5 | 0.1 | 0.8 (`anneal`) | 1.4 |
    | `deepseek-v3-tensorrt-llm-switch` | -0.9 | -0.4 | -2.7 | -0.2 | 0.3 (`bottleneck-8`) | 2.2 |
    | `deepseek-v3-tensorrt-llm-replay` | -1.0 | -0.3 | -2.1 | 0.3 | 0.4 (`anneal`) | 1.8 |
    | `deepseek-v3-vllm-ascend-stationary` | -0.4 | 4.7 | 11.0 | 11.2 | 11.2 (`flashlb`) | 15.7 |
    | `deepseek-v3-vllm-ascend-drift` | -1.4 | -0.2 | -1.7 | 0.6 | 0.6 (`anneal`) | 2.3 |
    | `deepseek-v3-vllm-ascend-switch` | -1.7 | 0.1 | -2.2 | 0.8 | 1.4 (`incremental`) | 3.6 |
    | `deepseek-v3-vllm-ascend-replay` | -2.1 | 0.2 | -0.6 | 1.6 | 1.5 (`incremental`) | 3.5 |

    `python benchmarks/reference_scores.py` measures the scores and writes this table.

    ## Version History
    * v0: initial version. Since 0.2.0: passes and intervals on balanced ranks; rewards add up to the time saved.
    """

    metadata = {"render_modes": ["human", "rgb_array"], "render_fps": 4}

    def __init__(
        self, render_mode: str | None = None, observation: str = "full", illegal_penalty: float = 0.0, **options: Any
    ) -> None:
        one_of(observation, OBSERVATIONS, "observation")
        self._compact = observation == "compact"
        self._begin(render_mode, options, illegal_penalty)
        self.observation_space, self.action_space = self._spaces()

    def _spaces(self) -> tuple[spaces.Space[Any], spaces.Space[Any]]:
        action = spaces.MultiDiscrete([self.batch.n_experts, 3 * self.batch.n_gpus])
        if self._compact:
            return compact_space(compact_observation(self._views, self.batch.n_gpus).size), action
        return spaces.Dict(observation_spaces(self.batch)), action

    def _observe(self) -> Any:
        if self._compact:
            return compact_observation(self._views, self.batch.n_gpus)
        return {name: view.copy() for name, view in self._views.items()}

    def _operation(self, action: Any) -> tuple[int, int]:
        """The expert and the node that an action stands for."""
        return int(action[0]), int(action[1])

    def _mask_info(self) -> dict[str, Any]:
        """What `info` has about the next action."""
        return {}

    def action_masks(self) -> npt.NDArray[np.bool_]:
        """(E + 3·G,) for sb3-contrib: what each component may be; see :func:`product_masks`."""
        return product_masks(self._views["joint_mask"], self._views["expert_mask"])

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is None:
            seed = -1 if self._seeded else int(self.np_random.integers(2**62))
        self._reset(seed)
        return self._observe(), self._mask_info()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        reward, done, info = self._act(*self._operation(action))
        return self._observe(), reward, done, False, info | self._mask_info()

    def render(self) -> npt.NDArray[np.uint8] | None:
        return self._render()

    def close(self) -> None:
        self._close()
