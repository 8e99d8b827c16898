"""A report on a recorded load: would another placement pay, and what is behind the answer. `analyse` computes all of it.

The record's windows with tokens are cut in half: plans are made from the first and judged by the second. Definitions of all numbers:
report_data.py and docs/placement-report.md.

Legend: W windows, L MoE layers, N ranks, E experts, p slots per rank.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from moe_runtime.core import ExpertPlacement
from moe_runtime.placement import report_data as data
from moe_runtime.placement.intervals import Estimate, ratio_estimate, relative_gain
from moe_runtime.placement.record import LoadRecord
from moe_runtime.placement.report_audit import audit
from moe_runtime.placement.report_setup import (
    Options,
    Setup,
    drift_loads,
    in_force,
    make_plan,
    make_setup,
    redundant_experts,
    seconds_per_step,
    window_s,
    with_tokens,
)
from moe_runtime.placement.report_stats import Drift, drift, replan_interval_s, verdict
from moe_runtime.placement.report_steps import Judge, Judged
from moe_runtime.placement.report_views import (
    coactivation,
    moves,
    reasons,
    relative_load,
    replica_counts,
)
from moe_runtime.placement.stored import Array
from moe_runtime.placement.traffic import MIN_ROUTES

MAX_TIMES = 48
"""Points on the axis of time."""


@dataclass(frozen=True)
class Analysis:
    """A report, and what it judged."""

    report: data.Report
    before: ExpertPlacement
    after: ExpertPlacement


def analyse(
    record: LoadRecord,
    options: Options,
    placement: ExpertPlacement | None = None,
    applied: tuple[ExpertPlacement, data.Prediction] | None = None,
) -> Analysis:
    """Judge a placement (None: one planned here from the first half) against the one in force at the record's end.

    applied: the last plan with its prediction, to be audited. Raises ConfigError if the record has fewer than two windows with
    tokens, or what is given does not fit it.
    """
    setup = make_setup(record, options)
    before = in_force(record)
    notes: list[str] = []
    if placement is None:
        redundant = redundant_experts(before) if options.redundant is None else options.redundant
        placement = make_plan(setup, redundant, before)
    else:
        notes.append(
            "The placement was given. If it was planned from this record, the judged windows are not unseen and the gain is too good."
        )
    notes += _notes(setup)
    judged_before, judged_after = setup.judge(before), setup.judge(placement)
    gain = relative_gain(judged_before.step_us_W, judged_after.step_us_W)
    lasting = drift(drift_loads(setup))
    report = data.Report(
        about=_about(setup),
        verdict=_verdict(setup, before, placement, judged_before, judged_after, lasting),
        notes=notes,
        layers=_layers(setup, before, placement),
        reasons=reasons(placement, setup.past.counts_WNLE.sum(axis=(0, 1))),
        over_time=_over_time(setup, before, placement),
        losses_before=_losses(judged_before),
        losses_after=_losses(judged_after),
        between=_between(setup, judged_before, judged_after),
        coactivation=coactivation(record.routes, before, placement),
        sweep=[_sweep_point(setup, r, judged_before) for r in _sweep_sizes(setup, before)],
        lasting=_lasting(
            setup, lasting, gain.mean, _payback(setup, before, placement, judged_before, judged_after)[3]
        ),
        audit=audit(record, options.phase, setup.cost, setup.split, options.steps_per_window, *applied)
        if applied
        else None,
    )
    return Analysis(report, before, placement)


def prediction(analysis: Analysis) -> data.Prediction:
    """What to write into the plan's file."""
    report = analysis.report
    return data.Prediction(
        gain=report.verdict.gain,
        before_us=report.verdict.before_us.mean,
        after_us=report.verdict.after_us.mean,
        hardware=report.about.modelled_hardware,
        split=report.about.split,
        measured_forward_us=max(report.between.measured_forward_us_N),
        measured_tokens=report.about.num_tokens / report.about.num_steps,
        before=[[list(rank) for rank in layer] for layer in analysis.before.slots],
    )


def _notes(setup: Setup) -> list[str]:
    notes = []
    if len(setup.record.meta.placements) > 1:
        notes.append(
            "The placement changed during the record; all windows are judged as if the last one had been in force."
        )
    if len(setup.windows) < len(setup.judged.steps_W):
        notes.append(
            f"{len(setup.windows)} of {len(setup.judged.steps_W)} held-out windows were judged, evenly spread."
        )
    if int(setup.traffic.steps_W.max()) > 1:
        notes.append(
            "Windows hold several steps: single steps were drawn from them at random, as if tokens had come independently."
        )
    if not len(setup.record.routes.step_t):
        notes.append(
            "No routes were kept: nothing is said of co-activation; traffic between ranks is expected from counts."
        )
    elif setup.bytes_from != "routes":
        notes.append(
            f"Not all judged windows have routes of {MIN_ROUTES} tokens of each rank, or of all its tokens: elsewhere traffic between ranks"
            " is expected from counts."
        )
    if not setup.record.meta.split and setup.options.split is None:
        notes.append(f"The record does not say how ranks chose among copies: {setup.split} is assumed.")
    return notes


def _about(setup: Setup) -> data.About:
    meta, options, traffic = setup.record.meta, setup.options, setup.traffic
    return data.About(
        model=meta.model, checkpoint=meta.checkpoint, recorded_on=meta.hardware, started_at=meta.started_at,
        modelled_hardware=options.hardware.name, num_nodes=options.cluster.num_nodes,
        ranks_per_node=options.cluster.ranks_per_node, split=setup.split, phase=options.phase,
        num_layers=meta.num_layers, num_experts=meta.num_experts, top_k=meta.top_k, num_windows=len(traffic.steps_W),
        num_steps=int(traffic.steps_W.sum()), num_tokens=int(traffic.tokens_WN.sum()),
        seconds=float(setup.end_time_W[-1] - setup.end_time_W[0]), seconds_per_step=seconds_per_step(setup),
        planned_windows=setup.half, judged_windows=[setup.half + w for w in setup.windows],
        steps_per_window=options.steps_per_window,
    )  # fmt: skip


def _payback(
    setup: Setup,
    before: ExpertPlacement,
    after: ExpertPlacement,
    judged_before: Judged,
    judged_after: Judged,
) -> tuple[int, Array, float, float]:
    """Moved replicas, bytes from rank to rank, microseconds of the migration, steps until it is paid back (may be infinite)."""
    moved, bytes_NN = moves(before, after, setup.options.cluster.same_node_NN, setup.record.meta.expert_bytes)
    migration_us = setup.cost.move_us(bytes_NN) if moved else 0.0
    saved_us = float(judged_before.step_us_W.mean() - judged_after.step_us_W.mean())
    if not moved:
        return moved, bytes_NN, 0.0, 0.0
    return moved, bytes_NN, migration_us, migration_us / saved_us if saved_us > 0 else math.inf


def _verdict(
    setup: Setup,
    before: ExpertPlacement,
    after: ExpertPlacement,
    judged_before: Judged,
    judged_after: Judged,
    found: Drift,
) -> data.Verdict:
    moved, bytes_NN, migration_us, payback_steps = _payback(setup, before, after, judged_before, judged_after)
    gain = relative_gain(judged_before.step_us_W, judged_after.step_us_W)
    payback_s = payback_steps * seconds_per_step(setup)
    half_life_s, longest_s = _half_life_s(setup, found)
    word, why = verdict(gain, len(setup.windows), found.lasting, payback_s, half_life_s, longest_s)
    finite = math.isfinite(payback_steps)
    slots = len(before.slots[0][0]), len(after.slots[0][0])
    return data.Verdict(
        word=word, why=why, gain=_interval(gain), before_us=_mean(judged_before), after_us=_mean(judged_after),
        saved_us=float(judged_before.step_us_W.mean() - judged_after.step_us_W.mean()), moved_slots=moved,
        migration_bytes=int(bytes_NN.sum()), migration_us=migration_us, payback_steps=payback_steps if finite else None,
        payback_s=payback_s if finite else None, redundant_before=redundant_experts(before), redundant_after=redundant_experts(after),
        extra_bytes_per_rank=(slots[1] - slots[0]) * len(before.slots) * setup.record.meta.expert_bytes,
    )  # fmt: skip


def _interval(estimate: Estimate) -> data.Interval:
    bounds = [None if math.isnan(bound) else bound for bound in (estimate.low, estimate.high)]
    return data.Interval(estimate.mean, *bounds)


def _mean(judged: Judged) -> data.Interval:
    return _interval(ratio_estimate(judged.step_us_W, np.ones(len(judged.step_us_W))))


def _layers(setup: Setup, before: ExpertPlacement, after: ExpertPlacement) -> data.Layers:
    loads_LE = setup.traffic.counts_WNLE.sum(axis=(0, 1))
    fullest = []
    for placement in (before, after):
        rows_LN = Judge(placement, setup.cost, setup.split).rows(setup.judged).sum(axis=2)
        fullest.append((rows_LN.max(axis=1) / np.maximum(rows_LN.mean(axis=1), 1e-9)).tolist())
    return data.Layers(
        load_LE=relative_load(loads_LE).tolist(),
        replicas_before_LE=replica_counts(before).tolist(),
        replicas_after_LE=replica_counts(after).tolist(),
        fullest_before_L=fullest[0],
        fullest_after_L=fullest[1],
        unused_L=(loads_LE == 0).sum(axis=1).tolist(),
    )


def _over_time(setup: Setup, before: ExpertPlacement, after: ExpertPlacement) -> data.OverTime:
    counts_WNLE = setup.traffic.counts_WNLE
    groups = np.array_split(np.arange(len(counts_WNLE)), min(len(counts_WNLE), MAX_TIMES))
    shares = []
    for placement in (before, after):
        judge = Judge(placement, setup.cost, setup.split)
        rows_TN = np.stack(
            [judge.rows(setup.traffic.pick(g.tolist()), int(g[0])).sum(axis=(0, 2)) for g in groups]
        )
        shares.append((rows_TN / np.maximum(rows_TN.mean(axis=1, keepdims=True), 1e-9)).tolist())
    return data.OverTime(
        seconds_T=[float(setup.end_time_W[g[-1]] - setup.end_time_W[0]) for g in groups],
        before_TN=shares[0],
        after_TN=shares[1],
        first_judged=next(i for i, g in enumerate(groups) if g[0] >= setup.half),
    )


def _losses(judged: Judged) -> data.Losses:
    return data.Losses(total_us=float(judged.step_us_W.mean()), even_us=judged.even_us, **judged.losses_us)


def _between(setup: Setup, before: Judged, after: Judged) -> data.Between:
    some_W = with_tokens(setup.record, setup.options.phase)
    steps = int(setup.traffic.steps_W.sum())
    return data.Between(
        bytes_from=setup.bytes_from,
        bytes_before_NN=before.bytes_NN.tolist(),
        bytes_after_NN=after.bytes_NN.tolist(),
        wait_before_NN=before.wait_NN.tolist(),
        wait_after_NN=after.wait_NN.tolist(),
        measured_wait_us_N=(setup.record.wait_us_WN[some_W].sum(axis=0) / steps).tolist(),
        measured_forward_us_N=(setup.record.forward_us_WN[some_W].sum(axis=0) / steps).tolist(),
        balancedness_before=before.balancedness,
        balancedness_after=after.balancedness,
    )


def _sweep_sizes(setup: Setup, before: ExpertPlacement) -> list[int]:
    """Redundant experts to try: none, one, two and four per rank, and as many as now."""
    ranks, experts = setup.options.cluster.num_ranks, setup.record.meta.num_experts
    sizes = {0, ranks, 2 * ranks, 4 * ranks, redundant_experts(before)}
    return sorted(size for size in sizes if size <= experts * (ranks - 1))


def _sweep_point(setup: Setup, redundant: int, judged_before: Judged) -> data.SweepPoint:
    placement = make_plan(setup, redundant, None)
    judged = setup.judge(placement)
    return data.SweepPoint(
        redundant=redundant,
        step_us=_mean(judged),
        gain=_interval(relative_gain(judged_before.step_us_W, judged.step_us_W)),
        balancedness=judged.balancedness,
        bytes_per_rank=len(placement.slots) * len(placement.slots[0][0]) * setup.record.meta.expert_bytes,
    )


def _half_life_s(setup: Setup, found: Drift) -> tuple[float | None, float]:
    """The half-life if it was reached, and the longest lag looked at."""
    unit, half_life = window_s(setup), found.half_life_windows
    return None if half_life is None else half_life * unit, len(found.similarity_lag) * unit


def _lasting(setup: Setup, found: Drift, gain: float, payback_steps: float) -> data.Lasting:
    half_life_s, longest_s = _half_life_s(setup, found)
    return data.Lasting(
        similarity_lag=found.similarity_lag,
        window_s=window_s(setup),
        lasting=found.lasting,
        half_life_s=half_life_s,
        longest_lag_s=longest_s,
        replan_interval_s=replan_interval_s(gain, payback_steps * seconds_per_step(setup), half_life_s),
    )
