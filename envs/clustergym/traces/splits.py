"""Training, validation and test part of a trace: for placement environments, trainers, ``eval`` and benchmarks.

Offloading has parts of its own: :func:`clustergym.moe_offload.tables.split_sequences`.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from clustergym.common.choices import index_of_choice
from clustergym.traces.token_trace import TokenTrace

SHARES = {"train": 0.5, "validation": 0.1, "test": 0.4}
"""Share of the tokens in each part."""
SAME_DOMAINS = "-same-domains"
"""Ending of the names of splits by sequence within each domain, whatever the number of domains."""
SPLITS = (*SHARES, *(name + SAME_DOMAINS for name in SHARES), "all")
DOMAINS_TO_SPLIT = 6
"""Traces with so many domains are split by domain, which leaves each part at least two. Others are split by sequence
within each domain."""


def split_trace(trace: TokenTrace, split: str = "train", seed: int = 0) -> TokenTrace:
    """One part of a trace, or with ``"all"`` the trace itself.

    If the recording defines splits (``trace.splits``), these are the parts. Otherwise ``seed`` divides the trace into
    parts that share no sequence. If the trace has enough domains, they share no domain either, so ``test`` shows
    how a policy does on traffic that it was not trained on. ``train-same-domains``, ``validation-same-domains`` and
    ``test-same-domains`` are another division, by sequence within each domain: they show what past traffic is worth.
    """
    index_of_choice(split, SPLITS if trace.splits is None else (*_recorded(trace), "all"), "split")
    if split == "all":
        return trace
    if trace.splits is not None:
        return _recorded(trace)[split]
    return _parts(trace, seed, split.endswith(SAME_DOMAINS))[split.removesuffix(SAME_DOMAINS)]


@lru_cache(maxsize=8)
def _recorded(trace: TokenTrace) -> dict[str, TokenTrace]:
    """The parts that the recording defines."""
    assert trace.splits is not None
    return {str(name): trace.select(sequences=np.flatnonzero(trace.splits == name)) for name in np.unique(trace.splits)}


@lru_cache(maxsize=8)
def _parts(trace: TokenTrace, seed: int, same_domains: bool) -> dict[str, TokenTrace]:
    """All parts. Cached, because what is computed from a trace is cached by the object."""
    if trace.n_sequences < len(SHARES):
        raise ValueError(
            f"{trace.name}: {trace.n_sequences} sequence(s) cannot be split into {', '.join(SHARES)}: cut the trace "
            'into more sequences (seq_lens), or use split="all"'
        )
    rng, names = np.random.default_rng(seed), trace.domain_names
    domain = np.searchsorted(names, trace.domains)
    if len(names) >= DOMAINS_TO_SPLIT and not same_domains:
        part = _deal(np.bincount(domain, weights=trace.seq_lens).astype(float), rng, least=2)[domain]
    else:
        part = np.empty(trace.n_sequences, int)
        for d in range(len(names)):
            part[domain == d] = _deal(trace.seq_lens[domain == d].astype(float), rng, least=1)
        if len(np.unique(part)) < len(SHARES):
            # Every domain has one or two sequences, which leaves nothing for the smallest part.
            part = _deal(trace.seq_lens.astype(float), rng, least=1)
    return {name: trace.select(sequences=np.flatnonzero(part == i)) for i, name in enumerate(SHARES)}


def _deal(sizes: npt.NDArray[np.float64], rng: np.random.Generator, least: int) -> npt.NDArray[np.int64]:
    """The part of each unit. In random order, each goes to the part that lacks most; every part gets ``least``."""
    shares = np.array(list(SHARES.values()))
    filled, count, part = np.zeros(len(SHARES)), np.zeros(len(SHARES)), np.empty(len(sizes), int)
    for unit in rng.permutation(len(sizes)):
        # If two parts lack the same number, the larger one comes first.
        chosen = int(np.lexsort((-shares, filled / shares, count >= least))[0])
        part[unit] = chosen
        filled[chosen] += sizes[unit]
        count[chosen] += 1
    return part
