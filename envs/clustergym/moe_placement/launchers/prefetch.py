"""Prefetch memory into the CPU caches before it is needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from clustergym.common.compiling import PLAIN_PYTHON, device

ir = cgutils.ir
LINE_BYTES = 64
# Columns of the blocks of memory.
ADDRESS, STRIDE, LINES, GROUP = range(4)
NOTHING = np.zeros((0, 4), np.int64)


@intrinsic
def _prefetch_lines(typingctx: Any, address: Any, lines: Any) -> Any:
    """A loop of LLVM's prefetch over cache lines from an address on. It never faults and changes nothing."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        start, count = arguments
        i32, pointer = ir.IntType(32), ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [pointer, i32, i32, i32])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        with cgutils.for_range(builder, count) as loop:
            line = builder.add(start, builder.mul(loop.index, ir.Constant(loop.index.type, LINE_BYTES)))
            # For reading, medium locality, data cache.
            builder.call(function, [builder.inttoptr(line, pointer), i32(0), i32(2), i32(1)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@device
def prefetch(blocks, b, group):
    """Prefetch the environment's part of the blocks of memory (see :func:`memory_of`) of this group or a lower one."""
    for i in range(blocks.shape[0]):
        if blocks[i, GROUP] <= group:
            _prefetch_lines(blocks[i, ADDRESS] + b * blocks[i, STRIDE], blocks[i, LINES])


@device
def part_of(block, b, part, n_parts):
    """(address, cache lines) of one of ``n_parts`` equal parts of the environment's memory in a block."""
    size = block[STRIDE] // n_parts
    return block[ADDRESS] + b * block[STRIDE] + part * size, (size + LINE_BYTES - 1) // LINE_BYTES


@device
def prefetch_part(blocks, i, b, part, n_parts):
    """Prefetch one part of a block; ``i`` counts the blocks from the last one, which is 1."""
    address, lines = part_of(blocks[blocks.shape[0] - i], b, part, n_parts)
    _prefetch_lines(address, lines)


def memory_of(*groups: Sequence[npt.NDArray[Any]]) -> npt.NDArray[np.int64]:
    """(arrays, 4) for :func:`prefetch`: address of the first environment, bytes per environment, cache lines, group.

    Empty if there is only one environment, or if nothing is compiled.
    """
    if len(groups[0][0]) == 1 or PLAIN_PYTHON:
        return NOTHING
    return np.array(
        [
            (array.__array_interface__["data"][0], array.strides[0], -(-array.strides[0] // LINE_BYTES), group)
            for group, arrays in enumerate(groups)
            for array in arrays
        ],
        np.int64,
    )
