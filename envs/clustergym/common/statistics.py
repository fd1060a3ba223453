"""Confidence intervals."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.stats import t as student


def ci95(values: Sequence[float]) -> float:
    """Half width of the 95 % confidence interval of the mean (Student's t). 0 for fewer than two values."""
    n = len(values)
    return float(student.ppf(0.975, n - 1) * np.std(values, ddof=1) / np.sqrt(n)) if n > 1 else 0.0


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
    return float(student.ppf(0.975, degrees) * np.sqrt(variance / min(groups, len(values))))
