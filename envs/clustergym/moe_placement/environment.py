"""Gymnasium and PettingZoo faces of the batched placement environment."""

from __future__ import annotations

import sys
from collections.abc import Collection
from dataclasses import fields
from typing import Any, ClassVar

import gymnasium
import numpy as np
import numpy.typing as npt
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space
from pettingzoo import ParallelEnv

from clustergym.moe_placement.batch import PlacementBatch, PlacementConfig
from clustergym.moe_placement.kernels.state import (
    CLOCK_DONE,
    CLOCK_LAYER,
    CLOCK_OPERATION,
    CLOCK_WINDOW,
    LAST_KIND,
    OP_ILLEGAL,
    TIME_MIGRATED,
    TIME_OBSERVED,
    TIME_OBSERVED_START,
    TIME_SAVED,
    TIME_SERVED,
)
from clustergym.moe_placement.viewer import KINDS, Frame, Operation, draw, open_window

ObsDict = dict[str, npt.NDArray[Any]]

# Kinds in the order of state.OP_*, as words.
OPERATIONS = ("nothing", "illegal", "place", "swap", "add", "delete")
assert set(OPERATIONS) == set(KINDS)
# Observations that change only when the agents walk to another layer.
LAYER_KEYS = ("coactivation", "affinity")
# Features are ratios and shares; nothing comes near this.
LIMIT = 1e6


def observation_spaces(batch: PlacementBatch) -> dict[str, spaces.Space[Any]]:
    """The space of each array of one environment's observation."""
    return {
        name: spaces.Box(0, 1, tensor.shape[1:], np.int8)
        if tensor.dtype == torch.int8
        else spaces.Box(-LIMIT, LIMIT, tensor.shape[1:], np.float32)
        for name, tensor in batch.obs.items()
    }


def frame_of(batch: PlacementBatch, saved: list[float], index: int = 0) -> Frame:
    """What a picture of environment ``index`` shows."""
    sim = {name: batch.sim[name][index].cpu().numpy() for name in ("slots", "pairs", "held_before", "load")}
    layer, op, window, _ = (int(x) for x in batch.episode["clock"][index])
    kind, expert, node, source, _, victim = (int(x) for x in batch.episode["last_operation"][index])
    times = batch.episode["times_us"][index].cpu().numpy()
    slots, pairs = sim["slots"], sim["pairs"][0]
    held = np.where(slots >= 0, np.take_along_axis(pairs.T, np.maximum(slots, 0).astype(np.int64), axis=1), 0)
    fresh = np.take_along_axis(sim["held_before"].T, np.maximum(slots, 0).astype(np.int64), axis=1) == 0
    last = None
    # An action may name an expert or node that does not exist: there is nothing to draw.
    if kind >= 0 and 0 <= expert < batch.n_experts and 0 <= node < 3 * batch.n_gpus:
        last = Operation(OPERATIONS[kind], expert, node % batch.n_gpus, source, victim)
    model = batch.model
    return Frame(
        slots=slots,
        expert_load=sim["load"][0].astype(float),
        gpu_pairs=held.sum(1).astype(float),
        gpu_compute_us=model.kernel_start_us
        + model.kernel_expert_us * (held > 0).sum(1)
        + model.kernel_pair_us * held.sum(1),
        traffic_bytes=batch.link_copies(index) * np.float64(model.hidden * model.dispatch_bytes),
        gpus_per_node=batch.cluster.gpus_per_node,
        layer=layer,
        n_layers=batch.n_layers,
        layer_id=int(batch.trace.layer_ids[layer]),
        window=min(window, batch.config.windows - 1),
        n_windows=batch.config.windows,
        op=op,
        ops_per_layer=batch.config.ops_per_layer,
        layer_time_us=float(times[TIME_OBSERVED]),
        start_time_us=float(times[TIME_OBSERVED_START]),
        static_time_us=batch.static_layer_us(layer),
        migrated=fresh & (slots >= 0),
        last_op=last,
        saved=saved,
    )


class _Picture:
    """Rendering that the Gymnasium and PettingZoo environments share."""

    render_mode: str | None
    batch: PlacementBatch
    _screen: Any = None
    _saved: list[float]

    def _note_window(self) -> None:
        """Remember what each served window saved, for the picture's history."""
        served = int(self.batch.episode["clock"][0, CLOCK_WINDOW])
        if served > len(self._saved):
            total = float(self.batch.episode["times_us"][0, TIME_SAVED]) / self.batch.rules_host.static_us
            self._saved.append(total - sum(self._saved))

    def _check_render_mode(self, render_mode: str | None) -> None:
        if render_mode not in (None, "human", "rgb_array"):
            raise ValueError(f"unknown render_mode {render_mode!r}; expected None, 'human' or 'rgb_array'")
        self.render_mode = render_mode

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


def _split_options(options: dict[str, Any]) -> PlacementConfig:
    known = {f.name for f in fields(PlacementConfig)}
    unknown = sorted(set(options) - known)
    if unknown:
        raise TypeError(f"unknown argument {unknown[0]!r}; the environment takes: {', '.join(sorted(known))}")
    return PlacementConfig(**options)


def _infos(batch: PlacementBatch) -> dict[str, npt.NDArray[Any]]:
    """Arrays (B,) that tell what the last operations came to."""
    kind = batch.episode["last_operation"][:, LAST_KIND].cpu().numpy()
    return {
        "operation": kind.copy(),
        "legal": kind != OP_ILLEGAL,
        "layer_time_us": batch.episode["times_us"][:, TIME_OBSERVED].cpu().numpy().copy(),
    }


def _episode_info(batch: PlacementBatch, index: int) -> dict[str, float]:
    """Sums over a finished episode: mean µs of a layer and window, and the share of the static time that was saved."""
    times = batch.episode["times_us"][index].cpu().numpy()
    served = batch.n_layers * batch.config.windows
    return {
        "served_us": float(times[TIME_SERVED] / served),
        "migration_us": float(times[TIME_MIGRATED] / served),
        "saved": float(times[TIME_SAVED] / batch.rules_host.static_us),
    }


class MoEPlacementEnv(_Picture, gymnasium.Env[Any, npt.NDArray[np.int64]]):
    """
    ## Description
    A mixture-of-experts model is served on a cluster: every GPU holds some experts of each layer, tokens travel to the
    experts that the router chose for them, and the slowest GPU sets the pace. Traffic comes from a token trace log. Between
    two windows of traffic the agents walk through the layers and change which GPU holds which expert, so that the
    NEXT window is served faster. They see the window just served and never the one to come.

    `MoEPlacement-v0` is one walk over the layers (`windows=1`, starting from the static placement, stationary traffic);
    `MoEPlacementDrift-v0` serves eight windows whose mix of domains drifts, starting from EPLB.

    The time of a layer is dispatch + compute + combine, exact per token: a token sends one copy to each GPU of its node and one
    to each other node that holds experts it needs (there it is forwarded), the busiest link sets dispatch and combine,
    the slowest expert kernel sets compute. Fetching an expert's weights costs time too, spread over `passes_per_window`.

    ## Action Space
    `MultiDiscrete([E, 3·G])`: an expert, and one of 3·G nodes. With g = node mod G:

    | node | operation |
    | --- | --- |
    | 0 … G−1 | PLACE the expert on GPU g: its replica on the busiest GPU moves there. A full GPU swaps its replica with fewest tokens back. Nothing where the expert is there already: this is the no-op. |
    | G … 2G−1 | ADD a replica on GPU g, which needs a free slot |
    | 2G … 3G−1 | DELETE the replica on GPU g, unless it is the last |

    An illegal action does nothing and is marked in `info["legal"]`; it never raises.

    ## Observation Space
    A `Dict` of arrays, all about the window just served and the layer that the agents stand at:

    | key | shape | content |
    | --- | --- | --- |
    | `experts` | (E, 9) | load share × E, its moving average, change against that average, replicas / G, share of tokens on its busiest replica, load of its busiest GPU / mean, replicas to fetch, co-active experts on the same GPU, is on the slowest GPU |
    | `coactivation` | (E, E) | P(column also used \\| row used), one token; from at most 1024 tokens |
    | `affinity` | (E, E) | P(column used in this layer \\| row used in the layer before); 0 in the first layer; from at most 256 tokens unless `comm="stay"` |
    | `gpus` | (3·G, 16) | the node's kind (3), pairs / mean, compute time, free slots, sent and received inside the node and between nodes (4), active experts, affinity to the hottest experts, is the slowest, load of its node / mean, replicas to fetch, inter/intra bandwidth |
    | `traffic` | (G, G) | time of the link from row to column, relative to the layer's |
    | `placement` | (E, G) | 1 where the GPU holds the expert |
    | `progress` | (6,) | layer, operation, window (each as a fraction), layer time now / at the start, slowest kernel and migration / layer time |
    | `expert_mask`, `gpu_mask` | (E,), (3·G,) | choices with at least one operation that changes something / is legal |
    | `joint_mask` | (E, 3·G) | 1 where the pair is legal |
    | `lookahead` | (E, 3·G) | with `lookahead=True`: share of the layer's time that the operation would save on the OBSERVED window |

    ## Rewards
    What the operation takes off the next window's time (served + migration), as a fraction of the static placement's time
    for a window: rewards add up to the relative time saved. With `credit="stream"` each window boundary adds what
    earlier operations still save, so that the return is what the whole stream saved against never moving.

    ## Starting State
    A stream begins at a random place of the trace; the first window has been served on the starting placement (`start`).

    ## Episode End
    Terminates after `windows` windows: windows × layers × `ops_per_layer` steps. `info` then holds `served_us`,
    `migration_us` (means per layer and window) and `saved`.

    ## Arguments
    The fields of `clustergym.moe_placement.PlacementConfig`: `trace`, `cluster`, `model`, `windows`, `window_tokens`,
    `ops_per_layer`, `schedule`, `drift_rate`, `passes_per_window`, `start`, `comm`, `lookahead`, `lookahead_norm`,
    `reward_window`, `reward_norm`, `credit`; and `render_mode` (`"rgb_array"`, `"human"`).

    ```python
    >>> import gymnasium
    >>> env = gymnasium.make("clustergym:MoEPlacement-v0", cluster="h800-2x8", window_tokens=1024)
    >>> obs, info = env.reset(seed=1)
    >>> obs, reward, terminated, truncated, info = env.step(env.action_space.sample())

    ```

    ## Version History
    * v0: initial version
    """

    metadata = {"render_modes": ["human", "rgb_array"], "render_fps": 4}

    def __init__(self, render_mode: str | None = None, **options: Any) -> None:
        self._check_render_mode(render_mode)
        self.batch = PlacementBatch(_split_options(options), 1)
        self.observation_space = spaces.Dict(observation_spaces(self.batch))
        self.action_space = spaces.MultiDiscrete([self.batch.n_experts, 3 * self.batch.n_gpus])
        self._views = {name: tensor[0].numpy() for name, tensor in self.batch.obs.items()}
        self._expert, self._node = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
        self._saved = []
        self._seeded = False

    def _observe(self) -> ObsDict:
        return {name: view.copy() for name, view in self._views.items()}

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[ObsDict, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None or not self._seeded:
            self.batch.seed(np.array([self.np_random.integers(2**62) if seed is None else seed]))
            self._seeded = True
        self.batch.reset()
        self._saved = []
        if self.render_mode == "human":
            self._render()
        return self._observe(), {}

    def step(self, action: npt.NDArray[np.int64]) -> tuple[ObsDict, float, bool, bool, dict[str, Any]]:
        self._expert[0], self._node[0] = int(action[0]), int(action[1])
        _, reward, _ = self.batch.step(self._expert, self._node)
        self._note_window()
        done = bool(self.batch.episode["clock"][0, CLOCK_DONE])
        info: dict[str, Any] = {name: values[0].item() for name, values in _infos(self.batch).items()}
        if done:
            info |= _episode_info(self.batch, 0)
        if self.render_mode == "human":
            self._render()
        return self._observe(), float(reward[0]), done, False, info

    def lookahead(self, expert: int) -> npt.NDArray[np.float32]:
        """(3·G,) what each operation on ``expert`` would save on the observed window, as a share of the layer's time."""
        return self.batch.lookahead(torch.tensor([expert])).numpy()[0].copy()

    def render(self) -> npt.NDArray[np.uint8] | None:
        return self._render()

    def close(self) -> None:
        self._close()


class _Recycled:
    """Arrays of one shape for observations. One that nobody else holds any more is given out again: new memory costs more than
    filling it."""

    def __init__(self, like: torch.Tensor, read_only: bool) -> None:
        self.shape, self.dtype, self.read_only = tuple(like.shape), like.numpy().dtype, read_only
        self.all: list[tuple[npt.NDArray[Any], torch.Tensor]] = []

    def take(self) -> tuple[npt.NDArray[Any], torch.Tensor]:
        """An array, and the tensor that shares its memory."""
        for pair in self.all:
            # Its place in the pair, the tensor's hold on it, and the argument: any view or tensor made of it would add one.
            if sys.getrefcount(pair[0]) == 3:
                return pair
        array = np.empty(self.shape, self.dtype)
        pair = (array, torch.from_numpy(array))
        array.setflags(write=not self.read_only)
        self.all.append(pair)
        return pair


class MoEPlacementVectorEnv(gymnasium.vector.VectorEnv[ObsDict, npt.NDArray[np.int64], npt.NDArray[Any]]):
    """`num_envs` copies of :class:`MoEPlacementEnv` in one batched simulator: ``gymnasium.make_vec("MoEPlacement-v0", num_envs=N)``.

    Environment i, seeded with s + i, plays exactly what a single environment seeded with s + i plays. Autoreset is
    SAME_STEP: where an episode ends, the observation returned is the next episode's first, and ``info["final_obs"]`` and
    ``info["final_info"]`` hold the last of the old one. Returned arrays are never written again while anybody holds them.

    Trainers that keep everything in torch use ``self.batch`` (:class:`PlacementBatch`) and its tensors directly.
    """

    metadata = {
        "render_modes": ["rgb_array"],
        "render_fps": 4,
        "autoreset_mode": AutoresetMode.SAME_STEP,
    }

    def __init__(
        self,
        num_envs: int = 1,
        render_mode: str | None = None,
        device: str | torch.device = "cpu",
        max_episode_steps: int | None = None,
        **options: Any,
    ) -> None:
        if max_episode_steps is not None:
            raise ValueError("episodes have a fixed length: set windows, and not max_episode_steps")
        if render_mode not in (None, "rgb_array"):
            raise ValueError(
                f"unknown render_mode {render_mode!r}; the vectorised environment has None and 'rgb_array'"
            )
        self.render_mode = render_mode
        self.batch = PlacementBatch(_split_options(options), num_envs, device)
        self.num_envs = num_envs
        self.single_observation_space = spaces.Dict(observation_spaces(self.batch))
        self.single_action_space = spaces.MultiDiscrete([self.batch.n_experts, 3 * self.batch.n_gpus])
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        # On a GPU observations are copied to the host; here the kernels write into the arrays that are returned.
        on_host = self.batch.obs if self.batch.device.type == "cpu" else {}
        self._recycled = {name: _Recycled(tensor, name in LAYER_KEYS) for name, tensor in on_host.items()}
        self._pairs: dict[str, tuple[npt.NDArray[Any], torch.Tensor]] = {}
        self._copies: ObsDict = {}
        self._seeded = False

    def _renew(self, names: Collection[str], keep: bool) -> None:
        """Let the next observation go to arrays that nobody holds; ``keep`` what the kernels may leave as it is."""
        fresh = {name: self._recycled[name].take() for name in names if name in self._recycled}
        if keep:
            for name, (_, tensor) in fresh.items():
                tensor.copy_(self.batch.obs[name])
        self._pairs |= fresh
        self.batch.observe_into({name: tensor for name, (_, tensor) in fresh.items()})

    def _observe(self, layer_changed: bool) -> ObsDict:
        if self._recycled:
            return {name: self._pairs[name][0] for name in self.batch.obs}
        names = [name for name in self.batch.obs if layer_changed or name not in LAYER_KEYS]
        self._copies |= {name: self.batch.obs[name].cpu().numpy() for name in names}
        for name in LAYER_KEYS:
            self._copies[name].setflags(write=False)
        return dict(self._copies)

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[ObsDict, dict[str, Any]]:
        super().reset(seed=seed if isinstance(seed, int) else None)
        if isinstance(seed, list):
            seeds = [self.np_random.integers(2**62) if s is None else s for s in seed]
            self.batch.seed(np.array(seeds, dtype=np.int64))
        elif seed is not None or not self._seeded:
            first = int(self.np_random.integers(2**62)) if seed is None else seed
            self.batch.seed(first + np.arange(self.num_envs))
        self._seeded = True
        self._renew(self.batch.obs, keep=False)
        self.batch.reset()
        return self._observe(True), {}

    def step(
        self, actions: npt.NDArray[np.int64]
    ) -> tuple[ObsDict, npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any], dict[str, Any]]:
        chosen = torch.as_tensor(np.ascontiguousarray(np.asarray(actions, dtype=np.int64).T), device=self.batch.device)
        if chosen.shape != (2, self.num_envs):
            raise ValueError(
                f"actions have shape {tuple(chosen.shape[::-1])}: expected ({self.num_envs}, 2): expert, node"
            )
        clock = self.batch.episode["clock"]
        leaves = clock[:, CLOCK_OPERATION] == self.batch.config.ops_per_layer - 1
        ends = (clock[:, CLOCK_LAYER] == self.batch.n_layers - 1) & (
            clock[:, CLOCK_WINDOW] == self.batch.config.windows - 1
        )
        changed = bool(leaves.any())
        self._renew([name for name in self.batch.obs if name not in LAYER_KEYS], keep=False)
        if changed:
            # The last observation of an episode is about the layer that it ended on.
            self._renew(LAYER_KEYS, keep=not bool((leaves & ~ends).all()))
        _, reward, done = self.batch.step(chosen[0], chosen[1])
        rewards, terminated = reward.cpu().numpy().copy(), done.cpu().numpy().copy()
        infos: dict[str, Any] = dict(_infos(self.batch))
        infos |= {f"_{name}": np.ones(self.num_envs, bool) for name in list(infos)}
        if terminated.any():
            infos |= self._finish(terminated, infos)
            # What an ended episode's last step came to is in final_info; a fresh episode has no operation yet.
            for name in ("operation", "legal", "layer_time_us"):
                infos[name][terminated] = 0
                infos[f"_{name}"][terminated] = False
            self.batch.reset(done.clone())
        return self._observe(changed), rewards, terminated, np.zeros(self.num_envs, bool), infos

    def _finish(self, ended: npt.NDArray[np.bool_], infos: dict[str, Any]) -> dict[str, Any]:
        final_obs = np.full(self.num_envs, None, dtype=object)
        last = {name: tensor.cpu().numpy() for name, tensor in self.batch.obs.items()}
        final_info: dict[str, Any] = {}
        for i in np.flatnonzero(ended):
            final_obs[i] = {name: array[i].copy() for name, array in last.items()}
            single = {name: infos[name][i].item() for name in ("operation", "legal", "layer_time_us")}
            final_info = self._add_info(final_info, single | _episode_info(self.batch, int(i)), int(i))
        return {
            "final_obs": final_obs,
            "_final_obs": ended.copy(),
            "final_info": final_info,
            "_final_info": ended.copy(),
        }

    def render(self) -> tuple[npt.NDArray[np.uint8], ...] | None:
        """A picture of each environment."""
        if self.render_mode is None:
            return None
        return tuple(draw(frame_of(self.batch, [], i)) for i in range(self.num_envs))


class MoEPlacementParallelEnv(_Picture, ParallelEnv[str, ObsDict, int]):
    """The placement task for two agents that act at the same time: `expert` picks an expert, `gpu` one of 3·G nodes.

    Everything else is as in :class:`MoEPlacementEnv`, whose docstring is the task's page. Both agents get the same reward.

    | agent | action | observation |
    | --- | --- | --- |
    | `expert` | `Discrete(E)` | `experts`, `coactivation`, `affinity`, `placement`, `progress`, `action_mask` (E,) |
    | `gpu` | `Discrete(3·G)` | `gpus`, `traffic`, `placement`, `progress`, `joint_mask` (E, 3·G), `action_mask` (3·G,), and `lookahead` where asked for |

    `joint_mask[e]` is what the `gpu` agent may do once `expert` has chosen e: a policy that conditions the second choice on the
    first reads its row. `state()` is one vector for a centralised critic.

    ```python
    >>> from clustergym import moe_placement_v0
    >>> env = moe_placement_v0.parallel_env(window_tokens=512)
    >>> observations, infos = env.reset(seed=1)
    >>> actions = {agent: env.action_space(agent).sample(observations[agent]["action_mask"]) for agent in env.agents}
    >>> observations, rewards, terminations, truncations, infos = env.step(actions)

    ```
    """

    metadata: ClassVar[dict[str, Any]] = {
        "name": "moe_placement_v0",
        "render_modes": ["human", "rgb_array"],
        "is_parallelizable": True,
        "render_fps": 4,
    }
    possible_agents: ClassVar[list[str]] = ["expert", "gpu"]
    _keys: ClassVar[dict[str, tuple[str, ...]]] = {
        "expert": ("experts", "coactivation", "affinity", "placement", "progress"),
        "gpu": ("gpus", "traffic", "placement", "progress", "joint_mask", "lookahead"),
    }
    _state_keys: ClassVar[tuple[str, ...]] = ("experts", "gpus", "traffic", "placement", "progress")

    def __init__(self, render_mode: str | None = None, **options: Any) -> None:
        self._check_render_mode(render_mode)
        self.batch = PlacementBatch(_split_options(options), 1)
        all_spaces = observation_spaces(self.batch)
        self.observation_spaces = {
            agent: spaces.Dict(
                {key: all_spaces[key] for key in keys if key in all_spaces}
                | {"action_mask": all_spaces[f"{agent}_mask"]}
            )
            for agent, keys in self._keys.items()
        }
        self.action_spaces = {
            "expert": spaces.Discrete(self.batch.n_experts),
            "gpu": spaces.Discrete(3 * self.batch.n_gpus),
        }
        self._views = {name: tensor[0].numpy() for name, tensor in self.batch.obs.items()}
        size = sum(self._views[key].size for key in self._state_keys)
        self.state_space = spaces.Box(-LIMIT, LIMIT, (size,), np.float32)
        self.agents: list[str] = []
        self._saved = []
        self._seeded = False

    def observation_space(self, agent: str) -> spaces.Dict:
        return self.observation_spaces[agent]

    def action_space(self, agent: str) -> spaces.Discrete:
        return self.action_spaces[agent]

    def _observe(self) -> dict[str, ObsDict]:
        return {
            agent: {key: self._views[key].copy() for key in keys if key in self._views}
            | {"action_mask": self._views[f"{agent}_mask"].copy()}
            for agent, keys in self._keys.items()
        }

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, ObsDict], dict[str, dict[str, Any]]]:
        if seed is not None or not self._seeded:
            self.batch.seed(
                np.array([np.random.SeedSequence().generate_state(1)[0] if seed is None else seed], dtype=np.int64)
            )
            self._seeded = True
        self.agents = self.possible_agents[:]
        self.batch.reset()
        self._saved = []
        if self.render_mode == "human":
            self._render()
        return self._observe(), {agent: {} for agent in self.agents}

    def step(
        self, actions: dict[str, int]
    ) -> tuple[dict[str, ObsDict], dict[str, float], dict[str, bool], dict[str, bool], dict[str, dict[str, Any]]]:
        expert, node = (torch.tensor([int(actions[agent])]) for agent in self.possible_agents)
        _, reward, _ = self.batch.step(expert, node)
        self._note_window()
        done = bool(self.batch.episode["clock"][0, CLOCK_DONE])
        info: dict[str, Any] = {name: values[0].item() for name, values in _infos(self.batch).items()}
        if done:
            info |= _episode_info(self.batch, 0)
        agents, self.agents = self.agents, ([] if done else self.agents)
        if self.render_mode == "human":
            self._render()
        return (
            self._observe(),
            {agent: float(reward[0]) for agent in agents},
            dict.fromkeys(agents, done),
            dict.fromkeys(agents, False),
            {agent: dict(info) for agent in agents},
        )

    def state(self) -> npt.NDArray[np.float32]:
        """All that both agents see, without the pair matrices, as one vector."""
        return np.concatenate([self._views[key].ravel() for key in self._state_keys])

    def render(self) -> npt.NDArray[np.uint8] | None:
        return self._render()

    def close(self) -> None:
        self._close()
