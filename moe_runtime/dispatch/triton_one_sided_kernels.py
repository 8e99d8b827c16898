"""Kernels of one exchange; `triton_one_sided_slabs` has the picture of the memory they work on.

Rows are copied as words (the widest integers that divide them), so their type does not matter, except where
rows are weighted and summed (`triton_one_sided_combine_kernels`).

    dispatch:  plan -> send -> signal      ...      wait -> receive -> count_pairs -> place_pairs
    combine:   return_rows or return_sums -> signal      ...      wait -> sum_rows or sum_partials

A kernel that waits never shares its grid with the stores that others wait for. `epoch` is the number of the last
exchange that this rank has received in full: kernels before `wait` work at epoch + 1, those after it at epoch.
Positions follow from prefix sums in token order, never from atomics, so the order of rows is always the same.

Legend: t token of the sender in this round, i row of a source in this round, n rank, w word of a row of W,
K experts per token, K2 the next power of two, BT and BW rows and words of one program.
"""

import triton.language as tl

from moe_runtime.triton_support import jit


@jit
def rows_at(address, offset, like):
    """A pointer to rows of elements like those of the pointer `like`; slabs begin on multiples of 64 bytes."""
    return tl.multiple_of((address + offset).to(tl.pointer_type(like.dtype.element_ty)), 16)


@jit(do_not_specialize=["begin", "num_tokens"])
def plan(
    slot_ptr,
    position_ptr,
    count_ptr,
    begin,
    num_tokens,
    SLOTS_PER_RANK: tl.constexpr,
    K: tl.constexpr,
    K2: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """position[n, t]: which row of the message to rank n token begin + t is, or -1; count[n]: rows of that message."""
    n = tl.program_id(0)
    k = tl.arange(0, K2)
    first_slot = n * SLOTS_PER_RANK
    rows = 0
    for start in range(0, num_tokens, BLOCK):
        t = start + tl.arange(0, BLOCK)
        token = (begin + t).to(tl.int64)
        here = (t < num_tokens)[:, None] & (k < K)[None, :]
        slot = tl.load(slot_ptr + token[:, None] * K + k[None, :], mask=here, other=-1)
        goes = tl.max(((slot >= first_slot) & (slot < first_slot + SLOTS_PER_RANK)).to(tl.int32), axis=1)
        position = rows + tl.cumsum(goes, axis=0) - goes
        tl.store(position_ptr + n * num_tokens + t, tl.where(goes > 0, position, -1), mask=t < num_tokens)
        rows += tl.sum(goes, axis=0)
    tl.store(count_ptr + n, rows)


@jit(do_not_specialize=["begin", "num_tokens", "me"])
def send(
    x_ptr,
    slot_ptr,
    weight_ptr,
    position_ptr,
    address_ptr,
    epoch_ptr,
    begin,
    num_tokens,
    me,
    W,
    N: tl.constexpr,
    SLOTS_PER_RANK: tl.constexpr,
    K: tl.constexpr,
    K2: tl.constexpr,
    RECORD: tl.constexpr,
    PARITY_BYTES: tl.constexpr,
    ROWS_AT: tl.constexpr,
    ROWS_BYTES: tl.constexpr,
    RECORDS_AT: tl.constexpr,
    RECORDS_BYTES: tl.constexpr,
    OUTBOX_AT: tl.constexpr,
    WITH_WEIGHTS: tl.constexpr,
    BT: tl.constexpr,
    BW: tl.constexpr,
):
    """Each token's row, read once, and its record go to the slab of every rank that wants it.

    A rank that can only be reached over a network has address 0: its message is laid out in this rank's outbox.
    """
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    w = tl.program_id(1) * BW + tl.arange(0, BW)
    k = tl.arange(0, K2)
    live = t < num_tokens
    token = (begin + t).to(tl.int64)
    half = ((tl.load(epoch_ptr) + 1) & 1) * PARITY_BYTES
    row = tl.load(x_ptr + token[:, None] * W + w[None, :], mask=live[:, None] & (w < W)[None, :])
    here = live[:, None] & (k < K)[None, :]
    slot = tl.load(slot_ptr + token[:, None] * K + k[None, :], mask=here, other=-1)
    for i in range(N):
        # The next rank first, so that not all store to rank 0 at once.
        n = (me + 1 + i) % N
        position = tl.load(position_ptr + n * num_tokens + t, mask=live, other=-1).to(tl.int64)
        goes = position >= 0
        address = tl.load(address_ptr + n)
        place = me.to(tl.int64)
        if OUTBOX_AT > 0 and address == 0:
            address = tl.load(address_ptr + me) + OUTBOX_AT
            place = n.to(tl.int64)
        else:
            address += half
        rows = rows_at(address, ROWS_AT + place * ROWS_BYTES, x_ptr)
        tl.store(rows + position[:, None] * W + w[None, :], row, mask=goes[:, None] & (w < W)[None, :])
        if tl.program_id(1) == 0:
            record = (address + RECORDS_AT + place * RECORDS_BYTES).to(tl.pointer_type(tl.int32))
            record += position * RECORD
            tl.store(record, t, mask=goes)
            local = slot - n * SLOTS_PER_RANK
            local = tl.where((local >= 0) & (local < SLOTS_PER_RANK), local, -1).to(tl.int32)
            wanted = goes[:, None] & (k < K)[None, :]
            tl.store(record[:, None] + 1 + k[None, :], local, mask=wanted)
            if WITH_WEIGHTS:
                weight = tl.load(weight_ptr + token[:, None] * K + k[None, :], mask=here, other=0.0)
                bits = weight.to(tl.int32, bitcast=True)
                tl.store(record[:, None] + 1 + K + k[None, :], bits, mask=wanted)


@jit(do_not_specialize=["me", "call"])
def signal(
    count_ptr,
    address_ptr,
    epoch_ptr,
    me,
    call,
    N: tl.constexpr,
    HEADERS_AT: tl.constexpr,
):
    """Publish the message to rank n: the header first, then the flag. Everything stored before is seen with the flag."""
    n = tl.program_id(0)
    epoch = tl.load(epoch_ptr) + 1
    address = tl.load(address_ptr + n)
    if address != 0:
        header = (address + HEADERS_AT).to(tl.pointer_type(tl.int64)) + ((epoch & 1) * N + me) * 2
        tl.store(header, tl.load(count_ptr + n).to(tl.int64))
        tl.store(header + 1, call)
        tl.debug_barrier()
        flag = address.to(tl.pointer_type(tl.int64)) + me
        tl.atomic_xchg(flag, epoch, sem="release", scope="sys")


@jit(do_not_specialize=["me", "call", "max_looks"])
def wait(
    address_ptr,
    epoch_ptr,
    problem_ptr,
    me,
    call,
    max_looks,
    N: tl.constexpr,
    N2: tl.constexpr,
    HEADERS_AT: tl.constexpr,
    LATE: tl.constexpr,
    OTHER_CALL: tl.constexpr,
):
    """Until every rank's flag has come to the next epoch, at most `max_looks` times; then that is the epoch.

    problem[n] becomes LATE or OTHER_CALL where rank n sent nothing or something else; its message then counts as empty.
    """
    n = tl.arange(0, N2)
    epoch = tl.load(epoch_ptr) + 1
    address = tl.load(address_ptr + me)
    flag = address.to(tl.pointer_type(tl.int64)) + n
    seen = tl.atomic_add(flag, tl.zeros((N2,), tl.int64), mask=n < N, sem="acquire", scope="sys")
    missing = tl.sum(((seen < epoch) & (n < N)).to(tl.int32), axis=0)
    looks = 1
    while (missing > 0) & (looks < max_looks):
        seen = tl.atomic_add(flag, tl.zeros((N2,), tl.int64), mask=n < N, sem="acquire", scope="sys")
        missing = tl.sum(((seen < epoch) & (n < N)).to(tl.int32), axis=0)
        looks += 1
    late = (seen < epoch) & (n < N)
    header = (address + HEADERS_AT).to(tl.pointer_type(tl.int64)) + ((epoch & 1) * N + n) * 2
    theirs = tl.load(header + 1, mask=n < N, other=0)
    other = (theirs != call) & (n < N) & (seen >= epoch)
    tl.store(problem_ptr + n, tl.where(late, LATE, OTHER_CALL), mask=late | other)
    # What lies in the slab belongs to an older exchange, maybe with other sizes.
    tl.store(header, tl.zeros((N2,), tl.int64), mask=late | other)
    tl.store(epoch_ptr, epoch)


@jit(do_not_specialize=["me", "first", "room", "rows_per_source"])
def receive(
    token_ptr,
    record_out_ptr,
    count_out_ptr,
    address_ptr,
    epoch_ptr,
    me,
    first,
    room,
    rows_per_source,
    W,
    N: tl.constexpr,
    R2: tl.constexpr,
    RECORD: tl.constexpr,
    PARITY_BYTES: tl.constexpr,
    HEADERS_AT: tl.constexpr,
    ROWS_AT: tl.constexpr,
    ROWS_BYTES: tl.constexpr,
    RECORDS_AT: tl.constexpr,
    RECORDS_BYTES: tl.constexpr,
    BT: tl.constexpr,
    BW: tl.constexpr,
):
    """Copy the messages of this round out of the slabs: row i of a source becomes its row first + i of `room` there.

    Records of rows that nobody sent are -1.
    """
    source = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BT + tl.arange(0, BT)
    w = tl.program_id(2) * BW + tl.arange(0, BW)
    r = tl.arange(0, R2)
    epoch = tl.load(epoch_ptr)
    address = tl.load(address_ptr + me)
    header = (address + HEADERS_AT).to(tl.pointer_type(tl.int64)) + ((epoch & 1) * N + source) * 2
    # Bounded, since after a peer was late it may say anything.
    count = tl.minimum(tl.maximum(tl.load(header), 0), room).to(tl.int32)
    address += (epoch & 1) * PARITY_BYTES
    rows = rows_at(address, ROWS_AT + source * ROWS_BYTES, token_ptr)
    to = source * rows_per_source + first + i
    live = (i < count)[:, None] & (w < W)[None, :]
    row = tl.load(rows + i[:, None].to(tl.int64) * W + w[None, :], mask=live)
    tl.store(token_ptr + to[:, None] * W + w[None, :], row, mask=live)
    if tl.program_id(2) == 0:
        records = (address + RECORDS_AT + source * RECORDS_BYTES).to(tl.pointer_type(tl.int32))
        wanted = (r < RECORD)[None, :]
        record = tl.load(
            records + i[:, None] * RECORD + r[None, :], mask=(i < count)[:, None] & wanted, other=-1
        )
        tl.store(
            record_out_ptr + to[:, None] * RECORD + r[None, :], record, mask=(i < room)[:, None] & wanted
        )
        if tl.program_id(1) == 0:
            tl.store(count_out_ptr + source, count)
