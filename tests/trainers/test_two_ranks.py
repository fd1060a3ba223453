"""Two ranks of every trainer that runs under torchrun: equal to one rank on the joined batch, killed and resumed.

The ranks are forked processes that meet over gloo, as those of torchrun do. ``ppo_federated.py`` has one agent per rank
and its own tests; ``ppo_llm.py`` and ``ppo_gpu_alloc_online.py`` run in one process.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from clustergym.training import World, load_checkpoint
from clustergym.training import run as training_run
from trainers import in_two_processes
from update_cases import CASES, Case

RANKED = [case for case in CASES if case.has_world]
each_case = pytest.mark.parametrize("case", RANKED, ids=lambda case: case.id)


pytestmark = pytest.mark.usefixtures("scripted", "reproducible")


@each_case
def test_update_of_two_ranks_equals_one_rank_on_the_joined_batch(case: Case, tmp_path: Path) -> None:
    """Each rank has every second row, in one minibatch. Advantages are normalised per rank, so not here."""
    settings = {"learning_rate": 1e-2, "num_minibatches": 1, "norm_adv": False, "max_grad_norm": 0.3, "num_envs": 4}

    def weights(world: World, _: Path) -> dict[str, torch.Tensor]:
        problem = case.problem(**settings)
        problem.update(world, world.rank if world.size == 2 else None)
        return dict(problem.module.state_dict())

    torch.set_default_dtype(torch.float64)
    try:
        joined = weights(World(), tmp_path)
        before = case.problem(**settings).module.state_dict()
        ranks = in_two_processes(weights, tmp_path)
    finally:
        torch.set_default_dtype(torch.float32)
    assert any(not torch.equal(joined[name], weight) for name, weight in before.items())
    for name, weight in joined.items():
        assert torch.equal(ranks[0][name], ranks[1][name]), f"{name} differs between the ranks"
        torch.testing.assert_close(ranks[0][name], weight, rtol=1e-9, atol=1e-12)


def both_ranks(work: Callable[[World], Any], folder: Path) -> list[int]:
    """Exit statuses of two ranks. A rank whose peer has died ends with an error."""
    folder.mkdir()

    def rank(number: int) -> None:
        torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=number, world_size=2)
        work(World(number, 2))

    children = []
    for number in range(2):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                signal.alarm(120)
                os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
                rank(number)
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    return [os.waitpid(child, 0)[1] for child in children]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def dies_in_rollout(case: Case, world: World) -> None:
    """Rank 1 dies in the third iteration. Rank 0 waits for its gradients and fails."""
    collect, calls = case.trainer.Rollouts.collect, []

    def deadly(self: Any) -> Any:
        calls.append(1)
        if len(calls) == 3 and world.rank == 1:
            die()
        return collect(self)

    case.trainer.Rollouts.collect = deadly


def dies_before_saving(case: Case, world: World) -> None:
    """Rank 0 dies just before it writes the second checkpoint."""
    write, calls = training_run.save_checkpoint, []

    def deadly(*args: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            die()
        write(*args)

    training_run.save_checkpoint = deadly


def dies_after_saving(case: Case, world: World) -> None:
    """Rank 0 dies just after it has written the second checkpoint. Rank 1 may be in the next iteration."""
    write, calls = training_run.save_checkpoint, []

    def deadly(*args: Any) -> None:
        calls.append(1)
        write(*args)
        if len(calls) == 2:
            die()

    training_run.save_checkpoint = deadly


DEATHS = {"in_rollout": dies_in_rollout, "before_saving": dies_before_saving, "after_saving": dies_after_saving}

DEATHS_OF = {"ppo": ["in_rollout"], "ppo_continuous_action": ["before_saving"], "ppo_atari": ["after_saving"]}


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b or a != a


def final(case: Case, folder: Path) -> dict[str, Any]:
    state = load_checkpoint(folder / "checkpoint.pt", case.name)
    return {key: value for key, value in state.items() if key != "args"}


@pytest.mark.parametrize("case", [case for case in RANKED if case.id == case.name], ids=lambda case: case.id)
def test_killed_ranks_resume_bit_for_bit(case: Case, tmp_path: Path) -> None:
    """Four iterations with a checkpoint after each. Trainers with a state per rank are killed at three points."""
    settings = {"update_epochs": 1, "num_envs": 4, "num_steps": 4, "env_id": case.real_env_id}

    def train(folder: Path, world: World, resume: bool) -> None:
        args = case.run_args(folder, 4, **settings, checkpoint_interval=1, resume=resume, total_timesteps=2 * 4 * 16)
        with case.real_environments():
            case.trainer.train(args, world)

    assert both_ranks(lambda world: train(tmp_path / "whole", world, False), tmp_path / "a") == [0, 0]
    whole = final(case, tmp_path / "whole")
    assert whole["iteration"] == 4
    for name in DEATHS_OF.get(case.name, DEATHS):
        death = DEATHS[name]

        def killed(world: World, name: str = name, death: Any = death) -> None:
            death(case, world)
            train(tmp_path / name, world, False)

        assert signal.SIGKILL in both_ranks(killed, tmp_path / f"b-{name}"), name
        resumed = both_ranks(lambda world, name=name: train(tmp_path / name, world, True), tmp_path / f"c-{name}")
        assert resumed == [0, 0], name
        assert same(final(case, tmp_path / name), whole), name
