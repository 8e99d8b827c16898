"""Placements that need no load statistics, and a placement as one rank sees it."""

from __future__ import annotations

import torch

from moe_runtime.core import ExpertPlacement, LayerPlacement
from moe_runtime.errors import ConfigError


def contiguous(num_layers: int, num_experts: int, num_ranks: int, num_redundant: int = 0) -> ExpertPlacement:
    """Rank r owns a contiguous block of experts; the first (E mod N) ranks own one more.

    Redundant copies repeat from expert 0, each on the next rank (cyclically) that lacks it. All ranks get equally many slots; those
    left over stay empty (-1). Raises ConfigError if a copy cannot be placed on a rank of its own.
    """
    check_redundant(num_redundant, num_experts, num_ranks)
    base, extra = divmod(num_experts, num_ranks)
    ranks: list[list[int]] = []
    first = 0
    for rank in range(num_ranks):
        size = base + (rank < extra)
        ranks.append(list(range(first, first + size)))
        first += size
    for i in range(num_redundant):
        expert = i % num_experts
        # The rank with the fewest slots filled that lacks the expert; the lowest such rank.
        rank = min((r for r in range(num_ranks) if expert not in ranks[r]), key=lambda r: (len(ranks[r]), r))
        ranks[rank].append(expert)
    width = max(1, *(len(r) for r in ranks))
    layer = tuple(tuple(r + [-1] * (width - len(r))) for r in ranks)
    return ExpertPlacement(slots=(layer,) * num_layers, num_experts=num_experts)


def check_redundant(num_redundant: int, num_experts: int, num_ranks: int) -> None:
    """Raises ConfigError if so many extra copies cannot each have a rank without the expert."""
    most = num_experts * (num_ranks - 1)
    if num_redundant > most:
        raise ConfigError(
            f"{num_redundant} redundant experts do not fit: {num_experts} experts on {num_ranks} ranks"
            f" allow at most {most}, since a rank holds an expert once"
        )


def layer_placement(
    placement: ExpertPlacement, layer: int, rank: int, device: torch.device | str = "cpu"
) -> LayerPlacement:
    """The layer's placement as `rank` uses it: its own copy of an expert if it has one, else a replica chosen by rank."""
    slots = torch.tensor(placement.slots[layer], dtype=torch.int64)
    width = slots.shape[1]
    places: list[list[tuple[int, int]]] = [[] for _ in range(placement.num_experts)]
    for r, held in enumerate(placement.slots[layer]):
        for slot, expert in enumerate(held):
            if expert >= 0:
                places[expert].append((r, slot))
    table, copies = [], []
    for expert, where in enumerate(places):
        if not where:
            raise ConfigError(
                f"placement version {placement.version}: expert {expert} of MoE layer {layer} has no slot"
            )
        own = [x for x in where if x[0] == rank]
        chosen_rank, slot = own[0] if own else where[rank % len(where)]
        table.append(chosen_rank * width + slot)
        copies.append([r * width + s for r, s in where])
    most = max(len(c) for c in copies)
    return LayerPlacement(
        slot_to_expert_Np=slots,
        expert_to_slot_E=torch.tensor(table, dtype=torch.int64, device=device),
        copies_EX=torch.tensor(
            [c + [-1] * (most - len(c)) for c in copies], dtype=torch.int64, device=device
        ),
    )
