"""The one-sided protocol: a sender stores into its slab in the receiver's segment, then raises the slab's flag.

One rank's segment with N ranks; sources are the other ranks, starting with the next one:

            slab                slab                      slab
    even  | from rank r+1     | from rank r+2     | ... | from rank r-1     |   exchanges 2, 4, 6, ...
    odd   | from rank r+1     | from rank r+2     | ... | from rank r-1     |   exchanges 1, 3, 5, ...
            |
            +-> header: 8 words of int64       | payload of C rows
                flag  number of the exchange   | K x int32 slots of C rows | padding to 64 | C rows of D elements
                total rows, rounds,            |
                what kind of call and its sizes|

Exchanges are numbered from 1 and every rank sends to every other in each, if only the header. No acknowledgement
is needed: a rank sends for exchange e only after it has copied out all messages of e - 1. So whoever has
received a peer's flag e - 1 knows that the peer has finished reading e - 2, and may overwrite that slab with e.

Stores need no fence: x86-64 makes them visible in program order (heap_shm.unsupported refuses other machines), the
C library closes streaming copies with a fence, and torch joins its threads before a copy returns.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import torch

from moe_runtime.dispatch.waiting import IsAlive, wait_until
from moe_runtime.errors import CapacityError, LockstepError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from moe_runtime.dispatch.heap_shm import SharedHeap
    from moe_runtime.dispatch.rows import Int32Array

HEADER_BYTES = 64
LAST_EXCHANGE = 1 << 62
"""After it comes number 1 again; even, so that odd and even numbers go on taking turns. 0 stays the unused flag."""
_FLAG, _TOTAL, _ROUNDS, _CALL = 0, 1, 2, 3
_KINDS = {1: "dispatch", 2: "combine", 3: "counts"}


class Call(NamedTuple):
    """What an exchange is about; ranks that disagree are out of step."""

    kind: int
    """1 dispatch, 2 combine, 3 counts."""
    max_num_tokens: int
    row_elements: int
    element_bytes: int
    topk: int
    """Slots beside each row; 0 in combine."""

    def __str__(self) -> str:
        kind = _KINDS.get(self.kind, f"call {self.kind}")
        return (
            f"{kind} of at most {self.max_num_tokens} tokens, {self.row_elements} x {self.element_bytes} bytes a row,"
            f" {self.topk} slots"
        )


class Header(NamedTuple):
    """What the receiver learns beside the payload."""

    total_rows: int
    """Rows of this message over all rounds."""
    rounds: int
    """Rounds that the sender needs for its longest message."""


@dataclass(frozen=True)
class Slab:
    """The payload of one slab, seen as rows."""

    rows_CD: torch.Tensor
    slots_CK: Int32Array


def _align(size: int) -> int:
    return -(-size // 64) * 64


def segment_bytes(num_ranks: int, rows: int, row_bytes: int, topk: int) -> int:
    """Bytes of shared memory per rank with which a message of `rows` token rows goes in one round."""
    slab = HEADER_BYTES + _align(rows * topk * 4) + _align(rows * row_bytes)
    return 2 * max(1, num_ranks - 1) * slab


def slab_bytes(num_ranks: int, bytes_per_rank: int) -> int:
    """Size of each slab when a rank may use `bytes_per_rank` of shared memory."""
    return bytes_per_rank // (2 * max(1, num_ranks - 1)) // 64 * 64


def slab_capacity(slab: int, row_bytes: int, topk: int) -> int:
    """Rows of `row_bytes` with `topk` slots each that fit a slab; less than 1 if none does."""
    room = slab - HEADER_BYTES
    rows = room // (row_bytes + 4 * topk)
    # The rows start on a multiple of 64, for which a few of them may have to give way.
    while rows > 0 and _align(rows * topk * 4) + rows * row_bytes > room:
        rows -= 1
    return rows


class Mailboxes:
    """Sends and receives the messages of one rank, one exchange at a time."""

    def __init__(
        self, heap: SharedHeap, slab: int, step_timeout: float, is_alive: IsAlive, first_byte: int = 0
    ) -> None:
        """first_byte: where its 2 * (num_ranks - 1) slabs begin in every segment, a multiple of 64."""
        self.rank, self.num_ranks = heap.rank, heap.num_ranks
        self._heap = heap
        self._first_byte = first_byte
        self._slab_bytes = slab
        self._timeout = step_timeout
        self._is_alive = is_alive
        self._exchange = 0
        # One entry per (owner, source, parity, row format): a handful, asked for in every layer.
        self._view = cache(self._make_view)

    def peers(self) -> Iterator[int]:
        """The other ranks, the next one first, so that not all send to rank 0 at once."""
        return ((self.rank + i) % self.num_ranks for i in range(1, self.num_ranks))

    def capacity(self, call: Call) -> int:
        """Rows per message and round. Raises CapacityError if not even one fits."""
        row_bytes = call.row_elements * call.element_bytes
        rows = slab_capacity(self._slab_bytes, row_bytes, call.topk)
        if rows < 1:
            needed = segment_bytes(self.num_ranks, 1, row_bytes, call.topk)
            raise CapacityError(
                f"the dispatch buffer is too small for one row of {row_bytes} bytes per peer:"
                f" {needed} bytes per rank are needed ({needed / 2**20:.3f} MiB; setting dispatch_buffer_mib)"
            )
        return rows

    def next_exchange(self) -> None:
        """Begin the next exchange. All messages of the last one must have been received."""
        self._exchange = self._exchange % LAST_EXCHANGE + 1

    def outbox(self, peer: int, call: Call, dtype: torch.dtype) -> Slab:
        """Where to write the message to `peer`."""
        return self._view(peer, self.rank, self._exchange % 2, call.row_elements, call.topk, dtype)

    def signal(self, peer: int, header: Header, call: Call) -> None:
        """Publish the message to `peer`; nothing may be written to it afterwards."""
        words = self._heap.words[peer]
        at = self._offset(peer, self.rank, self._exchange % 2) // 8
        words[at + _TOTAL] = header.total_rows
        words[at + _ROUNDS] = header.rounds
        for i, value in enumerate(call, start=at + _CALL):
            words[i] = value
        words[at + _FLAG] = self._exchange

    def receive(self, peer: int, call: Call, dtype: torch.dtype) -> tuple[Slab, Header]:
        """Wait for the message of `peer`. The slab may be read until next_exchange().

        Raises LockstepError if the peer is dead, late, or at another call.
        """
        words = self._heap.words[self.rank]
        parity = self._exchange % 2
        at = self._offset(self.rank, peer, parity) // 8
        if words[at] != self._exchange:
            what = f"{_KINDS.get(call.kind, 'unknown')} message"
            expected = self._exchange
            wait_until(lambda: words[at] == expected, peer, what, self._timeout, self._is_alive)
        theirs = Call(*words[at + _CALL : at + _CALL + len(call)])
        if theirs != call:
            raise LockstepError(f"rank {self.rank} is at {call}; rank {peer} is at {theirs}")
        slab = self._view(self.rank, peer, parity, call.row_elements, call.topk, dtype)
        return slab, Header(words[at + _TOTAL], words[at + _ROUNDS])

    def close(self) -> None:
        """Forget all memory."""
        self._view.cache_clear()
        self._heap.close()

    def _offset(self, owner: int, source: int, parity: int) -> int:
        place = (source - owner - 1) % self.num_ranks
        return self._first_byte + (parity * (self.num_ranks - 1) + place) * self._slab_bytes

    def _make_view(
        self, owner: int, source: int, parity: int, row_elements: int, topk: int, dtype: torch.dtype
    ) -> Slab:
        row_bytes = row_elements * dtype.itemsize
        rows = slab_capacity(self._slab_bytes, row_bytes, topk)
        start = self._offset(owner, source, parity) + HEADER_BYTES
        middle = start + _align(rows * topk * 4)
        memory = self._heap.segments[owner]
        # Tensors made inside inference mode cannot be written outside it, and the views outlive the caller's mode.
        with torch.inference_mode(False):
            return Slab(
                rows_CD=memory[middle : middle + rows * row_bytes].view(dtype).view(rows, row_elements),
                slots_CK=memory[start : start + rows * topk * 4].view(torch.int32).view(rows, topk).numpy(),
            )
