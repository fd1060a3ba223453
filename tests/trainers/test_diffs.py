"""``diff`` of two trainers shows the idea of the second and little else."""

from __future__ import annotations

import ast
import difflib

import pytest

from trainers import FOLDER


def training_loop(name: str) -> list[str]:
    """The lines of ``train`` in a file."""
    source = (FOLDER / f"{name}.py").read_text()
    (function,) = (node for node in ast.parse(source).body if getattr(node, "name", "") == "train")
    return (ast.get_source_segment(source, function) or "").splitlines()


@pytest.mark.parametrize(
    ("first", "second", "lines"),
    [
        ("ppo", "ppo_kl", 60),
        ("ppo", "ppo_continuous_action", 80),
        ("ppo", "ppo_atari", 60),
        ("ppo", "ppo_lstm", 100),
        ("ppo_gpu_alloc", "ppo_gpu_alloc_lstm", 130),
    ],
)
def test_training_loops_differ_in_few_lines(first: str, second: str, lines: int) -> None:
    changed = [
        line
        for line in difflib.unified_diff(training_loop(first), training_loop(second), n=0, lineterm="")
        if line[0] in "+-" and line[:3] not in ("+++", "---")
    ]
    assert len(changed) <= lines, "\n".join(changed)


@pytest.mark.parametrize("name", ["ppo_continuous_action", "ppo_atari", "ppo_lstm", "ppo_gpu_alloc"])
def test_losses_are_those_of_ppo(name: str) -> None:
    """From the ratio to the optimizer step, the texts are equal, up to the names of a minibatch and of coefficients."""

    def losses(name: str) -> list[str]:
        loop = [line.strip() for line in training_loop(name)]
        text = loop[loop.index("ratio = logratio.exp()") : loop.index("optimizer.step()")]
        other_names = {"[:, mb_envs]": "[mb_inds]", "args.ent_coef *": "ent_coef *"}
        out = []
        for line in text:
            if "average_gradients" in line:
                continue
            for old, new in other_names.items():
                line = line.replace(old, new)
            out.append(line.replace("b_", ""))
        return out

    assert losses(name) == losses("ppo")
