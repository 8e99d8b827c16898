"""The kernels of TritonPagedAttention. What is computed by which, and how work is split, is told in triton_paged.py.

A program computes for all query heads of one KV head, so that each key and value is read once for them.
Softmax runs in base 2: scores are multiplied by log2(e) beforehand.

Legend: T tokens, H query heads, G KV heads, R = H / G query heads per KV head, D head size, DP its next power of two,
BM query rows (query tokens times R) and BN keys of a tile, BT tokens of a tile, B sequences.
"""

import triton.language as tl

from moe_runtime.triton_support import jit

LOG2E = tl.constexpr(1.4426950408889634)
FP8_MAX = tl.constexpr(448.0)


@jit
def _store(ptr, x, scale, live):
    """Store float32 `x` as the pointer's type; FP8 as the rounded model dtype divided by the scale, cut to the range."""
    if ptr.dtype.element_ty == tl.float8e4nv:
        x = tl.div_rn(x, scale)
        # Not minimum and maximum, which would turn NaN into a number.
        x = tl.where(x > FP8_MAX, FP8_MAX, tl.where(x < -FP8_MAX, -FP8_MAX, x))
    tl.store(ptr, x.to(ptr.dtype.element_ty), mask=live)


@jit
def _copy(src_ptr, dst_ptr, scale, live, FIRST: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    """Move dimensions FIRST..D-1 of each row. Pointers are of the rows' starts, (BT, 1)."""
    at = FIRST + tl.arange(0, DP)[None, :]
    inside = live & (at < D)
    x = tl.load(src_ptr + at, mask=inside, other=0.0)
    _store(dst_ptr + at, x.to(tl.float32), scale, inside)


@jit
def _place(
    src_ptr, dst_ptr, cos, sin, scale, live,
    D: tl.constexpr, PAIRS: tl.constexpr, PP: tl.constexpr, RESTP: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Rotate the first 2 * PAIRS dimensions of each row, in float32, and move the rest. cos, sin: (BT, PP)."""
    pair = tl.arange(0, PP)[None, :]
    inside = live & (pair < PAIRS)
    if INTERLEAVED:
        one, two = 2 * pair, 2 * pair + 1
    else:
        one, two = pair, pair + PAIRS
    dtype: tl.constexpr = src_ptr.dtype.element_ty
    first = tl.load(src_ptr + one, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(src_ptr + two, mask=inside, other=0.0).to(tl.float32)
    _store(dst_ptr + one, (first * cos - second * sin).to(dtype).to(tl.float32), scale, inside)
    _store(dst_ptr + two, (second * cos + first * sin).to(dtype).to(tl.float32), scale, inside)
    if 2 * PAIRS < D:
        _copy(src_ptr, dst_ptr, scale, live, 2 * PAIRS, D, RESTP)


@jit(do_not_specialize=["T"])
def rotate_and_store(
    q_ptr, k_ptr, v_ptr, cos_ptr, sin_ptr, slot_ptr, q_out_ptr, k_cache_ptr, v_cache_ptr,
    T, q_stride_t, q_stride_h, k_stride_t, k_stride_h, v_stride_t, v_stride_h, key_scale, value_scale,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr,
    BT: tl.constexpr, PP: tl.constexpr, RESTP: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """Grid (ceil(T / BT), H + 2 G): rotated queries to q_out (T, H, D), rotated keys and plain values to their slots.

    A slot below 0 stores nothing. PP and RESTP: next powers of two of PAIRS and of the dimensions that do not turn.
    """
    row = tl.program_id(0) * BT + tl.arange(0, BT)
    head = tl.program_id(1)
    live = row < T
    row = row.to(tl.int64)
    slot = tl.load(slot_ptr + row, mask=live, other=-1)
    if head < H + G:
        pair = tl.arange(0, PP)[None, :]
        turns = live[:, None] & (pair < PAIRS)
        angle = row[:, None] * PAIRS + pair
        cos = tl.load(cos_ptr + angle, mask=turns, other=0.0).to(tl.float32)
        sin = tl.load(sin_ptr + angle, mask=turns, other=0.0).to(tl.float32)
        if head < H:
            _place(
                q_ptr + row[:, None] * q_stride_t + head * q_stride_h, q_out_ptr + (row[:, None] * H + head) * D,
                cos, sin, 1.0, live[:, None], D, PAIRS, PP, RESTP, INTERLEAVED,
            )  # fmt: skip
        else:
            _place(
                k_ptr + row[:, None] * k_stride_t + (head - H) * k_stride_h,
                k_cache_ptr + (slot[:, None] * G + (head - H)) * D,
                cos, sin, key_scale, (live & (slot >= 0))[:, None], D, PAIRS, PP, RESTP, INTERLEAVED,
            )  # fmt: skip
    else:
        _copy(
            v_ptr + row[:, None] * v_stride_t + (head - H - G) * v_stride_h,
            v_cache_ptr + (slot[:, None] * G + (head - H - G)) * D,
            value_scale, (live & (slot >= 0))[:, None], 0, D, DP,
        )  # fmt: skip


@jit
def _scores(q, k, scale, SOFT_CAP: tl.constexpr):
    """Scaled and capped scores of (BM, DP) queries and (BN, DP) keys, in base 2."""
    s = tl.dot(q, tl.trans(k), input_precision="ieee")
    if SOFT_CAP > 0:
        # tanh(x) = 1 - 2 / (e^2x + 1); the interpreter has no tanh.
        doubled = tl.exp2(s * (2 * LOG2E * scale / SOFT_CAP))
        return SOFT_CAP * LOG2E * (1 - 2 / (doubled + 1))
    return s * (scale * LOG2E)


@jit
def _attend(
    q, acc, largest, total, k_ptr, v_ptr, table_ptr, begin, end, oldest, length, position, scale,
    G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BLOCK_SIZE: tl.constexpr, BN: tl.constexpr,
    WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add keys begin..end-1 (begin a multiple of BN) to the running softmax of a tile of query rows.

    acc (BM, DP): sum of exp2(score - largest) * value; total (BM,): sum of the weights; position (BM,) of the queries.
    Keys before `oldest` or from `length` on are not read: they may never have been written. Tiles end at multiples of
    BN whatever is asked for, and a tile of which a row sees nothing leaves the row's bits as they were, so a row's
    result does not depend on where begin and end are. MASKED False promises that every row sees every key.
    """
    dim = tl.arange(0, DP)[None, :]
    for start in range(begin, end, BN):
        key = start + tl.arange(0, BN)
        known = (key >= oldest) & (key < length)
        block = tl.load(table_ptr + key // BLOCK_SIZE, mask=known, other=0).to(tl.int64)
        at = ((block * BLOCK_SIZE + key % BLOCK_SIZE) * (G * D))[:, None] + dim
        inside = known[:, None] & (dim < D)
        k = tl.load(k_ptr + at, mask=inside, other=0.0).to(q.dtype)
        s = _scores(q, k, scale, SOFT_CAP)
        if MASKED:
            sees = known[None, :] & (key[None, :] <= position[:, None])
            if WINDOW > 0:
                sees = sees & (key[None, :] > position[:, None] - WINDOW)
            s = tl.where(sees, s, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(s, 1))
        # A row that has seen nothing yet: -inf minus -inf would be NaN.
        base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weight = tl.exp2(s - base[:, None])
        shrink = tl.exp2(largest - base)
        total = total * shrink + tl.sum(weight, 1)
        v = tl.load(v_ptr + at, mask=inside, other=0.0).to(q.dtype)
        acc = tl.dot(weight.to(q.dtype), v, acc * shrink[:, None], input_precision="ieee")
        largest = new_largest
    return acc, largest, total


@jit(do_not_specialize=["table_stride"])
def extend(
    q_ptr, k_ptr, v_ptr, out_ptr, work_ptr, table_ptr, query_start_ptr, length_ptr, table_stride, scale, value_scale,
    R: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, G). A tile is BM // R consecutive new tokens of a sequence: work (tiles, 2) has sequence and first token."""
    sequence = tl.load(work_ptr + 2 * tl.program_id(0))
    first = tl.load(work_ptr + 2 * tl.program_id(0) + 1)
    group = tl.program_id(1)
    query_start = tl.load(query_start_ptr + sequence)
    num_new = tl.load(query_start_ptr + sequence + 1) - query_start
    length = tl.load(length_ptr + sequence)

    PER_TILE: tl.constexpr = BM // R
    m = tl.arange(0, BM)
    token = first + m // R
    live = (m < PER_TILE * R) & (token < num_new)
    dim = tl.arange(0, DP)[None, :]
    at = ((query_start + token).to(tl.int64) * (G * R) + group * R + m % R)[:, None] * D + dim
    inside = live[:, None] & (dim < D)
    q = tl.load(q_ptr + at, mask=inside, other=0.0)

    position = length - num_new + token
    first_position = length - num_new + first
    end = tl.minimum(first_position + PER_TILE, length)
    table_ptr += sequence.to(tl.int64) * table_stride
    k_ptr += group * D
    v_ptr += group * D
    acc = tl.zeros((BM, DP), tl.float32)
    largest = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    if WINDOW > 0:
        oldest = tl.maximum(first_position + 1 - WINDOW, 0)
        begin = oldest // BN * BN
    else:
        oldest = 0
        # Whole tiles that even the first query sees need no mask.
        begin = (first_position + 1) // BN * BN
        acc, largest, total = _attend(
            q, acc, largest, total, k_ptr, v_ptr, table_ptr, 0, begin, 0, length, position, scale,
            G, D, DP, BLOCK_SIZE, BN, WINDOW, SOFT_CAP, MASKED=False,
        )  # fmt: skip
    acc, largest, total = _attend(
        q, acc, largest, total, k_ptr, v_ptr, table_ptr, begin, end, oldest, length, position, scale,
        G, D, DP, BLOCK_SIZE, BN, WINDOW, SOFT_CAP, MASKED=True,
    )  # fmt: skip
    # Rows past the last new token may have seen nothing.
    out = acc * (value_scale / tl.where(live, total, 1.0))[:, None]
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=inside)


@jit
def _first_split(length, WINDOW: tl.constexpr, SPLIT: tl.constexpr):
    """The split with the oldest key that the last token of a sequence sees."""
    oldest = 0
    if WINDOW > 0:
        oldest = tl.maximum(length - WINDOW, 0)
    return oldest, oldest // SPLIT


@jit(do_not_specialize=["table_stride", "num_splits"])
def decode(
    q_ptr, k_ptr, v_ptr, part_ptr, stats_ptr, table_ptr, query_start_ptr, length_ptr, table_stride, num_splits, scale,
    R: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    RP: tl.constexpr, BN: tl.constexpr, SPLIT: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr,
):  # fmt: skip
    """Grid (num_splits, G, B): one new token of a sequence over keys s * SPLIT..(s + 1) * SPLIT - 1.

    Writes the unnormalised sum to part (B, H, num_splits, D) and (largest, total) to stats (B, H, num_splits, 2), at
    the split's place after the first one with a visible key. Sequences with another number of new tokens are left alone.
    """
    sequence = tl.program_id(2)
    group = tl.program_id(1)
    query_start = tl.load(query_start_ptr + sequence)
    if tl.load(query_start_ptr + sequence + 1) - query_start != 1:
        return
    length = tl.load(length_ptr + sequence)
    oldest, first_split = _first_split(length, WINDOW, SPLIT)
    begin = (first_split + tl.program_id(0)) * SPLIT
    if begin >= length:
        return
    end = tl.minimum(begin + SPLIT, length)
    begin = tl.maximum(begin, oldest // BN * BN)

    r = tl.arange(0, RP)
    head = group * R + r
    dim = tl.arange(0, DP)[None, :]
    inside = (r < R)[:, None] & (dim < D)
    q = tl.load(
        q_ptr + (query_start.to(tl.int64) * (G * R) + head)[:, None] * D + dim, mask=inside, other=0.0
    )
    acc, largest, total = _attend(
        q, tl.zeros((RP, DP), tl.float32), tl.full((RP,), float("-inf"), tl.float32), tl.zeros((RP,), tl.float32),
        k_ptr + group * D, v_ptr + group * D, table_ptr + sequence.to(tl.int64) * table_stride,
        begin, end, oldest, length, tl.zeros((RP,), tl.int32) + (length - 1), scale,
        G, D, DP, BLOCK_SIZE, BN, WINDOW, SOFT_CAP, MASKED=True,
    )  # fmt: skip
    place = (sequence.to(tl.int64) * (G * R) + head) * num_splits + tl.program_id(0)
    tl.store(part_ptr + place[:, None] * D + dim, acc, mask=inside)
    tl.store(stats_ptr + 2 * place, largest, mask=r < R)
    tl.store(stats_ptr + 2 * place + 1, total, mask=r < R)


@jit(do_not_specialize=["num_splits"])
def merge_splits(
    part_ptr, stats_ptr, out_ptr, query_start_ptr, length_ptr, num_splits, value_scale,
    D: tl.constexpr, DP: tl.constexpr, SPLIT: tl.constexpr, WINDOW: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """Grid (H, B): the softmax over all splits of a sequence's one new token, BS splits at a time.

    Only splits that the sequence has are read, in an order that depends on nothing else.
    """
    head, sequence = tl.program_id(0), tl.program_id(1)
    num_heads = tl.num_programs(0)
    query_start = tl.load(query_start_ptr + sequence)
    if tl.load(query_start_ptr + sequence + 1) - query_start != 1:
        return
    length = tl.load(length_ptr + sequence)
    _, first_split = _first_split(length, WINDOW, SPLIT)
    own_splits = tl.cdiv(length, SPLIT) - first_split
    base = (sequence.to(tl.int64) * num_heads + head) * num_splits
    dim = tl.arange(0, DP)
    acc = tl.zeros((DP,), tl.float32)
    largest = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    for start in range(0, own_splits, BS):
        split = start + tl.arange(0, BS)
        known = split < own_splits
        maxima = tl.load(stats_ptr + 2 * (base + split), mask=known, other=float("-inf"))
        totals = tl.load(stats_ptr + 2 * (base + split) + 1, mask=known, other=0.0)
        at = (base + split)[:, None] * D + dim[None, :]
        parts = tl.load(part_ptr + at, mask=known[:, None] & (dim < D)[None, :], other=0.0)
        new_largest = tl.maximum(largest, tl.max(maxima, 0))
        weight = tl.exp2(maxima - new_largest)
        shrink = tl.exp2(largest - new_largest)
        total = total * shrink + tl.sum(totals * weight, 0)
        acc = acc * shrink + tl.sum(parts * weight[:, None], 0)
        largest = new_largest
    out = acc * (value_scale / total)
    at = (query_start.to(tl.int64) * num_heads + head) * D + dim
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=dim < D)
