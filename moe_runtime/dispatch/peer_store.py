"""How rows are stored into one peer's memory: through the caches, or past them.

An ordinary store fetches its cache line from the core that read it last. Between cores that share a cache this is the faster way;
between others (on another chip of the package, on another socket) each line is waited for, and a streaming store, which
overwrites the line in memory unseen, takes a fifth of the time. Which it is depends on where ranks run, and in a virtual machine
changes from minute to minute, so both ways are timed.

Legend: M rows, B bytes of a row.
"""

from __future__ import annotations

import ctypes
import time
from collections import deque
from typing import TYPE_CHECKING

import numpy as np
import torch

from moe_runtime.dispatch.row_bytes import gather_many

if TYPE_CHECKING:
    from moe_runtime.dispatch.row_bytes import ByteRows
    from moe_runtime.dispatch.rows import Int64Array
    from moe_runtime.native.build import Native

LARGE_BYTES = 256 << 10
"""What is smaller stays in the caches of both cores, is quickly done, and says little about either way."""
READING_COST = 2.0
"""Streaming stores are taken if they are so many times as fast, since the peer then reads from memory."""
SAMPLES = 4
"""Times remembered for each way; the least counts, so that a thread that lost its core does not."""
CALLS_BETWEEN_TRIALS = 32
"""Large stores after which the other way is tried once."""


class _Call(ctypes.Structure):
    """StreamCall of native/stream.cpp, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("rows", "index", "out")),
        *((name, ctypes.c_int64) for name in ("num_rows", "num_stored", "row_bytes")),
        ("num_threads", ctypes.c_int32),
    )


class PeerStore:
    """For one peer. Without the library, or if the peer is this rank itself, all stores are ordinary."""

    def __init__(self, native: Native | None, is_here: bool) -> None:
        self._library = None if native is None or is_here else native.library
        self._seconds_per_byte: dict[bool, deque[float]] = {
            streaming: deque(maxlen=SAMPLES) for streaming in (False, True)
        }
        self._until_trial = 0

    def gather(self, x_MB: ByteRows, index_M: Int64Array, out: memoryview) -> None:
        """out = the rows x[index], one after the other; at least one."""
        if self._library is None or out.nbytes < LARGE_BYTES:
            gather_many(x_MB, index_M, out)
            return
        streaming = self._next_way()
        begin = time.perf_counter()
        if streaming:
            stream_rows(self._library, x_MB, index_M, out)
        else:
            gather_many(x_MB, index_M, out)
        self._seconds_per_byte[streaming].append((time.perf_counter() - begin) / out.nbytes)

    def timed(self, streaming: bool) -> list[float]:
        """Seconds per byte of the last large stores of one way, SAMPLES at most."""
        return list(self._seconds_per_byte[streaming])

    def streams(self) -> bool:
        """Whether streaming stores are the better way, as far as is known."""
        ordinary, streaming = self.timed(streaming=False), self.timed(streaming=True)
        return bool(ordinary and streaming) and READING_COST * min(streaming) < min(ordinary)

    def _next_way(self) -> bool:
        """The better way; now and then the other."""
        self._until_trial -= 1
        if self._until_trial >= 0:
            return self.streams()
        self._until_trial = CALLS_BETWEEN_TRIALS
        return not self.streams()


def stream_rows(library: ctypes.CDLL, x_MB: ByteRows, index_M: Int64Array, out: memoryview) -> None:
    """out = the rows x[index], one after the other, by streaming stores, with as many threads as torch uses.

    Raises IndexError if `index` leads outside x.
    """
    out_B, index_M = np.frombuffer(out, dtype=np.uint8), np.ascontiguousarray(index_M, dtype=np.int64)
    assert x_MB.flags.c_contiguous
    assert out_B.size == index_M.size * x_MB.shape[1], f"{out_B.size} bytes for {index_M.size} rows"
    call = _Call(
        x_MB.ctypes.data, index_M.ctypes.data, out_B.ctypes.data, x_MB.shape[0], index_M.size, x_MB.shape[1],
        torch.get_num_threads(),
    )  # fmt: skip
    if library.moe_runtime_stream_rows(ctypes.addressof(call)):
        raise IndexError(f"a row's number is not in 0 to {x_MB.shape[0] - 1}")
