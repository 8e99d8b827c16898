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
C library and native/stream.cpp close streaming copies with a fence, and threads are joined before a copy returns.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from moe_runtime.dispatch.waiting import IsAlive, all_peers, seen_soon, wait_until
from moe_runtime.errors import CapacityError, LockstepError

if TYPE_CHECKING:
    from moe_runtime.dispatch.heap_shm import SharedHeap

HEADER_BYTES = 64
LAST_EXCHANGE = 1 << 62
"""After it comes number 1 again; even, so that odd and even numbers go on taking turns. 0 stays the unused flag."""
_HEADER_WORDS = HEADER_BYTES // 8
_ROUND_BYTES = 5 << 18
"""Of a slab, no more is used in a round: what was just stored should be in a processor's cache when it is read."""
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


class Slab(NamedTuple):
    """The parts of one slab."""

    peer: int
    """Who writes or reads at the other end."""
    header: memoryview
    """The flag; the message's rows over all rounds; the rounds that its sender needs; the call. int64."""
    slots: memoryview
    """Bytes, as are the rows."""
    rows: memoryview


@dataclass(frozen=True)
class Format:
    """The slabs of one kind of row, by the parity of the exchange; the next rank first, so that not all send to rank 0 at once."""

    capacity: int
    """Rows per message and round."""
    row_bytes: int
    slot_bytes: int
    """Bytes of the slots beside one row."""
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

    def signal(self, outbox: Slab, total_rows: int, rounds: int, call: Call) -> None:
        """Publish the message; nothing may be written to it afterwards."""
        header = outbox.header
        header[1], header[2] = total_rows, rounds
        header[3], header[4], header[5], header[6], header[7] = call
        header[0] = self._exchange

    def receive(self, inbox: Slab, call: Call) -> tuple[int, int]:
        """Wait for the message of a peer: its rows over all rounds, and the rounds that the peer needs.

        The slab may be read until next_exchange(). Raises LockstepError if any peer is dead, or this one
        late or at another call.
        """
        header, expected = inbox.header, self._exchange
        if header[0] != expected and not seen_soon(header, expected):
            what = f"{_KINDS.get(call.kind, 'unknown')} message"
            peers = all_peers(self.rank, self.num_ranks, inbox.peer)
            wait_until(lambda: header[0] == expected, peers, what, self._timeout, self._is_alive)
        _, total_rows, rounds, kind, tokens, elements, size, topk = header.tolist()
        if (kind, tokens, elements, size, topk) != call:
            theirs = Call(kind, tokens, elements, size, topk)
            raise LockstepError(f"rank {self.rank} is at {call}; rank {inbox.peer} is at {theirs}")
        return total_rows, rounds

    def close(self) -> None:
        """Forget all memory."""
        self._format.cache_clear()
        self._heap.close()

    def _offset(self, owner: int, source: int, parity: int) -> int:
        place = (source - owner - 1) % self.num_ranks
        return self._first_byte + (parity * (self.num_ranks - 1) + place) * self._slab_bytes

    def _make_format(self, row_elements: int, element_bytes: int, topk: int) -> Format:
        row_bytes = row_elements * element_bytes
        at_most = max(1, slab_capacity(_ROUND_BYTES, row_bytes, topk))
        capacity = min(at_most, slab_capacity(self._slab_bytes, row_bytes, topk))
        if capacity < 1:
            needed = segment_bytes(self.num_ranks, 1, row_bytes, topk)
            raise CapacityError(
                f"the dispatch buffer is too small for one row of {row_bytes} bytes per peer:"
                f" {needed} bytes per rank are needed ({needed / 2**20:.3f} MiB; setting dispatch_buffer_mib)"
            )
        here, peers = self.rank, [(self.rank + i) % self.num_ranks for i in range(1, self.num_ranks)]

        def view(owner: int, source: int, parity: int) -> Slab:
            begin = self._offset(owner, source, parity)
            slots = begin + HEADER_BYTES
            rows = slots + _align(capacity * topk * 4)
            memory = self._heap.segments[owner].numpy().data
            return Slab(
                peer=source if owner == here else owner,
                header=self._heap.words[owner][begin // 8 : begin // 8 + _HEADER_WORDS],
                slots=memory[slots : slots + capacity * topk * 4],
                rows=memory[rows : rows + capacity * row_bytes],
            )

        return Format(
            capacity,
            row_bytes,
            slot_bytes=4 * topk,
            outboxes=([view(p, here, 0) for p in peers], [view(p, here, 1) for p in peers]),
            inboxes=([view(here, p, 0) for p in peers], [view(here, p, 1) for p in peers]),
        )
