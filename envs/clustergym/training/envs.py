"""Seeded vector environments: creation, state for checkpoints, evaluation episodes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers.vector import RecordEpisodeStatistics

VectorEnv = gym.vector.VectorEnv[Any, Any, Any]

STATISTICS = "episode_returns", "episode_lengths", "prev_dones"
QUEUES = "return_queue", "length_queue"


def derive_seed(*key: int) -> int:
    """A 31-bit seed for a key such as (seed, rank). Similar keys give unrelated seeds."""
    return int(np.random.SeedSequence(key).generate_state(1)[0] >> 1)


def evaluation_seed(seed: int) -> int:
    """Seed of the evaluation episodes of a run. No environment of a training run starts with it."""
    return derive_seed(seed, 0, 0, 1)


def make_vec(
    env_id: str, num_envs: int, videos: Path | None = None, flatten: bool = False, **options: Any
) -> VectorEnv:
    """``gymnasium.make_vec`` with SAME_STEP autoreset: the step that ends an episode also begins the next one.

    The vector version of an environment is used if it has one with this autoreset mode. Otherwise copies of the
    environment are stepped one after another (``SyncVectorEnv``). ``module:Id-v0`` imports the module first. With
    ``videos``, the first episode is recorded to this folder. With ``flatten``, observations that are no vectors become
    ones. ``options`` are passed on to the environment.
    """
    module, _, name = env_id.rpartition(":")
    if module:
        import_module(module)
    if gym.spec(name).vector_entry_point is not None and videos is None:
        envs: VectorEnv = gym.make_vec(name, num_envs=num_envs, **options)
        if envs.metadata.get("autoreset_mode") == AutoresetMode.SAME_STEP and (_is_flat(envs) or not flatten):
            return envs
        envs.close()
    if videos is not None:
        options["render_mode"] = "rgb_array"
    wrappers: list[Any] = [] if videos is None else [partial(record_video, folder=videos)]
    same_step = {"autoreset_mode": AutoresetMode.SAME_STEP}
    make = partial(gym.make_vec, name, num_envs, "sync", vector_kwargs=same_step, **options)
    envs = make(wrappers=wrappers)
    if flatten and not _is_flat(envs):
        envs.close()
        envs = make(wrappers=[*wrappers, gym.wrappers.FlattenObservation])
    return envs


def _is_flat(envs: VectorEnv) -> bool:
    return len(envs.single_observation_space.shape or ()) == 1


def record_video(env: gym.Env[Any, Any], folder: Path) -> gym.Env[Any, Any]:
    """Record the first episode of an environment. Its render mode must be rgb_array."""
    return gym.wrappers.RecordVideo(env, str(folder), episode_trigger=lambda number: number == 0, disable_logger=True)


def get_state(envs: VectorEnv) -> dict[str, Any] | None:
    """State of the environments and of their episode statistics. None if the environments cannot save theirs."""
    if not hasattr(envs.unwrapped, "get_state"):
        return None
    state: dict[str, Any] = {"envs": {key: _tensor(value) for key, value in envs.unwrapped.get_state().items()}}
    if recorder := _recorder(envs):
        state |= {name: torch.from_numpy(getattr(recorder, name)).clone() for name in STATISTICS}
        state |= {name: list(map(float, getattr(recorder, name))) for name in QUEUES}
    return state


def set_state(envs: VectorEnv, state: dict[str, Any]) -> None:
    """Go back to a state of :func:`get_state`: the environments continue bit for bit."""
    envs.unwrapped.set_state({key: _array(value) for key, value in state["envs"].items()})  # type: ignore[attr-defined]
    if recorder := _recorder(envs):
        for name in STATISTICS:
            setattr(recorder, name, state[name].numpy().copy())
        for name in QUEUES:
            getattr(recorder, name).extend(state[name])


def _recorder(envs: VectorEnv) -> RecordEpisodeStatistics[Any, Any] | None:
    while isinstance(envs, gym.vector.VectorWrapper):
        if isinstance(envs, RecordEpisodeStatistics):
            return envs
        envs = envs.env
    return None


def _tensor(value: Any) -> Any:
    # A copy: environments can return their own memory.
    return torch.from_numpy(value.copy()) if isinstance(value, np.ndarray) else value


def _array(value: Any) -> Any:
    return value.cpu().numpy() if isinstance(value, torch.Tensor) else value


def play_episodes(
    envs: VectorEnv,
    act: Callable[[Any, dict[str, Any]], Any],
    seed: int,
    begin: Callable[[int], None] | None = None,
) -> list[float]:
    """Undiscounted returns of one episode per environment. Closes ``envs``.

    ``act(obs, infos)`` chooses the actions. ``begin(num_envs)`` is called before the first step: an agent with a memory
    clears it.
    """
    if begin is not None:
        begin(envs.num_envs)
    returns, playing = np.zeros(envs.num_envs), np.ones(envs.num_envs, bool)
    obs, infos = envs.reset(seed=seed)
    while playing.any():
        obs, rewards, terminations, truncations, infos = envs.step(act(obs, infos))
        returns += rewards * playing
        playing &= ~(terminations | truncations)
    envs.close()
    found: list[float] = returns.tolist()
    return found


def evaluate(
    make_envs: Callable[[int, Path | None], VectorEnv],
    act: Callable[[Any, dict[str, Any]], Any],
    num_episodes: int,
    seed: int,
    videos: Path | None = None,
    begin: Callable[[int], None] | None = None,
) -> list[float]:
    """Returns of evaluation episodes, see :func:`play_episodes`. With ``videos``, one more episode is recorded there.

    ``seed`` is that of the training run; the environments get :func:`evaluation_seed`.
    """
    with torch.no_grad():
        if videos is not None:
            play_episodes(make_envs(1, videos), act, evaluation_seed(seed), begin)
        return play_episodes(make_envs(num_episodes, None), act, evaluation_seed(seed), begin) if num_episodes else []
