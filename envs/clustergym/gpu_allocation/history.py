"""History of an owner: what was measured of its earlier pods, and the features that a policy sees.

Standard library only, so that an agent on a node can use it alone. The simulator compiles :func:`remember` and
:func:`write_features`, so a policy sees the same features in training and behind the agent's HTTP API.
"""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence

# Columns of a history. "Share" and "usage" are parts of the requested cores.
(
    COUNT, MEAN, SPREAD, MAX, LAST, LAST_SHARE, MISSED, LAST_MISSED, WORST_SHARE, BEST_SHARE, MEMORY_MAX, OOM,
) = range(12)  # fmt: skip
N_HISTORY = 12
# Columns of the features. They follow the five numbers of the state in an observation.
(
    FEATURE_COUNT, FEATURE_MEAN, FEATURE_SPREAD, FEATURE_MISSED, FEATURE_LAST_MISSED, FEATURE_OOM, FEATURE_SENSITIVE,
    FEATURE_MEAN_CORES, FEATURE_MAX_CORES, FEATURE_LAST_CORES, FEATURE_LAST_SHARE_CORES, FEATURE_WORST_SHARE_CORES,
    FEATURE_BEST_SHARE_CORES, FEATURE_MAX_MEMORY,
) = range(14)  # fmt: skip
N_FEATURES = 14
RATE = 0.15
"""Weight of the newest pod in running averages. The first pods weigh 1 / count."""
FADE = 0.97
"""Per pod, the largest usage and share fade towards 0 and the smallest share towards 1: habits may change."""


def new_history() -> list[float]:
    """The history of an owner without pods."""
    return [0.0] * N_HISTORY


def remember(h: MutableSequence[float], usage: float, share: float, met: bool, oom: bool, memory: float) -> None:
    """Add a pod to a history.

    Args:
        h: the history of the pod's owner.
        usage: cores used / cores requested; with a missed objective, the cores that would have been needed.
        share: cores granted / cores requested.
        met: whether the pod met its objective.
        oom: whether the pod was killed because of too little memory.
        memory: memory used / memory requested.

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
        # The pod was killed before it ran: its use of cores is unknown.
        return
    if h[BEST_SHARE] == 0.0:
        # The first pod that ran.
        h[MEAN], h[MAX], h[BEST_SHARE] = usage, usage, 1.0
    gap = usage - h[MEAN]
    h[MEAN] += rate * gap
    h[SPREAD] += rate * (abs(gap) - h[SPREAD])
    h[MAX] = max(usage, FADE * h[MAX])
    h[LAST], h[LAST_SHARE] = usage, share
    h[WORST_SHARE] = max(FADE * h[WORST_SHARE], 0.0 if met else share)
    relaxed = min(1.0, h[BEST_SHARE] / FADE)
    h[BEST_SHARE] = min(relaxed, share) if met else relaxed


def write_features(
    h: Sequence[float], cores: float, memory: float, latency_sensitive: bool, out: MutableSequence[float]
) -> None:
    """Write the features into ``out``; the arguments are those of :func:`features`."""
    out[FEATURE_COUNT] = h[COUNT] / (h[COUNT] + 4.0)
    out[FEATURE_MEAN] = h[MEAN]
    out[FEATURE_SPREAD] = h[SPREAD]
    out[FEATURE_MISSED] = h[MISSED]
    out[FEATURE_LAST_MISSED] = h[LAST_MISSED]
    out[FEATURE_OOM] = h[OOM]
    out[FEATURE_SENSITIVE] = 1.0 if latency_sensitive else 0.0
    # In units of the GPU, for a pod of this size: a good allocation is nearly a linear function of these.
    out[FEATURE_MEAN_CORES] = h[MEAN] * cores
    out[FEATURE_MAX_CORES] = h[MAX] * cores
    out[FEATURE_LAST_CORES] = h[LAST] * cores
    out[FEATURE_LAST_SHARE_CORES] = h[LAST_SHARE] * cores
    out[FEATURE_WORST_SHARE_CORES] = h[WORST_SHARE] * cores
    out[FEATURE_BEST_SHARE_CORES] = h[BEST_SHARE] * cores
    out[FEATURE_MAX_MEMORY] = h[MEMORY_MAX] * memory


def features(h: Sequence[float], cores: float, memory: float, latency_sensitive: bool) -> list[float]:
    """The 14 numbers that follow the five of the state in an observation with history.

    Args:
        h: the history of the owner.
        cores: requested cores of the new pod, scaled as in the state.
        memory: requested memory of the new pod, scaled as in the state.
        latency_sensitive: whether the new pod has a latency objective.

    >>> features(new_history(), 0.8, 0.1, True)
    [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    """
    out = [0.0] * N_FEATURES
    write_features(h, cores, memory, latency_sensitive, out)
    return out
