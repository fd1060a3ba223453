"""Statistics of token traces that matter for a placement."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from clustergym.traces.token_trace import TokenTrace


# Only the largest domains are compared: 12 domains are 66 pairs.
MAX_DOMAINS = 12
# Shuffles of the domain labels to average over for the noise floor of the domain divergence.
N_SHUFFLES = 8
# Window of the window divergence: about a small batch of prefill or a few seconds of decoding.
WINDOW_TOKENS = 1024


def trace_statistics(trace: TokenTrace, n_gpus: int = 16) -> dict[str, float]:
    """Statistics of a trace, each a mean over layers.

    - ``max_mean_load``: load of the busiest expert divided by the mean load (1: perfectly even).
    - ``load_gini``: Gini coefficient of the expert loads.
    - ``gpus_per_token``: distinct GPUs that a token visits if experts are placed contiguously on ``n_gpus`` GPUs.
    - ``gpus_per_token_independent``: the same if each expert were drawn by its load alone. A lower ``gpus_per_token``
      means that experts on the same GPU are often used together.
    - ``gpus_per_token_grouped``: the same on held-out sequences if the experts are grouped by how often they are used
      together (:func:`coactivation_groups`) in the other half of the sequences.
    - ``grouped_max_mean_load``: load of the busiest GPU divided by the mean load, for the same sequences and grouping:
      the price of grouping in balance.
    - ``coactivation_lift``: mean of P(i, j) / (P(i) P(j)) over the pairs of experts of a token (1: independent).
    - ``next_layer_predictability``: share of the experts in the next layer that are among the K most likely successors
      of the token's experts in this layer. Half of the tokens train the prediction, the other half test it.
    - ``next_layer_chance``: the same share if the prediction is always the K experts with the largest loads.
    - ``next_token_overlap``: share of the experts of a token that the previous token of the sequence used too.
    - ``domain_divergence``: mean Jensen–Shannon divergence (bits) between the expert loads of two domains (of the
      12 largest), minus ``domain_divergence_shuffled``. About 0 if the labels carry no information.
    - ``domain_divergence_shuffled``: the same divergence with shuffled labels: the part that comes from sampling and
      from differences between sequences.
    - ``window_divergence``: median Jensen–Shannon divergence (bits) between the loads of consecutive windows of
      1024 tokens (or half of the trace, if that is shorter), sampling noise included.
    """
    loads = trace.loads().astype(float)
    # A layer with only padding has no loads.
    shares = _shares(loads[loads.any(1)])
    predicted, chance = next_layer_predictability(trace)
    grouped, grouped_load = held_out_grouping(trace, n_gpus)
    divergence, shuffled = domain_divergence(trace)
    return {
        "max_mean_load": float((shares.max(1) * trace.n_experts).mean()),
        "load_gini": float(np.mean([_gini(s) for s in shares])),
        "gpus_per_token": _gpus_per_token(trace, n_gpus),
        "gpus_per_token_independent": _independent_gpus_per_token(loads / trace.n_tokens, n_gpus),
        "gpus_per_token_grouped": grouped,
        "grouped_max_mean_load": grouped_load,
        "coactivation_lift": _coactivation_lift(trace),
        "next_layer_predictability": predicted,
        "next_layer_chance": chance,
        "next_token_overlap": next_token_overlap(trace),
        "domain_divergence": divergence - shuffled,
        "domain_divergence_shuffled": shuffled,
        "window_divergence": window_divergence(trace),
    }


def coactivation_groups(together: npt.NDArray[np.floating[Any]], n_gpus: int) -> npt.NDArray[np.int64]:
    """(E,) GPU of each expert. Each GPU in turn takes the busiest remaining expert, then those most used with it.

    Args:
        together: (E, E) how often two experts are used by the same token, with the load of each expert on the diagonal.
        n_gpus: number of GPUs. Their numbers of experts differ by at most one.
    """
    n_experts = len(together)
    loads = np.diag(together).astype(float)
    sizes = np.bincount(np.arange(n_experts) * n_gpus // n_experts, minlength=n_gpus)
    gpu = np.full(n_experts, -1)
    for g, size in enumerate(sizes):
        attraction = loads
        for _ in range(size):
            expert = int(np.where(gpu < 0, attraction, -1.0).argmax())
            # The first expert is chosen by load, the others by how often they are used with the experts already here.
            attraction = together[expert].astype(float) if attraction is loads else attraction + together[expert]
            gpu[expert] = g
    return gpu


def held_out_grouping(trace: TokenTrace, n_gpus: int) -> tuple[float, float]:
    """(distinct GPUs per token, load of the busiest GPU divided by the mean) of a grouping by half of the sequences.

    Both are measured on the other half. A trace of one sequence uses the same tokens for both.
    """
    train, test = trace.split(0.5) if trace.n_sequences > 1 else (trace, trace)
    distinct, balance = [], []
    for l in range(trace.n_layers):
        here = one_hot(train, l)
        gpu = coactivation_groups(here.T @ here, n_gpus)
        visits = one_hot(test, l) @ np.eye(n_gpus, dtype=np.float32)[gpu]
        distinct.append(float((visits > 0).sum(1).mean()))
        load = visits.sum(0, dtype=float)
        # In the held-out half a layer may have only padding: then there is no imbalance.
        balance.append(float(load.max() / load.mean()) if load.any() else 1.0)
    return float(np.mean(distinct)), float(np.mean(balance))


def domain_divergence(trace: TokenTrace) -> tuple[float, float]:
    """(mean divergence in bits between the loads of two domains, the same with shuffled labels). 0 for one domain."""
    names, label = np.unique(trace.domains, return_inverse=True)
    if len(names) < 2:
        return 0.0, 0.0
    sizes = np.bincount(label, weights=trace.seq_lens)
    largest = np.argsort(-sizes, kind="stable")[:MAX_DOMAINS]
    rank = np.full(len(names), -1)
    rank[largest] = np.arange(len(largest))
    found = rank[label]
    rng = np.random.default_rng(0)
    shuffled = [_mean_divergence(trace, rng.permutation(found), len(largest)) for _ in range(N_SHUFFLES)]
    return _mean_divergence(trace, found, len(largest)), float(np.mean(shuffled))


def window_divergence(trace: TokenTrace) -> float:
    """Median divergence (bits) between the loads of consecutive windows. 0 for a single token."""
    if trace.n_tokens < 2:
        return 0.0
    size = min(WINDOW_TOKENS, trace.n_tokens // 2)
    window = np.arange(trace.n_tokens) // size
    n_windows = trace.n_tokens // size
    shares = _shares(_grouped_loads(trace, np.where(window < n_windows, window, -1), n_windows))
    return float(np.median([_js_bits(a, b) for a, b in pairwise(shares)]))


def next_layer_predictability(trace: TokenTrace) -> tuple[float, float]:
    """(share of next-layer experts predicted from this layer, share predicted from loads alone), means over layers.

    Layers without test tokens are left out. (0, 0) if no layer is left.
    """
    train = np.arange(trace.n_tokens) % 2 == 0
    hits, chance = [], []
    tables = [one_hot(trace, l) for l in range(trace.n_layers)]
    for here, after in pairwise(tables):
        follow = here[train].T @ after[train]
        follow /= np.maximum(follow.sum(1, keepdims=True), 1)
        truth = after[~train]
        if not truth.any():
            continue
        scores = here[~train] @ follow
        k = round(float(truth.sum(1).mean())) or 1
        guess = np.argpartition(-scores, k - 1, axis=1)[:, :k]
        hits.append(np.take_along_axis(truth, guess, 1).sum() / truth.sum())
        top = np.argpartition(-after[train].sum(0), k - 1)[:k]
        chance.append(truth[:, top].sum() / truth.sum())
    return (float(np.mean(hits)), float(np.mean(chance))) if hits else (0.0, 0.0)


def next_token_overlap(trace: TokenTrace) -> float:
    """Share of the experts that the previous token of the sequence used too, a mean over layers.

    0 if every sequence has one token.
    """
    after = np.delete(np.arange(trace.n_tokens), trace.seq_starts)
    shares = []
    for l in range(trace.n_layers):
        here, before = trace.experts[after, l], trace.experts[after - 1, l]
        again = (here[:, :, None] == before[:, None, :]).any(2) & (here >= 0)
        shares.append(again.sum() / max((here >= 0).sum(), 1))
    return float(np.mean(shares))


def one_hot(trace: TokenTrace, layer: int) -> npt.NDArray[np.float32]:
    """(T, E) 1 where a token uses an expert."""
    ids = trace.experts[:, layer]
    table = np.zeros((trace.n_tokens, trace.n_experts + 1), dtype=np.float32)
    np.put_along_axis(table, np.where(ids < 0, trace.n_experts, ids).astype(np.int64), 1.0, axis=1)
    return table[:, :-1]


def _shares(loads: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    return np.asarray(loads / np.maximum(loads.sum(-1, keepdims=True), 1), dtype=np.float64)


def _grouped_loads(trace: TokenTrace, group: npt.NDArray[np.int64], n_groups: int) -> npt.NDArray[np.int64]:
    """(n_groups, L, E) loads of the tokens of each group. Tokens of group -1 are left out."""
    loads = np.zeros((n_groups, trace.n_layers, trace.n_experts), dtype=np.int64)
    tokens = np.flatnonzero(group >= 0)
    offset = group[tokens, None] * trace.n_experts
    for l in range(trace.n_layers):
        ids = trace.experts[tokens, l]
        counts = np.bincount((offset + ids)[ids >= 0], minlength=n_groups * trace.n_experts)
        loads[:, l] = counts.reshape(n_groups, trace.n_experts)
    return loads


def _mean_divergence(trace: TokenTrace, label: npt.NDArray[np.int64], n_labels: int) -> float:
    """Mean divergence between the loads of two labels, over all pairs. ``label`` has one entry per sequence."""
    shares = _shares(_grouped_loads(trace, np.repeat(label, trace.seq_lens), n_labels))
    return float(np.mean([_js_bits(a, b) for i, a in enumerate(shares) for b in shares[i + 1 :]]))


def _gpus_per_token(trace: TokenTrace, n_gpus: int) -> float:
    gpu = np.arange(trace.n_experts) * n_gpus // trace.n_experts
    where = np.where(trace.experts < 0, -1, gpu[trace.experts])
    ordered = np.sort(where, axis=2)
    distinct = (ordered[:, :, 0] >= 0).astype(int) + ((np.diff(ordered, axis=2) != 0) & (ordered[:, :, 1:] >= 0)).sum(2)
    return float(distinct.mean())


def _independent_gpus_per_token(used: npt.NDArray[np.float64], n_gpus: int) -> float:
    """Distinct GPUs per token if it uses expert e of layer l with probability ``used[l, e]``, independently."""
    n_layers, n_experts = used.shape
    gpu = np.arange(n_experts) * n_gpus // n_experts
    missed = np.ones((n_layers, n_gpus))
    for e in range(n_experts):
        missed[:, gpu[e]] *= 1 - used[:, e]
    return float((1 - missed).sum(1).mean())


def _coactivation_lift(trace: TokenTrace) -> float:
    if trace.top_k < 2:
        return 1.0
    lifts = []
    for l in range(trace.n_layers):
        table = one_hot(trace, l)
        together = table.T @ table / trace.n_tokens
        alone = np.diag(together).copy()
        np.fill_diagonal(together, 0.0)
        if not together.any():  # every token used one expert, so there are no pairs
            lifts.append(1.0)
            continue
        expected = np.outer(alone, alone)
        np.fill_diagonal(expected, 0.0)
        # Each pair is weighted by how often it occurs. A token never uses an expert twice, so independent draws would
        # give (K−1)/K.
        lift = np.divide(together, expected, out=np.zeros_like(together), where=expected > 0)
        lifts.append((together * lift).sum() / together.sum() * trace.top_k / (trace.top_k - 1))
    return float(np.mean(lifts))


def _gini(shares: npt.NDArray[np.float64]) -> float:
    ordered = np.sort(shares)
    n = len(ordered)
    return float((2 * np.arange(1, n + 1) - n - 1) @ ordered / (n * ordered.sum()))


def _js_bits(a: npt.NDArray[np.float64], b: npt.NDArray[np.float64]) -> float:
    middle = (a + b) / 2

    def kl(p: npt.NDArray[np.float64]) -> Any:
        return np.where(p > 0, p * np.log2(np.where(p > 0, p, 1) / np.where(middle > 0, middle, 1)), 0.0).sum(1)

    return float(((kl(a) + kl(b)) / 2).mean())
