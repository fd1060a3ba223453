"""What engines record instead of tokens: loads always, co-activation sometimes."""

from __future__ import annotations

from typing import NoReturn

import numpy as np
import numpy.typing as npt

from clustergym.moe_placement.streams import Interval


class LoadInterval(Interval):
    """An interval of which only the loads are known. Asking for its tokens is an error.

    Args:
        pass_loads: (P, L, E) tokens routed to each expert in each pass, or (L, E) for all passes together.
        n_tokens: tokens of one pass.
    """

    _loads: npt.NDArray[np.int64]
    _n_tokens: int

    def __init__(self, pass_loads: npt.NDArray[np.int64], n_tokens: int) -> None:
        object.__setattr__(self, "_loads", pass_loads if pass_loads.ndim == 3 else pass_loads[None])
        object.__setattr__(self, "_n_tokens", n_tokens)

    def __getattr__(self, name: str) -> NoReturn:
        """Called for the fields of :class:`Interval` that this class does not set."""
        if name not in ("experts", "rows", "rank_start"):
            raise AttributeError(name)
        raise ValueError("only the load of each expert is known, not which experts each token uses")

    @property
    def n_passes(self) -> int:
        return len(self._loads)

    @property
    def n_tokens(self) -> int:
        return self._n_tokens

    @property
    def n_layers(self) -> int:
        return int(self._loads.shape[1])

    def pass_loads(self, n_experts: int) -> npt.NDArray[np.int64]:
        found = np.zeros((*self._loads.shape[:2], n_experts), np.int64)
        found[..., : self._loads.shape[2]] = self._loads
        return found
