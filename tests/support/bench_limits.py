"""Functions that break a limit of the benchmark when they are called with 0. Imports little, to start fast."""

from __future__ import annotations

import os
import time

import numpy as np


def answer(obs: np.ndarray) -> np.ndarray:
    return obs + 1


def never_returns(obs: np.ndarray) -> np.ndarray:
    while not obs:
        time.sleep(1)
    return answer(obs)


def too_much_memory(obs: np.ndarray) -> np.ndarray:
    return answer(obs) if obs else np.ones(1 << 36)


def raises(obs: np.ndarray) -> np.ndarray:
    if not obs:
        raise KeyError("no such expert")
    return answer(obs)


def kills_itself(obs: np.ndarray) -> np.ndarray:
    if not obs:
        os.kill(os.getpid(), 9)
    return answer(obs)


def pickled(obs: np.ndarray) -> np.ndarray:
    return answer(obs) if obs else np.array([{"an": "object"}], dtype=object)


def first_legal(obs: dict[str, np.ndarray]) -> np.ndarray:
    """The first pair that is legal in an environment of the MoE tasks."""
    return np.argwhere(obs["action_mask"])[0]


def always_zero(obs: dict[str, np.ndarray]) -> np.ndarray:
    return np.array(0)


def no_such_key(obs: dict[str, np.ndarray]) -> np.ndarray:
    raise KeyError("no such key")
