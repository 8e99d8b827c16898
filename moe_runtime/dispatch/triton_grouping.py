"""Grouping of pairs by slot as one Triton kernel; semantics of `grouping.group_pairs`. Legend: see there."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moe_runtime.dispatch.grouping import Grouping


@dataclass(frozen=True)
class GroupingConfig:
    """How the kernel is cut."""

    block: int
    """Pairs looked at in one go."""
    num_warps: int


def grouping_config(num_pairs: int) -> GroupingConfig:
    """Short blocks for decode steps, long ones where every program walks over many pairs."""
    return GroupingConfig(1024, 4) if num_pairs <= 4096 else GroupingConfig(4096, 8)


def group_pairs(slot_TK: torch.Tensor, num_slots: int) -> Grouping:
    """slot_TK: int64 contiguous, from -1 to num_slots - 1. No host synchronisation, no atomics: the same result every time."""
    from moe_runtime.dispatch.triton_grouping_kernels import group_kernel

    num_pairs = slot_TK.numel()
    pair_S = torch.empty(num_pairs, dtype=torch.int64, device=slot_TK.device)
    position_TK = torch.empty_like(slot_TK)
    num_rows_p = torch.empty(num_slots, dtype=torch.int64, device=slot_TK.device)
    assert slot_TK.is_contiguous()
    config = grouping_config(num_pairs)
    group_kernel[(num_slots + 1,)](
        slot_TK,
        pair_S,
        position_TK,
        num_rows_p,
        num_pairs,
        num_slots,
        BLOCK=config.block,
        num_warps=config.num_warps,
        num_stages=1,
    )
    return Grouping(pair_S=pair_S, position_TK=position_TK, num_rows_p=num_rows_p)
