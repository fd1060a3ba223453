"""The picture of expert offloading."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from clustergym.moe_offload.environment import MoEOffloadEnv
from clustergym.moe_offload.kernels import state
from clustergym.moe_offload.viewer import (
    COMPUTE,
    DEMAND,
    HEIGHT,
    KINDS,
    MOVE,
    PREFETCH,
    STALL,
    WIDTH,
    Recorder,
    draw,
)


@pytest.mark.parametrize("gpus", [1, 4])
def test_the_timeline_is_what_the_simulator_did(gpus: int) -> None:
    """Every load is one bar of its length on its link; waiting and computing add up to the time that has passed."""
    env = MoEOffloadEnv(max_tokens=3, gpus=gpus, render_mode="rgb_array")
    obs, _ = env.reset(seed=1)
    rng, done = np.random.default_rng(0), False
    recorder, task = env._recorder, env.batch.task
    assert isinstance(recorder, Recorder)
    recorder.spans = type(recorder.spans)(recorder.spans)  # without a limit
    while not done:
        pairs = np.argwhere(obs["action_mask"])
        obs, _, done, _, info = env.step(pairs[rng.integers(len(pairs))])
    spans = recorder.spans
    kinds = [span.kind for span in spans]
    assert kinds.count(PREFETCH) == info["prefetches"] > 0
    assert kinds.count(DEMAND) == info["loads"] > 0
    assert kinds.count(MOVE) == info["moves"]
    for span in spans:
        if span.kind in (DEMAND, PREFETCH):
            assert span.end - span.begin == pytest.approx(task.load_ms)
    for g in range(gpus):
        on_link = sorted((span.begin, span.end) for span in spans if span.line == g and span.kind in (DEMAND, PREFETCH))
        assert all(second[0] >= first[1] - 1e-9 for first, second in pairwise(on_link))
    assert sum(s.end - s.begin for s in spans if s.kind == STALL) == pytest.approx(info["stall_ms"])
    computed = sum(s.end - s.begin for s in spans if s.kind == COMPUTE)
    assert computed == pytest.approx(env.batch.state.time[0, state.COMPUTE])


def test_pictures() -> None:
    env = MoEOffloadEnv(max_tokens=3, render_mode="rgb_array")
    obs, _ = env.reset(seed=1)
    first = env.render()
    assert first is not None
    assert first.shape == (HEIGHT, WIDTH, 3)
    assert np.array_equal(first, env.render())
    assert np.array_equal(first, draw(env._recorder.frame()))
    rng = np.random.default_rng(0)
    for _ in range(40):
        pairs = np.argwhere(obs["action_mask"])
        obs, *_ = env.step(pairs[rng.integers(len(pairs))])
    last = env.render()
    assert last is not None
    assert not np.array_equal(first, last)
    for kind in (DEMAND, PREFETCH, STALL, COMPUTE):
        assert (last == np.array(KINDS[kind], np.uint8)).all(2).sum() > 100, kind


def test_an_unknown_render_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown render_mode 'ansi'"):
        MoEOffloadEnv(render_mode="ansi")
