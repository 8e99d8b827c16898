"""Random placements that keep the rules."""

from __future__ import annotations

import random

from moe_runtime.core import ExpertPlacement


def random_placement(
    draw: random.Random,
    num_layers: int,
    num_experts: int,
    num_ranks: int,
    slots_per_rank: int,
    empty: float = 0.0,
) -> ExpertPlacement:
    """Every expert somewhere, replicas anywhere; `empty`: share of the spare slots left empty."""
    assert num_experts <= num_ranks * slots_per_rank
    assert empty > 0 or slots_per_rank <= num_experts, "a rank cannot fill its slots with different experts"
    layers = tuple(
        _random_layer(draw, num_experts, num_ranks, slots_per_rank, empty) for _ in range(num_layers)
    )
    return ExpertPlacement(slots=layers, num_experts=num_experts)


def _random_layer(
    draw: random.Random, num_experts: int, num_ranks: int, slots_per_rank: int, empty: float
) -> tuple[tuple[int, ...], ...]:
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    seats = [rank for rank in range(num_ranks) for _ in range(min(slots_per_rank, num_experts))]
    draw.shuffle(seats)
    for expert, rank in zip(draw.sample(range(num_experts), num_experts), seats, strict=False):
        ranks[rank].append(expert)
    for held in ranks:
        while len(held) < slots_per_rank:
            absent = [expert for expert in range(num_experts) if expert not in held]
            held.append(-1 if not absent or draw.random() < empty else draw.choice(absent))
        draw.shuffle(held)
    return tuple(tuple(held) for held in ranks)
