"""Gymnasium API of the offloading task."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from clustergym.common.choices import config_from
from clustergym.moe_offload.batch import ObsDict, OffloadBatch
from clustergym.moe_offload.specs import OffloadConfig

LIMIT = 100.0
"""Bound of features and weights. Features are logarithms and ratios of about 1, so none comes near it."""


def observation_space(batch: OffloadBatch) -> spaces.Dict:
    """The space of one environment's observation."""
    low = {"expert_graph": 0.0, "gpu_graph": 0.0, "pairs": 0.0}
    high = {"expert_graph": 1.0, "gpu_graph": 1.0, "pairs": 1.0}
    return spaces.Dict(
        {
            name: spaces.Box(0, 1, shape, np.int8)
            if name == "action_mask"
            else spaces.Box(low.get(name, -LIMIT), high.get(name, LIMIT), shape, np.float32)
            for name, shape in batch.shapes.items()
        }
    )


def pair_space(batch: OffloadBatch) -> spaces.MultiDiscrete:
    """The space of one environment's actions."""
    return spaces.MultiDiscrete([batch.n_rows, batch.n_nodes])


def first_of(info: dict[str, Any]) -> dict[str, Any]:
    """The information of a batch of one environment as plain numbers; events stay arrays."""
    return {name: value if isinstance(value, dict) else value[0].item() for name, value in info.items()}


class Rendering:
    """Pictures of environment 0, for the Gymnasium and the PettingZoo environments."""

    batch: OffloadBatch
    render_mode: str | None = None
    _recorder: Any = None
    _window: Any = None

    def _choose_render_mode(self, render_mode: str | None) -> None:
        if render_mode not in (None, "human", "rgb_array"):
            raise ValueError(f"unknown render_mode {render_mode!r}; expected None, 'human' or 'rgb_array'")
        if render_mode is not None:
            import clustergym.moe_offload.viewer  # noqa: F401  raises an error now if pygame is missing
        self.render_mode = render_mode

    def _record(self, begin: bool) -> None:
        """Note what has happened since the last call, for the picture."""
        if self.render_mode is None:
            return
        from clustergym.moe_offload.viewer import Recorder

        if begin or self._recorder is None:
            self._recorder = Recorder(self.batch)
        self._recorder.record()
        if self.render_mode == "human":
            self.render()

    def render(self) -> npt.NDArray[np.uint8] | None:
        if self.render_mode is None:
            gymnasium.logger.warn(
                "render() does nothing without a render_mode: make the environment with render_mode='rgb_array'"
            )
            return None
        from clustergym.moe_offload.viewer import Recorder, draw, open_window

        frame = (self._recorder or Recorder(self.batch)).frame()
        if self.render_mode == "rgb_array":
            return draw(frame)
        if self._window is None:
            self._window = open_window()
        self._window.show(frame)
        return None

    def close(self) -> None:
        if self._window is not None:
            self._window.close()
            self._window = None


class MoEOffloadEnv(Rendering, gymnasium.Env[Any, Any]):
    """
    ## Description
    A mixture-of-experts model is larger than the memory of the GPUs, so some of its experts wait in host memory. The
    node generates text: token by token, and for each token layer by layer, along a recorded token trace. When the
    router's choice for a layer becomes known (a *visit*), missing experts are loaded on demand over the link from the
    host, before anything else that waits there; an expert that is on its way is waited for. The time until the last one
    has arrived is *stall*. Then the layer computes, and until the next router result the link is free for prefetches.
    Two agents decide what is dropped and what is loaded ahead: one picks an expert, the other says what to do with it.

    Times are assumptions: an expert's bytes over a bandwidth, and `layer_ms + expert_ms · experts` per layer. Nothing
    was measured on a GPU. A trace has no hidden states, from which a real engine could predict more.

    | id | task |
    | --- | --- |
    | `MoEOffload-v0` | one pool of slots for 37.5 % of all experts, one sequence, PCIe 5 |
    | `MoEOffloadBusy-v0` | PCIe 4: the link has hardly any time for prefetches |
    | `MoEOffloadBatch-v0` | 4 sequences together, slots for 50 % |
    | `MoEOffloadNode-v0` | 4 GPUs that share the slots |

    `MoEOffloadFlat-v0`, `MoEOffloadBusyFlat-v0` … have one number per action instead of a pair.

    ## Action Space
    `MultiDiscrete([R, 3·G])`: a row of the table of experts, and one of 3·G nodes: `g` = PLACE on GPU g (move from a
    peer), `G+g` = ADD to GPU g (load from the host), `2G+g` = DELETE from GPU g. PLACE where there is nothing to move
    is the no-op: it ends the visit.

    Demand loads and prefetches may exceed the slots. Then only DELETE on that GPU is legal, until it fits. After that,
    missing experts of the next `horizon` layers can be loaded while a link has time, one per step, or the visit ended.
    Visits without a decision are skipped. The mask is exact. An illegal pair does nothing (`info["illegal"]`); while
    prefetches are possible it ends the visit.

    ## Observation Space
    `Dict` of float32 arrays. R rows: first the experts that can be chosen, in random order, then `context_rows` of the
    last visits (none by default), which are neighbours in the graph and cannot be chosen. An eviction can choose all
    residents of the current layer (those with the lowest counts, should there be very many); the lowest decayed counts
    of the other layers fill the table, at least `low_rows`. A prefetch can choose the `load_rows` missing experts that
    are likeliest by counts and transitions.

    | key | shape | content |
    | --- | --- | --- |
    | `experts` | (R, 21) | `kernels.observation.EXPERT_FEATURES`; 9 more with a predictor (see below) |
    | `gpus` | (3·G, 10) | `GPU_FEATURES`: kind of operation, backlog and free time of the link, free slots, residents |
    | `pairs` | (R, G, 1) | 1 where the expert is on the GPU |
    | `expert_graph` | (R, R) | chance that one expert is followed by another; (0, 0) unless `context_rows` is given |
    | `gpu_graph` | (G, G) | 1 between GPUs |
    | `context` | (10,) | `CONTEXT_FEATURES`: evict or prefetch, layer, demand loads per visit, … |
    | `action_mask` | (R, 3·G) | int8, legal pairs |

    With `predictor`, experts have 9 more columns, its log-odds / 4: that the layer's next 1, 2, 4 … 32 tokens use the
    expert, as of the layer's last visit, and that its next visit does, if it is 1, 2 or 3 layers ahead.

    Only what a serving engine knows is in it: no routing of a later visit.

    ## Rewards
    −stall since the last decision, in units of one load. The rewards of an episode sum to −its stall.

    ## Starting State
    The experts that the training split uses most are on the GPUs. The sequence is drawn; `reset(options={"group": i})`
    serves sequence i of the split (with `batch` > 1: group i of sequences of about the same length).

    ## Episode End
    The episode terminates after the last token of the sequence, or of the longest of the batch; or after `max_tokens`.

    ## Information
    Each step: `no_op`, `illegal`, `expert` (layer · E + id of the row), `elapsed` (visits since the last decision),
    `events` (what has become of earlier decisions: see :meth:`OffloadBatch.events`), `group` (what is served), and sums
    over the episode: `stall_ms`, `tokens`, `tokens_per_s`, `hit_rate`, `loads`, `prefetches`, `useful_prefetches`,
    `moves`, `bytes`.

    ## Arguments
    The fields of :class:`clustergym.moe_offload.specs.OffloadConfig`, and `render_mode` (`"rgb_array"`, `"human"`).

    ```python
    >>> import gymnasium
    >>> env = gymnasium.make("clustergym:MoEOffload-v0", max_tokens=4)
    >>> obs, info = env.reset(seed=1)
    >>> row, node = map(int, np.argwhere(obs["action_mask"])[0])
    >>> obs, reward, terminated, truncated, info = env.step((row, node))
    >>> info["illegal"]
    False

    ```

    ## Version History
    * v0: initial version
    """

    metadata = {"render_modes": ["human", "rgb_array"], "render_fps": 4}

    def __init__(self, render_mode: str | None = None, **options: Any) -> None:
        self._choose_render_mode(render_mode)
        self.batch = OffloadBatch(config_from(OffloadConfig, options), 1)
        self.observation_space, self.action_space = self._spaces()
        self._seeded = False

    # What the flat form changes

    def _spaces(self) -> tuple[spaces.Space[Any], spaces.Space[Any]]:
        return observation_space(self.batch), pair_space(self.batch)

    def _observe(self) -> Any:
        return {name: array[0] for name, array in self.batch.observe().items()}

    def _pair(self, action: Any) -> tuple[int, int]:
        row, node = np.asarray(action, np.int64).tolist()
        return row, node

    # Episodes

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None or not self._seeded:
            self.batch.seed([int(self.np_random.integers(2**62)) if seed is None else seed])
            self._seeded = True
        self.batch.reset(groups=(options or {}).get("group"))
        self._record(begin=True)
        return self._observe(), first_of(self.batch.totals())

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        row, node = self._pair(action)
        rewards, ended = self.batch.step(np.array([row]), np.array([node]))
        self._record(begin=False)
        info = first_of(self.batch.step_info() | self.batch.totals())
        return self._observe(), float(rewards[0]), bool(ended[0]), False, info

    def action_masks(self) -> npt.NDArray[np.bool_]:
        """(R, 3·G) legal pairs."""
        mask: npt.NDArray[np.bool_] = self.batch.observe()["action_mask"][0].astype(bool)
        return mask

    def get_state(self) -> dict[str, npt.NDArray[Any]]:
        """Everything that changes, as arrays."""
        return self.batch.get_state()

    def set_state(self, state: dict[str, npt.NDArray[Any]]) -> None:
        """Go back to a state of :meth:`get_state`: the environment continues bit for bit."""
        self.batch.set_state(state)


def copied(observation: ObsDict) -> ObsDict:
    """The arrays of one environment, as copies."""
    return {name: array.copy() for name, array in observation.items()}
