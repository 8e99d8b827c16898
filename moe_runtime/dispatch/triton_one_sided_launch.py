"""Launches the kernels of one-sided dispatch and combine: torch tensors in and out, nothing read by the host.

Legend: T tokens here, t tokens of this rank in one round, K experts per token, D elements and W words of a row, N ranks,
p slots per rank, R token rows (a capacity), S expert rows (a capacity), X words of a record.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from moe_runtime.dispatch.triton_one_sided_slabs import LATE, OTHER_CALL, SlabLayout
from moe_runtime.triton_support.availability import interpreting

if TYPE_CHECKING:
    from moe_runtime.dispatch.heap import SymmetricHeap
    from moe_runtime.dispatch.triton_one_sided_network import Network

_WORDS = (torch.int32, torch.int16, torch.uint8)


@dataclass(frozen=True)
class Tiles:
    """How much one program does."""

    rows: int
    """Token rows; a power of two, as are the others."""
    columns: int
    """Most words or elements of a row."""
    plan_tokens: int
    """Tokens that the plan's prefix sum takes at once."""
    num_warps: int


def choose_tiles(interpreted: bool) -> Tiles:
    """On a GPU 4 KiB of a row per program, so that a decode step fills the device; in the interpreter few large programs."""
    if interpreted:
        return Tiles(rows=32, columns=1024, plan_tokens=64, num_warps=4)
    return Tiles(rows=1, columns=1024, plan_tokens=512, num_warps=4)


def as_words(rows: torch.Tensor) -> torch.Tensor:
    """(R, D) of any type as (R, W) of the widest integers up to 32 bits that divide a row."""
    for dtype in _WORDS:
        size = dtype.itemsize
        if rows.shape[1] * rows.element_size() % size == 0 and rows.data_ptr() % size == 0:
            return rows.view(dtype)
    raise AssertionError("bytes divide every row")


def _power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def _blocks(size: int, block: int) -> int:
    return -(-size // block)


class OneSidedKernels:
    """The kernels over one heap. `epoch` (int64, one element): the last exchange received in full.

    problem (int32 [N], readable by the host at any time): what went wrong with each rank, 0 if nothing.
    max_looks: how often a waiting kernel looks at the flags before it gives up. network: carries the outbox, if there is one.
    """

    def __init__(
        self, heap: SymmetricHeap, layout: SlabLayout, max_looks: int, network: Network | None
    ) -> None:
        device = heap.segment.device
        self.heap = heap
        self.layout, self.tiles = layout, choose_tiles(interpreting())
        self.rank, self.num_ranks = heap.rank, heap.num_ranks
        self._addresses_N = heap.addresses_N
        self._max_looks = max_looks
        self._network = network
        # Tensors made inside inference mode could not be written outside it.
        with torch.inference_mode(False):
            self.epoch = torch.zeros(1, dtype=torch.int64, device=device)
            pinned = device.type == "cuda"
            self.problem_N = torch.zeros(self.num_ranks, dtype=torch.int32, pin_memory=pinned)

    def plan(
        self, slot_TK: torch.Tensor, begin: int, num_tokens: int, slots_per_rank: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """For tokens begin, begin + 1, ...: (N, t) int32 place in the message to each rank or -1; (N,) int32 message sizes."""
        from moe_runtime.dispatch.triton_one_sided_kernels import plan

        K = slot_TK.shape[1]
        position_Nt = slot_TK.new_empty(self.num_ranks, num_tokens, dtype=torch.int32)
        count_N = slot_TK.new_empty(self.num_ranks, dtype=torch.int32)
        plan[(self.num_ranks,)](
            slot_TK,
            position_Nt,
            count_N,
            begin,
            num_tokens,
            SLOTS_PER_RANK=slots_per_rank,
            K=K,
            K2=_power_of_two(K),
            BLOCK=self.tiles.plan_tokens,
            num_warps=self.tiles.num_warps,
        )
        return position_Nt, count_N

    def send(
        self,
        x_TW: torch.Tensor,
        slot_TK: torch.Tensor,
        weights_TK: torch.Tensor,
        position_Nt: torch.Tensor,
        count_N: torch.Tensor,
        begin: int,
        slots_per_rank: int,
    ) -> None:
        """Store the planned rows and their records (weights_TK: float32, contiguous) at their destinations."""
        from moe_runtime.dispatch.triton_one_sided_kernels import send

        layout, tiles = self.layout, self.tiles
        W, K, num_tokens = x_TW.shape[1], slot_TK.shape[1], position_Nt.shape[1]
        columns = min(tiles.columns, _power_of_two(W))
        send[(_blocks(num_tokens, tiles.rows), _blocks(W, columns))](
            x_TW,
            slot_TK,
            weights_TK,
            position_Nt,
            self._addresses_N,
            self.epoch,
            begin,
            num_tokens,
            self.rank,
            W,
            N=self.num_ranks,
            SLOTS_PER_RANK=slots_per_rank,
            K=K,
            K2=_power_of_two(K),
            RECORD=layout.record_words(K),
            PARITY_BYTES=layout.parity_bytes,
            ROWS_AT=layout.rows_at,
            ROWS_BYTES=layout.rows_bytes,
            RECORDS_AT=layout.records_at,
            RECORDS_BYTES=layout.records_bytes,
            OUTBOX_AT=layout.outbox_at,
            WITH_WEIGHTS=layout.with_weights,
            BT=tiles.rows,
            BW=columns,
            num_warps=tiles.num_warps,
        )
        if self._network is not None:
            row_bytes = W * x_TW.element_size()
            self._network.put_messages(self.epoch, count_N, num_tokens, row_bytes, K)

    def signal(self, count_N: torch.Tensor, call: int) -> None:
        """Publish the messages of the exchange. count_N: int32 rows of each; call: `Call.pack()`."""
        from moe_runtime.dispatch.triton_one_sided_kernels import signal

        signal[(self.num_ranks,)](
            count_N,
            self._addresses_N,
            self.epoch,
            self.rank,
            call,
            N=self.num_ranks,
            HEADERS_AT=self.layout.headers_at,
            num_warps=1,
        )
        if self._network is not None:
            self._network.signal(self.epoch, count_N, call)

    def wait(self, call: int) -> None:
        """Hold the stream until all have sent the exchange; what goes wrong is noted in problem_N."""
        from moe_runtime.dispatch.triton_one_sided_kernels import wait

        wait[(1,)](
            self._addresses_N,
            self.epoch,
            self.problem_N,
            self.rank,
            call,
            self._max_looks,
            N=self.num_ranks,
            N2=_power_of_two(self.num_ranks),
            HEADERS_AT=self.layout.headers_at,
            LATE=LATE,
            OTHER_CALL=OTHER_CALL,
            num_warps=1,
        )

    def receive(
        self, tokens_RW: torch.Tensor, record_RX: torch.Tensor, count_N: torch.Tensor, first: int, room: int
    ) -> None:
        """Copy out the messages of an exchange, to rows first .. first + room of each source's share of R.

        record_RX gets -1 in every word of the rows that hold nothing, count_N (int32) the rows that came.
        """
        from moe_runtime.dispatch.triton_one_sided_kernels import receive

        layout, tiles = self.layout, self.tiles
        W, words = tokens_RW.shape[1], record_RX.shape[1]
        columns = min(tiles.columns, _power_of_two(W))
        receive[(self.num_ranks, _blocks(room, tiles.rows), _blocks(W, columns))](
            tokens_RW,
            record_RX,
            count_N,
            self._addresses_N,
            self.epoch,
            self.rank,
            first,
            room,
            tokens_RW.shape[0] // self.num_ranks,
            W,
            N=self.num_ranks,
            R2=_power_of_two(words),
            RECORD=words,
            PARITY_BYTES=layout.parity_bytes,
            HEADERS_AT=layout.headers_at,
            ROWS_AT=layout.rows_at,
            ROWS_BYTES=layout.rows_bytes,
            RECORDS_AT=layout.records_at,
            RECORDS_BYTES=layout.records_bytes,
            BT=tiles.rows,
            BW=columns,
            num_warps=tiles.num_warps,
        )

    def send_back(
        self,
        y_SD: torch.Tensor,
        record_RX: torch.Tensor,
        expert_row_RK: torch.Tensor,
        count_N: torch.Tensor,
        first: int,
        room: int,
    ) -> None:
        """Store the results of the rows that came in one round at their owners: expert rows, or with weights in the
        records one partial sum of them per token."""
        from moe_runtime.dispatch import triton_one_sided_combine_kernels as kernels

        layout, tiles = self.layout, self.tiles
        kernel = kernels.return_sums if layout.with_weights else kernels.return_rows
        y_SW = y_SD if layout.with_weights else as_words(y_SD)
        W, K = y_SW.shape[1], expert_row_RK.shape[1]
        columns = min(tiles.columns, _power_of_two(W))
        kernel[(self.num_ranks, _blocks(room, tiles.rows), _blocks(W, columns))](
            y_SW,
            record_RX,
            expert_row_RK,
            count_N,
            self._addresses_N,
            self.epoch,
            self.rank,
            first,
            record_RX.shape[0] // self.num_ranks,
            W,
            K=K,
            RECORD=record_RX.shape[1],
            PARITY_BYTES=layout.parity_bytes,
            RETURNS_AT=layout.returns_at,
            RETURNS_BYTES=layout.returns_bytes,
            OUTBOX_AT=layout.outbox_at,
            BT=tiles.rows,
            BW=columns,
            num_warps=tiles.num_warps,
            # A fused multiply-add rounds once where the contract rounds twice.
            enable_fp_fusion=False,
        )
        if self._network is not None:
            row_bytes = W * y_SW.element_size()
            self._network.put_returns(self.epoch, record_RX, count_N, first, room, row_bytes, K)

    def sum_up(
        self,
        out_TD: torch.Tensor,
        slot_TK: torch.Tensor,
        weights_TK: torch.Tensor,
        begin: int,
        num_tokens: int,
        slots_per_rank: int,
    ) -> None:
        """Fill out_TD[begin : begin + num_tokens] from the returns of an exchange, in float32 and a fixed order."""
        from moe_runtime.dispatch import triton_one_sided_combine_kernels as kernels

        layout, tiles = self.layout, self.tiles
        D, K = out_TD.shape[1], slot_TK.shape[1]
        columns = min(tiles.columns, _power_of_two(D))
        grid = (_blocks(num_tokens, tiles.rows), _blocks(D, columns))
        where = (self._addresses_N, self.epoch, self.rank, begin, num_tokens, D)
        sizes = {
            "K": K,
            "PARITY_BYTES": layout.parity_bytes,
            "RETURNS_AT": layout.returns_at,
            "BT": tiles.rows,
            "BW": columns,
            "num_warps": tiles.num_warps,
            "enable_fp_fusion": False,
        }
        if layout.with_weights:
            ranks = {"N": self.num_ranks, "SLOTS_PER_RANK": slots_per_rank, "K2": _power_of_two(K)}
            kernels.sum_partials[grid](out_TD, slot_TK, *where, **ranks, **sizes)
        else:
            kernels.sum_rows[grid](out_TD, slot_TK, weights_TK, *where, **sizes)
