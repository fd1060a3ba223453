"""Devices, and training in several processes with ``torchrun``."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from clustergym.training.args import FlagError


@dataclass(frozen=True)
class World:
    """The processes of a run and this one's rank. Without ``torchrun`` there is one process."""

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def average_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Replace each gradient by its mean over all ranks, in one message."""
        if self.size == 1:
            return
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        torch.distributed.all_reduce(flat)
        flat /= self.size
        for gradient, mean in zip(gradients, torch.split(flat, [g.numel() for g in gradients]), strict=True):
            gradient.copy_(mean.view_as(gradient))

    def mean(self, value: float) -> float:
        """Mean of a number over all ranks, so that decisions based on it (early stopping) are the same on all ranks."""
        if self.size == 1:
            return value
        total = torch.tensor([value], dtype=torch.float64, device=self.device)
        torch.distributed.all_reduce(total)
        return float(total) / self.size

    def moments(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
        """Mean, variance and number of the rows of all ranks. Every rank passes the same number of rows."""
        number = len(rows)
        mean = rows.sum(0) / number
        variance = ((rows - mean) ** 2).sum(0) / number
        if self.size == 1:
            return mean, variance, number
        own = torch.from_numpy(np.stack([mean, variance])[None]).to(self.device)
        means, variances = self.all_gather(own).cpu().numpy().swapaxes(0, 1)
        return means.mean(0), variances.mean(0) + means.var(0), number * self.size

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, on rank 0. Other ranks get an empty list."""
        if self.size == 1:
            return [value]
        found: list[Any] | None = [None] * self.size if self.is_main else None
        torch.distributed.gather_object(value, found)
        return found or []

    def all_gather(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows of all ranks below each other, on all ranks. Every rank passes the same number of rows."""
        if self.size == 1:
            return rows
        parts = [torch.empty_like(rows) for _ in range(self.size)]
        torch.distributed.all_gather(parts, rows)
        return torch.cat(parts)

    def share(self, value: Any) -> Any:
        """The value of rank 0, on all ranks."""
        if self.size == 1:
            return value
        box = [value]
        torch.distributed.broadcast_object_list(box)
        return box[0]

    def broadcast(self, module: torch.nn.Module) -> None:
        """Copy the parameters and buffers of rank 0 to all ranks."""
        if self.size > 1:
            for tensor in module.state_dict().values():
                torch.distributed.broadcast(tensor, src=0)

    def close(self) -> None:
        """Call this after the last message of a run. All ranks leave together."""
        if self.size > 1:
            torch.distributed.barrier()
            torch.distributed.destroy_process_group()


def choose_device(cuda: bool | None, local_rank: int = 0, deterministic: bool = False) -> torch.device:
    """The GPU of this rank, or the CPU. With None, the GPU if there is one.

    With ``deterministic``, only deterministic kernels are used on the GPU from now on.

    Raises:
        FlagError: ``cuda`` is True, but there is no GPU.
    """
    if cuda and not torch.cuda.is_available():
        raise FlagError("--cuda was given, but torch finds no GPU: remove the flag to train on the CPU")
    if cuda is False or not torch.cuda.is_available():
        return torch.device("cpu")
    if deterministic:
        # Matrix products of cuBLAS are deterministic only with this setting, read when they are first used.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cudnn.benchmark = False
    return torch.device("cuda", local_rank)


def keep_freed_memory() -> None:
    """Reuse freed memory. By default, glibc returns large blocks to the system, and the pages of each new tensor are
    mapped again: half of the time of an update with tensors of some 10 MB. Without glibc, nothing happens."""
    m_trim_threshold, m_mmap_threshold = -1, -3
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(m_mmap_threshold, 2**30)
        libc.mallopt(m_trim_threshold, 2**31 - 1)


def init_distributed(cuda: bool | None = None, deterministic: bool = False) -> World:
    """Choose the device. Under ``torchrun``, join the process group (NCCL or Gloo)."""
    torch.set_num_threads(1)  # small networks gain nothing from more
    keep_freed_memory()
    size = int(os.environ.get("WORLD_SIZE", "1"))
    device = choose_device(cuda, int(os.environ.get("LOCAL_RANK", "0")), deterministic)
    if size == 1:
        return World(device=device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend, store, rank = "nccl" if device.type == "cuda" else "gloo", None, int(os.environ["RANK"])
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # The store of torchrun outlives the ranks. With the same keys, restarted ranks would connect to dead ones.
        shared = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        store = PrefixStore(f"restart-{os.environ['TORCHELASTIC_RESTART_COUNT']}", shared)
    torch.distributed.init_process_group(backend, store=store, rank=rank, world_size=size)
    return World(rank, size, device)
