"""The report's verdict: records whose answer is known, and what each word takes."""

from __future__ import annotations

import math

import numpy as np
import pytest

from moe_runtime.placement.intervals import Estimate
from moe_runtime.placement.report_stats import verdict
from tests.helpers.load_records import drifting, make_record
from tests.helpers.reports import report_on


def test_a_steady_skew_is_worth_a_plan(seed: int) -> None:
    """Two hot experts on the first rank: a plan parts them."""
    popularity = np.tile(np.array([0.4, 0.4, 0.05, 0.05, 0.05, 0.05]), (40, 2, 1))
    report = report_on(make_record(popularity, seed, tokens=2000))
    assert report.verdict.word == "apply"
    assert report.verdict.gain.low > 0.1
    assert report.lasting.lasting
    assert report.lasting.half_life_s is None
    # The plan parts the two; each is 0.4 of the load, the mean rank has a third.
    assert max(abs(x - 2.4) for x in report.layers.fullest_before_L) < 0.1
    assert max(report.layers.fullest_after_L) < 1.45


def test_a_uniform_load_is_not(seed: int) -> None:
    report = report_on(make_record(np.full((40, 2, 6), 1 / 6), seed, tokens=2000))
    assert report.verdict.word == "not worth it"
    assert report.verdict.gain.high < 0.01


def test_one_hot_expert_needs_replicas(seed: int) -> None:
    popularity = np.tile(np.array([0.5, 0.1, 0.1, 0.1, 0.1, 0.1]), (40, 1, 1))
    report = report_on(make_record(popularity, seed, tokens=2000, top_k=1))
    best = max(report.sweep, key=lambda p: p.gain.mean)
    assert best.redundant > 0
    assert best.gain.low > report.sweep[0].gain.high
    report = report_on(make_record(popularity, seed, tokens=2000, top_k=1), redundant=3)
    hottest = report.reasons[0]
    assert (hottest.expert, len(hottest.ranks)) == (0, max(report.layers.replicas_after_LE[0]))
    assert abs(hottest.load - 3.0) < 0.1


def test_drift_shows_its_half_life(seed: int) -> None:
    """A pattern whose correlation falls by 1 - d per window halves in ln 2 / -ln(1 - d) windows, counted from lag 1."""
    popularity = drifting(200, 6, 32, 0.1, seed)
    lasting = report_on(make_record(popularity, seed, tokens=3000)).lasting
    expected_s = 2.0 * (1 + math.log(2) / -math.log(0.9))
    assert lasting.half_life_s is not None
    assert 0.6 * expected_s < lasting.half_life_s < 1.6 * expected_s


def test_a_gain_that_drifts_away_is_not_worth_it(seed: int) -> None:
    """Windows of a pattern of its own each: what was planned for the past does not help."""
    report = report_on(make_record(drifting(40, 2, 8, 1.0, seed), seed, tokens=2000))
    assert report.verdict.word in ("not worth it", "not enough evidence")


@pytest.mark.parametrize("num_windows", [2, 5, 15])
def test_few_windows_are_no_evidence(num_windows: int, seed: int) -> None:
    popularity = np.tile(np.array([0.4, 0.4, 0.05, 0.05, 0.05, 0.05]), (num_windows, 2, 1))
    word = report_on(make_record(popularity, seed, tokens=2000)).verdict.word
    assert word == ("not enough evidence" if num_windows < 15 else "apply")


@pytest.mark.parametrize(
    ("gain", "num_judged", "lasting", "payback_s", "half_life_s", "word"),
    [
        ((0.10, 0.05, 0.15), 8, True, 10.0, 20.0, "apply"),
        ((0.10, 0.05, 0.15), 8, True, 10.0, None, "apply"),  # lasts at least 15 s
        ((0.10, 0.05, 0.15), 7, True, 10.0, 20.0, "not enough evidence"),  # too few windows
        ((0.10, math.nan, math.nan), 1, True, 10.0, 20.0, "not enough evidence"),
        ((0.10, -0.01, 0.15), 8, True, 10.0, 20.0, "not enough evidence"),  # may be a loss
        ((0.10, 0.05, 0.15), 8, False, 10.0, None, "not enough evidence"),  # no pattern
        (
            (0.10, 0.05, 0.15),
            8,
            True,
            20.0,
            None,
            "not enough evidence",
        ),  # the record is shorter than the payback
        ((0.10, 0.05, 0.15), 8, True, 20.0, 20.0, "not worth it"),  # gone before it pays back
        ((0.005, 0.001, 0.009), 8, True, 1.0, 20.0, "not worth it"),
        ((0.008, 0.001, 0.015), 8, True, 1.0, 20.0, "not worth it"),  # sure, but small
        ((-0.20, -0.25, -0.15), 8, True, math.inf, 20.0, "not worth it"),
    ],
)
def test_what_a_verdict_takes(
    gain: tuple[float, float, float],
    num_judged: int,
    lasting: bool,
    payback_s: float,
    half_life_s: float | None,
    word: str,
) -> None:
    assert verdict(Estimate(*gain), num_judged, lasting, payback_s, half_life_s, 15.0)[0] == word
