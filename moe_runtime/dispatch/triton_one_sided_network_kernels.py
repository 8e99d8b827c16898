"""Kernels that push what lies in the outbox to ranks whose memory is not mapped here, over NVSHMEM.

`send` and the kernels that return results have laid their messages out in the outbox; `triton_one_sided_slabs` has the
picture. A rank is beyond a network if its address is 0.

Legend: n rank, i row of a source in this round, t token of the owner, K experts per token.
"""

import triton.language as tl

from moe_runtime.dispatch.nvshmem_device import (
    SIGNAL_SET,
    putmem_nbi_block,
    putmem_signal_nbi_block,
    quiet,
)
from moe_runtime.triton_support import jit


@jit(do_not_specialize=["me"])
def put_messages(
    count_ptr,
    address_ptr,
    epoch_ptr,
    me,
    ROW_BYTES: tl.constexpr,
    RECORD_BYTES: tl.constexpr,
    PARITY_BYTES: tl.constexpr,
    ROWS_AT: tl.constexpr,
    ROWS_BYTES: tl.constexpr,
    RECORDS_AT: tl.constexpr,
    RECORDS_BYTES: tl.constexpr,
    OUTBOX_AT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Rows and records begin .. begin + BLOCK of the message to rank n."""
    n = tl.program_id(0)
    begin = tl.program_id(1).to(tl.int64) * BLOCK
    if tl.load(address_ptr + n) == 0:
        rows = tl.minimum(tl.load(count_ptr + n) - begin, BLOCK)
        if rows > 0:
            own = tl.load(address_ptr + me)
            inbox = own + ((tl.load(epoch_ptr) + 1) & 1) * PARITY_BYTES
            outbox = own + OUTBOX_AT
            to = inbox + ROWS_AT + me.to(tl.int64) * ROWS_BYTES + begin * ROW_BYTES
            source = outbox + ROWS_AT + n.to(tl.int64) * ROWS_BYTES + begin * ROW_BYTES
            putmem_nbi_block(to, source, rows * ROW_BYTES, n)
            to = inbox + RECORDS_AT + me.to(tl.int64) * RECORDS_BYTES + begin * RECORD_BYTES
            source = outbox + RECORDS_AT + n.to(tl.int64) * RECORDS_BYTES + begin * RECORD_BYTES
            putmem_nbi_block(to, source, rows * RECORD_BYTES, n)


@jit(do_not_specialize=["me", "first", "rows_per_source"])
def put_returns(
    record_ptr,
    count_ptr,
    address_ptr,
    epoch_ptr,
    me,
    first,
    rows_per_source,
    K: tl.constexpr,
    RECORD: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    PARITY_BYTES: tl.constexpr,
    RETURNS_AT: tl.constexpr,
    RETURNS_BYTES: tl.constexpr,
    OUTBOX_AT: tl.constexpr,
    ONE_PER_TOKEN: tl.constexpr,
):
    """The results of row i of a source, each to place (t, k) there; with ONE_PER_TOKEN only the first."""
    source = tl.program_id(0)
    i = tl.program_id(1)
    address = tl.load(address_ptr + source)
    count = tl.load(count_ptr + source)
    if (address == 0) & (i < count):
        own = tl.load(address_ptr + me)
        inbox = own + ((tl.load(epoch_ptr) + 1) & 1) * PARITY_BYTES + RETURNS_AT
        outbox = own + OUTBOX_AT + RETURNS_AT + source.to(tl.int64) * RETURNS_BYTES
        record = record_ptr + (source.to(tl.int64) * rows_per_source + first + i) * RECORD
        t = tl.load(record).to(tl.int64)
        left = K
        for k in range(K):
            if (tl.load(record + 1 + k) >= 0) & (left > 0):
                at = (t * K + k) * ROW_BYTES
                putmem_nbi_block(inbox + at, outbox + at, tl.full((), ROW_BYTES, tl.int64), source)
                left = 0 if ONE_PER_TOKEN else left - 1


@jit(do_not_specialize=["me", "call"])
def signal_over_network(
    count_ptr,
    address_ptr,
    epoch_ptr,
    me,
    call,
    N: tl.constexpr,
    HEADERS_AT: tl.constexpr,
    OUTBOX_HEADERS_AT: tl.constexpr,
):
    """Once all puts have arrived: the header to rank n, and behind it the flag."""
    n = tl.program_id(0)
    if tl.load(address_ptr + n) == 0:
        epoch = tl.load(epoch_ptr) + 1
        own = tl.load(address_ptr + me)
        staged = own + OUTBOX_HEADERS_AT + n * 16
        words = staged.to(tl.pointer_type(tl.int64))
        tl.store(words, tl.load(count_ptr + n).to(tl.int64))
        tl.store(words + 1, call)
        tl.debug_barrier()
        quiet()
        header = own + HEADERS_AT + ((epoch & 1) * N + me) * 16
        size = tl.full((), 16, tl.int64)
        flag = own + me.to(tl.int64) * 8
        putmem_signal_nbi_block(header, staged, size, flag, epoch.to(tl.uint64), SIGNAL_SET, n)
