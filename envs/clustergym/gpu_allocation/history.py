"""What is remembered of an owner's earlier pods, and how a policy sees it; without third-party imports, for agents on nodes.

The simulator keeps the same 12 numbers for each owner (``dynamics.remember``) and shows them in the same way: a policy trained
there finds behind HTTP what it knows. A test holds the two together.
"""

from __future__ import annotations

from collections.abc import Sequence

(
    COUNT, MEAN, SPREAD, MAX, LAST, LAST_SHARE, MISSED, LAST_MISSED, WORST_SHARE, BEST_SHARE, MEMORY_MAX, OOM,
) = range(12)  # fmt: skip
N_HISTORY = 12
N_FEATURES = 14
"""Features of an observation that follow the five of the state."""
RATE = 0.15
"""Weight of the newest pod in running averages, once the owner has had a few."""
FADE = 0.97
"""The worst share that missed and the best that was met are forgotten at this rate."""


def new_history() -> list[float]:
    """An owner nobody has met."""
    return [0.0] * N_HISTORY


def remember(h: list[float], usage: float, share: float, met: bool, oom: bool, memory: float) -> None:
    """Add a pod. All are parts of what the pod asked for: cores used, cores granted, memory used.

    >>> history = new_history()
    >>> remember(history, usage=0.5, share=0.8, met=True, oom=False, memory=0.4)
    >>> history[COUNT], history[MEAN], history[LAST_SHARE], history[MEMORY_MAX]
    (1.0, 0.5, 0.8, 0.4)
    """
    h[COUNT] += 1.0
    rate = max(1.0 / h[COUNT], RATE)
    missed = 0.0 if met else 1.0
    h[OOM] += rate * ((1.0 if oom else 0.0) - h[OOM])
    h[MEMORY_MAX] = max(memory, h[MEMORY_MAX])
    h[MISSED] += rate * (missed - h[MISSED])
    h[LAST_MISSED] = missed
    if oom:
        # Killed before it ran: it says nothing of the cores that it would have used.
        return
    if h[LAST] == 0.0:
        h[MEAN], h[MAX], h[BEST_SHARE] = usage, usage, 1.0
    gap = usage - h[MEAN]
    h[MEAN] += rate * gap
    h[SPREAD] += rate * (abs(gap) - h[SPREAD])
    h[MAX] = max(usage, FADE * h[MAX])
    h[LAST], h[LAST_SHARE] = usage, share
    h[WORST_SHARE] = max(FADE * h[WORST_SHARE], 0.0 if met else share)
    relaxed = min(1.0, h[BEST_SHARE] / FADE)
    h[BEST_SHARE] = min(relaxed, share) if met else relaxed


def features(h: Sequence[float], cores: float, memory: float, latency_sensitive: bool) -> list[float]:
    """The 14 numbers that follow the five of the state in an observation with history.

    Args:
        h: the owner's history.
        cores: what the new pod asks for, as in the state (share of the GPU).
        memory: likewise.
        latency_sensitive: whether the new pod has a latency objective.

    >>> features(new_history(), 0.8, 0.1, True)
    [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    """
    return [
        h[COUNT] / (h[COUNT] + 4.0),
        *(h[i] for i in (MEAN, SPREAD, MISSED, LAST_MISSED, OOM)),
        1.0 if latency_sensitive else 0.0,
        # In units of the GPU, for a pod of this size: an allocation is near a linear function of these.
        *(h[i] * cores for i in (MEAN, MAX, LAST, LAST_SHARE, WORST_SHARE, BEST_SHARE)),
        h[MEMORY_MAX] * memory,
    ]
