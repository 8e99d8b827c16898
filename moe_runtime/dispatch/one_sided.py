"""Tokens are stored straight into the memory of the rank that needs them, over a shared-memory heap.

dispatch() and combine() store this rank's messages and return; wait() on their result receives the peers', so
work placed between the two (a shared expert) overlaps with slower ranks. `in_flight` calls may be under way at a time,
each with mailboxes of its own, which calls use in turn; one more call first finishes the oldest. Calls are finished in
the order in which they were made, so that ranks never wait for one another's later ones. `mailbox` has the protocol
and its picture.

Legend: T tokens here, K experts per token, D hidden, N ranks, R token rows, S expert rows.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from moe_runtime.core import DispatchPlan, ExpertBatch
from moe_runtime.dispatch import heap_shm
from moe_runtime.dispatch.base import Deferred, sums_per_rank
from moe_runtime.dispatch.combining import OwnPairs, own_pairs, partial_sums, sum_returned, words_beside
from moe_runtime.dispatch.heap_delay import delay_words
from moe_runtime.dispatch.mailbox import Call, Mailboxes, segment_bytes, slab_bytes, slab_capacity
from moe_runtime.dispatch.peer_store import PeerStore
from moe_runtime.dispatch.rows import Incoming, Outgoing, Traffic, plan_incoming, plan_outgoing
from moe_runtime.dispatch.transfer import COMBINE, DISPATCH, SHARE, Transfer
from moe_runtime.errors import CapacityError

if TYPE_CHECKING:
    from moe_runtime.dispatch.rows import Int32Array, Int64Array
    from moe_runtime.dispatch.waiting import IsAlive
    from moe_runtime.native.build import Native


def unsupported(
    num_ranks: int,
    same_host: bool,
    device_type: str,
    buffer_bytes: int,
    free_shm_bytes: int,
    row_bytes: int,
    topk: int,
    combine: str = "exact",
    in_flight: int = 1,
) -> str | None:
    """Why the one-sided dispatcher cannot serve this, or None.

    `buffer_bytes`: shared memory per rank; `free_shm_bytes`: what heap_shm.free_shm_bytes() says before any rank has
    reserved; `row_bytes`: the widest token row; `in_flight`: calls under way at a time, which share the buffer.
    """
    reason = heap_shm.unsupported(same_host, device_type)
    if reason is not None:
        return reason
    words = _words(topk, combine)
    needed = in_flight * segment_bytes(num_ranks, 1, row_bytes, words)
    if slab_capacity(slab_bytes(num_ranks, buffer_bytes // in_flight), row_bytes, words) < 1:
        return f"a buffer of {buffer_bytes} bytes per rank cannot hold a row per peer, which takes {needed}"
    if num_ranks * buffer_bytes > free_shm_bytes:
        return (
            f"{num_ranks} x {buffer_bytes / 2**20:.1f} MiB of shared memory are needed,"
            f" {heap_shm.SHM_FOLDER} has {free_shm_bytes / 2**20:.1f} MiB free"
        )
    return None


def _words(topk: int, combine: str) -> int:
    """Words of int32 beside a row."""
    return 2 * topk if sums_per_rank(combine) else topk


@dataclass(frozen=True)
class _Handle:
    outgoing: Outgoing
    incoming: Incoming
    rows_N: list[int]
    """Token rows received from each rank."""
    own: OwnPairs | None
    """What this rank sums itself; None in exact combine."""


class OneSidedDispatcher:
    """Dispatcher between CPU ranks of one host.

    all_gather_text: how ranks meet during construction, which is collective. hidden_size, topk, dtype: the widest rows of any layer.
    buffer_bytes: shared memory of each rank. step_timeout: seconds that a peer may be late.
    is_alive(rank): whether a peer's process still runs. combine: `exact` or `per_rank`, see Dispatcher.
    in_flight: calls that may be under way at a time; they share the buffer.
    delay_s: hold every message back by this long, to try out a slower network.
    native: the C++ library, whose stores then carry long messages; else torch's do.
    Raises CapacityError if the buffer cannot hold one row per peer or /dev/shm cannot hold the buffers.
    """

    name = "one_sided"

    def __init__(
        self,
        rank: int,
        num_ranks: int,
        all_gather_text: heap_shm.AllGatherText,
        *,
        hidden_size: int,
        topk: int,
        dtype: torch.dtype,
        buffer_bytes: int,
        step_timeout: float,
        is_alive: IsAlive,
        combine: str = "exact",
        in_flight: int = 1,
        delay_s: float = 0.0,
        native: Native | None = None,
    ) -> None:
        self.traffic = Traffic()
        self._per_rank = sums_per_rank(combine)
        slab = slab_bytes(num_ranks, buffer_bytes // in_flight)
        words = _words(topk, combine)
        needed = in_flight * segment_bytes(num_ranks, 1, hidden_size * dtype.itemsize, words)
        if slab_capacity(slab, hidden_size * dtype.itemsize, words) < 1:
            raise CapacityError(
                f"dispatch buffer of {buffer_bytes} bytes: one row of {hidden_size} x {dtype} per peer needs {needed}"
                f" bytes per rank with {num_ranks} ranks (dispatch_buffer_mib >= {-(-needed >> 20)})"
            )
        boxes_bytes = slab * 2 * max(1, num_ranks - 1)
        heap = heap_shm.SharedHeap(rank, all_gather_text, boxes_bytes * in_flight)
        if delay_s:
            delay_words(heap, delay_s)
        self._mail = [
            Mailboxes(heap, slab, step_timeout, is_alive, first_byte=i * boxes_bytes)
            for i in range(in_flight)
        ]
        self._next_mail = 0
        self._stores_N = [PeerStore(native, is_here=peer == rank) for peer in range(num_ranks)]
        self._under_way: deque[Transfer] = deque()

    def dispatch(self, x_TD: torch.Tensor, plan: DispatchPlan) -> Deferred[ExpertBatch]:
        """Stores the rows at their destinations; wait() receives. x_TD must not change until then.

        Raises LockstepError if a peer is dead, late or at another call, CapacityError if no row fits the buffer.
        """
        outgoing = plan_outgoing(plan.global_slot_TK.numpy(), plan.num_ranks, plan.slots_per_rank)
        words_MW = words_beside(outgoing, plan.topk_weights_TK.numpy() if self._per_rank else None)
        call = Call(DISPATCH, plan.max_num_tokens, x_TD.shape[1], x_TD.element_size(), words_MW.shape[1])
        transfer = self._post(x_TD, outgoing.token_M, words_MW, outgoing.rows_N, call)
        self.traffic.dispatches += 1
        self.traffic.rows_sent += sum(outgoing.rows_N) - outgoing.rows_N[plan.rank]

        def finish() -> ExpertBatch:
            tokens, words, rows_N = self._finish(transfer)
            K = plan.global_slot_TK.shape[1]
            incoming = plan_incoming(words[:, :K], rows_N, plan.slots_per_rank)
            own = own_pairs(words, K, incoming.return_S) if self._per_rank else None
            return ExpertBatch(
                tokens_RD=tokens,
                row_index_S=torch.from_numpy(incoming.row_index_S),
                num_rows_p=torch.from_numpy(incoming.rows_p),
                handle=_Handle(outgoing, incoming, rows_N, own),
                num_rows=len(incoming.row_index_S),
            )

        return Deferred(finish)

    def combine(self, y_SD: torch.Tensor, batch: ExpertBatch, plan: DispatchPlan) -> Deferred[torch.Tensor]:
        """Stores result rows at their tokens' owners; wait() receives and sums. y_SD must not change until then.

        Raises as dispatch does.
        """
        handle: _Handle = batch.handle
        outgoing, incoming = handle.outgoing, handle.incoming
        if handle.own is None:
            rows, order, rows_N = y_SD, incoming.return_S, incoming.pairs_N
            expected_N = outgoing.pairs_N
        else:
            rows, order, rows_N = partial_sums(y_SD, handle.own), handle.own.place_R, handle.rows_N
            expected_N = outgoing.rows_N
        call = Call(COMBINE, plan.max_num_tokens, y_SD.shape[1], y_SD.element_size(), 0)
        no_words = np.empty((sum(rows_N), 0), dtype=np.int32)
        transfer = self._post(rows, order, no_words, rows_N, call)
        self.traffic.combines += 1
        self.traffic.rows_returned += sum(rows_N) - rows_N[plan.rank]

        def finish() -> torch.Tensor:
            returned, _, returned_N = self._finish(transfer)
            assert returned_N == expected_N, f"{returned_N} rows came back instead of {expected_N}"
            return sum_returned(returned, outgoing, plan.topk_weights_TK, per_rank=handle.own is not None)

        return Deferred(finish)

    def check(self) -> None:
        """A lost peer raises in wait()."""

    def share(self, counts_E: torch.Tensor) -> torch.Tensor:
        """Tell every rank this rank's counts, int32; returns int32 (N, E), one row per rank. Collective.

        Raises LockstepError as dispatch does, CapacityError if E counts do not fit the buffer.
        """
        num_ranks = self._mail[0].num_ranks
        call = Call(SHARE, 0, counts_E.shape[0], counts_E.element_size(), 0)
        no_words = np.empty((num_ranks, 0), dtype=np.int32)
        index_N = np.zeros(num_ranks, dtype=np.int64)
        transfer = self._post(counts_E[None], index_N, no_words, [1] * num_ranks, call)
        counts_NE, _, _ = self._finish(transfer)
        return counts_NE

    def close(self) -> None:
        """Give the shared memory back. Idempotent."""
        self._under_way.clear()
        for mail in self._mail:
            mail.close()

    def _post(
        self,
        x: torch.Tensor,
        index_M: Int64Array,
        slot_MK: Int32Array,
        rows_N: list[int],
        call: Call,
    ) -> Transfer:
        if len(self._under_way) == len(self._mail):
            self._under_way.popleft().finish()
        mail = self._mail[self._next_mail]
        self._next_mail = (self._next_mail + 1) % len(self._mail)
        transfer = Transfer(mail, self._stores_N, self.traffic, x, index_M, slot_MK, rows_N, call)
        self._under_way.append(transfer)
        return transfer

    def _finish(self, transfer: Transfer) -> tuple[torch.Tensor, Int32Array, list[int]]:
        # It holds the rows it sent; they should not live until the next layer.
        while transfer in self._under_way:
            self._under_way.popleft().finish()
        return transfer.finish()
