"""Launch CUDA kernels with one thread per environment, on torch's current stream."""

from __future__ import annotations

from typing import Any

import torch
from numba import config, cuda

THREADS = 64


def launch(kernel: Any, n: int, *arguments: Any) -> None:
    """Run a kernel for environments 0 … n−1, without waiting for it."""
    blocks = (n + THREADS - 1) // THREADS
    if config.ENABLE_CUDASIM:
        kernel[blocks, THREADS](*arguments)
        return
    kernel[blocks, THREADS, cuda.external_stream(torch.cuda.current_stream().cuda_stream)](*arguments)


def shared(tensor: torch.Tensor) -> Any:
    """The memory of a tensor as a kernel wants it, not copied. Under numba's simulator, tensors are on the host."""
    return tensor.numpy() if config.ENABLE_CUDASIM else cuda.as_cuda_array(tensor)
