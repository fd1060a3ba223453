"""What every trainer needs and none should write twice: run folder, logging, checkpoints, progress, devices, ranks.

Nothing here knows an algorithm. The parts of PPO that trainers share (``layer_init``, ``compute_gae`` …) are copied between
them on purpose, so that each trainer reads from top to bottom; infrastructure is imported, so that it is right once.

A trainer uses it like this::

    world = init_distributed(args.cuda)
    folder = run_folder("ppo__CartPole-v1__1", args.run_dir, args.resume)
    state = load_checkpoint(folder / "checkpoint.pt", kind="ppo") if args.resume else None
    with RunLogger(folder, vars(args), track=args.track, start_step=0) as logger, Progress(args.total_timesteps) as progress:
        ...
        logger.scalars({"losses/value_loss": 0.1}, step)
        progress.update(step, mean_return=200.0)
        save_checkpoint(folder / "checkpoint.pt", "ppo", {"agent": agent.state_dict(), "iteration": 3})
    print_result({"mean_return": 500.0})
"""

from __future__ import annotations

import importlib
import json
import math
import os
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from clustergym.common.checkpoints import CHECKPOINT_NAME, CheckpointError, load_checkpoint, save_checkpoint

__all__ = [
    "CHECKPOINT_NAME", "CheckpointError", "Progress", "RunLogger", "World", "capture_rng_state", "check_same_args",
    "choose_device", "derive_seed", "init_distributed", "load_checkpoint", "plain_args", "print_result", "read_scalars",
    "restore_rng_state", "run_folder", "save_checkpoint",
]  # fmt: skip

# Run folders


def run_folder(name: str, run_dir: str | Path | None = None, resume: bool = False) -> Path:
    """The folder of a run, created where needed.

    Without ``run_dir`` a fresh run takes ``runs/<name>``, or ``runs/<name>-2`` and so on where that is taken, and a resumed one
    the newest of these that holds a checkpoint. A given ``run_dir`` that already holds a checkpoint is only entered to
    resume: a fresh run would mix its curves with the old ones. Without any checkpoint to resume from, the run starts
    afresh, so the command that ``--resume`` stands in may be repeated until it is done. Under ``torchrun`` rank 0 chooses for all.
    """
    if not torch.distributed.is_initialized():
        return _choose_folder(name, run_dir, resume)
    chosen = [str(_choose_folder(name, run_dir, resume)) if torch.distributed.get_rank() == 0 else ""]
    torch.distributed.broadcast_object_list(chosen)
    return Path(chosen[0])


def _choose_folder(name: str, run_dir: str | Path | None, resume: bool) -> Path:
    if run_dir is not None:
        folder = Path(run_dir)
        if (folder / CHECKPOINT_NAME).exists() and not resume:
            raise FileExistsError(
                f"{folder} already holds {CHECKPOINT_NAME}: --resume continues that run, another --run-dir starts a new one"
            )
    else:
        taken = _numbered_folders(Path("runs"), name)
        resumable = [folder for folder in taken if (folder / CHECKPOINT_NAME).exists()]
        if resume and resumable:
            folder = resumable[-1]
        else:
            folder = Path("runs") / (name if not taken else f"{name}-{_number(taken[-1], name) + 1}")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _numbered_folders(root: Path, name: str) -> list[Path]:
    """``name``, ``name-2``, … below root, in order of their numbers."""
    pattern = re.compile(re.escape(name) + r"(-\d+)?")
    found = [path for path in root.glob("*") if path.is_dir() and pattern.fullmatch(path.name)]
    return sorted(found, key=lambda path: _number(path, name))


def _number(folder: Path, name: str) -> int:
    return int(folder.name[len(name) + 1 :] or 1)


# Logging


class RunLogger:
    """Scalars to TensorBoard always, to Weights & Biases as well where ``track`` is set.

    ``WANDB_MODE=offline`` is honoured, and where no account is at hand the run is recorded offline (``wandb sync`` uploads it
    later). On resume, give the step the checkpoint was taken at: what an interrupted run logged beyond it is hidden.
    Ranks other than 0 pass ``enabled=False`` and log nothing. ``name`` names the run there, for trainers that keep several
    in one process; otherwise it is the folder's.
    """

    def __init__(
        self,
        folder: Path,
        config: Mapping[str, Any],
        track: bool = False,
        project: str = "clustergym",
        start_step: int = 0,
        enabled: bool = True,
        name: str | None = None,
    ) -> None:
        self._writer: Any = None
        self._wandb: Any = None
        if not enabled:
            return
        from torch.utils.tensorboard import SummaryWriter

        _wait_for_a_later_name(folder)
        self._writer = SummaryWriter(str(folder), purge_step=start_step + 1 if start_step else None)
        if not start_step:
            rows = "\n".join(f"|{key}|{value}|" for key, value in config.items())
            self._writer.add_text("hyperparameters", f"|param|value|\n|-|-|\n{rows}")
        if track:
            self._wandb = _init_wandb(folder, config, project, name)

    def scalar(self, tag: str, value: float, step: int) -> None:
        self.scalars({tag: value}, step)

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        if self._writer is None:
            return
        for tag, value in values.items():
            self._writer.add_scalar(tag, value, step)
        if self._wandb is not None:
            self._wandb.log(dict(values), step=step)

    def text(self, tag: str, text: str, step: int) -> None:
        if self._writer is not None:
            self._writer.add_text(tag, text, step)

    def image(self, tag: str, pixels: np.ndarray, step: int) -> None:
        """A picture (height, width, 3) of uint8."""
        if self._writer is not None:
            self._writer.add_image(tag, pixels, step, dataformats="HWC")
        if self._wandb is not None:
            wandb = importlib.import_module("wandb")
            self._wandb.log({tag: wandb.Image(pixels)}, step=step)

    def flush(self) -> None:
        """Everything so far onto the disk; call it before a checkpoint, so that curves are never behind it."""
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        if self._wandb is not None:
            self._wandb.finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _wait_for_a_later_name(folder: Path) -> None:
    """Event files are read in the order of their names, which begin with the second they were made in and go on with the
    process id: a run resumed within the second it was killed in could come first and hide nothing. So let that second pass."""
    stamps = {file.name.split(".")[3] for file in folder.glob("events.out.tfevents.*")}
    while str(int(time.time())) in stamps:
        time.sleep(0.01)


def _init_wandb(folder: Path, config: Mapping[str, Any], project: str, name: str | None = None) -> Any:
    import wandb

    # The same folder is the same run: a resumed trainer appends to it.
    identity = re.sub(r"[^\w-]", "-", name or folder.resolve().name)
    settings: dict[str, Any] = {
        "project": project,
        "name": name or folder.name,
        "id": identity,
        "dir": str(folder),
        "config": dict(config),
        "resume": "allow",
    }
    if name is not None:
        settings["reinit"] = "create_new"
    try:
        return wandb.init(**settings)
    except wandb.errors.UsageError as reason:
        Console(stderr=True).print(f"wandb: {reason}; recording offline in {folder}", markup=False, highlight=False)
        return wandb.init(**settings, mode="offline")


def read_scalars(folder: Path, tag: str) -> tuple[list[int], list[float]]:
    """(steps, values) of one TensorBoard tag of a run: what benchmarks plot and sweeps score."""
    reader = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    events = reader.EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    tags = events.Tags()["scalars"]
    if tag not in tags:
        raise KeyError(f"{folder} has no scalar {tag!r}: it has {', '.join(sorted(tags)) or 'none'}")
    found = events.Scalars(tag)
    return [event.step for event in found], [event.value for event in found]


# Arguments


def plain_args(args: object) -> dict[str, Any]:
    """The fields of an Args dataclass as values a checkpoint may hold."""
    return {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}


def check_same_args(saved: Mapping[str, Any], given: Mapping[str, Any], may_differ: Iterable[str] = ()) -> None:
    """Refuse to resume under other hyper-parameters: the run would be neither the old one nor a new one."""
    free = {"resume", "run_dir", "track", "cuda", "save_model", *may_differ}
    differing = [
        f"{key} was {saved.get(key)!r}, now {given.get(key)!r}"
        for key in sorted(saved.keys() | given.keys())
        if key not in free and saved.get(key) != given.get(key)
    ]
    if differing:
        raise CheckpointError("cannot resume with other arguments: " + "; ".join(differing))


# Random numbers


def derive_seed(*key: int) -> int:
    """A 31-bit seed from a tuple such as (seed, iteration, rank): near keys give unrelated seeds."""
    return int(np.random.SeedSequence(key).generate_state(1)[0] >> 1)


def capture_rng_state(*generators: np.random.Generator) -> dict[str, Any]:
    """torch's global generators (CPU and GPUs) and the given numpy ones as plain tensors and numbers, fit for a checkpoint."""
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": [generator.bit_generator.state for generator in generators],
    }


def restore_rng_state(state: Mapping[str, Any], *generators: np.random.Generator) -> None:
    """Put the generators back to where :func:`capture_rng_state` found them; numpy's in the order given there."""
    torch.set_rng_state(state["torch"].cpu())
    if state["cuda"] and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([each.cpu() for each in state["cuda"]])
    for generator, each in zip(generators, state["numpy"], strict=True):
        generator.bit_generator.state = each


# Progress and results


class Progress:
    """A bar with steps/s, time left and a trainer's own fields on a terminal; a plain line now and then elsewhere.

    Everything goes to standard error: standard output is for results.
    """

    def __init__(self, total_steps: int, start_step: int = 0, enabled: bool = True, line_every_s: float = 30.0) -> None:
        self.total_steps = total_steps
        self._console = Console(stderr=True)
        self._enabled = enabled
        self._bar: RichProgress | None = None
        self._task = TaskID(0)
        self._start_step = start_step
        self._began = self._last_line = time.perf_counter()
        self._line_every_s = line_every_s
        if enabled and self._console.is_terminal:
            self._bar = RichProgress(
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[rate]}"),
                TimeRemainingColumn(),
                TextColumn("{task.fields[extra]}"),
                console=self._console,
            )
            self._task = self._bar.add_task("", total=total_steps, completed=start_step, rate="", extra="")

    def steps_per_s(self, step: int) -> float:
        """Over this process's own steps: a resumed run does not count what was done before."""
        return (step - self._start_step) / max(time.perf_counter() - self._began, 1e-9)

    def update(self, step: int, **fields: float) -> None:
        if not self._enabled:
            return
        rate = self.steps_per_s(step)
        extra = "  ".join(f"{key} {value:.4g}" for key, value in fields.items() if not math.isnan(value))
        if self._bar is not None:
            self._bar.update(self._task, completed=step, rate=f"{rate:,.0f} steps/s", extra=extra)
        elif time.perf_counter() - self._last_line >= self._line_every_s or step >= self.total_steps:
            self._last_line = time.perf_counter()
            left_s = (self.total_steps - step) / max(rate, 1e-9)
            self._console.print(
                f"{step:,}/{self.total_steps:,} steps  {rate:,.0f} steps/s  {left_s:.0f} s left  {extra}",
                markup=False,
                highlight=False,
                soft_wrap=True,
            )

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()


def print_result(result: Mapping[str, Any]) -> None:
    """The last line on standard output: ``result {json}``. Infinities and NaN, which JSON lacks, become null."""

    def plain(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {str(key): plain(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [plain(each) for each in value]
        if isinstance(value, Path):
            return str(value)
        if isinstance(value, np.generic):
            value = value.item()
        return None if isinstance(value, float) and not math.isfinite(value) else value

    print("result " + json.dumps(plain(result)), flush=True)


# Devices and ranks


@dataclass(frozen=True)
class World:
    """Where this process stands among those that ``torchrun`` started; a plain ``python`` run is a world of one."""

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def average_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Replace every gradient by its mean over ranks, in one message."""
        if self.size == 1:
            return
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        torch.distributed.all_reduce(flat)
        flat /= self.size
        for gradient, mean in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(mean.view_as(gradient))

    def mean(self, value: float) -> float:
        """Mean of a number over ranks: decisions taken on it (an early stop) are then the same everywhere."""
        if self.size == 1:
            return value
        total = torch.tensor([value], dtype=torch.float64, device=self.device)
        torch.distributed.all_reduce(total)
        return float(total) / self.size

    def broadcast(self, module: torch.nn.Module) -> None:
        """Every rank starts from rank 0's parameters and buffers."""
        if self.size > 1:
            for tensor in module.state_dict().values():
                torch.distributed.broadcast(tensor, src=0)

    def barrier(self) -> None:
        if self.size > 1:
            torch.distributed.barrier()

    def close(self) -> None:
        if self.size > 1:
            torch.distributed.destroy_process_group()


def choose_device(cuda: bool, local_rank: int = 0) -> torch.device:
    """The GPU that was asked for, or the CPU. Asking for a GPU that is not there is an error, not a slow surprise."""
    if not cuda:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise RuntimeError("--cuda was given, but torch sees no GPU here: drop the flag to train on the CPU")
    return torch.device("cuda", local_rank)


def init_distributed(cuda: bool = False, threads: int = 1) -> World:
    """Device, thread count and, under ``torchrun``, the process group (nccl on GPUs, gloo on CPUs).

    One torch thread a process: small networks gain nothing from a second, and lose much where cores are shared.
    """
    torch.set_num_threads(threads)
    size = int(os.environ.get("WORLD_SIZE", "1"))
    device = choose_device(cuda, int(os.environ.get("LOCAL_RANK", "0")))
    if size == 1:
        return World(device=device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return World(torch.distributed.get_rank(), size, device)
