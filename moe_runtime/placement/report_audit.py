"""The last plan, predicted against achieved.

Legend: W windows.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from moe_runtime.core import ExpertPlacement
from moe_runtime.errors import ConfigError
from moe_runtime.placement.cost import Cost
from moe_runtime.placement.intervals import relative_gain
from moe_runtime.placement.record import LoadRecord, Routes
from moe_runtime.placement.report_data import Audit, Interval, Prediction
from moe_runtime.placement.report_steps import Judge, evenly_spread
from moe_runtime.placement.traffic import traffic_of

MAX_WINDOWS = 32
"""Judged, evenly spread over those under the plan."""


def audit(
    record: LoadRecord,
    phase: str,
    cost: Cost,
    split: str,
    steps_per_window: int,
    applied: ExpertPlacement,
    predicted: Prediction,
) -> Audit:
    """Judge the applied plan and the placement before it by the windows under the plan. Raises ConfigError if there are none."""
    under = _windows_under(record, applied)
    traffic = traffic_of(under, phase)
    windows = evenly_spread(len(traffic.steps_W), MAX_WINDOWS)
    before = ExpertPlacement(
        slots=tuple(tuple(tuple(rank) for rank in layer) for layer in predicted.before),
        num_experts=applied.num_experts,
    )
    times = [
        Judge(p, cost, split).judge(traffic, traffic, windows, steps_per_window).step_us_W
        for p in (before, applied)
    ]
    achieved = relative_gain(*times)
    steps = int(under.num_steps_W.sum())
    low, high = (None if math.isnan(bound) else bound for bound in (achieved.low, achieved.high))
    bound = predicted.gain.mean if predicted.gain.low is None else predicted.gain.low
    return Audit(
        predicted=predicted.gain,
        achieved=Interval(achieved.mean, low, high),
        kept=achieved.mean >= bound,
        num_windows=len(windows),
        measured_before_us=predicted.measured_forward_us,
        measured_after_us=float(under.forward_us_WN.sum(axis=0).max()) / steps,
        measured_tokens_before=predicted.measured_tokens,
        measured_tokens_after=float(under.tokens_WPN.sum()) / steps,
    )


def _windows_under(record: LoadRecord, applied: ExpertPlacement) -> LoadRecord:
    """The record's windows during which the plan was in force."""
    slots = [[list(rank) for rank in layer] for layer in applied.slots]
    versions = [i for i, placement in enumerate(record.meta.placements) if placement == slots]
    under_W = np.isin(record.placement_W, versions)
    if not under_W.any():
        raise ConfigError(
            "the applied plan was not in force in any window of the record: give the plan file that the server was started with or"
            " that was applied to it"
        )
    window_t = record.route_window_t
    under_t = (window_t >= 0) & under_W[window_t]
    routes = record.routes
    return replace(
        record,
        routes=Routes(
            step_t=routes.step_t[under_t],
            rank_t=routes.rank_t[under_t],
            phase_t=routes.phase_t[under_t],
            request_t=routes.request_t[under_t],
            topk_ids_tLK=routes.topk_ids_tLK[under_t],
        ),
        first_step_W=record.first_step_W[under_W],
        num_steps_W=record.num_steps_W[under_W],
        end_time_W=record.end_time_W[under_W],
        placement_W=record.placement_W[under_W],
        counts_WPNLE=record.counts_WPNLE[under_W],
        tokens_WPN=record.tokens_WPN[under_W],
        wait_us_WN=record.wait_us_WN[under_W],
        forward_us_WN=record.forward_us_WN[under_W],
    )
