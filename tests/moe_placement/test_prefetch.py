"""Memory that a batch prefetches while the environment before works: addresses, and that nothing changes."""

from __future__ import annotations

import numpy as np

from clustergym.moe_placement.launchers.prefetch import NOTHING, memory_of, part_of, prefetch, prefetch_part


def address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def test_parts_are_where_the_array_has_them() -> None:
    tokens = np.zeros((3, 2, 4, 5, 8), np.uint64)  # environment, pass, GPU, slot, word
    rows = np.zeros((3, 7, 16), np.int16)  # environment, expert, GPU
    blocks = memory_of([np.zeros((3, 9))], [tokens, rows])
    for b in range(3):
        for w in range(2):
            for g in range(4):
                # 5 slots of 8 words are 320 bytes: 5 lines.
                assert part_of(blocks[1], b, 4 * w + g, 8) == (address(tokens[b, w, g]), 5)
        for e in range(7):
            # 16 GPUs of 2 bytes are half a line.
            assert part_of(blocks[2], b, e, 7) == (address(rows[b, e]), 1)


def test_prefetching_changes_nothing() -> None:
    first, second = np.arange(1000.0).reshape(4, 250), np.arange(64, dtype=np.int8).reshape(4, 16)
    blocks = memory_of([first], [second])
    assert blocks[:, -1].tolist() == [0, 1]
    for b in range(4):
        prefetch(blocks, b, 1)
        prefetch_part(blocks, 2, b, 1, 5)
        prefetch_part(blocks, 1, b, 0, 1)
    assert np.array_equal(first, np.arange(1000.0).reshape(4, 250))
    assert np.array_equal(second, np.arange(64).reshape(4, 16))


def test_one_environment_has_no_neighbour_to_prefetch() -> None:
    assert memory_of([np.zeros((1, 5))]) is NOTHING
