"""How predictable the routing of decode traces is: the table of ``traces/README.md``.

    python traces/decode_statistics.py tiny_decode
    python traces/decode_statistics.py tiny_decode other.npz --slots 0.25 0.5

Everything is counted on one half of the sequences and measured on the other half. Files need ``experts``, ``n_experts``
and ``seq_lens``; every token must use the same number of experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
import numpy.typing as npt
import tyro
from numba import njit

from clustergym.traces import TokenTrace

DECAY = 0.95
SMOOTHING = 20.0
"""Weight of the popularity in a transition table, in tokens."""
RIDGE = 10.0


@dataclass
class Args:
    traces: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="TRACE…")]
    """Files or names of bundled traces."""
    slots: tuple[float, ...] = (0.37,)
    """Shares of the experts of a layer that fit into the cache."""
    seed: int = 0
    """Seed of the halves."""


def used(trace: TokenTrace) -> npt.NDArray[np.float32]:
    """(T, L, E) 1 for the experts of each token."""
    found = np.zeros((trace.n_tokens, trace.n_layers, trace.n_experts), np.float32)
    np.put_along_axis(found, trace.experts.astype(np.int64), 1, axis=2)
    return found


def recall(scores: npt.NDArray[np.floating], truth: npt.NDArray[np.float32], top_k: int) -> float:
    """Share of the experts in ``truth`` (T, E) that are among the ``top_k`` largest scores (T, E)."""
    best = np.argpartition(-scores, top_k - 1, axis=1)[:, :top_k]
    return float(np.take_along_axis(truth, best, 1).sum() / truth.sum())


def with_bias(experts: npt.NDArray[np.float32], first: npt.NDArray[np.int64], layer: int) -> npt.NDArray[np.float32]:
    """Features of the linear predictor: the last four layers, this layer at the previous token, and a constant."""
    previous = np.roll(experts[:, layer], 1, axis=0)
    previous[first] = 0
    before = [experts[:, l] for l in range(max(0, layer - 4), layer)]
    return np.concatenate([*before, previous, np.ones((len(experts), 1), np.float32)], axis=1)


@njit(cache=True)
def hit_rate(experts, starts, lengths, popularity, slots, decay):  # type: ignore[no-untyped-def]
    """Share of experts that are in a cache of ``slots`` per layer. The cache starts with the most popular experts.

    ``decay`` < 0 evicts the least recently used expert, 0 < ``decay`` ≤ 1 the one with the lowest decayed count.
    """
    n_layers, n_experts = popularity.shape
    hits = 0
    for s in range(len(starts)):
        for l in range(n_layers):
            score = popularity[l] - 1.0 if decay < 0 else 8.0 * popularity[l]
            cached = np.zeros(n_experts, np.bool_)
            cached[np.argsort(-popularity[l])[:slots]] = True
            for t in range(starts[s], starts[s] + lengths[s]):
                if decay >= 0:
                    score *= decay
                for e in experts[t, l]:
                    hits += cached[e]
                    score[e] = t - starts[s] if decay < 0 else score[e] + 1.0
                cached[experts[t, l]] = True
                while cached.sum() > slots:
                    worst = -1
                    for e in range(n_experts):
                        if cached[e] and (worst < 0 or score[e] < score[worst]):
                            worst = e
                    cached[worst] = False
    return hits / experts.size


def statistics(trace: TokenTrace, slots: tuple[float, ...], seed: int) -> dict[str, float]:
    fit, held_out = trace.split(0.5, seed)
    k, n_layers, n_experts = trace.top_k, trace.n_layers, trace.n_experts
    a, b = used(fit), used(held_out)
    popularity = a.mean(0)
    share = popularity / k
    found = {
        "popularity_entropy_bits": float(-(share * np.log2(np.maximum(share, 1e-12))).sum(1).mean()),
        "max_mean_load": float((share.max(1) * n_experts).mean()),
    }
    later = range(1, n_layers)
    layers = {name: [] for name in ("popularity", "transition", "linear")}
    for l in later:
        layers["popularity"].append(recall(np.broadcast_to(popularity[l], b[:, l].shape), b[:, l], k))
        counts = a[:, l - 1].T @ a[:, l] + SMOOTHING * popularity[l]
        table = counts / (a[:, l - 1].sum(0)[:, None] + SMOOTHING)
        layers["transition"].append(recall(b[:, l - 1] @ table, b[:, l], k))
        x = with_bias(a, fit.seq_starts, l)
        weights = np.linalg.solve(x.T @ x + RIDGE * np.eye(x.shape[1]), x.T @ a[:, l])
        layers["linear"].append(recall(with_bias(b, held_out.seq_starts, l) @ weights, b[:, l], k))
    found |= {f"recall_{name}": float(np.mean(values)) for name, values in layers.items()}
    inside = np.ones(held_out.n_tokens, bool)
    inside[held_out.seq_starts] = False
    found["previous_token_overlap"] = float((b[1:] * b[:-1])[inside[1:]].sum() / b[1:][inside[1:]].sum())
    found["overlap_by_popularity"] = float((popularity**2).sum(1).mean() / k)
    for part in slots:
        n = round(part * n_experts)
        top = np.argsort(-popularity, axis=1)[:, :n]
        static = np.mean([b[:, l, top[l]].sum() / b[:, l].sum() for l in range(n_layers)])
        found[f"hit_static_{part:.0%}"] = float(static)
        given = (held_out.experts, held_out.seq_starts, held_out.seq_lens, popularity.astype(np.float64), n)
        found[f"hit_lru_{part:.0%}"] = hit_rate(*given, -1.0)
        found[f"hit_counts_{part:.0%}"] = hit_rate(*given, 1.0)
        found[f"hit_decayed_counts_{part:.0%}"] = hit_rate(*given, DECAY)
    return found


def main(args: Args) -> None:
    columns = {name: statistics(TokenTrace.load(name), args.slots, args.seed) for name in args.traces}
    print("| statistic | " + " | ".join(f"`{name}`" for name in columns) + " |")
    print("| --- |" + " ---: |" * len(columns))
    for row in next(iter(columns.values())):
        print(f"| `{row}` | " + " | ".join(f"{column[row]:.3f}" for column in columns.values()) + " |")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
