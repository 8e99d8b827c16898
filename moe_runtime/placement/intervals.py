"""Means and ratios over windows with the intervals that so few windows allow: bootstraps, widened as Student's t is beside the normal.

Legend: W windows, B draws.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from moe_runtime.placement.stored import Array

RESAMPLES = 1000
CONFIDENCE = 0.9


@dataclass(frozen=True)
class Estimate:
    """A mean over windows, and the interval in which it lies with CONFIDENCE if windows are drawn anew (bootstrap)."""

    mean: float
    low: float
    high: float


def ratio_estimate(over_W: Array, under_W: Array, seed: int = 0) -> Estimate:
    """Sum of one over sum of the other. Bootstrap over windows (Efron, Annals of Statistics 7(1), 1979); NaN bounds for one window."""
    chosen_BW = np.random.default_rng(seed).integers(len(over_W), size=(RESAMPLES, len(over_W)))
    drawn_B = over_W[chosen_BW].sum(axis=1) / under_W[chosen_BW].sum(axis=1)
    return Estimate(float(over_W.sum() / under_W.sum()), *bounds(drawn_B, len(over_W), CONFIDENCE))


def relative_gain(before_W: Array, after_W: Array) -> Estimate:
    """1 - sum(after) / sum(before) of paired windows, and its CONFIDENCE interval by moving-block bootstrap.

    Windows near one another are alike, so blocks of ceil(W^(1/3)) neighbours are drawn (Kuensch, Annals of Statistics 17(3), 1989).
    NaN bounds for fewer than two blocks.
    """
    chosen_BW = _block_choices(len(before_W))
    drawn_B = 1.0 - after_W[chosen_BW].sum(axis=1) / before_W[chosen_BW].sum(axis=1)
    num_blocks = len(before_W) / _block_length(len(before_W))
    return Estimate(float(1.0 - after_W.sum() / before_W.sum()), *bounds(drawn_B, num_blocks, CONFIDENCE))


def block_low(values_W: Array, confidence: float) -> float:
    """Lower bound of the mean of neighbouring values: Student's t of the blocks, with the spread of a moving-block bootstrap.

    Not a percentile of the draws, which never leave the range of the few blocks there are. NaN for fewer than two blocks.
    """
    num_blocks = len(values_W) / _block_length(len(values_W))
    if num_blocks < 2:
        return math.nan
    spread = float(values_W[_block_choices(len(values_W))].mean(axis=1).std())
    return float(values_W.mean()) - _widening(num_blocks, confidence) * spread


def bounds(drawn_B: Array, num_units: float, confidence: float) -> tuple[float, float]:
    """The expanded percentile interval of bootstrap draws from `num_units` independent units; NaN for fewer than two.

    Plain percentiles are too near for few units, by the factor sqrt((n - 1) / n) z / t(n - 1); so the shares are those at which a
    normal distribution is that much wider (Hesterberg, The American Statistician 69(4), 2015).
    """
    if num_units < 2:
        return math.nan, math.nan
    share = NormalDist().cdf(-_widening(num_units, confidence))
    low, high = np.quantile(drawn_B, [share, 1 - share])
    return float(low), float(high)


def _widening(num_units: float, confidence: float) -> float:
    """Standard deviations of a bootstrap's draws from the middle to the bounds."""
    return math.sqrt(num_units / (num_units - 1)) * student_t((1 + confidence) / 2, num_units - 1)


def student_t(share: float, degrees: float) -> float:
    """Quantile of Student's t, within 1 % from 3 degrees of freedom on for shares of 0.005 to 0.995.

    Expansion around the normal quantile (Abramowitz and Stegun, 26.7.5).
    """
    z = NormalDist().inv_cdf(share)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / degrees**i for i, term in enumerate(terms, start=1))


def _block_length(num_windows: int) -> int:
    return math.ceil(round(num_windows ** (1 / 3), 9))


def _block_choices(num_windows: int) -> Array:
    """int64 (RESAMPLES, num_windows): windows drawn in blocks of neighbours."""
    length = _block_length(num_windows)
    num_blocks = -(-num_windows // length)
    first = np.random.default_rng(0).integers(num_windows - length + 1, size=(RESAMPLES, num_blocks))
    return (first[:, :, None] + np.arange(length)).reshape(RESAMPLES, -1)[:, :num_windows]
