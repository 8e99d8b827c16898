"""Collective exchange in messages of equal size, planned on the device: the host reads nothing, so a graph can hold it.

Every rank sends every rank one block of C token rows, C being max_num_tokens rounded up to 4:

    block    | C rows of D elements | C x W words of int32 | padding to a whole number of rows |

Token t is row t of every block; its slots are -1 in the block of a rank that has none of its experts. As a block is a
whole number of rows, the blocks received are the batch's tokens as they lie; the rows between are never indexed.
Back travel C x K expert rows per block, or C sums. Used where C is small: the volume is that of the fullest rank.

Legend: T tokens here, K experts per token, D hidden, N ranks, p slots per rank, R token rows, S expert rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from moe_runtime.core import DispatchPlan, ExpertBatch
from moe_runtime.dispatch.all_to_all import all_to_all, as_bytes
from moe_runtime.dispatch.base import Deferred
from moe_runtime.dispatch.grouping import group_pairs
from moe_runtime.dispatch.rows import sum_in_k_order
from moe_runtime.dispatch.waiting import wait_work

if TYPE_CHECKING:
    import torch.distributed as dist

    from moe_runtime.dispatch.rows import Traffic


@dataclass(frozen=True)
class FixedHandle:
    """What combine needs of its dispatch: tensors on the device only."""

    position_RK: torch.Tensor
    """For the N * C block rows: the expert row of each pair, -1 for none."""
    weights_RK: torch.Tensor | None
    """float32 routing weights of the block rows, for `per_rank`."""


@dataclass(frozen=True)
class FixedExchange:
    """The two directions of one dispatcher."""

    group: dist.ProcessGroup
    timeout: float
    per_rank: bool
    traffic: Traffic
    num_distant: int = 0
    """Ranks on other hosts."""

    def dispatch(self, x_TD: torch.Tensor, plan: DispatchPlan) -> Deferred[ExpertBatch]:
        """The blocks are under way on return. Raises LockstepError."""
        words_NCW = _words(plan, self.per_rank)
        N, C, _ = words_NCW.shape
        source = as_bytes(x_TD)
        T, row_bytes = source.shape
        words = as_bytes(words_NCW.view(N, -1))
        rows_per_block = C + -(-words.shape[1] // row_bytes)
        blocks = source.new_empty(N, rows_per_block * row_bytes)
        blocks[:, : T * row_bytes] = source.view(1, T * row_bytes)
        blocks[:, C * row_bytes : C * row_bytes + words.shape[1]] = words
        received, work = all_to_all(self.group, blocks)
        self.traffic.rounds += 1
        self.traffic.dispatches += 1
        self.traffic.rows_sent += (N - 1) * C
        self.traffic.bytes_sent += (N - 1) * blocks.shape[1]
        self.traffic.bytes_local += blocks.shape[1]
        self.traffic.bytes_between_hosts += self.num_distant * blocks.shape[1]

        def finish() -> ExpertBatch:
            wait_work(work, "dispatch", self.timeout, x_TD.device.type)
            arrived = received[:, C * row_bytes : C * row_bytes + words.shape[1]]
            # A clone begins at an address that suits int32.
            words_RW = arrived.clone(memory_format=torch.contiguous_format).view(torch.int32).view(N * C, -1)
            tokens = received.view(N * rows_per_block, row_bytes).view(x_TD.dtype)
            return self._batch(tokens, words_RW, rows_per_block, plan)

        return Deferred(finish)

    def combine(self, y_SD: torch.Tensor, handle: FixedHandle, plan: DispatchPlan) -> Deferred[torch.Tensor]:
        """The results are under way on return. Raises LockstepError."""
        position_RK = handle.position_RK
        if handle.weights_RK is not None:
            rows = sum_in_k_order(y_SD, position_RK, handle.weights_RK, all_present=False)
        elif y_SD.shape[0] == 0:
            rows = y_SD.new_zeros(position_RK.numel(), y_SD.shape[1])
        else:
            rows = y_SD.index_select(0, position_RK.view(-1).clamp(min=0))
        N = plan.num_ranks
        per_block = rows.shape[0] // N
        received, work = all_to_all(self.group, as_bytes(rows).view(N, -1))
        self.traffic.rounds += 1
        self.traffic.combines += 1
        self.traffic.rows_returned += (N - 1) * per_block
        self.traffic.bytes_returned += (N - 1) * received.shape[1]
        self.traffic.bytes_local += received.shape[1]
        self.traffic.bytes_between_hosts += self.num_distant * received.shape[1]

        def finish() -> torch.Tensor:
            wait_work(work, "combine", self.timeout, y_SD.device.type)
            returned = received.view(N * per_block, -1).view(y_SD.dtype)
            return _sum_blocks(returned, plan, self.per_rank)

        return Deferred(finish)

    def _batch(
        self, tokens: torch.Tensor, words_RW: torch.Tensor, rows_per_block: int, plan: DispatchPlan
    ) -> ExpertBatch:
        K, C = plan.global_slot_TK.shape[1], words_RW.shape[0] // plan.num_ranks
        grouping = group_pairs(words_RW[:, :K].long(), plan.slots_per_rank)
        row_S = torch.div(grouping.expert_rows(), K, rounding_mode="floor")
        block_S = torch.div(row_S, C, rounding_mode="floor")
        weights = words_RW[:, K:].contiguous().view(torch.float32) if self.per_rank else None
        return ExpertBatch(
            tokens_RD=tokens,
            row_index_S=row_S + block_S * (rows_per_block - C),
            num_rows_p=grouping.num_rows_p,
            handle=FixedHandle(grouping.position_TK, weights),
            num_rows=row_S.shape[0] if row_S.device.type == "cpu" else None,
        )


def _words(plan: DispatchPlan, per_rank: bool) -> torch.Tensor:
    """(N, C, W) int32: for every destination the slots of all tokens, -1 where it has none, and their weights' bits."""
    slot_TK = plan.global_slot_TK
    T, K = slot_TK.shape
    N, p = plan.num_ranks, plan.slots_per_rank
    C = -(-plan.max_num_tokens // 4) * 4
    rank_N11 = torch.arange(N, device=slot_TK.device).view(N, 1, 1)
    # -1 // p is -1, which is no rank.
    goes_NTK = torch.div(slot_TK, p, rounding_mode="floor") == rank_N11
    words = torch.full((N, C, 2 * K if per_rank else K), -1, dtype=torch.int32, device=slot_TK.device)
    words[:, :T, :K] = torch.where(goes_NTK, slot_TK - rank_N11 * p, -1)
    if per_rank:
        words[:, :T, K:] = plan.topk_weights_TK.contiguous().view(torch.int32)
    return words


def _sum_blocks(returned: torch.Tensor, plan: DispatchPlan, per_rank: bool) -> torch.Tensor:
    """(T, D) from the N blocks that came home."""
    slot_TK = plan.global_slot_TK
    T, K = slot_TK.shape
    N = plan.num_ranks
    rank_TK = torch.div(slot_TK, plan.slots_per_rank, rounding_mode="floor")
    C = returned.shape[0] // N // (1 if per_rank else K)
    if not per_rank:
        pair_TK = torch.arange(T * K, device=slot_TK.device).view(T, K)
        position_TK = torch.where(slot_TK >= 0, rank_TK * (C * K) + pair_TK, -1)
        return sum_in_k_order(returned, position_TK, plan.topk_weights_TK, all_present=False)
    total = returned.new_zeros(T, returned.shape[1], dtype=torch.float32)
    for rank in range(N):
        part = returned[rank * C : rank * C + T].to(torch.float32)
        # Selected, not multiplied by 0: what stands in a row that is not meant may be infinite.
        total += torch.where((rank_TK == rank).any(dim=1, keepdim=True), part, 0.0)
    return total.to(returned.dtype)
