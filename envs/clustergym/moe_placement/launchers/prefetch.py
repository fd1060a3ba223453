"""Ask the CPU to fetch memory before it is needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import config, types
from numba.core import cgutils
from numba.extending import intrinsic

from clustergym.moe_placement.dynamics import device

ir = cgutils.ir
LINE = 64
_NOTHING = np.zeros((0, 4), np.int64)


@intrinsic
def _prefetch_lines(typingctx: Any, address: Any, lines: Any) -> Any:
    """A loop of LLVM's prefetch over cache lines from an address on; it never faults and changes nothing."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        start, count = arguments
        i32, pointer = ir.IntType(32), ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [pointer, i32, i32, i32])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        with cgutils.for_range(builder, count) as loop:
            line = builder.add(start, builder.mul(loop.index, ir.Constant(loop.index.type, LINE)))
            # To read, wanted soon, data.
            builder.call(function, [builder.inttoptr(line, pointer), i32(0), i32(2), i32(1)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@device
def prefetch(blocks, b, which):
    """Fetch environment ``b``'s part of the blocks of memory (see :func:`memory_of`) of kind ``which`` or less."""
    for i in range(blocks.shape[0]):
        if blocks[i, 3] <= which:
            _prefetch_lines(blocks[i, 0] + b * blocks[i, 1], blocks[i, 2])


def memory_of(*kinds: Sequence[npt.NDArray[Any]]) -> npt.NDArray[np.int64]:
    """(arrays, 4) for :func:`prefetch`: address of the first environment, bytes from one to the next, cache lines of one, kind.

    Nothing where there is no neighbour to fetch for, or nothing is compiled.
    """
    if len(kinds[0][0]) == 1 or config.ENABLE_CUDASIM or config.DISABLE_JIT:
        return _NOTHING
    return np.array(
        [
            (array.__array_interface__["data"][0], array.strides[0], -(-array.strides[0] // LINE), kind)
            for kind, arrays in enumerate(kinds)
            for array in arrays
        ],
        np.int64,
    )
