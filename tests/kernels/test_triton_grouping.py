"""Grouping of pairs by slot: torch's against its definition, the kernel's against torch's, and both inside the dispatcher."""

from __future__ import annotations

import random

import pytest
import torch

from moe_runtime.core import DispatchPlan
from moe_runtime.dispatch import grouping, triton_grouping
from moe_runtime.dispatch.local import LocalDispatcher


def draw_slots(draw: random.Random, kind: str) -> tuple[torch.Tensor, int]:
    num_tokens, top_k, num_slots = draw.randint(1, 40), draw.randint(1, 9), draw.randint(1, 20)
    if kind == "none":
        return torch.full((num_tokens, top_k), -1), num_slots
    if kind == "hot":
        return torch.full((num_tokens, top_k), draw.randrange(num_slots)), num_slots
    if kind == "long":
        num_tokens, top_k, num_slots = 701, 8, 3
    if kind == "empty":
        num_tokens = 0
    return torch.randint(-1, num_slots, (num_tokens, top_k)), num_slots


KINDS = ("random", "none", "hot", "long", "empty")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "group", [grouping.group_pairs, triton_grouping.group_pairs], ids=["torch", "triton"]
)
def test_matches_definition(group: grouping.GroupPairs, kind: str, seed: int) -> None:
    slot_TK, num_slots = draw_slots(random.Random(seed), kind)
    got = group(slot_TK, num_slots)
    slots = slot_TK.reshape(-1).tolist()
    order = sorted(range(len(slots)), key=lambda i: (slots[i] < 0, slots[i], i))
    assert got.pair_S.tolist() == order
    assert got.num_rows_p.tolist() == [slots.count(p) for p in range(num_slots)]
    position = (
        [-1 if slots[i] < 0 else order.index(i) for i in range(len(slots))] if len(slots) < 1000 else None
    )
    if position is not None:
        assert got.position_TK.reshape(-1).tolist() == position
    assert got.position_TK.shape == slot_TK.shape
    assert {t.dtype for t in (got.pair_S, got.position_TK, got.num_rows_p)} == {torch.int64}
    if kind == "long":
        assert slot_TK.numel() > triton_grouping.grouping_config(slot_TK.numel()).block
        valid = got.position_TK[slot_TK >= 0]
        assert torch.equal(got.pair_S[valid], torch.arange(slot_TK.numel()).view_as(slot_TK)[slot_TK >= 0])
        assert (got.position_TK[slot_TK < 0] == -1).all()


def test_the_dispatcher_gives_the_same_with_both(seed: int) -> None:
    T, K, p, D = 11, 3, 5, 8
    plan = DispatchPlan(
        global_slot_TK=torch.randint(-1, p, (T, K)),
        topk_weights_TK=torch.rand(T, K),
        slots_per_rank=p,
        num_ranks=1,
        rank=0,
        max_num_tokens=T,
    )
    x = torch.randn(T, D)
    results = []
    for group in (grouping.group_pairs, triton_grouping.group_pairs):
        dispatcher = LocalDispatcher(group)
        batch = dispatcher.dispatch(x, plan).wait()
        slot_S = torch.repeat_interleave(torch.arange(p), batch.num_rows_p)
        y = x[batch.row_index_S] * (1 + slot_S[:, None])
        results.append(dispatcher.combine(y, batch, plan).wait())
    slot = plan.global_slot_TK
    factor = (torch.where(slot >= 0, 1 + slot, 0) * plan.topk_weights_TK).sum(1, keepdim=True)
    assert torch.equal(*results)
    torch.testing.assert_close(results[0], x * factor)
