"""One training run: its folder, checkpoints, logs and progress bar."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

import numpy as np
import torch

from clustergym.common.checkpoints import CHECKPOINT_NAME, CheckpointError, load_checkpoint, save_checkpoint
from clustergym.common.extras import require
from clustergym.common.files import atomic_file, write_atomically
from clustergym.common.statistics import ci95
from clustergym.training.arguments import check_same_args, plain_args
from clustergym.training.distributed import World, init_distributed
from clustergym.training.folders import run_folder
from clustergym.training.logger import RunLogger
from clustergym.training.progress import Progress, print_result
from clustergym.training.random_state import derive_seed


class RequiredArgs(Protocol):
    """Arguments that a trainer must have. Further ones of :class:`TrainArgs` are used if it has them."""

    seed: int
    total_timesteps: int
    run_dir: Path | None
    resume: bool
    checkpoint_interval: int
    save_model: bool
    cuda: bool
    track: bool


class NonFiniteLoss(FloatingPointError):
    """A loss became NaN or infinite. The message names the last good checkpoint."""


def check_finite(metrics: Mapping[str, float], iteration: int, checkpoint: Path) -> None:
    """Raise NonFiniteLoss if a metric in ``losses/`` is not finite. Only the explained variance may be undefined."""
    bad = [
        f"{key} is {value}"
        for key, value in metrics.items()
        if key.startswith("losses/") and key != "losses/explained_variance" and not math.isfinite(value)
    ]
    if bad:
        kept = f"the last good checkpoint is {checkpoint}" if checkpoint.exists() else "there is no checkpoint yet"
        raise NonFiniteLoss(
            f"iteration {iteration}: {', '.join(bad)}; {kept}. "
            "Try a lower --learning-rate, and at least two transitions per minibatch"
        )


class Run:
    """Folder, checkpoints, logs and progress of a training run.

    ::

        run = Run("ppo", args, world, args.env_id, batch_size=args.num_envs * args.num_steps)
        state = run.load_checkpoint(agent=agent)
        with run:
            for iteration in run.iterations():
                ...
                run.log(metrics, iteration, mean_return=mean_return)
                run.checkpoint(iteration, agent=agent)
        return run.result(mean_return=mean_return)

    Args:
        kind: Name of the trainer. Checkpoints of other trainers are refused.
        args: Arguments of the trainer.
        world: Processes of the run.
        name: Name of the task, part of the default folder name.
        batch_size: Environment steps per iteration and process.
        may_be_empty: Allow ``--total-timesteps 0``, for trainers with a phase before the first iteration.
    """

    def __init__(
        self,
        kind: str,
        args: RequiredArgs,
        world: World,
        name: str,
        batch_size: int,
        may_be_empty: bool = False,
    ) -> None:
        steps = self.steps_per_iteration = batch_size * world.size
        if args.total_timesteps < (0 if may_be_empty else 1):
            raise ValueError(f"total_timesteps is {args.total_timesteps}: expected 1 or more")
        self.num_iterations = -(-args.total_timesteps // steps)
        self.total_steps = self.num_iterations * steps
        if self.total_steps != args.total_timesteps and world.is_main:
            message = f"{args.total_timesteps:,} steps are not a multiple of {steps:,}, the steps of an iteration"
            print(f"{message}: training for {self.total_steps:,}", file=sys.stderr)
        self.folder = run_folder(f"{kind}__{name.replace('/', '-')}__{args.seed}", args.run_dir, args.resume)
        self.first_iteration = 1
        self.steps_per_s = 0.0
        self._kind, self._args, self._world = kind, args, world
        self._config = plain_args(args) | {"world_size": world.size}
        self._checkpoint = self.folder / CHECKPOINT_NAME

    def load_checkpoint(self, **objects: Any) -> dict[str, Any] | None:
        """State to resume from, or None if the run starts from the beginning.

        Rank 0 reads the file and sends it to the others, so all ranks resume from the same iteration. Tensors are on
        the CPU: ``load_state_dict`` of a module or an optimizer moves them to its own device.

        Args:
            **objects: Restored with ``load_state_dict`` from the state of that name.
        """
        state: dict[str, Any] | None = None
        if self._args.resume and self._world.is_main and self._checkpoint.exists():
            state = load_checkpoint(self._checkpoint, self._kind)
        state = self._world.share(state)
        if state is None:
            return None
        check_same_args(state["args"], self._config)
        self.first_iteration = state["iteration"] + 1
        if state["iteration"] > self.num_iterations:
            done = state["iteration"] * self.steps_per_iteration
            raise CheckpointError(f"{self._checkpoint} already has {done:,} steps: increase --total-timesteps")
        others = state.pop("other_ranks", [])
        state |= {} if self._world.is_main or not others else others[self._world.rank - 1]
        for name, each in objects.items():
            each.load_state_dict(state[name])
        return state

    def __enter__(self) -> Self:
        start_step, is_main = (self.first_iteration - 1) * self.steps_per_iteration, self._world.is_main
        self._stack = ExitStack()
        self.logger = self._stack.enter_context(
            RunLogger(
                self.folder,
                self._config,
                self._args.track,
                getattr(self._args, "wandb_project_name", "clustergym"),
                start_step=start_step,
                enabled=is_main,
                entity=getattr(self._args, "wandb_entity", None),
            )
        )
        self.progress = self._stack.enter_context(Progress(self.total_steps, start_step, enabled=is_main))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stack.close()

    def iterations(self) -> Iterator[int]:
        """Numbers of the remaining iterations; the first iteration of a run is 1."""
        yield from range(self.first_iteration, self.num_iterations + 1)
        self.steps_per_s = self.progress.steps_per_s(self.total_steps)

    def check_finite(self, metrics: Mapping[str, float], iteration: int) -> None:
        """Raise NonFiniteLoss if a loss is NaN or infinite. :meth:`log` does this too."""
        check_finite(metrics, iteration, self._checkpoint)

    def log(self, metrics: Mapping[str, float], iteration: int, **shown: float) -> None:
        """Log the metrics of an iteration and update the progress bar, which shows the fields ``shown``.

        Raises:
            NonFiniteLoss: a loss is NaN or infinite. A checkpoint after it would be useless.
        """
        self.check_finite(metrics, iteration)
        step = iteration * self.steps_per_iteration
        self.logger.scalars({**metrics, "charts/SPS": self.progress.steps_per_s(step)}, step)
        self.progress.update(step, **shown)

    def checkpoint_due(self, iteration: int) -> bool:
        """Whether a checkpoint is saved after the iteration. The answer is the same on all ranks."""
        interval = self._args.checkpoint_interval
        return bool(interval) and (iteration % interval == 0 or iteration == self.num_iterations)

    def restart_due(self, iteration: int) -> bool:
        """Whether environments are reset before the iteration: at the start, after a resume and after checkpoints."""
        interval = self._args.checkpoint_interval or self.num_iterations
        return iteration == self.first_iteration or (iteration - 1) % interval == 0

    def seed_torch(self, iteration: int) -> int:
        """Seed torch's generators for the iterations from this one. Returns the seed, which differs between ranks."""
        seed = derive_seed(self._args.seed, iteration, self._world.rank)
        torch.manual_seed(seed)
        return seed

    def evaluation_due(self, iteration: int) -> bool:
        """Whether this rank evaluates after the iteration. The evaluation after training is not included."""
        interval = getattr(self._args, "eval_interval", 0)
        due = bool(interval) and iteration % interval == 0 and iteration < self.num_iterations
        return due and self._world.is_main

    def video_folder(self, iteration: int | None = None) -> Path | None:
        """Folder for the video of an evaluation, with its step. None without ``--capture-video``."""
        step = (self.num_iterations if iteration is None else iteration) * self.steps_per_iteration
        return self.folder / "videos" / f"step-{step}" if getattr(self._args, "capture_video", False) else None

    def checkpoint(self, iteration: int, per_rank: Mapping[str, Any] | None = None, **state: Any) -> None:
        """Save a checkpoint if it is due; see :meth:`save_checkpoint`."""
        if self.checkpoint_due(iteration):
            self.save_checkpoint(iteration, per_rank, **state)

    def save_checkpoint(self, iteration: int, per_rank: Mapping[str, Any] | None = None, **state: Any) -> None:
        """Save one checkpoint for all ranks. Call it on every rank.

        Args:
            iteration: The last iteration that the state includes.
            per_rank: State that differs between ranks. Each rank gets its own back from :meth:`load_checkpoint`.
            **state: State that is equal on all ranks, or only needed on rank 0. Of objects with a ``state_dict``, that
                is saved.
        """
        ranks = self._world.gather(_on_cpu(_plain_state(per_rank))) if per_rank is not None else [{}]
        if not self._world.is_main:
            return
        # The logs must not be behind the checkpoint, because a resumed run starts logging after it.
        self.logger.flush()
        content = {"args": self._config, "iteration": iteration, **_plain_state(state), **ranks[0]}
        if len(ranks) > 1:
            content["other_ranks"] = ranks[1:]
        save_checkpoint(self._checkpoint, self._kind, content)

    def save_model(self, **state: Any) -> None:
        """With ``--save-model``, save the trained network. See :func:`save_model`."""
        if self._args.save_model:
            save_model(self.folder, self._kind, self._config, **_plain_state(state))

    @staticmethod
    def mean_return(returns: Sequence[float]) -> dict[str, float]:
        """The metric of an evaluation. Empty without episodes."""
        return {"eval/mean_return": float(np.mean(returns))} if returns else {}

    def log_returns(self, returns: Sequence[float]) -> dict[str, float | None]:
        """Log the mean return of the final evaluation. Returns the fields for the result line."""
        if not returns:
            return {"mean_return": None, "mean_return_ci95": None}
        mean = float(np.mean(returns))
        self.logger.scalar("eval/mean_return", mean, self.total_steps)
        return {"mean_return": mean, "mean_return_ci95": ci95(returns)}

    def result(self, **fields: Any) -> dict[str, Any]:
        """Content of the result line: the given fields (None for NaN) and those that every trainer reports."""
        return {
            "seed": self._args.seed,
            **{key: None if isinstance(value, float) and math.isnan(value) else value for key, value in fields.items()},
            "steps": self.total_steps,
            "steps_per_s": self.steps_per_s,
            "checkpoint": self.folder / CHECKPOINT_NAME if self._args.checkpoint_interval else None,
            "run_dir": self.folder,
        }


def save_model(folder: Path, kind: str, config: Mapping[str, Any], **state: Any) -> None:
    """Write model.safetensors and model.json, which other programs can read, and model.pt for ``clustergym eval``.

    Tensors in nested dicts get names such as "agent.actor.0.weight". The JSON file has the trainer and its arguments.
    """
    save_checkpoint(folder / "model.pt", f"{kind}-model", {"args": dict(config), **state})
    tensors: dict[str, torch.Tensor] = {}

    def collect(prefix: str, value: Any) -> None:
        if isinstance(value, Mapping):
            for key, each in value.items():
                collect(f"{prefix}.{key}" if prefix else str(key), each)
        elif isinstance(value, torch.Tensor):
            # Networks can share weights. A copy for each name keeps the file simple.
            tensors[prefix] = value.detach().cpu().clone().contiguous()

    collect("", state)
    with atomic_file(folder / "model.safetensors") as file:
        file.write(require("safetensors.torch", "train").save(tensors))
    write_atomically(folder / "model.json", json.dumps({"trainer": kind, "args": dict(config)}, indent=1) + "\n")


def _plain_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Replace objects by what their ``state_dict`` returns."""
    return {key: value.state_dict() if hasattr(value, "state_dict") else value for key, value in state.items()}


def _on_cpu(value: Any) -> Any:
    """Copy nested dicts and lists, with all tensors on the CPU."""
    if isinstance(value, torch.Tensor):
        return value.cpu()
    if isinstance(value, Mapping):
        return {key: _on_cpu(each) for key, each in value.items()}
    return [_on_cpu(each) for each in value] if isinstance(value, list | tuple) else value


TrainerArgs = TypeVar("TrainerArgs", bound=RequiredArgs)


def run_trainer(train: Callable[[TrainerArgs, World], Mapping[str, Any]], args: TrainerArgs) -> None:
    """Entry point of a trainer: join the process group, train, and print the result line on rank 0."""
    world = init_distributed(args.cuda, deterministic=getattr(args, "torch_deterministic", False))
    try:
        result = train(args, world)
    except NonFiniteLoss as reason:
        raise SystemExit(f"training stopped: {reason}") from reason
    finally:
        world.close()
    if world.is_main:
        print_result(result)
