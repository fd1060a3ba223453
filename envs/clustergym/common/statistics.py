"""Confidence intervals."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.stats import t as student


def ci95(values: Sequence[float]) -> float:
    """Half width of the 95 % confidence interval of the mean (Student's t). 0 for fewer than two values."""
    n = len(values)
    return float(student.ppf(0.975, n - 1) * np.std(values, ddof=1) / np.sqrt(n)) if n > 1 else 0.0
