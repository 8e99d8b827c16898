"""The report: every number recomputed with plain loops."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from moe_runtime.core import ExpertPlacement
from moe_runtime.errors import ConfigError
from moe_runtime.placement.cost import Cluster
from moe_runtime.placement.planner import plan
from moe_runtime.placement.record import LoadRecord, load_record
from moe_runtime.placement.report import analyse, prediction
from moe_runtime.placement.report_data import Coactivation, Interval, Losses, Report
from moe_runtime.placement.report_setup import Options
from tests.helpers.load_records import drifting, make_record, stationary, write_record
from tests.helpers.placements import random_placement
from tests.helpers.plain_report import Plain, read_raw
from tests.helpers.reports import HARDWARE, report_on


def lists(placement: ExpertPlacement) -> list[list[list[int]]]:
    return [[list(rank) for rank in layer] for layer in placement.slots]


def near(a: Any, b: Any) -> bool:
    return bool(np.allclose(a, b, rtol=1e-9, atol=1e-9))


def same_interval(got: Interval, wanted: tuple[float, float, float]) -> bool:
    return near([got.mean, got.low, got.high], wanted)


@pytest.mark.parametrize(
    ("num_windows", "split", "phase", "num_routes", "steps", "tokens"),
    [
        (21, "static", "all", 5000, 3, 200),
        (21, "waterfill", "all", 2700, 1, 200),
        (21, "auto", "decode", 6000, 3, 200),  # static where no rank has 64 tokens, about two steps in three
        # one_replica below 32 pairs per expert, about half of the steps
        (21, "dynamic", "decode", 0, 3, 112),
        (300, "waterfill", "prefill", 150, 3, 200),
    ],
)
def test_every_number_once_more(
    num_windows: int,
    split: str,
    phase: str,
    num_routes: int,
    steps: int,
    tokens: int,
    seed: int,
    tmp_path: Path,
) -> None:
    draw = random.Random(seed)
    popularity = drifting(num_windows, 2, 7, 0.2, seed)
    before = random_placement(draw, 2, 7, 4, 3)
    made = make_record(
        popularity, seed, num_ranks=4, num_routes=num_routes, placements=(before,), steps=steps, tokens=tokens
    )
    write_record(made, tmp_path)
    record = load_record(tmp_path)
    cluster = Cluster(2, 2)
    after = random_placement(draw, 2, 7, 4, 4)
    options = Options(HARDWARE, cluster, split, phase, steps_per_window=2)
    report = analyse(record, options, after).report
    plain = Plain(read_raw(tmp_path), HARDWARE, cluster, report.about.judged_windows, 2, split, phase)
    check_windows(report.about.judged_windows, num_windows)
    old, new = plain.judge(lists(before)), plain.judge(lists(after))
    assert plain.methods == {"auto": {"static", "waterfill"}, "dynamic": {"one_replica", "waterfill"}}.get(
        split, {split}
    )
    check_about(report, plain)
    check_verdict(report, plain, old, new, lists(before), lists(after))
    for losses, wanted in ((report.losses_before, old), (report.losses_after, new)):
        assert all(near(getattr(losses, name), wanted[name]) for name in Losses.__struct_fields__)
        parts = [getattr(losses, name) for name in Losses.__struct_fields__ if name != "total_us"]
        assert near(sum(parts), losses.total_us)
    between = report.between
    judged_tokens = [plain.count(w)[1].tolist() for w in plain.windows]
    # About 60, 32, 36, 0 and 0.25 kept tokens of each source in each window; from 32 on they count.
    known = [bool(r) for w in plain.windows for r in plain.routes_of(w)]
    assert all(t for row in judged_tokens for t in row)
    assert between.bytes_from == ("routes" if all(known) else "routes and counts" if any(known) else "counts")
    assert near(between.bytes_before_NN, old["bytes"])
    assert near(between.bytes_after_NN, new["bytes"])
    assert near(between.wait_before_NN, old["wait"])
    assert near(between.wait_after_NN, new["wait"])
    assert near(
        [between.balancedness_before, between.balancedness_after], [old["balancedness"], new["balancedness"]]
    )
    assert near(
        between.measured_wait_us_N, [record.wait_us_WN[:, n].sum() / (num_windows * steps) for n in range(4)]
    )
    assert near(
        between.measured_forward_us_N,
        [record.forward_us_WN[:, n].sum() / (num_windows * steps) for n in range(4)],
    )
    check_layers(report, plain, lists(before), lists(after))
    check_lasting(report, plain)
    check_sweep(report, record, plain, cluster, old)
    together = report.coactivation
    if num_routes == 0:
        assert together is None
    else:
        assert together is not None
        assert together.num_tokens == num_routes
        check_clusters(together, plain)
        assert near(together.ranks_per_token_before, plain.ranks_per_token(lists(before)))
        assert near(together.ranks_per_token_after, plain.ranks_per_token(lists(after)))
    assert report.audit is None


def check_windows(judged: list[int], num_windows: int) -> None:
    """The second half, or 32 of it: first, last, and the rest as far apart as whole numbers allow."""
    half = num_windows // 2
    if num_windows - half <= 32:
        assert judged == list(range(half, num_windows))
    else:
        assert (judged[0], judged[-1], len(judged)) == (half, num_windows - 1, 32)
        gaps = [b - a for a, b in pairwise(judged)]
        assert max(gaps) - min(gaps) <= 1


def check_about(report: Report, plain: Plain) -> None:
    about, num, steps = report.about, len(plain.record.num_steps_W), int(plain.record.num_steps_W[0])
    tokens = sum(int(plain.count(w)[1].sum()) for w in range(num))
    assert (about.num_tokens, about.num_steps, about.num_windows) == (tokens, num * steps, num)
    assert (about.num_nodes, about.ranks_per_node, about.planned_windows) == (2, 2, num // 2)
    assert near([about.seconds, about.seconds_per_step], [2.0 * (num - 1), 2.0 / steps])
    assert (about.checkpoint, about.split, about.modelled_hardware) == ("c" * 64, plain.split, "made")


def check_verdict(report: Report, plain: Plain, old: Any, new: Any, before: Any, after: Any) -> None:
    judged = report.verdict
    gain = plain.gain_interval(old["times"], new["times"])
    assert same_interval(judged.gain, gain)
    assert same_interval(judged.before_us, plain.mean_interval(old["times"]))
    assert same_interval(judged.after_us, plain.mean_interval(new["times"]))
    saved = old["total_us"] - new["total_us"]
    moved, bytes_NN = plain.moves(before, after)
    migration = plain.travel_us(bytes_NN, 1)
    assert near([judged.saved_us, judged.moved_slots], [saved, moved])
    assert near([judged.migration_bytes, judged.migration_us], [bytes_NN.sum(), migration])
    if saved > 0:
        assert near(
            [judged.payback_steps, judged.payback_s],
            [migration / saved, migration / saved * report.about.seconds_per_step],
        )
    else:
        assert judged.payback_steps is judged.payback_s is None
    extra = [
        max(sum(e >= 0 for rank in layer for e in rank) for layer in slots) - 7 for slots in (before, after)
    ]
    assert [judged.redundant_before, judged.redundant_after] == extra
    widths = len(after[0][0]) - len(before[0][0])
    assert judged.extra_bytes_per_rank == widths * 2 * plain.meta.expert_bytes
    lasting = report.lasting
    lasts = lasting.longest_lag_s if lasting.half_life_s is None else lasting.half_life_s
    if gain[2] < 0.01 or (gain[1] > 0 and gain[0] < 0.01):
        assert judged.word == "not worth it"
    elif gain[1] <= 0 or not lasting.lasting:
        assert judged.word == "not enough evidence"
    elif migration / saved * report.about.seconds_per_step < lasts:
        assert judged.word == "apply"
    else:
        assert judged.word == ("not enough evidence" if lasting.half_life_s is None else "not worth it")


def check_layers(report: Report, plain: Plain, before: Any, after: Any) -> None:
    num = len(plain.record.num_steps_W)
    layers, judged = report.layers, plain.together(range(plain.half, num))
    past = sum(plain.count(w)[0].sum(axis=0) for w in range(plain.half))
    total = past + judged[0].sum(axis=0)
    reasons = []
    for layer in range(2):
        mean = sum(total[layer].tolist()) / 7
        assert near(layers.load_LE[layer], [x / mean for x in total[layer].tolist()])
        assert layers.unused_L[layer] == sum(x == 0 for x in total[layer].tolist())
        for slots, counted, fullest in (
            (before, layers.replicas_before_LE, layers.fullest_before_L),
            (after, layers.replicas_after_LE, layers.fullest_after_L),
        ):
            assert counted[layer] == [sum(e in rank for rank in slots[layer]) for e in range(7)]
            rows = [sum(rank.values()) for rank in plain.rows(slots, *judged)[layer]]
            assert near(fullest[layer], max(rows) / (sum(rows) / 4))
        for expert in range(7):
            ranks = [n for n in range(4) if expert in after[layer][n]]
            if len(ranks) > 1:
                reasons.append((layer, expert, ranks, past[layer][expert] / (past[layer].sum() / 7)))
    got = [(r.layer, r.expert, r.ranks, r.load) for r in report.reasons]
    assert sorted(r[:3] for r in got) == [r[:3] for r in reasons]
    assert near([r[3] for r in sorted(got)], [r[3] for r in reasons])
    assert all(
        f"{len(r.ranks)} replicas" in r.why if r.load >= 1 else "not hot" in r.why for r in report.reasons
    )
    over = report.over_time
    # At most 48 groups of neighbours, the longer ones first.
    sizes = [num // min(num, 48) + (g < num % min(num, 48)) for g in range(min(num, 48))]
    ends = [sum(sizes[: g + 1]) for g in range(len(sizes))]
    assert near(over.seconds_T, [2.0 * (end - 1) for end in ends])
    assert over.first_judged == next(g for g, end in enumerate(ends) if end - sizes[g] >= plain.half)
    for slots, shown in ((before, over.before_TN), (after, over.after_TN)):
        for g, end in enumerate(ends):
            rows = [0.0] * 4
            for layer in plain.rows(slots, *plain.together(range(end - sizes[g], end))):
                rows = [a + sum(rank.values()) for a, rank in zip(rows, layer, strict=True)]
            assert near(shown[g], [r / (sum(rows) / 4) for r in rows])


def check_lasting(report: Report, plain: Plain) -> None:
    lasting, similarity = report.lasting, plain.similarity()
    assert near(lasting.similarity_lag, similarity)
    unit = 2.0 * -(-len(plain.record.num_steps_W) // 256)
    assert near([lasting.window_s, lasting.longest_lag_s], [unit, unit * len(similarity)])
    assert lasting.lasting == plain.lasting()
    half_life, payback = plain.half_life(), report.verdict.payback_s
    if half_life is None:
        assert lasting.half_life_s is lasting.replan_interval_s is None
        return
    assert near(lasting.half_life_s, half_life * unit)
    if payback is None or report.verdict.gain.mean <= 0:
        assert lasting.replan_interval_s is None
    else:
        best = min(math.sqrt(2 * payback * half_life * unit / math.log(2)), half_life * unit)
        assert near(lasting.replan_interval_s, best)


def check_clusters(together: Coactivation, plain: Plain) -> None:
    got = sorted((c.layer, c.experts, c.lift, c.tokens) for c in together.clusters)
    wanted = sorted(plain.clusters())
    assert [(g[0], g[1], g[3]) for g in got] == [(w[0], w[1], w[3]) for w in wanted]
    assert near([g[2] for g in got], [w[2] for w in wanted])


def check_sweep(report: Report, record: LoadRecord, plain: Plain, cluster: Cluster, old: Any) -> None:
    assert [p.redundant for p in report.sweep] == sorted({0, 4, 8, 16, report.verdict.redundant_before})
    loads_WLE = np.stack([plain.count(w)[0].sum(axis=0) for w in range(plain.half)])
    for point in report.sweep:
        placement = plan(loads_WLE, cluster, num_slots=7 + point.redundant).placement
        judged = plain.judge(lists(placement))
        assert same_interval(point.step_us, plain.mean_interval(judged["times"]))
        assert same_interval(point.gain, plain.gain_interval(old["times"], judged["times"]))
        assert near(point.balancedness, judged["balancedness"])
        assert point.bytes_per_rank == 2 * len(placement.slots[0][0]) * record.meta.expert_bytes


def test_groups_of_experts_chosen_together(seed: int, tmp_path: Path) -> None:
    record = make_record(np.full((8, 2, 24), 1 / 24), seed, num_routes=600)
    ids_tLK = record.routes.topk_ids_tLK.copy()
    # In layer 1 a third of the tokens choose two of experts 2, 9, 20, which are on three ranks.
    for t in range(0, 600, 3):
        ids_tLK[t, 1] = random.Random(seed + t).sample([2, 9, 20], 2)
    # In layer 0 each chooses two of one of four sets, which may overlap.
    draw = random.Random(seed)
    sets = [draw.sample(range(24), 4) for _ in range(4)]
    for t in range(600):
        ids_tLK[t, 0] = draw.sample(draw.choice(sets), 2)
    grouped = replace(record, routes=replace(record.routes, topk_ids_tLK=ids_tLK))
    together = report_on(grouped).coactivation
    assert together is not None
    plain = Plain(
        read_raw(write_record(grouped, tmp_path)), HARDWARE, Cluster.single(3), [], 1, "static", "all"
    )
    check_clusters(together, plain)
    assert len({c.layer for c in together.clusters}) == 2
    (cluster,) = (c for c in together.clusters if c.layer == 1)
    assert (cluster.experts, cluster.ranks_before) == ([2, 9, 20], 3)
    assert cluster.lift > 1.5
    pairs = sum(len({2, 9, 20} & set(row)) == 2 for row in ids_tLK[:, 1].tolist())
    assert cluster.tokens == pairs


def test_audit_holds_the_prediction_against_what_came(seed: int, tmp_path: Path) -> None:
    popularity = stationary(40, 2, 6, 0.3, seed)
    options = Options(HARDWARE, Cluster.single(3), "static", steps_per_window=2)
    first = make_record(popularity, seed, tokens=2000)
    planned = analyse(first, options)
    promise = prediction(planned)
    # The plan comes into force after a third of the windows.
    placement_W = np.repeat([0, 1], [10, 30]).astype(np.int32)
    second = make_record(
        popularity, seed + 1, tokens=2000, placements=(planned.before, planned.after), placement_W=placement_W,
        num_routes=5000,
    )  # fmt: skip
    audit = analyse(second, options, applied=(planned.after, promise)).report.audit
    assert audit is not None
    assert audit.predicted == planned.report.verdict.gain
    # The same popularity: what was promised comes, but for noise.
    assert abs(audit.achieved.mean - audit.predicted.mean) < 0.05
    assert audit.num_windows == 30
    plain = Plain(
        read_raw(write_record(second, tmp_path)),
        HARDWARE,
        options.cluster,
        list(range(20, 40)),
        2,
        "static",
        "all",
    )
    assert same_interval(audit.achieved, plain.audit(1, lists(planned.before), lists(planned.after)))
    assert audit.kept == (audit.achieved.mean >= promise.gain.low)
    assert near(audit.measured_before_us, (first.forward_us_WN.sum(axis=0) / 120).max())
    assert near(audit.measured_after_us, (second.forward_us_WN[10:].sum(axis=0) / 90).max())
    assert near(audit.measured_tokens_after, second.tokens_WPN[10:].sum() / 90)
    with pytest.raises(ConfigError, match="was not in force in any window"):
        analyse(first, options, applied=(planned.after, promise))


def test_the_split_is_the_record_s_unless_named(seed: int, tmp_path: Path) -> None:
    """Records of before say nothing of it."""
    before = random_placement(random.Random(seed), 2, 7, 4, 3)
    made = make_record(stationary(20, 2, 7, 0.3, seed), seed, num_ranks=4, placements=(before,))
    folder = write_record(
        replace(made, meta=msgspec.structs.replace(made.meta, split="static")), tmp_path / "new"
    )
    record = load_record(folder)
    recorded, static, filled = (
        report_on(record),
        report_on(record, split="static"),
        report_on(record, split="waterfill"),
    )
    assert recorded == static
    assert recorded.about.split == "static"
    assert recorded.over_time.before_TN != filled.over_time.before_TN
    text = json.loads((folder / "record.json").read_text())
    del text["split"]
    (folder / "record.json").write_text(json.dumps(text))
    old = report_on(load_record(folder))
    assert old.about.split == "waterfill"
    (note,) = set(old.notes) - set(filled.notes)
    assert note == "The record does not say how ranks chose among copies: waterfill is assumed."
    assert msgspec.structs.replace(old, notes=filled.notes) == filled


def test_what_cannot_be_reported(seed: int) -> None:
    record = make_record(stationary(1, 2, 6, 1.0, seed), seed)
    with pytest.raises(ConfigError, match="one window with tokens"):
        report_on(record)
    with pytest.raises(ConfigError, match="the record has 3 ranks, the topology 4"):
        analyse(record, Options(HARDWARE, Cluster(2, 2)))
