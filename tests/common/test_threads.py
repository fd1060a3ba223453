"""Work that is spread over threads."""

from __future__ import annotations

import numpy as np
import pytest

from clustergym.common.threads import parallel_for


@pytest.mark.parametrize("n", [1, 2, 7, 100, 1000])
@pytest.mark.parametrize("chunks", [None, 1, 3, 50])
def test_spread_does_every_part_once(n: int, chunks: int | None) -> None:
    done = np.zeros(n, int)

    def work(first: int, last: int, step: int) -> None:
        done[first:last] += step

    parallel_for(work, n, 2, chunks=chunks)
    assert (done == 2).all()


def test_spread_raises_what_a_part_raises() -> None:
    def work(first: int, last: int) -> None:
        if first <= 37 < last:
            raise KeyError(37)

    with pytest.raises(KeyError):
        parallel_for(work, 64, chunks=64)
