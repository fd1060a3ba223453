"""One training run: folder, seeds, device, logs and checkpoints."""

from __future__ import annotations

import json
import math
import os
import random
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch

from clustergym.common.checkpoints import CHECKPOINT_NAME, CheckpointError, load_checkpoint, save_checkpoint
from clustergym.common.extras import require
from clustergym.common.files import atomic_file, write_atomically
from clustergym.common.statistics import ci95
from clustergym.training.args import FREE_ON_RESUME, FlagError, RunArgs
from clustergym.training.distributed import World, choose_device
from clustergym.training.envs import derive_seed, get_state, set_state
from clustergym.training.logs import Progress, open_tensorboard, open_wandb


class NonFiniteLoss(FloatingPointError):
    """A loss became NaN or infinite. The message names the last good checkpoint."""


class Run:
    """Folder, seeds, device, logs and checkpoints of a training run.

    ::

        run = Run("ppo", args, args.env_id, steps_per_iteration=args.num_envs * args.num_steps)
        ...                                                # environments, agent, optimizer on run.device
        saved = run.load_checkpoint(agent=agent, optimizer=optimizer, envs=envs)
        for iteration in run.iterations():
            ...                                            # roll-out and update
            run.log({"losses/value_loss": value_loss})
            run.checkpoint(agent=agent, optimizer=optimizer, envs=envs, next_obs=next_obs)
        return run.finish(mean_return=mean_return)         # prints the result line

    Creating a run seeds the generators of torch, NumPy and Python, and with ``--resume`` reads the checkpoint.

    Attributes:
        folder: Logs and checkpoints are here.
        device: The GPU, if there is one and ``--cuda`` is not False. Otherwise the CPU.
        num_iterations, total_steps: Length of the run.
        first_iteration: 1, or the number of the iteration after the checkpoint.
        resumed: Whether ``--resume`` was given, or torchrun has started this process again.
        iteration, global_step: The current iteration, and the environment steps at its end.
        writer: TensorBoard's SummaryWriter on rank 0, otherwise None.

    Args:
        trainer: Name of the trainer. Checkpoints of other trainers are refused.
        args: Its arguments.
        task: Name of the task, part of the folder's name.
        steps_per_iteration: Environment steps per iteration of one process.
        world: The processes of a trainer that ``torchrun`` can start. Default: one process.
        num_iterations: Length of the run. Default: ``--total-timesteps``, rounded up to whole iterations.
    """

    def __init__(
        self,
        trainer: str,
        args: RunArgs,
        task: str,
        steps_per_iteration: int,
        world: World | None = None,
        num_iterations: int | None = None,
    ) -> None:
        # When a rank fails, torchrun starts all ranks again, with their first arguments.
        args = replace(args, resume=args.resume or int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0)
        if world is None:
            if int(os.environ.get("WORLD_SIZE", "1")) > 1:
                raise FlagError(f"{trainer}.py runs in one process: start it with python, not with torchrun")
            torch.set_num_threads(1)  # small networks gain nothing from more
            world = World(device=choose_device(args.cuda, deterministic=args.torch_deterministic))
        self.world, self.device = world, world.device
        self.steps_per_iteration = steps_per_iteration * world.size
        self.num_iterations = num_iterations or math.ceil(args.total_timesteps / self.steps_per_iteration)
        self.total_steps = self.num_iterations * self.steps_per_iteration
        self.steps_per_s = 0.0
        self.writer = self.wandb = None
        self._trainer, self._args = trainer, args
        self._config: dict[str, Any] = json.loads(json.dumps(asdict(args), default=str))  # paths become text
        self.folder = Path(
            world.share(str(choose_folder(f"{trainer}__{task}__{args.seed}", args.run_dir, args.resume)))
        )
        self._checkpoint = self.folder / CHECKPOINT_NAME
        self._saved = self._read_checkpoint()
        self.resumed = args.resume
        self.iteration = self._saved["iteration"] if self._saved else 0
        self.first_iteration = self.iteration + 1
        seed = derive_seed(args.seed, self.first_iteration, world.rank)
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002  environments may use the global generator
        torch.manual_seed(seed)
        if world.is_main:
            print(f"device {self.device}, folder {self.folder}", file=sys.stderr)
            self.folder.mkdir(parents=True, exist_ok=True)
            self.writer = open_tensorboard(self.folder, self._config, self.global_step)
            if args.track or os.environ.get("WANDB_SWEEP_ID"):
                self.wandb = open_wandb(self.folder, self._config, bool(self._saved))

    @property
    def global_step(self) -> int:
        return self.iteration * self.steps_per_iteration

    def iterations(self) -> Iterator[int]:
        """Numbers of the remaining iterations. Shows the progress."""
        self._progress = Progress(self.total_steps, self.global_step) if self.world.is_main else None
        try:
            for iteration in range(self.first_iteration, self.num_iterations + 1):
                self.iteration = iteration
                yield iteration
        finally:
            if self._progress:
                self.steps_per_s = self._progress.steps_per_s(self.global_step)
                self._progress.close()

    def log(self, metrics: Mapping[str, float], **shown: float) -> None:
        """Log the metrics of the iteration. The progress bar also shows the fields ``shown``.

        Raises:
            NonFiniteLoss: a loss is NaN or infinite. A checkpoint after it would be useless.
        """
        bad = [
            f"{key} is {value}"
            for key, value in metrics.items()
            if key.startswith("losses/") and key != "losses/explained_variance" and not math.isfinite(value)
        ]
        if bad:
            kept = (
                f"the last good checkpoint is {self._checkpoint}" if self._checkpoint.exists() else "no checkpoint yet"
            )
            raise NonFiniteLoss(f"iteration {self.iteration}: {', '.join(bad)}; {kept}. Try a lower --learning-rate")
        if self.writer is None or self._progress is None:
            return
        metrics = dict(metrics) | {"charts/SPS": self._progress.steps_per_s(self.global_step)}
        for key, value in metrics.items():
            self.writer.add_scalar(key, value, self.global_step)
        if self.wandb is not None:
            self.wandb.log(metrics, step=self.global_step)
        self._progress.update(self.global_step, shown)

    def evaluation_due(self) -> bool:
        """Whether ``--eval-interval`` asks for an evaluation after this iteration, which is not the last one."""
        interval = self._args.eval_interval
        return bool(interval) and self.iteration % interval == 0 and self.iteration < self.num_iterations

    def video_folder(self) -> Path | None:
        """Folder for the video of an evaluation, None without ``--capture-video``."""
        return self.folder / "videos" / f"step-{self.global_step}" if self._args.capture_video else None

    def checkpoint(self, **state: Any) -> None:
        """Save a checkpoint if ``--checkpoint-interval`` asks for one, and after the last iteration.

        Call it on every rank. Modules, optimizers and other objects with a ``state_dict`` are equal on all ranks and
        are saved once. All other values (environments, tensors, numbers) are saved for each rank, with the states of
        the random number generators. The file is written atomically.
        """
        interval = self._args.checkpoint_interval
        if not interval or (self.iteration % interval and self.iteration < self.num_iterations):
            return
        shared = {name: each.state_dict() for name, each in state.items() if hasattr(each, "state_dict")}
        own = {name: each for name, each in state.items() if name not in shared}
        own = {name: get_state(each) if isinstance(each, gym.vector.VectorEnv) else each for name, each in own.items()}
        ranks = self.world.gather(_on_cpu(own) | {"rng": rng_state()})
        if self.writer is not None:
            # The logs must not be behind the checkpoint, because a resumed run starts logging after it.
            self.writer.flush()
            content = {"args": self._config, "iteration": self.iteration, "shared": shared, "ranks": ranks}
            save_checkpoint(self._checkpoint, self._trainer, content)

    def _read_checkpoint(self) -> dict[str, Any] | None:
        saved = None
        if self._args.resume and self.world.is_main and self._checkpoint.exists():
            saved = load_checkpoint(self._checkpoint, self._trainer)
        saved = self.world.share(saved)
        if saved is None:
            return None
        before, now = saved["args"], self._config
        differing = [
            f"{key} was {before.get(key)!r}, now {now.get(key)!r}"
            for key in sorted(before.keys() | now.keys())
            if key not in FREE_ON_RESUME and before.get(key) != now.get(key)
        ]
        if differing:
            raise CheckpointError("cannot resume with other arguments: " + "; ".join(differing))
        if len(saved["ranks"]) != self.world.size:
            raise CheckpointError(f"{self._checkpoint} is of {len(saved['ranks'])} processes, not {self.world.size}")
        if saved["iteration"] >= self.num_iterations:
            done = saved["iteration"] * self.steps_per_iteration
            raise CheckpointError(f"{self._checkpoint} already has {done:,} steps: increase --total-timesteps")
        return dict(saved)

    def load_checkpoint(self, **objects: Any) -> dict[str, Any]:
        """Restore the objects and the random number generators. Returns the other values of :meth:`checkpoint`.

        Without a checkpoint, nothing is restored and the dictionary is empty. Environments without a ``set_state`` stay
        as they are, and ``"envs"`` is not in the dictionary: they have to begin new episodes.
        """
        if self._saved is None:
            return {}
        saved, self._saved = self._saved, None
        own = saved["ranks"][self.world.rank]
        for name, each in objects.items():
            if not isinstance(each, gym.vector.VectorEnv):
                each.load_state_dict(saved["shared"][name])
            elif own[name] is None:
                del own[name]
            else:
                set_state(each, own[name])
        set_rng_state(own.pop("rng"))
        return dict(own)

    def save_model(self, **modules: torch.nn.Module) -> None:
        """With ``--save-model``, save networks: model.safetensors and model.json, and model.pt for clustergym eval."""
        if not (self._args.save_model and self.world.is_main):
            return
        states = {name: module.state_dict() for name, module in modules.items()}
        save_checkpoint(self.folder / "model.pt", f"{self._trainer}-model", {"args": self._config, **states})
        tensors = {f"{name}.{key}": each for name, state in states.items() for key, each in state.items()}
        # Networks can share weights. A copy for each name keeps the file simple.
        content = {key: each.detach().cpu().clone().contiguous() for key, each in tensors.items()}
        with atomic_file(self.folder / "model.safetensors") as file:
            file.write(require("safetensors.torch", "train").save(content))
        about = {"trainer": self._trainer, "args": self._config}
        write_atomically(self.folder / "model.json", json.dumps(about, indent=1) + "\n")

    def finish(self, returns: Sequence[float] = (), **fields: Any) -> dict[str, Any]:
        """Log the returns of the final evaluation, close the logs, print ``result {json}`` and return its content."""
        if not self.world.is_main:
            return {}
        assert self.writer is not None
        if returns:
            self.writer.add_scalar("eval/mean_return", float(np.mean(returns)), self.global_step)
            fields |= {"mean_return": float(np.mean(returns)), "mean_return_ci95": ci95(returns)}
        result = {
            "seed": self._args.seed,
            **fields,
            "steps": self.total_steps,
            "steps_per_s": self.steps_per_s,
            "checkpoint": str(self._checkpoint) if self._args.checkpoint_interval else None,
            "run_dir": str(self.folder),
        }
        self.writer.close()
        if self.wandb is not None:
            video = require("wandb", "train").Video
            for file in sorted(self.folder.glob("videos/**/*.mp4")):
                self.wandb.log({f"videos/{file.parent.name}": video(str(file), format="mp4")})
            last = {"eval/mean_return": fields["mean_return"]} if returns else {}
            self.wandb.log(last | {f"final/{key}": value for key, value in fields.items()})
            self.wandb.finish()
        print("result " + json.dumps(_without_nan(result)), flush=True)
        return result


def choose_folder(name: str, run_dir: Path | None, resume: bool) -> Path:
    """The folder of a run. Creates nothing.

    Without ``run_dir``, a new run uses ``runs/<name>``, or ``runs/<name>-2``, ``-3``, … if that exists. A resumed run
    uses the newest of them with a checkpoint. If there is none, it starts from the beginning, so that the same command
    can be repeated. A ``run_dir`` with a checkpoint is refused unless the run resumes: the logs would be mixed.
    """
    if run_dir is not None:
        if (Path(run_dir) / CHECKPOINT_NAME).exists() and not resume:
            advice = "use --resume to continue that run, or another --run-dir to start a new one"
            raise FlagError(f"--run-dir {run_dir} already holds {CHECKPOINT_NAME}: {advice}")
        return Path(run_dir)
    name = name.replace("/", "-")
    numbered = {int(match[1] or 1): path for path in Path("runs").glob("*")
                if (match := re.fullmatch(re.escape(name) + r"(?:-(\d+))?", path.name))}  # fmt: skip
    resumable = [number for number, path in numbered.items() if (path / CHECKPOINT_NAME).exists()]
    if resume and resumable:
        return numbered[max(resumable)]
    return Path("runs") / (f"{name}-{max(numbered) + 1}" if numbered else name)


def rng_state() -> dict[str, Any]:
    """State of the global random number generators of torch (CPU and GPUs), NumPy and Python."""
    numpy_state: Any = np.random.get_state(legacy=True)  # noqa: NPY002
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": [numpy_state[0], torch.from_numpy(numpy_state[1].astype(np.int64)), *numpy_state[2:]],
        "python": random.getstate(),
    }


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Restore a state of :func:`rng_state`."""
    torch.set_rng_state(state["torch"])
    if len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    name, key, *rest = state["numpy"]
    np.random.set_state((name, key.numpy().astype(np.uint32), *rest))  # noqa: NPY002
    random.setstate(state["python"])


def _on_cpu(value: Any) -> Any:
    """Copy nested dicts and lists, with all tensors on the CPU."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, Mapping):
        return {key: _on_cpu(each) for key, each in value.items()}
    return [_on_cpu(each) for each in value] if isinstance(value, list | tuple) else value


def _without_nan(value: Any) -> Any:
    """NaN and infinities become None, because JSON has no such numbers."""
    if isinstance(value, Mapping):
        return {str(key): _without_nan(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(each) for each in value]
    value = value.item() if isinstance(value, np.generic) else value
    return None if isinstance(value, float) and not math.isfinite(value) else value
