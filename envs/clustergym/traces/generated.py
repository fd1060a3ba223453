"""Synthetic traces by name: drawn when they are first used, in a few seconds, so that the package stays small."""

from __future__ import annotations

from functools import lru_cache

from clustergym.traces.synthetic import SyntheticConfig, synthetic_trace
from clustergym.traces.token_trace import TokenTrace

GENERATED = {
    "synthetic-small": (
        "small-moe",
        SyntheticConfig(n_tokens=88_000, n_layers=2, n_experts=16, top_k=2, n_domains=8, mean_seq_len=60.0),
    ),
    "synthetic-deepseek-v3": (
        "deepseek-v3",
        SyntheticConfig(
            n_tokens=88_000, n_layers=4, first_layer=3, n_experts=256, top_k=8, n_groups=8, group_limit=4, n_domains=8
        ),
    ),
}
"""Name → model and parameters."""


@lru_cache(maxsize=len(GENERATED))
def generated_trace(name: str) -> TokenTrace:
    """The trace of a name in ``GENERATED``."""
    model, config = GENERATED[name]
    drawn = synthetic_trace(config)
    return TokenTrace(drawn.experts, drawn.n_experts, drawn.layer_ids, drawn.seq_lens, drawn.domains, model, name)
