"""Rounds from any placement to any other: every map on the way is whole, and only empty slots are written."""

from __future__ import annotations

import random

import pytest

from moe_runtime.core import ExpertPlacement
from moe_runtime.errors import ConfigError
from moe_runtime.placement.layout import contiguous
from moe_runtime.placement.transition import (
    LayerChange,
    apply_changes,
    check_reachable,
    next_round,
    num_copies,
    with_empty_slots,
)


def random_layer(
    draw: random.Random, num_experts: int, num_ranks: int, width: int
) -> tuple[tuple[int, ...], ...]:
    """Every expert once at least, at most once per rank, one slot of every rank empty at least; at random places."""
    while True:
        ranks: list[list[int]] = [[] for _ in range(num_ranks)]
        for expert in draw.sample(range(num_experts), num_experts):
            draw.choice([r for r in ranks if len(r) < width - 1]).append(expert)
        for _ in range(draw.randrange(num_ranks * width)):
            rank = draw.choice(ranks)
            if len(rank) < width - 1:
                missing = [e for e in range(num_experts) if e not in rank]
                if missing:
                    rank.append(draw.choice(missing))
        slots = [rank + [-1] * (width - len(rank)) for rank in ranks]
        for rank in slots:
            draw.shuffle(rank)
        return tuple(tuple(rank) for rank in slots)


def check_change(change: LayerChange, num_experts: int) -> None:
    before, after = change.before, change.after
    written = {(c.to_rank, c.to_slot) for c in change.copies}
    assert len(written) == len(change.copies)
    for c in change.copies:
        assert before[c.from_rank][c.from_slot] == c.expert
        assert before[c.to_rank][c.to_slot] == -1, "a live slot would be overwritten"
        assert after[c.to_rank][c.to_slot] == c.expert
    for rank, (old, new) in enumerate(zip(before, after, strict=True)):
        held = [e for e in new if e >= 0]
        assert len(set(held)) == len(held)
        assert new.count(-1) >= 1, "no slot is left for the next round"
        for slot, (a, b) in enumerate(zip(old, new, strict=True)):
            assert b in (a, -1) or (rank, slot) in written
    assert {e for rank in after for e in rank if e >= 0} == set(range(num_experts))


def test_any_placement_is_reached(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(300):
        num_ranks = draw.randint(1, 6)
        num_experts = draw.randint(1, 12)
        width = -(-num_experts // num_ranks) + 1 + draw.randrange(3)
        layers = draw.randint(1, 3)
        current, target = (
            ExpertPlacement(
                tuple(random_layer(draw, num_experts, num_ranks, width) for _ in range(layers)), num_experts
            )
            for _ in range(2)
        )
        check_reachable(current, target)
        travelled, version = 0, current.version
        expected = num_copies(current, target)
        for _ in range(10 * num_experts * num_ranks):
            changes = next_round(current, target)
            if not changes:
                break
            for change in changes:
                check_change(change, num_experts)
                travelled += len(change.copies)
            current = apply_changes(current, changes)
        for reached, wanted in zip(current.slots, target.slots, strict=True):
            assert [set(r) - {-1} for r in reached] == [set(r) - {-1} for r in wanted]
        assert travelled == expected
        assert current.version >= version


def test_a_swap_takes_one_round_with_one_empty_slot() -> None:
    current = with_empty_slots(contiguous(2, 4, 2), 1)
    target = ExpertPlacement((((0, 1, -1), (2, 3, -1)), ((0, 2, -1), (1, 3, -1))), 4)
    (change,) = next_round(current, target)
    assert change.layer == 1
    assert change.after == ((0, -1, 2), (-1, 3, 1))
    assert next_round(apply_changes(current, [change]), target) == []


def test_what_cannot_be_reached_is_refused_with_layer_and_rank() -> None:
    current = with_empty_slots(contiguous(2, 4, 2), 1)
    fine = ((0, 1), (2, 3))
    cases = [
        (((fine,), 4), "for 1 MoE layers"),
        (((fine, ((0, 1), (2, 4))), 4), "MoE layer 1, rank 1: expert 4 does not exist"),
        (((((0, 0), (1, 2, 3)), fine), 4), "MoE layer 0, rank 0 holds an expert twice"),
        (((fine, ((0, 1), (2, -1))), 4), "MoE layer 1: expert 3 has no slot"),
        (((fine, ((0, 1, 2), (2, 3))), 4), "at most 2 are allowed"),
        (((fine, ((0, 1), (2,), (3,))), 4), "has 3 ranks; there are 2"),
    ]
    for (slots, num_experts), part in cases:
        with pytest.raises(ConfigError, match=part):
            check_reachable(current, ExpertPlacement(slots, num_experts))
