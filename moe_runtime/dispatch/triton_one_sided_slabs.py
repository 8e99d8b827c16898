"""What a segment of the one-sided Triton kernels looks like, and how the host of CPU ranks watches it.

    flags: N words | headers: 2 x N x (rows, call) | even half | odd half | outbox, if a rank is beyond a network:
                                                                           rows and records to N ranks, N x returns, headers

    a half:    rows from rank 0 | ... | rows from rank N-1      C rows each, of token rows
               records, likewise                                C x (token, K slots[, K weights]) of int32
               returns                                          C x K rows: the results of this rank's tokens

Exchanges are numbered, and use the halves in turn. The flag of a source holds the number of the last exchange it has
sent; it is stored last, with release, and read with acquire. No acknowledgement is needed: a rank sends for exchange
e only after it has copied out all messages of e - 1, so whoever has received a peer's e - 1 knows that the peer
has finished with e - 2, and may overwrite that half. A returned row has one writer, the rank of that expert, hence
its place follows from (token, k) and nobody needs to say where it is.

Every rank sends at most C of its tokens in a round, so the number of rounds follows from the largest number of tokens
on any rank, which all know.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from moe_runtime.dispatch.waiting import IsAlive, wait_until
from moe_runtime.errors import CapacityError, LockstepError

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    import numpy.typing as npt

LATE, OTHER_CALL = 1, 2
"""What the waiting kernel notes of a peer."""
_KINDS = {1: "dispatch", 2: "combine"}
_TOKEN_BITS, _ROW_BITS, _TOPK_BITS = 26, 24, 10


class Call(NamedTuple):
    """What an exchange is about; ranks that disagree are out of step."""

    kind: int
    """1 dispatch, 2 combine."""
    max_num_tokens: int
    row_bytes: int
    topk: int

    def pack(self) -> int:
        """In one int64, never 0. Raises CapacityError for sizes that no such word can hold."""
        word = self.kind
        fields = (("experts per token", self.topk, _TOPK_BITS), ("bytes per row", self.row_bytes, _ROW_BITS))
        for name, value, bits in (*fields, ("tokens per step", self.max_num_tokens, _TOKEN_BITS)):
            if value >= 1 << bits:
                raise CapacityError(
                    f"one-sided dispatch: {value} {name}; fewer than {1 << bits} are supported"
                )
            word = word << bits | value
        return word

    @staticmethod
    def unpack(word: int) -> Call:
        """The inverse of pack()."""
        tokens = word & ((1 << _TOKEN_BITS) - 1)
        word >>= _TOKEN_BITS
        row_bytes = word & ((1 << _ROW_BITS) - 1)
        word >>= _ROW_BITS
        return Call(word >> _TOPK_BITS, tokens, row_bytes, word & ((1 << _TOPK_BITS) - 1))

    def __str__(self) -> str:
        kind = _KINDS.get(self.kind, f"call {self.kind}")
        return (
            f"{kind} of at most {self.max_num_tokens} tokens, {self.row_bytes} bytes a row, {self.topk} slots"
        )


def _align(size: int) -> int:
    return -(-size // 64) * 64


@dataclass(frozen=True)
class SlabLayout:
    """Sizes and offsets of a segment, in bytes; the same on all ranks."""

    num_ranks: int
    capacity: int
    """Tokens of a rank that one round carries."""
    row_bytes: int
    """Of the widest row."""
    topk: int
    """The most experts per token."""
    with_weights: bool
    """Whether records carry routing weights."""
    networked: bool
    """Whether a rank can only be reached over a network, so that there is an outbox."""

    def record_words(self, topk: int) -> int:
        """int32 words of a record."""
        return 1 + topk * (2 if self.with_weights else 1)

    @property
    def headers_at(self) -> int:
        """Where the headers begin, 16 bytes for each rank and parity."""
        return _align(8 * self.num_ranks)

    @property
    def rows_at(self) -> int:
        """Where the even half begins, with the rows of rank 0."""
        return _align(self.headers_at + 2 * self.num_ranks * 16)

    @property
    def rows_bytes(self) -> int:
        """Of one source."""
        return _align(self.capacity * self.row_bytes)

    @property
    def records_at(self) -> int:
        """Where the records of rank 0 begin in the even half."""
        return self.rows_at + self.num_ranks * self.rows_bytes

    @property
    def records_bytes(self) -> int:
        """Of one source."""
        return _align(self.capacity * self.record_words(self.topk) * 4)

    @property
    def returns_at(self) -> int:
        """Where the rows that combine returns begin in the even half."""
        return self.records_at + self.num_ranks * self.records_bytes

    @property
    def returns_bytes(self) -> int:
        """For an expert row for each (token, k) of a round."""
        return _align(self.capacity * self.topk * self.row_bytes)

    @property
    def parity_bytes(self) -> int:
        """From the even half to the odd one."""
        return self.returns_at + self.returns_bytes - self.rows_at

    @property
    def outbox_at(self) -> int:
        """From where an outbox has its rows, records and N returns at the offsets of a half; 0: there is none."""
        return 2 * self.parity_bytes if self.networked else 0

    @property
    def outbox_headers_at(self) -> int:
        """Where a rank composes the N headers that go over a network."""
        return self.outbox_at + self.returns_at + self.num_ranks * self.returns_bytes

    @property
    def segment_bytes(self) -> int:
        """Of everything, the outbox included."""
        if self.networked:
            return self.outbox_headers_at + _align(16 * self.num_ranks)
        return self.rows_at + 2 * self.parity_bytes

    def num_rounds(self, max_num_tokens: int) -> int:
        """Exchanges that a call takes; at least one, so that ranks stay in step."""
        return max(1, -(-max_num_tokens // self.capacity))


def fit_layout(
    num_ranks: int, bytes_per_rank: int, row_bytes: int, topk: int, with_weights: bool, networked: bool
) -> SlabLayout:
    """The layout with the largest capacity that a segment can hold. Raises CapacityError if not even one token fits."""

    def layout(capacity: int) -> SlabLayout:
        return SlabLayout(num_ranks, capacity, row_bytes, topk, with_weights, networked)

    needed = layout(1).segment_bytes
    if needed > bytes_per_rank:
        raise CapacityError(
            f"dispatch buffer of {bytes_per_rank} bytes: one token of {row_bytes} bytes a row and {topk} experts needs"
            f" {needed} bytes per rank with {num_ranks} ranks (dispatch_buffer_mib >= {-(-needed >> 20)})"
        )
    low, high = 1, bytes_per_rank // row_bytes + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if layout(middle).segment_bytes <= bytes_per_rank else (low, middle)
    return layout(low)


def watch(
    words: npt.NDArray[np.int64],
    layout: SlabLayout,
    rank: int,
    epoch: int,
    call: Call,
    step_timeout: float,
    is_alive: IsAlive,
) -> None:
    """Wait on the host until every peer has sent exchange `epoch`. `words`: this rank's segment.

    Raises LockstepError if a peer is dead, late or at another call.
    """
    what = f"{_KINDS[call.kind]} message"
    for i in range(1, layout.num_ranks):
        peer = (rank + i) % layout.num_ranks
        wait_until(_arrival(words, peer, epoch), peer, what, step_timeout, is_alive)
        header = layout.headers_at // 8 + ((epoch & 1) * layout.num_ranks + peer) * 2
        theirs = Call.unpack(int(words[header + 1]))
        if theirs != call:
            raise LockstepError(f"rank {rank} is at {call}; rank {peer} is at {theirs}")


def _arrival(words: npt.NDArray[np.int64], peer: int, epoch: int) -> Callable[[], bool]:
    return lambda: bool(words[peer] >= epoch)
