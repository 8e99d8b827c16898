"""The simulator against hand-computed cases and plain loops over pairs."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from moe_runtime.core import ExpertPlacement
from moe_runtime.errors import ConfigError
from moe_runtime.placement.cost import Cluster, Cost, Hardware, ModelCost
from moe_runtime.placement.intervals import ratio_estimate
from moe_runtime.placement.layout import contiguous, layer_placement
from moe_runtime.placement.record import load_record
from moe_runtime.placement.router import Router
from moe_runtime.placement.run_time_split import ALL_SPLITS
from moe_runtime.placement.simulate import STEPS_PER_WINDOW, Setting, pareto, replay, simulate
from moe_runtime.placement.traffic import Traffic, deal, draw_step, traffic_of
from moe_runtime.tools.pareto_svg import pareto_svg
from moe_runtime.tools.plan_simulate import as_json, cluster_for, table
from tests.helpers.load_records import drifting, make_record, write_record
from tests.helpers.placements import random_placement
from tests.helpers.plain_report import Plain, read_raw
from tests.helpers.records import write_random_record

MODEL = ModelCost(hidden=10, intermediate=5, expert_bytes=1000, row_bytes=20, return_bytes=40, top_k=2)
HARDWARE = Hardware("test", 3e6, 1e9, 1e6, 1e5, 7.0, 4)


def random_traffic(seed: int, num_windows: int, num_ranks: int, num_layers: int, num_experts: int) -> Traffic:
    draw = np.random.default_rng(seed)
    tokens_WN = draw.integers(0, 40, (num_windows, num_ranks))
    share_LE = draw.dirichlet(np.full(num_experts, 0.5), num_layers)
    counts_WNLE = draw.multinomial(tokens_WN[:, :, None] * 2, share_LE)
    return Traffic(counts_WNLE, tokens_WN, draw.integers(1, 6, num_windows))


def cost(num_ranks: int, nodes: int = 1) -> Cost:
    return Cost(MODEL, HARDWARE, Cluster(nodes, num_ranks // nodes))


def test_one_step_by_hand() -> None:
    """Two ranks, experts 0 and 1 on the first, 2 on the second; rank 0 sends 3, 1 and 5 pairs, rank 1 nothing."""
    placement = ExpertPlacement(slots=(((0, 1), (2, -1)),), num_experts=3)
    traffic = Traffic(np.array([[[[3, 1, 5]], [[0, 0, 0]]]]), np.array([[5, 0]]), np.array([1]))
    got = replay(traffic, placement, cost(2), "static")
    assert got.rows_WLNp.tolist() == [[[[3, 1], [5, 0]]]]
    assert got.rank_rows.tolist() == [[4, 5]]
    assert got.balancedness == 4.5 / 5
    assert got.fullest_rows == 5
    assert got.tokens_W.tolist() == [5]
    # All 5 tokens go to rank 1, and come back.
    assert got.sent_bytes_W.tolist() == [5 * (20 + 40)]
    assert got.internode_bytes_W.tolist() == [0]
    # Both ranks pad to 8 rows: 8 * 6 * 10 * 5 operations at 3 per us; sent at 1 byte per us; twice 7 us of latency.
    assert got.step_us_W.tolist() == [pytest.approx(2400 / 3 + 5 * 20 + 5 * 40 + 14)]


@pytest.mark.parametrize("split", ALL_SPLITS)
def test_no_row_is_lost(split: str, seed: int) -> None:
    draw = np.random.default_rng(seed)
    num_experts, num_ranks = int(draw.integers(3, 9)), int(draw.integers(2, 5))
    traffic = random_traffic(seed, 3, num_ranks, 2, num_experts)
    placement = random_placement(
        random.Random(seed), 2, num_experts, num_ranks, num_experts // 2 + 1, empty=0.3
    )
    got = replay(traffic, placement, cost(num_ranks), split)
    for w in range(3):
        for layer in range(2):
            by_expert = np.zeros(num_experts, dtype=np.int64)
            for rank, experts in enumerate(placement.slots[layer]):
                for slot, expert in enumerate(experts):
                    rows = got.rows_WLNp[w, layer, rank, slot]
                    assert rows == 0 or expert >= 0
                    by_expert[expert] += rows
            assert by_expert.tolist() == traffic.counts_WNLE[w, :, layer].sum(axis=0).tolist()
    assert np.isfinite(got.step_us_W).all()
    assert (got.step_us_W > 0).all()


@pytest.mark.parametrize("split", ALL_SPLITS)
def test_telling_counts_is_charged_where_there_are_replicas(split: str, seed: int) -> None:
    """Experts 0 to 4 on two ranks; expert 0 has a second copy in the second of three layers."""
    drawn = random_traffic(seed, 4, 2, 3, 5)
    traffic = Traffic(drawn.counts_WNLE, drawn.tokens_WN, np.ones(4, dtype=np.int64))
    alone, copied = ((0, 1, 2), (3, 4, -1)), ((0, 1, 2), (3, 4, 0))
    placement = ExpertPlacement(slots=(alone, copied, alone), num_experts=5)
    model = cost(2)
    router = Router.of(placement, split, model.cluster.ranks_per_node)
    got = replay(traffic, placement, model, split)
    for w in range(4):
        routed = router.route(traffic.counts_WNLE[w], traffic.tokens_WN[w], w)
        asked = split in ("waterfill", "one_replica", "dynamic") or (
            split == "auto" and traffic.tokens_WN[w].max() >= 64
        )
        # 7 us of latency, and 5 counts of 4 bytes at 1 byte per us.
        extra = 7 + 20 if asked else 0
        assert got.step_us_W[w] == pytest.approx(model.step_time_us(*routed) + extra)


def test_the_static_split_is_the_engine_s(seed: int) -> None:
    """Row for row what layer_placement, which the ranks use, says."""
    placement = random_placement(random.Random(seed), 2, 6, 3, 4)
    traffic = random_traffic(seed, 2, 3, 2, 6)
    got = replay(traffic, placement, cost(3), "static")
    want = np.zeros_like(got.rows_WLNp)
    for layer in range(2):
        for rank in range(3):
            table_E = layer_placement(placement, layer, rank).expert_to_slot_E.tolist()
            for expert, slot in enumerate(table_E):
                want[:, layer, slot // 4, slot % 4] += traffic.counts_WNLE[:, rank, layer, expert]
    assert np.array_equal(got.rows_WLNp, want)


@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 6), (6, 2), (3, 4), (4, 3), (1, 5), (5, 1)])
def test_dealing_keeps_every_pair_and_token(before: int, after: int, seed: int) -> None:
    traffic = random_traffic(seed, 3, before, 2, 7)
    dealt = deal(traffic, after)
    assert dealt.num_ranks == after
    assert np.array_equal(dealt.counts_WNLE.sum(axis=1), traffic.counts_WNLE.sum(axis=1))
    assert np.array_equal(dealt.tokens_WN.sum(axis=1), traffic.tokens_WN.sum(axis=1))
    if after == before:
        assert dealt is traffic
    if after == 3 * before:
        parts = dealt.counts_WNLE.reshape(3, before, 3, 2, 7)
        assert np.array_equal(parts.sum(axis=2), traffic.counts_WNLE)
        assert (parts.max(axis=2) - parts.min(axis=2)).max() <= 1
    if before == 3 * after:
        assert np.array_equal(dealt.tokens_WN, traffic.tokens_WN.reshape(3, after, 3).sum(axis=2))


def test_drawn_steps_are_fair(seed: int) -> None:
    counts = np.full((2, 3, 4), 1000)
    tokens = np.array([500, 700])
    steps = [draw_step(counts, tokens, 4, (seed, i)) for i in range(50)]
    mean = np.mean([c for c, _ in steps], axis=0)
    # Six standard errors.
    assert np.abs(mean - 250).max() < 6 * math.sqrt(1000 * 0.25 * 0.75 / 50)
    assert len({c.tobytes() for c, _ in steps}) == 50
    assert draw_step(counts, tokens, 1, (seed,))[0] is counts
    again = draw_step(counts, tokens, 4, (seed, 7))[0]
    assert np.array_equal(again, steps[7][0])


def test_time_is_that_of_single_steps() -> None:
    """A window of many alike steps takes as long per step as one of them, and not longer for having more experts in all."""
    placement = contiguous(1, 4, 2)
    one = Traffic(np.array([[[[4000, 0, 0, 0]], [[0, 0, 0, 0]]]]), np.array([[4000, 0]]), np.array([1]))
    many = Traffic(one.counts_WNLE * 100, one.tokens_WN * 100, np.array([100]))
    first, second = replay(one, placement, cost(2), "static"), replay(many, placement, cost(2), "static")
    assert second.step_us_W[0] == pytest.approx(first.step_us_W[0], rel=0.05)
    assert second.tokens_W.tolist() == first.tokens_W.tolist()
    assert second.sent_bytes_W[0] == pytest.approx(first.sent_bytes_W[0])
    assert STEPS_PER_WINDOW < 100


def test_phases(tmp_path: Path, seed: int) -> None:
    write_random_record(tmp_path, seed, num_windows=6)
    record = load_record(tmp_path)
    everything = traffic_of(record)
    parts = [traffic_of(record, phase) for phase in ("prefill", "decode")]
    assert sum(int(p.counts_WNLE.sum()) for p in parts) == int(everything.counts_WNLE.sum()) > 0
    assert parts[0].counts_WNLE.sum() == record.counts_WPNLE[:, 0].sum()
    with pytest.raises(ConfigError, match="phase 'both': choose from prefill, decode, all"):
        traffic_of(record, "both")
    write_random_record(tmp_path / "short", seed, num_windows=1)  # its only window is of decode
    with pytest.raises(ConfigError, match="no tokens of phase prefill"):
        traffic_of(load_record(tmp_path / "short"), "prefill")


def test_plans_see_the_past_only(tmp_path: Path, seed: int) -> None:
    write_random_record(tmp_path, seed, num_windows=8, num_ranks=2)
    record = load_record(tmp_path)
    settings = [Setting(Cluster.single(2), 2, "ours", "static")]
    first = simulate(record, settings, HARDWARE)[0]
    assert len(first.replay.step_us_W) == 4
    record.counts_WPNLE[4:] = record.counts_WPNLE[4:, :, :, :, ::-1].copy()
    second = simulate(record, settings, HARDWARE)[0]
    assert second.placement == first.placement
    assert second.replay.rank_rows.sum() == first.replay.rank_rows.sum()
    in_sample = simulate(record, settings, HARDWARE, held_out=False)[0]
    assert len(in_sample.replay.step_us_W) == 8
    assert in_sample.placement != first.placement


def test_estimates(seed: int) -> None:
    draw = np.random.default_rng(seed)
    over, under = draw.uniform(1, 2, 40), draw.uniform(3, 4, 40)
    estimate = ratio_estimate(over, under)
    assert estimate.mean == over.sum() / under.sum()
    assert estimate.low < estimate.mean < estimate.high
    single = ratio_estimate(over[:1], under[:1])
    assert math.isnan(single.low)
    alike = ratio_estimate(np.full(9, 2.0), np.full(9, 4.0))
    assert (alike.low, alike.mean, alike.high) == (0.5, 0.5, 0.5)


@pytest.mark.parametrize(
    ("split", "steps", "num_routes"), [("static", 1, 700), ("waterfill", 1, 1700), ("dynamic", 3, 300)]
)
def test_times_and_bytes_once_more(
    split: str, steps: int, num_routes: int, seed: int, tmp_path: Path
) -> None:
    """From the record's own files by plain loops, at the recorded number of ranks."""
    popularity = drifting(9, 2, 7, 0.2, seed)
    made = make_record(popularity, seed, num_ranks=4, num_routes=num_routes, steps=steps)
    record = load_record(write_record(made, tmp_path))
    cluster = Cluster(2, 2)
    (outcome,) = simulate(record, [Setting(cluster, 4, "ours", split)], HARDWARE)
    windows = [4, 5, 6, 7, 8]
    plain = Plain(read_raw(tmp_path), HARDWARE, cluster, windows, STEPS_PER_WINDOW, split, "all")
    slots = [[list(rank) for rank in layer] for layer in outcome.placement.slots]
    times = plain.times(slots)
    got = outcome.replay
    assert got.step_us_W == pytest.approx(times, rel=1e-9)
    assert outcome.step_us.mean == pytest.approx(sum(times) / 5, rel=1e-9)
    tokens = [plain.count(w)[1].sum() / steps for w in windows]
    assert outcome.tokens_per_s.mean == pytest.approx(sum(tokens) / sum(times) * 1e6, rel=1e-9)
    rows = [plain.rows(slots, *plain.count(w), steps) for w in windows]
    wanted = [[sum(sum(layer[n].values()) for layer in of_window) for n in range(4)] for of_window in rows]
    assert got.rank_rows.tolist() == wanted
    known = [bool(routes) for w in windows for routes in plain.routes_of(w)]
    # About 19, 47 and 8 tokens with routes for each source and window; from 32 on they count.
    assert got.bytes_from == ("routes" if all(known) else "routes and counts" if any(known) else "counts")
    if steps > 1:
        return
    for window, at in enumerate(windows):
        sent = plain.step(slots, at, 0)["bytes"]
        near = sum(sent[a, b] for a in range(4) for b in range(4) if a // 2 == b // 2)
        assert got.sent_bytes_W[window] == pytest.approx(near, rel=1e-9)
        assert got.internode_bytes_W[window] == pytest.approx(sent.sum() - near, rel=1e-9)


def test_intervals_hold_the_truth_as_often_as_they_say(seed: int) -> None:
    draw = np.random.default_rng(seed)
    held = 0
    for i in range(200):
        estimate = ratio_estimate(draw.normal(10, 1, 60), np.ones(60), seed=i)
        held += estimate.low <= 10 <= estimate.high
    # 180 expected; five standard deviations and what the bootstrap is known to lack.
    assert 150 <= held <= 200


def test_table_json_and_plot_agree(tmp_path: Path, seed: int) -> None:
    write_random_record(tmp_path, seed, num_windows=6, num_ranks=4)
    record = load_record(tmp_path)
    settings = [
        Setting(cluster_for(None, ep), r, a, "waterfill")
        for ep in (2, 4, 3)
        for r in (0, 3)
        for a in ("ours", "contiguous")
    ]
    outcomes = simulate(record, settings, HARDWARE)
    best = pareto(outcomes)
    assert any(best)
    for i, outcome in enumerate(outcomes):
        beaten = any(
            o.step_us.mean <= outcome.step_us.mean and o.tokens_per_s_per_rank >= outcome.tokens_per_s_per_rank
            and (o.step_us.mean, o.tokens_per_s_per_rank) != (outcome.step_us.mean, outcome.tokens_per_s_per_rank)
            for o in outcomes
        )  # fmt: skip
        assert best[i] != beaten
    lines = table(outcomes, "title").splitlines()[2:]
    assert [line.startswith("*") for line in lines] == best
    for line, outcome in zip(lines, outcomes, strict=True):
        values = json.loads(json.dumps(as_json(outcome)))
        assert values["step_us"]["mean"] == pytest.approx(np.mean(values["step_us_by_window"]))
        assert f" {values['step_us']['mean']:.1f} " in line
        throughput = sum(values["tokens_per_step"]) / sum(values["step_us_by_window"]) * 1e6
        assert values["tokens_per_s"]["mean"] == pytest.approx(throughput)
        assert np.array_equal(values["rank_rows"], outcome.replay.rank_rows)
        fullest = np.mean(
            [max(rows) / steps for rows, steps in zip(values["rank_rows"], values["steps"], strict=True)]
        )
        assert f" {fullest:.0f} " in line
    svg = ElementTree.fromstring(pareto_svg(outcomes, "a <title> & more"))
    marks = [c for c in svg.iter("{http://www.w3.org/2000/svg}circle") if len(c)]
    assert len(marks) == len(outcomes)
    assert sum(c.get("fill") != "#ffffff" for c in marks) == sum(best)
    # Shorter steps are further left.
    order = np.argsort([float(c.get("cx", "nan")) for c in marks], kind="stable")
    times = np.array([o.step_us.mean for o in outcomes])[order]
    assert (np.diff(times) > -0.01 * times.max()).all()


def test_clusters() -> None:
    assert cluster_for("nodes=4x8", 8) == Cluster(1, 8)
    assert cluster_for("nodes=4x8", 5) == Cluster(1, 5)
    assert cluster_for("nodes=4x8", 16) == Cluster(2, 8)
    assert cluster_for(None, 16) == Cluster(1, 16)
    for ep in (12, 40):
        with pytest.raises(ConfigError, match="allowed are up to 8 ranks, or multiples of that up to 32"):
            cluster_for("nodes=4x8", ep)
