"""Draw the pictures of the placement and the allocation environment on the pages: ``python docs/make_pictures.py``."""

from __future__ import annotations

from pathlib import Path

import gymnasium
import matplotlib.image
import numpy as np

from clustergym.gpu_allocation.rules import RULES

FOLDER = Path(__file__).parent / "images"


def viewer(path: Path) -> None:
    """The placement environment in the middle of an episode of a greedy agent."""
    env = gymnasium.make(
        "clustergym:MoEPlacementDrift-v0", trace="synthetic", cluster="h800-4x4", tokens_per_rank=64, intervals=4,
        render_mode="rgb_array",
    )  # fmt: skip
    env.reset(seed=4)
    experts = np.arange(env.unwrapped.batch.n_experts)[None]
    layer_steps = env.unwrapped.batch.config.ops_per_layer
    for _ in range(2 * 8 * layer_steps + 3 * layer_steps + layer_steps // 2):
        savings = env.unwrapped.batch.lookahead(experts)[0, ..., 1:].sum(-1)  # true time and migration
        env.step(np.unravel_index(int(np.argmax(savings)), savings.shape))
    matplotlib.image.imsave(path, env.render())


def allocation(path: Path) -> None:
    """The allocation environment after an episode under the rule vpa."""
    env = gymnasium.make("clustergym:GPUAllocationHistory-v0", render_mode="rgb_array")
    env.reset(seed=1)
    rule = RULES["vpa"](env.unwrapped.batch)
    for _ in range(100):
        env.step(rule.act()[0])
        rule.learn()
    matplotlib.image.imsave(path, env.render())


if __name__ == "__main__":
    viewer(FOLDER / "placement.png")
    allocation(FOLDER / "gpu_allocation.png")
