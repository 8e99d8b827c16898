"""Pushes messages to ranks beyond a network; see `triton_one_sided_network_kernels`. Only for GPUs, with NVSHMEM.

Legend: K experts per token, N ranks, R token rows, X words of a record.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from moe_runtime.dispatch.heap import SymmetricHeap
    from moe_runtime.dispatch.triton_one_sided_slabs import SlabLayout

_ROWS_PER_PUT = 32


class Network(Protocol):
    """Carries an outbox to where its parts belong, for the ranks whose address is 0. Works at exchange `epoch` + 1."""

    def put_messages(
        self, epoch: torch.Tensor, count_N: torch.Tensor, capacity: int, row_bytes: int, topk: int
    ) -> None:
        """The messages of a dispatch: count_N (int32, at most `capacity`) rows each, and their records."""
        ...

    def put_returns(
        self,
        epoch: torch.Tensor,
        record_RX: torch.Tensor,
        count_N: torch.Tensor,
        first: int,
        room: int,
        row_bytes: int,
        topk: int,
    ) -> None:
        """The results of the rows that came in one round."""
        ...

    def signal(self, epoch: torch.Tensor, count_N: torch.Tensor, call: int) -> None:
        """Headers and flags, after all that was put before has arrived."""
        ...


class NvshmemNetwork:
    """Network over NVSHMEM. `library`: path of libnvshmem_device.bc, whose modules the process initialises (`heap_nvshmem`)."""

    def __init__(self, heap: SymmetricHeap, layout: SlabLayout, library: str) -> None:
        self._rank, self._num_ranks = heap.rank, heap.num_ranks
        self._addresses_N, self._layout = heap.addresses_N, layout
        self._options = {"extern_libs": {"libnvshmem_device": library}, "num_warps": 4}

    def put_messages(
        self, epoch: torch.Tensor, count_N: torch.Tensor, capacity: int, row_bytes: int, topk: int
    ) -> None:
        """See Network."""
        from moe_runtime.dispatch.triton_one_sided_network_kernels import put_messages

        layout = self._layout
        put_messages[(self._num_ranks, -(-capacity // _ROWS_PER_PUT))](
            count_N,
            self._addresses_N,
            epoch,
            self._rank,
            ROW_BYTES=row_bytes,
            RECORD_BYTES=4 * layout.record_words(topk),
            PARITY_BYTES=layout.parity_bytes,
            ROWS_AT=layout.rows_at,
            ROWS_BYTES=layout.rows_bytes,
            RECORDS_AT=layout.records_at,
            RECORDS_BYTES=layout.records_bytes,
            OUTBOX_AT=layout.outbox_at,
            BLOCK=_ROWS_PER_PUT,
            **self._options,
        )

    def put_returns(
        self,
        epoch: torch.Tensor,
        record_RX: torch.Tensor,
        count_N: torch.Tensor,
        first: int,
        room: int,
        row_bytes: int,
        topk: int,
    ) -> None:
        """See Network."""
        from moe_runtime.dispatch.triton_one_sided_network_kernels import put_returns

        layout = self._layout
        put_returns[(self._num_ranks, room)](
            record_RX,
            count_N,
            self._addresses_N,
            epoch,
            self._rank,
            first,
            record_RX.shape[0] // self._num_ranks,
            K=topk,
            RECORD=record_RX.shape[1],
            ROW_BYTES=row_bytes,
            PARITY_BYTES=layout.parity_bytes,
            RETURNS_AT=layout.returns_at,
            RETURNS_BYTES=layout.returns_bytes,
            OUTBOX_AT=layout.outbox_at,
            ONE_PER_TOKEN=layout.with_weights,
            **self._options,
        )

    def signal(self, epoch: torch.Tensor, count_N: torch.Tensor, call: int) -> None:
        """See Network."""
        from moe_runtime.dispatch.triton_one_sided_network_kernels import signal_over_network

        signal_over_network[(self._num_ranks,)](
            count_N,
            self._addresses_N,
            epoch,
            self._rank,
            call,
            N=self._num_ranks,
            HEADERS_AT=self._layout.headers_at,
            OUTBOX_HEADERS_AT=self._layout.outbox_headers_at,
            **self._options,
        )
