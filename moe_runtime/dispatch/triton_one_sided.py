"""One-sided dispatch and combine as Triton kernels: between GPUs, or between CPU ranks in Triton's interpreter.

dispatch() and combine() store this rank's messages and return; wait() on their result receives the peers', so
work placed between the two overlaps with slower ranks. `in_flight` calls may be under way at a time, each in a part of
the heap of its own, which calls use in turn; one more call first finishes the oldest. Calls are finished in the order in
which they were made. `triton_one_sided_slabs` has the protocol of a part and its picture.

Nothing is read by the host on a GPU: R = N * max_num_tokens and S = R * K are capacities, the valid counts are tensors.
On CPU ranks the host watches the flags, so that a dead peer is noticed at once; on a GPU the waiting kernel gives up
after the step timeout and notes it where the host can see it: check() raises, also at the start of every call.

Legend: T tokens here, K experts per token, D hidden, N ranks, R token rows, S expert rows, X words of a record.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from moe_runtime.core import DispatchPlan, ExpertBatch
from moe_runtime.dispatch.heap import HeapPart
from moe_runtime.dispatch.rows import Traffic
from moe_runtime.dispatch.triton_grouping import group_pairs
from moe_runtime.dispatch.triton_one_sided_launch import OneSidedKernels, as_words
from moe_runtime.dispatch.triton_one_sided_slabs import LATE, Call, fit_layout, watch
from moe_runtime.dispatch.triton_one_sided_transfer import Transfer
from moe_runtime.errors import BackendUnavailable, CapacityError, LockstepError
from moe_runtime.triton_support.availability import interpreting, triton_problem

if TYPE_CHECKING:
    from collections.abc import Callable

    from moe_runtime.dispatch.heap import SymmetricHeap
    from moe_runtime.dispatch.triton_one_sided_network import Network
    from moe_runtime.dispatch.triton_one_sided_slabs import SlabLayout
    from moe_runtime.dispatch.waiting import IsAlive

_DISPATCH, _COMBINE = 1, 2
# A look at the flags takes a GPU about this long, so the timeout of a waiting kernel is approximate.
_LOOKS_PER_SECOND = 1_500_000


def unsupported(
    num_ranks: int,
    device_type: str,
    buffer_bytes: int,
    row_bytes: int,
    topk: int,
    combine: str = "exact",
    in_flight: int = 1,
) -> str | None:
    """Why the kernels cannot serve ranks of this device type, or None.

    `buffer_bytes`: memory per rank; `row_bytes`: the widest token row; `in_flight`: calls under way at a time, which share it.
    """
    reason = triton_problem(device_type)
    if reason is not None:
        return reason
    try:
        part_bytes = _part_bytes(buffer_bytes, in_flight)
        fit_layout(num_ranks, part_bytes, row_bytes, topk, combine == "per_rank", False)
    except CapacityError as error:
        return str(error)
    return None


def _part_bytes(num_bytes: int, in_flight: int) -> int:
    return num_bytes // in_flight // 64 * 64


@dataclass(frozen=True)
class _Handle:
    """What combine needs of a dispatch."""

    record_RX: torch.Tensor
    """int32: token, slots and maybe weights of every row, as `triton_one_sided_slabs` draws them."""
    expert_row_RK: torch.Tensor
    """int64: the expert row of each pair, -1 for none."""
    count_rN: torch.Tensor
    """int32 [round, source]: rows that came."""


class TritonOneSidedDispatcher:
    """Dispatcher over a symmetric heap, which it closes. `traffic` counts rows only where the host can read, on CPU ranks.

    hidden_size, topk, dtype: the widest rows of any layer. step_timeout: seconds that a peer may be late.
    is_alive(rank): whether a peer's process still runs (CPU ranks). combine: `exact` returns every expert row; `per_rank`
    returns one partial sum per token and rank, rounded to the rows' type. in_flight: calls that may be under way at a time;
    they share the heap. make_network: how to reach ranks whose memory is not mapped here, given a part of the heap and its layout.
    Raises CapacityError if the heap cannot hold one token per peer, BackendUnavailable if a rank cannot be reached.
    """

    name = "one_sided"

    def __init__(
        self,
        heap: SymmetricHeap,
        *,
        hidden_size: int,
        topk: int,
        dtype: torch.dtype,
        step_timeout: float,
        is_alive: IsAlive,
        combine: str = "exact",
        in_flight: int = 1,
        make_network: Callable[[SymmetricHeap, SlabLayout], Network] | None = None,
    ) -> None:
        assert combine in ("exact", "per_rank"), f"combine={combine!r}"
        self.traffic = Traffic()
        self._heap: SymmetricHeap | None = heap
        networked = bool((heap.addresses_N == 0).any())
        if networked and make_network is None:
            raise BackendUnavailable("one-sided dispatch: the memory of some ranks is not mapped here")
        row_bytes, size = hidden_size * dtype.itemsize, _part_bytes(heap.segment.numel(), in_flight)
        self.layout = fit_layout(heap.num_ranks, size, row_bytes, topk, combine == "per_rank", networked)
        # Only where the host shares the ranks' memory and kernels run when they are called.
        self._on_host = heap.segment.device.type == "cpu" and interpreting()
        looks = 1 if self._on_host else min(2**31 - 1, int(step_timeout * _LOOKS_PER_SECOND))
        parts = [HeapPart(heap, i * size, size) for i in range(in_flight)]
        self.kernels = [
            OneSidedKernels(
                part,
                self.layout,
                looks,
                make_network(part, self.layout) if networked and make_network else None,
            )
            for part in parts
        ]
        self._problems = [kernels.problem_N.numpy() for kernels in self.kernels]
        self._timeout, self._is_alive = step_timeout, is_alive
        self._next = 0
        # Calls that have not been finished, oldest first.
        self._under_way: deque[Transfer[Any]] = deque()

    def dispatch(self, x_TD: torch.Tensor, plan: DispatchPlan) -> Transfer[ExpertBatch]:
        """Stores the rows at their destinations; wait() receives. x_TD (contiguous, any type) must not change until then.

        Raises LockstepError if a peer is dead, late or at another call, CapacityError for rows wider or more experts per
        token than the dispatcher was made for.
        """
        N = plan.num_ranks
        kernels, call = self._begin(_DISPATCH, x_TD, plan)
        x_TW, slot_TK = as_words(x_TD), plan.global_slot_TK.contiguous()
        weights_TK, K = plan.topk_weights_TK.contiguous(), plan.global_slot_TK.shape[1]
        R, rounds = N * plan.max_num_tokens, self.layout.num_rounds(plan.max_num_tokens)
        tokens_RD = x_TD.new_empty(R, x_TD.shape[1])
        record_RX = slot_TK.new_empty(R, self.layout.record_words(K), dtype=torch.int32)
        count_rN = slot_TK.new_zeros(rounds, N, dtype=torch.int32)

        def send(number: int) -> None:
            begin, num_tokens = self._share(number, x_TD.shape[0])
            position_Nt, count_N = kernels.plan(slot_TK, begin, num_tokens, plan.slots_per_rank)
            kernels.send(x_TW, slot_TK, weights_TK, position_Nt, count_N, begin, plan.slots_per_rank)
            self._signal(kernels, count_N, call)
            if self._on_host:
                self.traffic.rows_sent += int(count_N.sum() - count_N[plan.rank])

        def receive(number: int) -> None:
            first, room = self._share(number, plan.max_num_tokens)
            self._wait(kernels, call)
            kernels.receive(as_words(tokens_RD), record_RX, count_rN[number], first, room)

        def result() -> ExpertBatch:
            grouping = group_pairs(record_RX[:, 1 : 1 + K].long(), plan.slots_per_rank)
            row_index_S = torch.div(grouping.pair_S, K, rounding_mode="floor")
            handle = _Handle(record_RX, grouping.position_TK, count_rN)
            return ExpertBatch(tokens_RD, row_index_S, grouping.num_rows_p, handle)

        self.traffic.dispatches += 1
        transfer = Transfer(rounds, send, receive, result, self._settle)
        self._under_way.append(transfer)
        return transfer

    def combine(self, y_SD: torch.Tensor, batch: ExpertBatch, plan: DispatchPlan) -> Transfer[torch.Tensor]:
        """Stores results at their tokens' owners; wait() receives and sums. y_SD (contiguous) must not change until then.

        Raises as dispatch does.
        """
        handle: _Handle = batch.handle
        kernels, call = self._begin(_COMBINE, y_SD, plan)
        slot_TK, weights_TK = plan.global_slot_TK.contiguous(), plan.topk_weights_TK.contiguous()
        out_TD = y_SD.new_empty(slot_TK.shape[0], y_SD.shape[1])

        def send(number: int) -> None:
            first, room = self._share(number, plan.max_num_tokens)
            count_N = handle.count_rN[number]
            kernels.send_back(y_SD, handle.record_RX, handle.expert_row_RK, count_N, first, room)
            self._signal(kernels, count_N, call)

        def receive(number: int) -> None:
            begin, num_tokens = self._share(number, slot_TK.shape[0])
            self._wait(kernels, call)
            kernels.sum_up(out_TD, slot_TK, weights_TK, begin, num_tokens, plan.slots_per_rank)

        if self._on_host:
            self.traffic.rows_returned += self._rows_returned(handle, plan)
        self.traffic.combines += 1
        rounds = self.layout.num_rounds(plan.max_num_tokens)
        transfer = Transfer(rounds, send, receive, lambda: out_TD, self._settle)
        self._under_way.append(transfer)
        return transfer

    def check(self) -> None:
        """Raise LockstepError if a waiting kernel has noted a peer that was late or at another call. Waits for nothing."""
        if any(problem_N.any() for problem_N in self._problems):
            notes = [
                f"rank {n} "
                + ("sent nothing in time (step_timeout)" if note == LATE else "is at another call")
                for problem_N in self._problems
                for n, note in enumerate(problem_N.tolist())
                if note
            ]
            raise LockstepError("one-sided dispatch: " + ", ".join(notes))

    def close(self) -> None:
        """Give the memory back. Idempotent."""
        self._under_way.clear()
        if self._heap is not None:
            for kernels in self.kernels:
                kernels.heap.close()
            self._heap.close()
            self._heap = None

    def _settle(self, transfer: Transfer[Any]) -> None:
        while transfer in self._under_way:
            self._under_way.popleft().finish()

    def _begin(self, kind: int, rows: torch.Tensor, plan: DispatchPlan) -> tuple[OneSidedKernels, Call]:
        """The kernels of the next part of the heap, once it is free, and the call if it fits."""
        assert self._heap is not None, "the dispatcher is closed"
        if len(self._under_way) == len(self.kernels):
            self._under_way.popleft().finish()
        self.check()
        row_bytes, topk = rows.shape[1] * rows.element_size(), plan.global_slot_TK.shape[1]
        if row_bytes > self.layout.row_bytes or topk > self.layout.topk:
            raise CapacityError(
                f"the dispatch buffer was made for rows of {self.layout.row_bytes} bytes and {self.layout.topk} experts per"
                f" token and is too small for {row_bytes} bytes and {topk} experts"
            )
        assert plan.num_ranks == self.layout.num_ranks, f"a plan for {plan.num_ranks} ranks"
        kernels = self.kernels[self._next]
        self._next = (self._next + 1) % len(self.kernels)
        return kernels, Call(kind, plan.max_num_tokens, row_bytes, topk)

    def _share(self, number: int, num_tokens: int) -> tuple[int, int]:
        """The first of `num_tokens` that round `number` carries, and how many."""
        begin = min(num_tokens, number * self.layout.capacity)
        return begin, min(self.layout.capacity, num_tokens - begin)

    def _signal(self, kernels: OneSidedKernels, count_N: torch.Tensor, call: Call) -> None:
        kernels.signal(count_N, call.pack())
        self.traffic.rounds += 1

    def _wait(self, kernels: OneSidedKernels, call: Call) -> None:
        if self._on_host:
            assert self._heap is not None, "the dispatcher is closed"
            epoch = int(kernels.epoch) + 1
            words = kernels.heap.segment.view(torch.int64).numpy()
            watch(words, self.layout, kernels.rank, epoch, call, self._timeout, self._is_alive)
        kernels.wait(call.pack())
        if self._on_host:
            self.check()

    def _rows_returned(self, handle: _Handle, plan: DispatchPlan) -> int:
        """Rows that go to other ranks: pairs computed here, or with partial sums tokens."""
        K = handle.expert_row_RK.shape[1]
        words = slice(0, 1) if self.layout.with_weights else slice(1, 1 + K)
        rows_N = (handle.record_RX[:, words] >= 0).view(plan.num_ranks, -1).sum(1)
        return int(rows_N.sum() - rows_N[plan.rank])
