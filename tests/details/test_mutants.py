"""The mutation tool works, and its list of survivors is current for a few functions. The run itself is a script."""

from __future__ import annotations

import os
from typing import Any

import torch

from mutants import Mutant, all_mutants, apply, explained
from trainers import load_trainer

FUNCTIONS = ("policy_loss", "normalize_advantages", "explained_variance", "update", "Agent.act")


def some_mutants() -> dict[str, Mutant]:
    return {str(mutant): mutant for mutant in all_mutants(("ppo",), FUNCTIONS)}


def result_with(mutant: Mutant) -> float:
    """Loss of the trainer in a child process that has the mutant."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        apply(mutant)
        os.write(writing, str(loss()).encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        return float(pipe.read())


def loss() -> float:
    ratio, advantages = torch.tensor([1.5, 0.5]), torch.tensor([2.0, -2.0])
    return float(load_trainer("ppo").policy_loss(ratio, advantages, 0.2))


def test_breakages_that_went_unnoticed_before_are_among_the_mutants() -> None:
    names: Any = some_mutants().keys()
    assert "ppo.update: optimizer.step() → pass" in names
    assert "ppo.update: world.average_gradients(parameters) → pass" in names
    losses = "loss = pg_loss - args.ent_coef * entropy + args.vf_coef * v_loss"
    assert f"ppo.update: {losses} → {losses.replace(' - ', ' + ')}" in names
    assert len(names) > 100


def test_mutant_changes_the_function_in_the_child_only() -> None:
    line = "clipped = -advantages * ratio.clamp(1 - clip_coef, 1 + clip_coef)"
    mutant = some_mutants()[f"ppo.policy_loss: {line} → {line.replace('1 - clip', '1 + clip')}"]
    before = loss()
    assert result_with(mutant) != before
    assert loss() == before


def test_every_survivor_of_the_list_exists_and_has_a_reason() -> None:
    listed = explained()
    assert all(len(reason) > 20 for reason in listed.values())
    own = {name for name in listed if name.startswith(tuple(f"ppo.{function}:" for function in FUNCTIONS))}
    assert own <= some_mutants().keys()
