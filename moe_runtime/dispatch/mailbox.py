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

from array import array
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from moe_runtime.dispatch.row_arrays import integers
from moe_runtime.dispatch.waiting import IsAlive, wait_until
from moe_runtime.errors import CapacityError, LockstepError

if TYPE_CHECKING:
    from moe_runtime.dispatch.heap_shm import SharedHeap
    from moe_runtime.dispatch.row_arrays import RowArray
    from moe_runtime.dispatch.rows import Int32Array

HEADER_BYTES = 64
LAST_EXCHANGE = 1 << 62
"""After it comes number 1 again; even, so that odd and even numbers go on taking turns. 0 stays the unused flag."""
_FLAG, _TOTAL, _ROUNDS, _CALL = 0, 1, 2, 3


class Call(NamedTuple):
    """What an exchange is about; ranks that disagree are out of step."""

    kind: int
    """1 dispatch, 2 combine."""
    max_num_tokens: int
    row_elements: int
    element_bytes: int
    topk: int
    """Slots beside each row; 0 in combine."""

    def __str__(self) -> str:
        kind = {1: "dispatch", 2: "combine"}.get(self.kind, f"call {self.kind}")
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
    """The payload of one slab, seen as rows. Legend: C its capacity in rows, D elements of a row, K slots beside it."""

    peer: int
    """Who writes or reads at the other end."""
    rows_CD: RowArray
    slots_CK: Int32Array


@dataclass(frozen=True)
class Format:
    """The slabs of one kind of row, by the parity of the exchange; the next rank first, so that not all send to rank 0 at once."""

    capacity: int
    """Rows per message and round."""
    outboxes: tuple[list[Slab], list[Slab]]
    inboxes: tuple[list[Slab], list[Slab]]


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
        # A handful, asked for in every layer.
        self._format = cache(self._make_format)

    def format(self, call: Call) -> Format:
        """The slabs as `call` uses them. Raises CapacityError if not even one row fits."""
        return self._format(call.row_elements, call.element_bytes, call.topk)

    def next_exchange(self) -> int:
        """Begin the next exchange; returns its parity. All messages of the last one must have been received."""
        self._exchange = self._exchange % LAST_EXCHANGE + 1
        return self._exchange % 2

    def signal(self, peer: int, header: Header, call: Call) -> None:
        """Publish the message to `peer`; nothing may be written to it afterwards."""
        words = self._heap.words[peer]
        at = self._offset(peer, self.rank, self._exchange % 2) // 8
        values = array("q", (*header, *call))
        words[at + _TOTAL : at + _TOTAL + len(values)] = values
        words[at + _FLAG] = self._exchange

    def receive(self, peer: int, call: Call) -> Header:
        """Wait for the message of `peer`. Its slab may be read until next_exchange().

        Raises LockstepError if the peer is dead, late, or at another call.
        """
        words = self._heap.words[self.rank]
        expected = self._exchange
        at = self._offset(self.rank, peer, expected % 2) // 8
        if words[at] != expected:
            what = "dispatch message" if call.topk else "combine message"
            wait_until(lambda: words[at] == expected, peer, what, self._timeout, self._is_alive)
        total, rounds, *theirs = words[at + _TOTAL : at + _CALL + len(call)].tolist()
        if tuple(theirs) != call:
            raise LockstepError(f"rank {self.rank} is at {call}; rank {peer} is at {Call(*theirs)}")
        return Header(total, rounds)

    def close(self) -> None:
        """Forget all memory."""
        self._format.cache_clear()
        self._heap.close()

    def _offset(self, owner: int, source: int, parity: int) -> int:
        place = (source - owner - 1) % self.num_ranks
        return self._first_byte + (parity * (self.num_ranks - 1) + place) * self._slab_bytes

    def _make_format(self, row_elements: int, element_bytes: int, topk: int) -> Format:
        row_bytes = row_elements * element_bytes
        capacity = slab_capacity(self._slab_bytes, row_bytes, topk)
        if capacity < 1:
            needed = segment_bytes(self.num_ranks, 1, row_bytes, topk)
            raise CapacityError(
                f"the dispatch buffer is too small for one row of {row_bytes} bytes per peer:"
                f" {needed} bytes per rank are needed ({needed / 2**20:.3f} MiB; setting dispatch_buffer_mib)"
            )
        here, peers = self.rank, [(self.rank + i) % self.num_ranks for i in range(1, self.num_ranks)]

        def view(owner: int, source: int, parity: int) -> Slab:
            start = self._offset(owner, source, parity) + HEADER_BYTES
            middle = start + _align(capacity * topk * 4)
            memory = self._heap.segments[owner].numpy()
            return Slab(
                peer=source if owner == here else owner,
                rows_CD=memory[middle : middle + capacity * row_bytes]
                .view(integers(element_bytes))
                .reshape(capacity, row_elements),
                slots_CK=memory[start : start + capacity * topk * 4].view(np.int32).reshape(capacity, topk),
            )

        return Format(
            capacity,
            outboxes=([view(p, here, 0) for p in peers], [view(p, here, 1) for p in peers]),
            inboxes=([view(here, p, 0) for p in peers], [view(here, p, 1) for p in peers]),
        )
