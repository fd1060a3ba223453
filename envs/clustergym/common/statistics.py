"""Confidence intervals and aggregates of scores."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


def _student_t(degrees: float) -> float:
    """97.5 % quantile of Student's t distribution."""
    # scipy takes a third of a second to import, and scipy.stats a whole one: an agent does not need them.
    from scipy.special import stdtrit

    return float(stdtrit(degrees, 0.975))


def ci95(values: Sequence[float]) -> float:
    """Half width of the 95 % confidence interval of the mean (Student's t). 0 for fewer than two values."""
    n = len(values)
    return float(_student_t(n - 1) * np.std(values, ddof=1) / np.sqrt(n)) if n > 1 else 0.0


def ci95_of_deals(values: Sequence[float], groups: int) -> float:
    """Half width of the 95 % confidence interval of the mean of streams that share data. 0 for fewer than two groups.

    The data are dealt into ``groups`` disjoint groups, and one stream is drawn from each. After ``groups`` streams the
    data are dealt again. Streams of the same deal are independent. Another deal improves the estimate of their spread,
    but brings no new data. So the variance within the deals is divided by the number of groups, and not by the number
    of streams, which would make the interval as short as one likes.

    Args:
        values: one value per stream. The first ``groups`` values belong to the first deal, and so on.
        groups: number of streams per deal.
    """
    deals = [np.asarray(values[i : i + groups], float) for i in range(0, len(values), groups)]
    degrees = sum(len(deal) - 1 for deal in deals)
    if degrees < 1:
        return 0.0
    variance = sum(float(((deal - deal.mean()) ** 2).sum()) for deal in deals) / degrees
    return float(_student_t(degrees) * np.sqrt(variance / min(groups, len(values))))


def ci95_of_resamples(values: npt.NDArray[np.float64], sequences: float, pass_share: float, n_passes: int) -> float:
    """Half width of the 95 % confidence interval of a mean over passes, from the block bootstrap. 0 for one sequence.

    Passes of the same draw differ by chance, passes of different draws also because of their sequences. The variance of
    the mean of ``n_passes`` passes has both parts. The part of the sequences is estimated from the means of the draws,
    less the chance that is in them. It is at least what independent tokens would give. No pass repeats a token of
    another one, so that passes of all tokens leave nothing to chance.

    Args:
        values: (B, P) of P passes of each of B draws of the sequences with replacement.
        sequences: number of sequences.
        pass_share: tokens of a pass over the tokens of all sequences.
        n_passes: passes of the mean.
    """
    draws, passes = values.shape
    if sequences < 1.5 or draws < 2:
        return 0.0
    of_passes = float(values.var(axis=1, ddof=1).mean())

    def chance(n: int) -> float:
        """Variance of the mean of n passes of the same sequences."""
        return of_passes / n * max(0.0, 1 - n * pass_share)

    of_sequences = max(float(values.mean(1).var(ddof=1)) - chance(passes), of_passes * pass_share)
    # A draw with replacement varies less than a new sample, by 1 − 1/n.
    variance = of_sequences * sequences / (sequences - 1) + chance(n_passes)
    return float(_student_t(min(sequences, draws) - 1) * np.sqrt(variance))


def ci95_of_blocks(values: npt.NDArray[np.float64]) -> float:
    """Half width of the 95 % confidence interval of the mean of steps in time. 0 for fewer than two steps.

    Neighbouring steps are similar. So √n blocks of √n steps are taken as independent, not the steps.
    """
    n = len(values)
    return ci95([float(block.mean()) for block in np.array_split(values, max(2, int(np.sqrt(n))))]) if n > 1 else 0.0


# Aggregates over tasks and runs, as defined by Agarwal et al., "Deep Reinforcement Learning at the Edge of the
# Statistical Precipice" (NeurIPS 2021), and by their package rliable.


Scores = Sequence[Sequence[float] | npt.NDArray[np.float64]]
"""One list of runs per task"""


def interquartile_mean(scores: Scores) -> float:
    """Mean of the middle half of all scores, pooled over tasks."""
    from scipy.stats import trim_mean

    return float(trim_mean(np.concatenate([np.asarray(runs, float) for runs in scores]), 0.25))


def stratified_bootstrap(
    scores: Scores, resamples: int = 2000, confidence: float = 0.95, seed: int = 0
) -> tuple[float, float]:
    """Percentile bootstrap interval of the interquartile mean. Runs are resampled with replacement, separately for each
    task."""
    from scipy.stats import trim_mean

    rng = np.random.default_rng(seed)
    tasks = [np.asarray(runs, float) for runs in scores]
    draws = [np.concatenate([r[rng.integers(len(r), size=len(r))] for r in tasks]) for _ in range(resamples)]
    tail = 50 * (1 - confidence)
    low, high = np.percentile(trim_mean(np.array(draws), 0.25, axis=1), [tail, 100 - tail])
    return float(low), float(high)
