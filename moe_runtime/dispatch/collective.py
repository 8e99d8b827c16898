"""Tokens travel by all_to_all_single of torch.distributed: gloo between CPU ranks, NCCL between GPUs.

A message is a run of records of bytes, one per token row, which also carries where the row goes:

    record   | D elements of x | padding to 4 | K x int32: local slot at the destination, or -1 |

Two ways of dispatch, chosen from numbers that all ranks have:
  fixed   as many records per peer as the fullest rank has tokens; unused ones have only -1 slots. One collective.
  exact   the row counts first, then the records. Two collectives; less padding for long batches.
Combine is one collective, as both sides know its sizes from the dispatch.

Bytes are what moves because gloo refuses some element types (bfloat16 in part, fp8 wholly).
Legend: T tokens here, K experts per token, D hidden, N ranks, R token rows, S expert rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist

from moe_runtime.core import DispatchPlan, ExpertBatch
from moe_runtime.dispatch.base import Deferred
from moe_runtime.dispatch.rows import (
    Incoming,
    Outgoing,
    Traffic,
    plan_incoming,
    plan_outgoing,
    sum_in_k_order,
)
from moe_runtime.dispatch.waiting import lockstep_errors, wait_work

if TYPE_CHECKING:
    from collections.abc import Sequence


def unsupported(device_type: str, backend: str) -> str | None:
    """Why a process group of this backend cannot carry tensors of this device, or None."""
    needed = {"cpu": "gloo", "cuda": "nccl"}.get(device_type)
    if needed is None:
        return f"no torch.distributed backend is known for device {device_type!r}; it serves cpu and cuda"
    if needed not in backend:
        return f"the process group uses {backend!r}, but {device_type} tensors need {needed!r}"
    return None


@dataclass(frozen=True)
class _Handle:
    outgoing: Outgoing
    incoming: Incoming


class CollectiveDispatcher:
    """Dispatcher over a process group. On a GPU each dispatch reads the routing and the received slots on the host.

    `step_timeout`: seconds that a peer may be late (gloo; NCCL has its own watchdog). `fixed_message_bytes`: a message
    to one peer up to this size is padded rather than preceded by an exchange of counts, which costs about as much
    as sending this many bytes between processes of one host.
    """

    name = "collective"

    def __init__(
        self, group: dist.ProcessGroup, step_timeout: float, fixed_message_bytes: int = 64 << 10
    ) -> None:
        self.traffic = Traffic()
        self._group = group
        self._timeout = step_timeout
        self._fixed_message_bytes = fixed_message_bytes

    def dispatch(self, x_TD: torch.Tensor, plan: DispatchPlan) -> Deferred[ExpertBatch]:
        """The messages are under way on return; wait() receives them. Raises LockstepError."""
        outgoing = plan_outgoing(plan.global_slot_TK.cpu().numpy(), plan.num_ranks, plan.slots_per_rank)
        records = _pack(x_TD, outgoing)
        if plan.max_num_tokens * records.shape[1] <= self._fixed_message_bytes:
            records = _pad(records, outgoing.rows_N, plan)
            sent_N = received_N = [plan.max_num_tokens] * plan.num_ranks
        else:
            sent_N, received_N = outgoing.rows_N, self._exchange_counts(outgoing.rows_N, x_TD.device)
        received, work = self._all_to_all(records, sent_N, received_N)
        self.traffic.dispatches += 1
        self.traffic.rounds += 1
        self.traffic.rows_sent += sum(outgoing.rows_N) - outgoing.rows_N[plan.rank]

        def finish() -> ExpertBatch:
            wait_work(work, "dispatch", self._timeout, x_TD.device.type)
            return _unpack(received, received_N, x_TD, plan, outgoing)

        return Deferred(finish)

    def combine(self, y_SD: torch.Tensor, batch: ExpertBatch, plan: DispatchPlan) -> Deferred[torch.Tensor]:
        """The rows are under way on return; wait() receives and sums them. Raises LockstepError."""
        handle: _Handle = batch.handle
        outgoing, incoming = handle.outgoing, handle.incoming
        device = y_SD.device
        rows = y_SD.index_select(0, torch.from_numpy(incoming.return_S).to(device))
        received, work = self._all_to_all(_as_bytes(rows), incoming.pairs_N, outgoing.pairs_N)
        self.traffic.combines += 1
        self.traffic.rounds += 1
        self.traffic.rows_returned += sum(incoming.pairs_N) - incoming.pairs_N[plan.rank]

        def finish() -> torch.Tensor:
            wait_work(work, "combine", self._timeout, device.type)
            return sum_in_k_order(
                received.view(y_SD.dtype),
                torch.from_numpy(outgoing.position_TK).to(device),
                plan.topk_weights_TK,
                all_present=outgoing.num_pairs == outgoing.position_TK.size,
            )

        return Deferred(finish)

    def close(self) -> None:
        """Nothing to release: the process group belongs to whoever made it."""

    def _exchange_counts(self, rows_N: list[int], device: torch.device) -> list[int]:
        mine = torch.tensor(rows_N, dtype=torch.int64, device=device)
        theirs = torch.empty_like(mine)
        with lockstep_errors("exchange of row counts"):
            work = dist.all_to_all_single(theirs, mine, group=self._group, async_op=True)
        wait_work(work, "exchange of row counts", self._timeout, device.type)
        return theirs.tolist()

    def _all_to_all(
        self, records: torch.Tensor, sent_N: Sequence[int], received_N: Sequence[int]
    ) -> tuple[torch.Tensor, dist.Work]:
        received = records.new_empty(sum(received_N), records.shape[1])
        with lockstep_errors("all-to-all"):
            work = dist.all_to_all_single(
                received, records, list(received_N), list(sent_N), group=self._group, async_op=True
            )
        return received, work


def _as_bytes(rows: torch.Tensor) -> torch.Tensor:
    rows = rows.contiguous()
    # A tensor with a size of 0 or 1 may have any stride there, and view() insists on 1 in the last dimension.
    return rows.as_strided(rows.shape, (rows.shape[1], 1)).view(torch.uint8)


def _slot_offset(row_bytes: int) -> int:
    return -(-row_bytes // 4) * 4


def _pack(x_TD: torch.Tensor, outgoing: Outgoing) -> torch.Tensor:
    """(M, record bytes) uint8, grouped by destination."""
    token_M = torch.from_numpy(outgoing.token_M).to(x_TD.device)
    slot_MK = torch.from_numpy(outgoing.slot_MK).to(x_TD.device)
    source = _as_bytes(x_TD)
    row_bytes = source.shape[1]
    offset = _slot_offset(row_bytes)
    records = source.new_empty(token_M.shape[0], offset + 4 * slot_MK.shape[1])
    records[:, :row_bytes] = source.index_select(0, token_M)
    records[:, offset:] = _as_bytes(slot_MK)
    return records


def _pad(records: torch.Tensor, rows_N: list[int], plan: DispatchPlan) -> torch.Tensor:
    """Room for plan.max_num_tokens records per destination; bytes of 0xff make the slots of unused ones -1."""
    padded = records.new_full((plan.num_ranks, plan.max_num_tokens, records.shape[1]), 0xFF)
    for rank, part in enumerate(torch.split(records, rows_N)):
        padded[rank, : part.shape[0]] = part
    return padded.view(-1, records.shape[1])


def _unpack(
    received: torch.Tensor,
    received_N: Sequence[int],
    x_TD: torch.Tensor,
    plan: DispatchPlan,
    outgoing: Outgoing,
) -> ExpertBatch:
    row_bytes = x_TD.shape[1] * x_TD.element_size()
    slots = received[:, _slot_offset(row_bytes) :].contiguous().view(torch.int32).cpu().numpy()
    # Every real record has a slot, so records without one are padding.
    kept_R = np.flatnonzero((slots >= 0).any(axis=1))
    source_R = np.repeat(np.arange(plan.num_ranks), received_N)[kept_R]
    rows_N = np.bincount(source_R, minlength=plan.num_ranks).tolist()
    incoming = plan_incoming(slots[kept_R], rows_N, plan.slots_per_rank)
    payload = received[:, :row_bytes]
    if kept_R.size < slots.shape[0]:
        payload = payload.index_select(0, torch.from_numpy(kept_R).to(x_TD.device))
    return ExpertBatch(
        tokens_RD=payload.contiguous().view(x_TD.dtype),
        row_index_S=torch.from_numpy(incoming.row_index_S).to(x_TD.device),
        num_rows_p=torch.from_numpy(incoming.rows_p).to(x_TD.device),
        handle=_Handle(outgoing, incoming),
    )
