"""Run folders: where a run writes its logs and checkpoints."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from clustergym.common.checkpoints import CHECKPOINT_NAME


def run_folder(name: str, run_dir: str | Path | None = None, resume: bool = False) -> Path:
    """Choose and create the folder of a run. Under ``torchrun``, rank 0 chooses for all ranks.

    Without ``run_dir``, a new run uses ``runs/<name>``, or ``runs/<name>-2``, ``-3``, … if that exists. A resumed run
    uses the newest of these folders that holds a checkpoint. If there is none, it starts from the beginning, so the
    same command can be repeated until it succeeds. A given ``run_dir`` with a checkpoint is refused unless the run
    resumes, because the logs of two runs would be mixed.
    """
    distributed = torch.distributed.is_initialized()
    chosen = [""]
    if not distributed or torch.distributed.get_rank() == 0:
        folder = choose_folder(name, run_dir, resume)
        folder.mkdir(parents=True, exist_ok=True)
        chosen = [str(folder)]
    if distributed:
        torch.distributed.broadcast_object_list(chosen)
    return Path(chosen[0])


def choose_folder(
    name: str, run_dir: str | Path | None, resume: bool, checkpoint_pattern: str = CHECKPOINT_NAME
) -> Path:
    """The folder that :func:`run_folder` uses. ``checkpoint_pattern`` finds its checkpoints. Creates nothing."""
    if run_dir is not None:
        folder = Path(run_dir)
        if (folder / CHECKPOINT_NAME).exists() and not resume:
            raise FileExistsError(
                f"{folder} already holds {CHECKPOINT_NAME}: use --resume to continue that run, "
                "or another --run-dir to start a new one"
            )
    else:
        existing = _numbered_folders(Path("runs"), name)
        resumable = [folder for folder in existing if any(folder.glob(checkpoint_pattern))]
        if resume and resumable:
            folder = resumable[-1]
        else:
            folder = Path("runs") / (name if not existing else f"{name}-{_number(existing[-1], name) + 1}")
    return folder


def _numbered_folders(root: Path, name: str) -> list[Path]:
    """The folders ``name``, ``name-2``, ``name-3``, … in ``root``, sorted by number."""
    pattern = re.compile(re.escape(name) + r"(-\d+)?")
    found = [path for path in root.glob("*") if path.is_dir() and pattern.fullmatch(path.name)]
    return sorted(found, key=lambda path: _number(path, name))


def _number(folder: Path, name: str) -> int:
    return int(folder.name[len(name) + 1 :] or 1)
