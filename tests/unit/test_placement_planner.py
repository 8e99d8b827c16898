"""What every plan must respect, and how good plans are on routing made here. Legend: W windows, L layers, N ranks, E experts, p slots."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from benchmarks.planner_judge import Imbalance, batches_of, even_bound, even_loads, judge, ranks_per_token
from benchmarks.planner_routing import KINDS, make_trace, splits_of_time
from moe_runtime.core import ExpertPlacement
from moe_runtime.errors import ConfigError
from moe_runtime.placement import deepseek
from moe_runtime.placement.cost import Cluster, Cost, Hardware, ModelCost
from moe_runtime.placement.planner import PlanResult, Price, plan
from moe_runtime.placement.problem import scaled_loads

Array = npt.NDArray[Any]
MODEL = ModelCost(hidden=64, intermediate=32, expert_bytes=12288, row_bytes=128, return_bytes=128, top_k=2)


def check(result: PlanResult, num_slots: int, num_experts: int, most: Array, copies: int = 1) -> Array:
    """The slots, after checking what holds for every plan: `most` replicas a rank, `copies` of each expert, none twice on a rank."""
    slots_LNp = np.array(result.placement.slots)
    for layer in slots_LNp:
        for rank, limit in zip(layer, most, strict=True):
            held = rank[rank >= 0]
            assert len(held) == len(set(held.tolist())) <= limit
        assert (layer >= 0).sum() == num_slots
        assert np.bincount(layer[layer >= 0], minlength=num_experts).min() >= copies
    return slots_LNp


def loads(
    rng: np.random.Generator, num_layers: int, num_experts: int, num_windows: int = 3, hot: bool = False
) -> Array:
    load = rng.lognormal(0.0, 1.0, (num_windows, num_layers, num_experts))
    if hot:
        load[:, :, rng.integers(num_experts)] *= 500
    return load


@pytest.mark.parametrize("split", ["waterfill", "even"])
@pytest.mark.parametrize(
    ("num_ranks", "num_experts", "num_slots"),
    [
        (8, 64, 72),
        (5, 13, 17),
        (4, 9, 36),
        (7, 10, 29),
        (1, 6, 6),
        (2, 5, 9),
        (6, 3, 18),
        (16, 16, 32),
        (3, 8, 8),
    ],
)
def test_any_number_of_slots(seed: int, num_ranks: int, num_experts: int, num_slots: int, split: str) -> None:
    rng = np.random.default_rng(seed)
    for hot in (False, True):
        given = loads(rng, 4, num_experts, hot=hot)
        given[:, 1] = 0  # a layer nobody used
        given[:, 2, num_experts // 2 :] = 0
        result = plan(given, Cluster.single(num_ranks), num_slots=num_slots, split=split)
        most = np.full(num_ranks, -(-num_slots // num_ranks))
        check(result, num_slots, num_experts, most)
        again = plan(given * 7.0, Cluster.single(num_ranks), num_slots=num_slots, split=split)
        assert again.placement == result.placement  # deterministic, and of no unit


def test_more_slots_than_can_be_used_stay_empty() -> None:
    result = plan(np.ones((1, 3)), Cluster.single(2), num_slots=9)
    assert [sorted(rank) for rank in result.placement.slots[0]] == [[0, 1, 2]] * 2
    assert result.notes == ("3 of 9 slots stay empty: no rank may or can use them",)


@pytest.mark.parametrize("split", ["waterfill", "even"])
def test_limits_so_uneven_that_counts_follow_the_room(seed: int, split: str) -> None:
    given = loads(np.random.default_rng(seed), 2, 6)
    result = plan(given, Cluster.single(4), num_slots=9, max_slots_per_rank=[6, 1, 1, 1], split=split)
    check(result, 9, 6, np.array([6, 1, 1, 1]))
    skewed = plan(
        [[1000.0, 900.0, 800.0, 1.0, 1.0, 1.0]], Cluster.single(3), num_slots=8, max_slots_per_rank=[6, 1, 1]
    )
    check(skewed, 8, 6, np.array([6, 1, 1]))


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("max_moved", [0.0, 0.05, 1.0])
def test_constraints_hold_with_and_without_a_current_placement(
    seed: int, max_moved: float, together: bool
) -> None:
    rng = np.random.default_rng(seed)
    given = loads(rng, 3, 20)
    first = plan(given, Cluster(2, 4), num_slots=56)
    coactivation = rng.random((3, 20, 20)) if together else None
    if coactivation is not None:
        coactivation = coactivation + coactivation.swapaxes(1, 2)
    limits = [9, 9, 3, 9, 9, 9, 9, 9]
    for current in (None, first.placement):
        result = plan(
            loads(rng, 3, 20),
            Cluster(2, 4),
            num_slots=52,
            current=current,
            max_moved=max_moved,
            coactivation_LEE=coactivation,
            max_slots_per_rank=limits,
            failed_ranks=[5],
            pinned=[(3, 0), (3, 1), (7, 0)],
            cover_loss=True,
        )
        slots_LNp = check(result, 52, 20, np.array([9, 9, 3, 9, 9, 0, 9, 9]), copies=2)
        assert (slots_LNp[:, 5] == -1).all()
        for layer in slots_LNp:
            assert 3 in layer[0]
            assert 3 in layer[1]
            assert 7 in layer[0]
            for lost in range(8):  # every expert survives the loss of any one rank
                left = np.delete(layer, lost, axis=0)
                assert set(left[left >= 0].tolist()) == set(range(20))


def test_replicas_stay_in_their_slots_and_moves_are_counted(seed: int) -> None:
    rng = np.random.default_rng(seed)
    given = loads(rng, 6, 32)
    first = plan(given, Cluster.single(8), num_slots=40)
    assert first.moved_slots == 6 * 40
    same = plan(given, Cluster.single(8), num_slots=40, current=first.placement, max_moved=0.0)
    assert same.moved_slots == 0
    assert same.placement.slots == first.placement.slots
    assert same.placement.version == first.placement.version + 1
    other = plan(loads(rng, 6, 32), Cluster.single(8), num_slots=40, current=first.placement, max_moved=0.1)
    before, after = np.array(first.placement.slots), np.array(other.placement.slots)
    moved = 0
    for old, new in zip(before.reshape(-1, 5), after.reshape(-1, 5), strict=True):
        stayed = set(old.tolist()) & set(new.tolist())
        assert all(old.tolist().index(e) == new.tolist().index(e) for e in stayed)
        moved += len(set(new.tolist()) - stayed)
    assert 0 < moved == other.moved_slots <= 0.1 * 6 * 40


def test_a_failed_rank_is_replaced_whatever_the_budget(seed: int) -> None:
    given = loads(np.random.default_rng(seed), 2, 12)
    first = plan(given, Cluster.single(4), num_slots=16)
    result = plan(
        given, Cluster.single(4), num_slots=12, current=first.placement, max_moved=0.0, failed_ranks=[2]
    )
    slots_LNp = check(result, 12, 12, np.array([4, 4, 0, 4]))
    assert (slots_LNp[:, 2] == -1).all()
    assert "had to move" in result.notes[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_slots": 7}, "num_slots=7 is too few for 8 experts: at least 8"),
        ({"num_slots": 15, "cover_loss": True}, "so that a rank may be lost: at least 16"),
        (
            {"cover_loss": True, "failed_ranks": [1, 2, 3], "num_slots": 16},
            "at least 2 ranks that work; there is 1",
        ),
        ({"max_slots_per_rank": 1}, "leaves 4 slots on the 4 ranks that work; 8 experts need at least 8"),
        ({"max_slots_per_rank": [3, 3]}, "or one for each of 4 ranks"),
        ({"failed_ranks": [4]}, "failed rank 4 does not exist; ranks are 0 to 3"),
        ({"failed_ranks": [0, 1, 2, 3]}, "at least one that works"),
        ({"pinned": [(8, 0)]}, "pinned expert 8 does not exist; experts are 0 to 7"),
        ({"pinned": [(0, 4)]}, "pinned to rank 4; ranks are 0 to 3"),
        ({"pinned": [(0, 1)], "failed_ranks": [1]}, "pinned to rank 1, which has 0 slots because it failed"),
        ({"pinned": [(e, 0) for e in range(4)]}, "4 experts are pinned to rank 0, which has 3 slots"),
        (
            {"pinned": [(0, r) for r in range(4)], "num_slots": 9},
            "one of each other need 11 slots; there are 9",
        ),
        ({"algorithm": "best"}, "choose from ours, deepseek, contiguous"),
        ({"split": "best"}, "choose from waterfill, even"),
        ({"algorithm": "deepseek", "pinned": [(0, 0)]}, "choose 'ours'"),
        ({"algorithm": "contiguous", "failed_ranks": [0]}, "choose 'ours'"),
        ({"max_moved": 1.5}, "from 0 to 1"),
        ({"coactivation_LEE": np.ones((1, 8, 7))}, r"the loads want \(1, 8, 8\)"),
        ({"coactivation_LEE": np.arange(64.0).reshape(1, 8, 8)}, "symmetric"),
        ({"current": ExpertPlacement((((0, 1), (2, 3)),), 8)}, "the cluster 4 ranks"),
    ],
)
def test_what_cannot_be_met_is_said(change: dict[str, Any], message: str) -> None:
    options: dict[str, Any] = {"num_slots": 10} | change
    with pytest.raises(ConfigError, match=message):
        plan(np.ones((1, 8)), Cluster.single(4), **options)


@pytest.mark.parametrize(
    "bad", [np.full((1, 4), np.nan), np.full((1, 4), -1.0), np.ones(4), np.ones((0, 1, 4))]
)
def test_bad_loads(bad: Array) -> None:
    with pytest.raises(ConfigError, match="loads must"):
        plan(bad, Cluster.single(2), num_slots=4)


@pytest.mark.parametrize("kind", KINDS)
def test_even_shares_are_at_least_as_level_as_eplbs(kind: str, seed: int) -> None:
    trace = make_trace(kind, num_tokens=1500, num_layers=4, num_experts=64, top_k=6, seed=seed)
    load = scaled_loads(trace.loads(0, 1500)).mean(axis=0)
    for num_ranks, num_slots in ((8, 72), (16, 96), (32, 128)):
        slots = np.array(
            plan(load, Cluster.single(num_ranks), num_slots=num_slots, split="even").placement.slots
        )
        eplb = deepseek.rebalance_experts(load, num_slots, 1, 1, num_ranks).slot_to_expert_LS.reshape(
            4, num_ranks, -1
        )
        ours_max = even_loads(slots, load).max(axis=1).sum()
        assert ours_max <= even_loads(eplb, load).max(axis=1).sum() * (1 + 1e-6)
        assert even_bound(load, num_slots, num_ranks).sum() / ours_max >= 0.985


@pytest.mark.parametrize("kind", KINDS)
def test_held_out_excess_after_the_split_is_far_below_eplbs(kind: str, seed: int) -> None:
    trace = make_trace(kind, num_tokens=3000, num_layers=4, num_experts=64, top_k=6, seed=seed)
    rng = np.random.default_rng(seed)
    eplb_sum, ours_sum = Imbalance(), Imbalance()
    for num_ranks, num_slots in ((8, 72), (16, 80), (16, 96)):
        for past, start, stop in splits_of_time(trace, "rolling")[::2]:
            given = trace.loads(past, start)
            batches = batches_of(trace, rng, start, stop, num_ranks, 64, 3)
            eplb = deepseek.rebalance_experts(scaled_loads(given).mean(axis=0), num_slots, 1, 1, num_ranks)
            judge(eplb.slot_to_expert_LS.reshape(4, num_ranks, -1), batches, 64, eplb_sum, Imbalance())
            ours = plan(given, Cluster.single(num_ranks), num_slots=num_slots)
            judge(np.array(ours.placement.slots), batches, 64, ours_sum, Imbalance())
    assert ours_sum.value - 1 <= (eplb_sum.value - 1) * 2 / 3


def test_replans_keep_up_with_plans_from_scratch(seed: int) -> None:
    trace = make_trace("drifting", num_tokens=6000, num_layers=6, num_experts=64, top_k=6, seed=seed)
    rng = np.random.default_rng(seed)
    current = plan(trace.loads(0, 1500), Cluster.single(8), num_slots=80).placement
    kept, scratch_sum, replan_sum = current, Imbalance(), Imbalance()
    kept_sum = Imbalance()
    for start, stop in pairwise(range(1500, 6000, 750)):
        given = trace.loads(start - 1500, start)
        result = plan(given, Cluster.single(8), num_slots=80, current=current)
        assert result.moved_slots <= 0.05 * 6 * 80
        current = result.placement
        scratch = plan(given, Cluster.single(8), num_slots=80).placement
        batches = batches_of(trace, rng, start, stop, 8, 128, 3)
        for placement, total in ((scratch, scratch_sum), (current, replan_sum), (kept, kept_sum)):
            judge(np.array(placement.slots), batches, 64, total, Imbalance())
    assert replan_sum.value <= scratch_sum.value * 1.015
    assert replan_sum.value <= kept_sum.value * 1.005


def test_weighed_coactivation_sends_tokens_to_fewer_ranks(seed: int) -> None:
    trace = make_trace("clustered", num_tokens=4000, num_layers=3, num_experts=64, top_k=6, seed=seed)
    given, together = trace.loads(0, 2000), trace.coactivation(0, 2000)
    visits = {}
    for name, options in (("plain", {}), ("gathered", {"coactivation_LEE": together})):
        slots = np.array(plan(given, Cluster.single(8), num_slots=72, **options).placement.slots)
        visits[name], _ = ranks_per_token(trace, slots, np.random.default_rng(seed), 2000, 4000, 64)
    assert visits["gathered"] <= 0.85 * visits["plain"]


def test_nodes_are_kept_to_when_coactivation_says_so() -> None:
    # Experts 0-7 are chosen together, and 8-15; each half fits one node.
    half = np.arange(16) // 8
    together = (half[:, None] == half).astype(float)[None]
    result = plan(np.ones((1, 16)), Cluster(2, 4), num_slots=16, coactivation_LEE=together)
    nodes = [{int(half[e]) for rank in result.placement.slots[0][n : n + 4] for e in rank} for n in (0, 4)]
    assert sorted(map(sorted, nodes)) == [[0], [1]]


@pytest.mark.parametrize(("horizon", "moves"), [(1, False), (10_000_000, True)])
def test_a_move_must_pay(horizon: int, moves: bool) -> None:
    load = np.ones((2, 16))
    first = plan(load, Cluster.single(4), num_slots=20).placement
    load[:, [e for e in first.slots[0][0] if e >= 0]] = 20.0
    # Weights that take long to move and no time to read.
    hardware = replace(Hardware.named("cpu"), memory_bytes_s=1e18)
    cost = Cost(replace(MODEL, expert_bytes=10**9), hardware, Cluster.single(4))
    price = Price(cost, tokens_per_rank=256, horizon_steps=horizon)
    result = plan(load, Cluster.single(4), price, num_slots=20, current=first, max_moved=0.5)
    assert (result.moved_slots > 0) == moves
    assert (result.placement == first) == (not moves)
    assert any("the current placement stays" in note for note in result.notes) == (not moves)
