"""The statistics of a report: what is sure, how long a load lasts, and what follows from both.

Legend: W windows, L MoE layers, E experts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from moe_runtime.placement.intervals import Estimate, block_low
from moe_runtime.placement.stored import Array

MIN_JUDGED_WINDOWS = 8
"""With fewer held-out windows no interval is believed."""
LASTING_CONFIDENCE = 0.99
"""Of the interval that tells whether the load has a pattern at all. Without one, one in twenty 90 % intervals of the gain is above 0 by
chance; neighbours of the held-out and the other windows say independently of it, and sharper, that there is nothing to plan for."""
MIN_GAIN = 0.01
"""A gain below 1 % of the step is not worth a change."""
APPLY, NOT_WORTH_IT, NOT_ENOUGH = "apply", "not worth it", "not enough evidence"


@dataclass(frozen=True)
class Drift:
    """How long the pattern of a load lasts."""

    similarity_lag: list[float]
    """For each lag in windows, from 1: mean product of the experts' deviations from the mean load in two windows so far apart."""
    half_life_windows: float | None
    """Lag at which the similarity has fallen to half of that of lag 1; None: it has not within the record."""
    lasting: bool
    """Whether there is a pattern at all: the similarity of lag 1 is above 0 for sure (LASTING_CONFIDENCE, lower bound)."""


def drift(loads_WLE: Array) -> Drift:
    """From loads of equally long windows, oldest first.

    A load is taken relative to its layer's mean, minus 1. Its products between different windows hold no sampling noise, which is
    independent; so a stationary skew gives the same similarity at every lag, and none gives 0. Lags reach to half of the windows.
    """
    total_WL1 = loads_WLE.sum(axis=2, keepdims=True)
    deviation = np.where(total_WL1 > 0, loads_WLE / np.maximum(total_WL1, 1) * loads_WLE.shape[2] - 1.0, 0.0)
    flat_WX = deviation.reshape(len(loads_WLE), -1)
    products_WW = flat_WX @ flat_WX.T / max(flat_WX.shape[1], 1)
    similarity = [float(products_WW.diagonal(lag).mean()) for lag in range(1, len(loads_WLE) // 2 + 1)]
    if len(loads_WLE) < MIN_JUDGED_WINDOWS:
        return Drift(similarity, None, False)
    lasting = block_low(products_WW.diagonal(1), LASTING_CONFIDENCE) > 0
    return Drift(similarity, _half_life(similarity) if lasting else None, lasting)


def _half_life(similarity: list[float]) -> float | None:
    """First lag (linear between lags) at which half of the first value is reached."""
    half = similarity[0] / 2
    for lag, (before, after) in enumerate(pairwise(similarity), start=1):
        if after <= half:
            return lag + (before - half) / (before - after)
    return None


def replan_interval_s(gain: float, payback_s: float, half_life_s: float | None) -> float | None:
    """How often to plan anew, in seconds: the interval with the largest gain after costs, or None without a half-life or gain.

    A plan's gain g halves every h seconds; a move costs C = g * payback seconds. Over an interval t the mean rate is about
    g (1 - t ln 2 / (2 h)) - C / t, largest at t = sqrt(2 C h / (g ln 2)) = sqrt(2 payback h / ln 2); at most h.
    """
    if half_life_s is None or gain <= 0 or not math.isfinite(payback_s):
        return None
    return min(math.sqrt(2 * payback_s * half_life_s / math.log(2)), half_life_s)


def verdict(
    gain: Estimate,
    num_judged: int,
    lasting: bool,
    payback_s: float,
    half_life_s: float | None,
    longest_s: float,
) -> tuple[str, str]:
    """One of APPLY, NOT_WORTH_IT, NOT_ENOUGH, and why in a sentence.

    half_life_s: None if it was not reached within `longest_s`, the longest lag looked at; both in seconds.
    """
    if num_judged < MIN_JUDGED_WINDOWS:
        return NOT_ENOUGH, (
            f"Only {num_judged} windows were held out to judge by; at least {MIN_JUDGED_WINDOWS} are needed. Record for longer."
        )
    if gain.high < MIN_GAIN:
        return NOT_WORTH_IT, f"Even the upper bound of the gain is below {100 * MIN_GAIN:.0f} % of the step."
    if gain.low <= 0:
        return NOT_ENOUGH, (
            "The interval of the gain reaches from a loss to a gain: the record does not tell. Record for longer."
        )
    if gain.mean < MIN_GAIN:
        return NOT_WORTH_IT, f"There is a gain for sure, but below {100 * MIN_GAIN:.0f} % of the step."
    if not lasting:
        return (
            NOT_ENOUGH,
            "No pattern of the load lasts from one window to the next, so the gain may be chance.",
        )
    if half_life_s is None and payback_s >= longest_s:
        return NOT_ENOUGH, (
            "The record is too short to tell whether the load lasts until the move is paid back. Record for longer."
        )
    if half_life_s is not None and payback_s >= half_life_s:
        return NOT_WORTH_IT, "The load's pattern has changed before the move is paid back."
    return (
        APPLY,
        "The gain is above zero on traffic that the plan has not seen, and pays back before the load has changed.",
    )
