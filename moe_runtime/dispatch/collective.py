"""Tokens travel by all_to_all_single of torch.distributed: gloo between CPU ranks, NCCL between GPUs.

A message is a run of records of bytes, one per token row, which also carries where the row goes:

    record   | D elements of x | padding to 4 | W x int32: K local slots at the destination, or -1; K weights |

Three ways of dispatch, chosen from numbers that all ranks have:
  device  at most `device_tokens` tokens a rank: equal messages planned on the device (`collective_fixed`), for graphs.
  padded  as many records per peer as the fullest rank has tokens; unused ones have only -1 slots. One collective.
  exact   the row counts, which travel while the records are packed, then the records. Less padding for long batches.
Combine is one collective, as both sides know its sizes from the dispatch.

Legend: T tokens here, K experts per token, D hidden, N ranks, R token rows, S expert rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist

from moe_runtime.core import DispatchPlan, ExpertBatch
from moe_runtime.dispatch.all_to_all import all_to_all, as_bytes
from moe_runtime.dispatch.base import Deferred, sums_per_rank
from moe_runtime.dispatch.collective_fixed import FixedExchange, FixedHandle
from moe_runtime.dispatch.combining import OwnPairs, own_pairs, partial_sums, sum_returned, words_beside
from moe_runtime.dispatch.rows import Incoming, Outgoing, Traffic, plan_incoming, plan_outgoing
from moe_runtime.dispatch.waiting import wait_work

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moe_runtime.dispatch.rows import Int32Array


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
    rows_N: list[int]
    """Token rows received from each rank."""
    own: OwnPairs | None
    """What this rank sums itself; None in exact combine."""


class CollectiveDispatcher:
    """Dispatcher over a process group.

    `step_timeout`: seconds that a peer may be late (gloo; NCCL has its own watchdog). `combine`: `exact` or `per_rank`, see
    Dispatcher. `device_tokens`: steps in which no rank has more tokens are planned on the device; in longer ones the host
    reads the routing and the received slots. `padded_message_bytes`: a message to one peer up to this size is padded rather
    than preceded by an exchange of counts, which costs about as much as sending this many bytes between processes of one host.
    `distant`: ranks on other hosts, whose bytes are counted apart.
    """

    name = "collective"

    def __init__(
        self,
        group: dist.ProcessGroup,
        step_timeout: float,
        combine: str = "exact",
        device_tokens: int = 0,
        padded_message_bytes: int = 64 << 10,
        distant: Sequence[int] = (),
    ) -> None:
        self.traffic = Traffic()
        self._distant = tuple(distant)
        self._group = group
        self._timeout = step_timeout
        self._per_rank = sums_per_rank(combine)
        self._device_tokens = device_tokens
        self._padded_message_bytes = padded_message_bytes
        self._fixed = FixedExchange(group, step_timeout, self._per_rank, self.traffic, len(self._distant))

    def dispatch(self, x_TD: torch.Tensor, plan: DispatchPlan) -> Deferred[ExpertBatch]:
        """The messages are under way on return; wait() receives them. Raises LockstepError."""
        # Without any token there is nothing to send, but all ranks take the same way.
        if 0 < plan.max_num_tokens <= self._device_tokens:
            return self._fixed.dispatch(x_TD, plan)
        outgoing = plan_outgoing(plan.global_slot_TK.cpu().numpy(), plan.num_ranks, plan.slots_per_rank)
        weights = plan.topk_weights_TK.cpu().numpy() if self._per_rank else None
        words_MW = words_beside(outgoing, weights)
        record_bytes = _words_offset(x_TD.shape[1] * x_TD.element_size()) + 4 * words_MW.shape[1]
        others = plan.num_ranks - 1
        if plan.max_num_tokens * record_bytes <= self._padded_message_bytes:
            records = _pad(_pack(x_TD, outgoing, words_MW), outgoing.rows_N, plan)
            sent_N = received_N = [plan.max_num_tokens] * plan.num_ranks
        else:
            counts, counting = self._send_counts(outgoing.rows_N, x_TD.device)
            records = _pack(x_TD, outgoing, words_MW)
            wait_work(counting, "exchange of row counts", self._timeout, x_TD.device.type)
            sent_N, received_N = outgoing.rows_N, counts.view(-1).tolist()
            self.traffic.control_bytes += others * counts.element_size()
        received, work = all_to_all(self._group, records, sent_N, received_N)
        self.traffic.dispatches += 1
        self.traffic.rounds += 1
        self.traffic.rows_sent += sum(outgoing.rows_N) - outgoing.rows_N[plan.rank]
        self.traffic.bytes_sent += (sum(sent_N) - sent_N[plan.rank]) * records.shape[1]
        self.traffic.bytes_local += sent_N[plan.rank] * records.shape[1]
        self.traffic.bytes_between_hosts += sum(sent_N[n] for n in self._distant) * records.shape[1]

        def finish() -> ExpertBatch:
            wait_work(work, "dispatch", self._timeout, x_TD.device.type)
            return self._unpack(received, received_N, x_TD, plan, outgoing)

        return Deferred(finish)

    def combine(self, y_SD: torch.Tensor, batch: ExpertBatch, plan: DispatchPlan) -> Deferred[torch.Tensor]:
        """The rows are under way on return; wait() receives and sums them. Raises LockstepError."""
        handle: _Handle | FixedHandle = batch.handle
        if isinstance(handle, FixedHandle):
            return self._fixed.combine(y_SD, handle, plan)
        outgoing, incoming = handle.outgoing, handle.incoming
        if handle.own is None:
            rows = y_SD.index_select(0, torch.from_numpy(incoming.return_S).to(y_SD.device))
            sent_N, received_N = incoming.pairs_N, outgoing.pairs_N
        else:
            place_R = torch.from_numpy(handle.own.place_R).to(y_SD.device)
            rows = partial_sums(y_SD, handle.own).index_select(0, place_R)
            sent_N, received_N = handle.rows_N, outgoing.rows_N
        received, work = all_to_all(self._group, as_bytes(rows), sent_N, received_N)
        returned = sum(sent_N) - sent_N[plan.rank]
        self.traffic.combines += 1
        self.traffic.rounds += 1
        self.traffic.rows_returned += returned
        self.traffic.bytes_returned += returned * received.shape[1]
        self.traffic.bytes_local += sent_N[plan.rank] * received.shape[1]
        self.traffic.bytes_between_hosts += sum(sent_N[n] for n in self._distant) * received.shape[1]

        def finish() -> torch.Tensor:
            wait_work(work, "combine", self._timeout, y_SD.device.type)
            home = received.view(y_SD.dtype)
            return sum_returned(home, outgoing, plan.topk_weights_TK, per_rank=handle.own is not None)

        return Deferred(finish)

    def check(self) -> None:
        """A lost peer raises in wait(), and on CUDA NCCL's watchdog ends the process."""

    def close(self) -> None:
        """Nothing to release: the process group belongs to whoever made it."""

    def _send_counts(self, rows_N: list[int], device: torch.device) -> tuple[torch.Tensor, dist.Work]:
        mine = torch.tensor(rows_N, dtype=torch.int64, device=device)
        return all_to_all(self._group, mine.view(-1, 1))

    def _unpack(
        self,
        received: torch.Tensor,
        received_N: Sequence[int],
        x_TD: torch.Tensor,
        plan: DispatchPlan,
        outgoing: Outgoing,
    ) -> ExpertBatch:
        row_bytes, K = x_TD.shape[1] * x_TD.element_size(), plan.global_slot_TK.shape[1]
        words = received[:, _words_offset(row_bytes) :].contiguous().view(torch.int32).cpu().numpy()
        # Every real record has a slot, so records without one are padding.
        kept_R = np.flatnonzero((words[:, :K] >= 0).any(axis=1))
        source_R = np.repeat(np.arange(plan.num_ranks), received_N)[kept_R]
        rows_N = np.bincount(source_R, minlength=plan.num_ranks).tolist()
        payload = received[:, :row_bytes]
        if kept_R.size < words.shape[0]:
            words = words[kept_R]
            payload = payload.index_select(0, torch.from_numpy(kept_R).to(x_TD.device))
        incoming = plan_incoming(words[:, :K], rows_N, plan.slots_per_rank)
        own = own_pairs(words, K, incoming.return_S) if self._per_rank else None
        return ExpertBatch(
            tokens_RD=payload.contiguous().view(x_TD.dtype),
            row_index_S=torch.from_numpy(incoming.row_index_S).to(x_TD.device),
            num_rows_p=torch.from_numpy(incoming.rows_p).to(x_TD.device),
            handle=_Handle(outgoing, incoming, rows_N, own),
            # On a GPU None, as in the short steps that are planned on the device: a step has both kinds if its halves differ.
            num_rows=len(incoming.row_index_S) if x_TD.device.type == "cpu" else None,
        )


def _words_offset(row_bytes: int) -> int:
    return -(-row_bytes // 4) * 4


def _pack(x_TD: torch.Tensor, outgoing: Outgoing, words_MW: Int32Array) -> torch.Tensor:
    """(M, record bytes) uint8, grouped by destination."""
    token_M = torch.from_numpy(outgoing.token_M).to(x_TD.device)
    words = as_bytes(torch.from_numpy(words_MW).to(x_TD.device))
    source = as_bytes(x_TD)
    row_bytes = source.shape[1]
    offset = _words_offset(row_bytes)
    records = source.new_empty(token_M.shape[0], offset + words.shape[1])
    records[:, :row_bytes] = source.index_select(0, token_M)
    records[:, offset:] = words
    return records


def _pad(records: torch.Tensor, rows_N: list[int], plan: DispatchPlan) -> torch.Tensor:
    """Room for plan.max_num_tokens records per destination; bytes of 0xff make the slots of unused ones -1."""
    padded = records.new_full((plan.num_ranks, plan.max_num_tokens, records.shape[1]), 0xFF)
    for rank, part in enumerate(torch.split(records, rows_N)):
        padded[rank, : part.shape[0]] = part
    return padded.view(-1, records.shape[1])
