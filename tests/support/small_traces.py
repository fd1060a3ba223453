"""Small traces for tests: one by hand, two blocks of experts, and random ones."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from clustergym.traces import TokenTrace

# Two blocks of experts, {0, 1} and {2, 3}: a token uses one block in layer 0 and the other in layer 1.
BLOCKS = np.array([[[0, 1], [2, 3]], [[0, 1], [2, 3]], [[2, 3], [0, 1]], [[2, 3], [0, 1]]])


def small_trace(**changes: Any) -> TokenTrace:
    """Six tokens in three sequences of two domains; token t uses experts t and t + 1 (mod 6) in both layers."""
    tokens = np.arange(6)
    experts = np.stack([tokens, (tokens + 1) % 6], axis=1)[:, None, :].repeat(2, axis=1)
    given_ = {"n_experts": 6, "layer_ids": [3, 5], "seq_lens": [1, 2, 3], "domains": np.array(["a", "b", "a"])}
    return TokenTrace(experts, **{**given_, "model": "toy", "name": "small", **changes})  # type: ignore[arg-type]


def same(a: TokenTrace, b: TokenTrace) -> bool:
    arrays = ("experts", "layer_ids", "seq_lens", "domains")
    return (a.n_experts, a.model) == (b.n_experts, b.model) and all(
        np.array_equal(getattr(a, field), getattr(b, field)) for field in arrays
    )


@st.composite
def traces(draw: st.DrawFn, min_sequences: int = 1) -> TokenTrace:
    """Valid traces of every small shape, with padding, up to three domains, and sometimes ids beyond int8."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    n_experts = draw(st.sampled_from([2, 5, 127, 128, 129, 300]))
    n_layers, top_k = draw(st.integers(1, 3)), draw(st.integers(1, min(4, n_experts)))
    seq_lens = draw(st.lists(st.integers(1, 5), min_size=min_sequences, max_size=6))
    shape = (sum(seq_lens), n_layers)
    experts = rng.random((*shape, n_experts)).argsort(2)[:, :, :top_k]
    experts[rng.random(experts.shape) < draw(st.sampled_from([0.0, 0.4]))] = -1
    # Every sequence keeps one id, because a trace with only padding is refused.
    experts[:, 0, 0] = np.where(experts[:, 0, 0] < 0, experts[:, 0].max(1), experts[:, 0, 0])
    experts[:, 0, 1:][experts[:, 0, 1:] == experts[:, 0, :1]] = -1
    experts[:, 0, 0] = np.maximum(experts[:, 0, 0], 0)
    labels = draw(st.lists(st.sampled_from(["a", "b", "ccc"]), min_size=len(seq_lens), max_size=len(seq_lens)))
    return TokenTrace(
        experts,
        n_experts=n_experts,
        layer_ids=rng.permutation(50)[:n_layers],
        seq_lens=np.array(seq_lens),
        domains=np.array(labels),
        model=draw(st.sampled_from([None, "toy"])),
    )
