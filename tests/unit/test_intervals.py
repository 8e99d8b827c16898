"""Intervals from few windows hold the truth as often as they say, and a load without a pattern is not taken for one."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from moe_runtime.placement.intervals import bounds, ratio_estimate, relative_gain, student_t
from moe_runtime.placement.report_stats import drift
from tests.helpers.load_records import drifting


def test_student_t_is_scipy_s() -> None:
    for degrees in (3.0, 3.7, 5.0, 8.5, 20.0, 300.0):
        for share in (0.005, 0.05, 0.95, 0.995):
            assert student_t(share, degrees) == pytest.approx(stats.t.ppf(share, degrees), rel=0.01)


def test_bounds_of_normal_draws_are_student_s(seed: int) -> None:
    """Draws with the bootstrap's spread, that of n - 1 of n, give t intervals."""
    draws = np.random.default_rng(seed).normal(5.0, math.sqrt(7 / 8) / math.sqrt(8), 200_000)
    low, high = bounds(draws, 8, 0.9)
    half = stats.t.ppf(0.95, 7) / math.sqrt(8)
    assert [low, high] == pytest.approx([5 - half, 5 + half], abs=0.02)
    assert all(math.isnan(x) for x in bounds(draws, 1.5, 0.9))


@pytest.mark.parametrize("num_windows", [8, 20, 60])
def test_means_of_few_windows(num_windows: int, seed: int) -> None:
    draw = np.random.default_rng(seed)
    estimates = [
        ratio_estimate(draw.normal(10, 1, num_windows), np.ones(num_windows), seed=i) for i in range(300)
    ]
    held = sum(e.low <= 10 <= e.high for e in estimates)
    # 270 expected; six standard deviations. Without widening it would be about 250 for 8 windows.
    assert 270 - 6 * math.sqrt(27) <= held <= 300


@pytest.mark.parametrize("num_windows", [8, 20, 60])
def test_gains_of_few_windows(num_windows: int, seed: int) -> None:
    draw = np.random.default_rng(seed)
    false = 0
    for _ in range(300):
        times = draw.normal(100, 3, (2, num_windows))
        false += relative_gain(*times).low > 0
    # 15 expected of no gain at all; five standard deviations.
    assert false <= 15 + 5 * math.sqrt(15)


def test_windows_of_a_pattern_of_their_own_have_none_that_lasts(seed: int) -> None:
    """Half a percent at most were seen; among 200 a dozen would be a chance of less than one in a million."""
    draw = np.random.default_rng(seed)
    false = sum(drift(draw.poisson(1000 * drifting(40, 2, 8, 1.0, seed + i))).lasting for i in range(200))
    assert false < 12
    slow = [drift(draw.poisson(1000 * drifting(40, 2, 8, 0.1, seed + i))).lasting for i in range(50)]
    assert sum(slow) >= 45
