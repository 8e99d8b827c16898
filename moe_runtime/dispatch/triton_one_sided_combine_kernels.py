"""Kernels that send results back and sum them; see `triton_one_sided_kernels`.

Legend: i row of a source in this round, t token of the owner in this round, w word of a row, d element
of a row, n rank, K experts per token, K2 the next power of two, BT and BW rows and words or elements of one program.
"""

import triton.language as tl

from moe_runtime.dispatch.triton_one_sided_kernels import rows_at
from moe_runtime.triton_support import jit


@jit
def _returns_of(
    address_ptr, epoch_ptr, me, source, y_ptr, PARITY_BYTES: tl.constexpr, RETURNS_AT: tl.constexpr, RETURNS_BYTES: tl.constexpr,
    OUTBOX_AT: tl.constexpr,
):  # fmt: skip
    """Where results for rank `source` are stored: its own returns, or beyond a network the outbox."""
    address = tl.load(address_ptr + source)
    if OUTBOX_AT > 0 and address == 0:
        address = tl.load(address_ptr + me) + OUTBOX_AT + source * RETURNS_BYTES
    else:
        address += ((tl.load(epoch_ptr) + 1) & 1) * PARITY_BYTES
    return rows_at(address, RETURNS_AT, y_ptr)


@jit(do_not_specialize=["me", "first", "rows_per_source"])
def return_rows(
    y_ptr,
    record_ptr,
    expert_row_ptr,
    count_ptr,
    address_ptr,
    epoch_ptr,
    me,
    first,
    rows_per_source,
    W,
    K: tl.constexpr,
    RECORD: tl.constexpr,
    PARITY_BYTES: tl.constexpr,
    RETURNS_AT: tl.constexpr,
    RETURNS_BYTES: tl.constexpr,
    OUTBOX_AT: tl.constexpr,
    BT: tl.constexpr,
    BW: tl.constexpr,
):
    """Exact combine: each expert row goes to place (t, k) of its token's owner."""
    source = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BT + tl.arange(0, BT)
    w = tl.program_id(2) * BW + tl.arange(0, BW)
    live = i < tl.load(count_ptr + source)
    back = _returns_of(
        address_ptr, epoch_ptr, me, source, y_ptr, PARITY_BYTES, RETURNS_AT, RETURNS_BYTES, OUTBOX_AT
    )
    row = source * rows_per_source + first + i
    t = tl.load(record_ptr + row * RECORD, mask=live, other=0).to(tl.int64)
    for k in tl.static_range(K):
        has = tl.load(record_ptr + row * RECORD + 1 + k, mask=live, other=-1) >= 0
        expert_row = tl.load(expert_row_ptr + row * K + k, mask=has, other=0).to(tl.int64)
        moved = has[:, None] & (w < W)[None, :]
        y = tl.load(y_ptr + expert_row[:, None] * W + w[None, :], mask=moved)
        tl.store(back + (t * K + k)[:, None] * W + w[None, :], y, mask=moved)


@jit(do_not_specialize=["me", "first", "rows_per_source"])
def return_sums(
    y_ptr,
    record_ptr,
    expert_row_ptr,
    count_ptr,
    address_ptr,
    epoch_ptr,
    me,
    first,
    rows_per_source,
    W,
    K: tl.constexpr,
    RECORD: tl.constexpr,
    PARITY_BYTES: tl.constexpr,
    RETURNS_AT: tl.constexpr,
    RETURNS_BYTES: tl.constexpr,
    OUTBOX_AT: tl.constexpr,
    BT: tl.constexpr,
    BW: tl.constexpr,
):
    """Per-rank combine: the weighted sum of a token's rows here goes to place (t, first k of them) of its owner.

    W: elements of a row.
    """
    source = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BT + tl.arange(0, BT)
    d = tl.program_id(2) * BW + tl.arange(0, BW)
    live = i < tl.load(count_ptr + source)
    back = _returns_of(
        address_ptr, epoch_ptr, me, source, y_ptr, PARITY_BYTES, RETURNS_AT, RETURNS_BYTES, OUTBOX_AT
    )
    row = source * rows_per_source + first + i
    t = tl.load(record_ptr + row * RECORD, mask=live, other=0).to(tl.int64)
    total = tl.zeros((BT, BW), tl.float32)
    first_k = tl.full((BT,), K, tl.int32)
    for k in tl.static_range(K):
        has = tl.load(record_ptr + row * RECORD + 1 + k, mask=live, other=-1) >= 0
        weight = tl.load(record_ptr + row * RECORD + 1 + K + k, mask=live, other=0).to(
            tl.float32, bitcast=True
        )
        expert_row = tl.load(expert_row_ptr + row * K + k, mask=has, other=0).to(tl.int64)
        y = tl.load(
            y_ptr + expert_row[:, None] * W + d[None, :], mask=has[:, None] & (d < W)[None, :], other=0.0
        )
        total = tl.where(has[:, None], total + weight[:, None] * y.to(tl.float32), total)
        first_k = tl.where(has & (first_k == K), k, first_k)
    moved = (live & (first_k < K))[:, None] & (d < W)[None, :]
    tl.store(back + (t * K + first_k)[:, None] * W + d[None, :], total.to(y_ptr.dtype.element_ty), mask=moved)


@jit(do_not_specialize=["me", "begin", "num_tokens"])
def sum_rows(
    out_ptr,
    slot_ptr,
    weight_ptr,
    address_ptr,
    epoch_ptr,
    me,
    begin,
    num_tokens,
    W,
    K: tl.constexpr,
    PARITY_BYTES: tl.constexpr,
    RETURNS_AT: tl.constexpr,
    BT: tl.constexpr,
    BW: tl.constexpr,
):
    """out[begin + t] = sum over k of weight * the row at (t, k), in float32 and in k order. W: elements of a row."""
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    d = tl.program_id(1) * BW + tl.arange(0, BW)
    live = t < num_tokens
    token = (begin + t).to(tl.int64)
    address = tl.load(address_ptr + me) + (tl.load(epoch_ptr) & 1) * PARITY_BYTES
    back = rows_at(address, RETURNS_AT, out_ptr)
    total = tl.zeros((BT, BW), tl.float32)
    for k in tl.static_range(K):
        has = tl.load(slot_ptr + token * K + k, mask=live, other=-1) >= 0
        weight = tl.load(weight_ptr + token * K + k, mask=live, other=0.0)
        at = (t * K + k).to(tl.int64)
        y = tl.load(back + at[:, None] * W + d[None, :], mask=has[:, None] & (d < W)[None, :], other=0.0)
        total = tl.where(has[:, None], total + weight[:, None] * y.to(tl.float32), total)
    written = live[:, None] & (d < W)[None, :]
    tl.store(out_ptr + token[:, None] * W + d[None, :], total.to(out_ptr.dtype.element_ty), mask=written)


@jit(do_not_specialize=["me", "begin", "num_tokens"])
def sum_partials(
    out_ptr,
    slot_ptr,
    address_ptr,
    epoch_ptr,
    me,
    begin,
    num_tokens,
    W,
    N: tl.constexpr,
    SLOTS_PER_RANK: tl.constexpr,
    K: tl.constexpr,
    K2: tl.constexpr,
    PARITY_BYTES: tl.constexpr,
    RETURNS_AT: tl.constexpr,
    BT: tl.constexpr,
    BW: tl.constexpr,
):
    """out[begin + t] = sum over ranks of their partial sums, in float32 and in rank order. W: elements of a row."""
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    d = tl.program_id(1) * BW + tl.arange(0, BW)
    k = tl.arange(0, K2)
    live = t < num_tokens
    token = (begin + t).to(tl.int64)
    address = tl.load(address_ptr + me) + (tl.load(epoch_ptr) & 1) * PARITY_BYTES
    back = rows_at(address, RETURNS_AT, out_ptr)
    here = live[:, None] & (k < K)[None, :]
    slot = tl.load(slot_ptr + token[:, None] * K + k[None, :], mask=here, other=-1)
    total = tl.zeros((BT, BW), tl.float32)
    for n in range(N):
        there = (slot >= n * SLOTS_PER_RANK) & (slot < (n + 1) * SLOTS_PER_RANK)
        first_k = tl.min(tl.where(there, k[None, :], K), axis=1)
        has = first_k < K
        at = (t * K + first_k).to(tl.int64)
        y = tl.load(back + at[:, None] * W + d[None, :], mask=has[:, None] & (d < W)[None, :], other=0.0)
        total = tl.where(has[:, None], total + y.to(tl.float32), total)
    written = live[:, None] & (d < W)[None, :]
    tl.store(out_ptr + token[:, None] * W + d[None, :], total.to(out_ptr.dtype.element_ty), mask=written)
