"""Choosing copies: pairs are dealt as the quotas say, and a random choice spreads them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moe_runtime.core import Routing
from moe_runtime.dispatch.base import plan_dispatch
from moe_runtime.placement.layout import contiguous, layer_placement
from moe_runtime.placement.run_time_split import WEIGHT_ROWS, split_of
from moe_runtime.replicas import choose_randomly, deal


def test_pairs_are_dealt_in_order(seed: int) -> None:
    draw = np.random.default_rng(seed)
    E, C = 7, 3
    id_S = draw.integers(-1, E, size=int(draw.integers(0, 200)))
    copies_EC = draw.permutation(E * C).reshape(E, C)
    quota_EC = np.zeros((E, C), dtype=np.int64)
    for expert in range(E):
        cuts = np.sort(draw.integers(0, (id_S == expert).sum() + 1, size=C - 1))
        quota_EC[expert] = np.diff([0, *cuts, (id_S == expert).sum()])
    slot_S = deal(id_S, copies_EC, quota_EC)
    left = quota_EC.copy()
    for expert, slot in zip(id_S, slot_S, strict=True):
        if expert < 0:
            assert slot == -1
            continue
        copy = int(np.flatnonzero(left[expert])[0])
        assert slot == copies_EC[expert, copy]
        left[expert, copy] -= 1
    assert not left.any()


@pytest.mark.parametrize("num_redundant", [0, 5, 21])
def test_a_random_copy_is_one_of_the_expert(num_redundant: int, seed: int) -> None:
    placement = layer_placement(contiguous(1, 7, 4, num_redundant), 0, rank=1)
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(-1, 7, (300, 3), generator=draw)
    routing = Routing(ids, torch.ones(300, 3))
    plan = choose_randomly(routing, placement, 1, 300)
    slots = placement.slot_to_expert_Np.view(-1)
    assert torch.equal(torch.where(ids >= 0, slots[plan.global_slot_TK.clamp(min=0)], -1), ids)
    assert torch.equal(plan.global_slot_TK, choose_randomly(routing, placement, 1, 300).global_slot_TK)
    if num_redundant == 0:
        assert torch.equal(plan.global_slot_TK, plan_dispatch(routing, placement, 1, 300).global_slot_TK)
    for expert in range(7):
        copies = placement.copies_EX[expert][placement.copies_EX[expert] >= 0]
        chosen = plan.global_slot_TK[ids == expert]
        share = torch.stack([(chosen == copy).float().mean() for copy in copies])
        # Over 100 pairs per expert: a fair choice strays by more than a third of 1/2 once in ten thousand times.
        assert (share - 1 / len(copies)).abs().max() < 0.2, share


def test_few_rows_go_to_one_copy() -> None:
    few = np.array([[1, 0, 3], [2, 0, 0]])
    assert split_of(few) == "one_replica"
    assert split_of(few * WEIGHT_ROWS) == "waterfill"
