"""Grouped GEMM of experts in Triton: one kernel for both products, with its block map and split-K reduction.

Legend: x rows times the weights of their slot, [slot, part, N, K]; parts are gate and up, or one alone. A tile is BM expert rows of
one slot by BN columns of every part. Suffix-free names of tiles: x (BM, BK), w (BN, BK), accumulators (BM, BN), or
(BN, BM) where SWAP_AB puts the weights on the M side of the dot, whose 64 or 128 rows a few expert rows would not fill.
"""

# Shapes of tiles are compile-time constants here, and pointers have no static type: see pyproject.toml.
import triton.language as tl

from moe_runtime.triton_support import jit
from moe_runtime.triton_support.activation_kernels import activate
from moe_runtime.triton_support.fp8_kernels import decode_e4m3, scale_of, to_e4m3

GROUP = tl.constexpr(128)

# Rows of the block map, int32 [5, capacity]; a column describes one row tile.
MAP_SLOT = tl.constexpr(0)
MAP_FIRST_ROW = tl.constexpr(1)
MAP_END_ROW = tl.constexpr(2)  # of the slot, so the tile may have fewer than BM rows
MAP_GROUP_FIRST = tl.constexpr(3)  # first tile of those that share weight tiles in time
MAP_GROUP_SIZE = tl.constexpr(4)


@jit
def build_block_map(
    num_rows_ptr, map_ptr, num_tiles_ptr, num_slots, capacity,
    BM: tl.constexpr, GROUP_M: tl.constexpr, SLOTS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """From rows per slot to row tiles, and how many there are. Each program makes TILES of them; SLOTS >= num_slots."""
    slots = tl.arange(0, SLOTS)
    num_rows = tl.load(num_rows_ptr + slots, mask=slots < num_slots, other=0).to(tl.int32)
    num_tiles = (num_rows + BM - 1) // BM
    row_ends, tile_ends = tl.cumsum(num_rows, 0), tl.cumsum(num_tiles, 0)
    total = tl.sum(num_tiles, 0)
    tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    slot = tl.sum((tile_ends[None, :] <= tile[:, None]).to(tl.int32), 1)
    mine = slots[None, :] == slot[:, None]
    row_end = tl.sum(tl.where(mine, row_ends[None, :], 0), 1)
    row_begin = row_end - tl.sum(tl.where(mine, num_rows[None, :], 0), 1)
    tile_end = tl.sum(tl.where(mine, tile_ends[None, :], 0), 1)
    tile_begin = tile_end - tl.sum(tl.where(mine, num_tiles[None, :], 0), 1)
    group_first = tile_begin + (tile - tile_begin) // GROUP_M * GROUP_M
    to = map_ptr + tile
    ok = tile < total
    tl.store(to + MAP_SLOT * capacity, slot, mask=ok)
    tl.store(to + MAP_FIRST_ROW * capacity, row_begin + (tile - tile_begin) * BM, mask=ok)
    tl.store(to + MAP_END_ROW * capacity, row_end, mask=ok)
    tl.store(to + MAP_GROUP_FIRST * capacity, group_first, mask=ok)
    tl.store(to + MAP_GROUP_SIZE * capacity, tl.minimum(tile_end - group_first, GROUP_M), mask=ok)
    if tl.program_id(0) == 0:
        tl.store(num_tiles_ptr, total)


@jit
def grouped_gemm(
    x, x_scale_ptr, w, w_scale_ptr, bias_ptr, out_ptr, out_scale_ptr, row_index_ptr, map_ptr, num_tiles_ptr,
    N, K, x_stride, x_scale_stride, capacity, num_rows,
    SCHEME: tl.constexpr, ACT: tl.constexpr, LIMIT: tl.constexpr, PARTS: tl.constexpr, QUANTIZE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SWAP_AB: tl.constexpr, SPLIT_K: tl.constexpr,
    X_TMA: tl.constexpr, X_GATHER: tl.constexpr, W_TMA: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """out[row] = act(x[row_index[row]] @ w[slot].T + bias), FP8 with scales if QUANTIZE; or, split, partial sums in float32.

    Persistent: any number of programs share the tiles. Order: all column tiles of a group of row tiles, the group's row
    tiles innermost, so that programs that run together read the same weights. x, w: pointers, or descriptors if *_TMA, of single rows if X_GATHER.
    """
    tiles_n = tl.cdiv(N, BN)
    steps = tl.cdiv(tl.cdiv(K, BK), SPLIT_K)
    for i in range(tl.program_id(0), tl.load(num_tiles_ptr) * tiles_n * SPLIT_K, tl.num_programs(0)):
        unit, split = i // SPLIT_K, i % SPLIT_K
        group_first = tl.load(map_ptr + MAP_GROUP_FIRST * capacity + unit // tiles_n)
        group_size = tl.load(map_ptr + MAP_GROUP_SIZE * capacity + unit // tiles_n)
        within = unit - group_first * tiles_n
        tile = map_ptr + group_first + within % group_size
        col = within // group_size * BN
        slot = tl.load(tile + MAP_SLOT * capacity)
        first_row = tl.load(tile + MAP_FIRST_ROW * capacity)
        end_row = tl.load(tile + MAP_END_ROW * capacity)
        row = first_row + tl.arange(0, BM)
        source = _source_rows(row_index_ptr, row, end_row)
        gate, up = _products(
            x, x_scale_ptr, w, w_scale_ptr, source, first_row, slot, col, split * steps * BK, tl.minimum((split + 1) * steps * BK, K),
            N, K, x_stride, x_scale_stride, SCHEME, PARTS, BM, BN, BK, SWAP_AB, X_TMA, X_GATHER, W_TMA, EVEN_K,
        )  # fmt: skip
        if SWAP_AB:
            gate, up = gate.T, up.T
        if SPLIT_K == 1:
            _finish(
                gate, up, x_scale_ptr, w_scale_ptr, bias_ptr, out_ptr, out_scale_ptr, row, end_row, source, slot, col, N,
                x_scale_stride, SCHEME, ACT, LIMIT, PARTS, QUANTIZE, BN,
            )  # fmt: skip
        else:
            column = col + tl.arange(0, BN)
            ok = (row < end_row)[:, None] & (column < N)[None, :]
            tl.store(_partial_at(out_ptr, split * PARTS, row, column, num_rows, N), gate, mask=ok)
            if PARTS == 2:
                tl.store(_partial_at(out_ptr, split * PARTS + 1, row, column, num_rows, N), up, mask=ok)


@jit
def reduce_splits(
    partial_ptr, x_scale_ptr, w_scale_ptr, bias_ptr, out_ptr, out_scale_ptr, row_index_ptr, map_ptr, num_tiles_ptr,
    N, x_scale_stride, capacity, num_rows,
    SCHEME: tl.constexpr, ACT: tl.constexpr, LIMIT: tl.constexpr, PARTS: tl.constexpr, QUANTIZE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, SPLIT_K: tl.constexpr,
):  # fmt: skip
    """What grouped_gemm leaves out when it splits K: the sum over splits, in their order, and everything after it."""
    if tl.program_id(0) < tl.load(num_tiles_ptr):
        tile = map_ptr + tl.program_id(0)
        slot = tl.load(tile + MAP_SLOT * capacity)
        end_row = tl.load(tile + MAP_END_ROW * capacity)
        row = tl.load(tile + MAP_FIRST_ROW * capacity) + tl.arange(0, BM)
        col = tl.program_id(1) * BN
        column = col + tl.arange(0, BN)
        ok = (row < end_row)[:, None] & (column < N)[None, :]
        gate = tl.zeros((BM, BN), tl.float32)
        up = tl.zeros((BM, BN), tl.float32)
        for split in range(SPLIT_K):
            at = _partial_at(partial_ptr, split * PARTS, row, column, num_rows, N)
            gate += tl.load(at, mask=ok, other=0.0)
            if PARTS == 2:
                at = _partial_at(partial_ptr, split * PARTS + 1, row, column, num_rows, N)
                up += tl.load(at, mask=ok, other=0.0)
        _finish(
            gate, up, x_scale_ptr, w_scale_ptr, bias_ptr, out_ptr, out_scale_ptr, row, end_row,
            _source_rows(row_index_ptr, row, end_row), slot, col, N, x_scale_stride, SCHEME, ACT, LIMIT, PARTS, QUANTIZE, BN,
        )  # fmt: skip


@jit
def _source_rows(row_index_ptr, row, end_row):
    """Rows of x for expert rows, those beyond the slot's end replaced by one that may be read."""
    if row_index_ptr is None:
        source = tl.minimum(row, end_row - 1)
    else:
        source = tl.load(row_index_ptr + row, mask=row < end_row, other=0)
    return source.to(tl.int64)


@jit
def _products(
    x, x_scale_ptr, w, w_scale_ptr, source, first_row, slot, col, k_begin, k_end, N, K, x_stride, x_scale_stride,
    SCHEME: tl.constexpr, PARTS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SWAP_AB: tl.constexpr,
    X_TMA: tl.constexpr, X_GATHER: tl.constexpr, W_TMA: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """Sums over k of x * w for every part of one tile (up is 0 for one part), block scales applied."""
    SHAPE: tl.constexpr = (BN, BM) if SWAP_AB else (BM, BN)
    gate = tl.zeros(SHAPE, tl.float32)
    up = tl.zeros(SHAPE, tl.float32)
    # Columns beyond N read the first ones instead; nothing of them is stored.
    column = (col + tl.arange(0, BN)) % N
    for k in range(k_begin, k_end, BK):
        x_tile = _tile(x, source, first_row, k, K, x_stride, BK, X_TMA, X_GATHER, EVEN_K)
        for part in tl.static_range(PARTS):
            w_first = (slot * PARTS + part) * N
            w_tile = _tile(w, w_first.to(tl.int64) + column, w_first + col, k, K, K, BK, W_TMA, False, EVEN_K)
            if SCHEME == "fp8_block":
                at = ((slot * PARTS + part) * tl.cdiv(N, GROUP) + col // GROUP) * tl.cdiv(K, GROUP)
                scale = tl.load(w_scale_ptr + at + k // GROUP)
                if x_scale_ptr is not None:
                    scale = scale * tl.load(x_scale_ptr + source * x_scale_stride + k // GROUP)
                    scale = scale[None, :] if SWAP_AB else scale[:, None]
                product = _dot(x_tile, w_tile, tl.zeros(SHAPE, tl.float32), BK, SWAP_AB) * scale
                if part == 0:
                    gate += product
                else:
                    up += product
            elif part == 0:
                gate = _dot(x_tile, w_tile, gate, BK, SWAP_AB)
            else:
                up = _dot(x_tile, w_tile, up, BK, SWAP_AB)
    return gate, up


@jit
def _tile(
    source, rows, first_row, k, K, stride, BK: tl.constexpr, TMA: tl.constexpr, GATHER: tl.constexpr, EVEN_K: tl.constexpr
):  # fmt: skip
    """(rows, BK) values from k on, 0 beyond K. TMA: consecutive rows from first_row on, or `rows` with GATHER."""
    if GATHER:
        tile = source.gather(rows.to(tl.int32), k)
    elif TMA:
        tile = source.load([first_row, k])
    else:
        at = k + tl.arange(0, BK)
        from_ptr = source + rows[:, None] * stride + at[None, :]
        if EVEN_K:
            tile = tl.load(from_ptr)
        else:
            tile = tl.load(from_ptr, mask=(at < K)[None, :], other=0.0)
    return tile


@jit
def _dot(x, w, total, BK: tl.constexpr, SWAP_AB: tl.constexpr):
    """total + x @ w.T, or its transpose. Weights narrower than x are widened first, exactly."""
    if w.dtype == tl.uint8:
        w = decode_e4m3(w, x.dtype)
    elif w.dtype != x.dtype:
        w = w.to(x.dtype)
    # FP8 tensor cores of sm_90 add with few bits; sums leave them every 128 values.
    FEW: tl.constexpr = (128 if BK > 128 else BK) if x.dtype.is_fp8() else 0
    if SWAP_AB:
        total = tl.dot(w, x.T, total, input_precision="ieee", max_num_imprecise_acc=FEW)
    else:
        total = tl.dot(x, w.T, total, input_precision="ieee", max_num_imprecise_acc=FEW)
    return total


@jit
def _finish(
    gate, up, x_scale_ptr, w_scale_ptr, bias_ptr, out_ptr, out_scale_ptr, row, end_row, source, slot, col, N, x_scale_stride,
    SCHEME: tl.constexpr, ACT: tl.constexpr, LIMIT: tl.constexpr, PARTS: tl.constexpr, QUANTIZE: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Row and column scales, bias, activation, and the store of the rows before end_row."""
    column = col + tl.arange(0, BN)
    inside = column < N
    weight_row = slot * PARTS * N + column
    if x_scale_ptr is not None and SCHEME != "fp8_block":
        row_scale = tl.load(x_scale_ptr + source * x_scale_stride)[:, None]
        gate, up = gate * row_scale, up * row_scale
    if SCHEME == "fp8_channel":
        gate = gate * tl.load(w_scale_ptr + weight_row, mask=inside, other=0.0)[None, :]
        if PARTS == 2:
            up = up * tl.load(w_scale_ptr + weight_row + N, mask=inside, other=0.0)[None, :]
    elif SCHEME == "fp8_tensor":
        gate = gate * tl.load(w_scale_ptr + slot * PARTS)
        if PARTS == 2:
            up = up * tl.load(w_scale_ptr + slot * PARTS + 1)
    if bias_ptr is not None:
        gate += tl.load(bias_ptr + weight_row, mask=inside, other=0.0).to(tl.float32)[None, :]
        if PARTS == 2:
            up += tl.load(bias_ptr + weight_row + N, mask=inside, other=0.0).to(tl.float32)[None, :]
    h = _activate(gate, up, ACT, LIMIT)
    row = row.to(tl.int64)
    at = row[:, None] * N + column[None, :]
    if QUANTIZE:
        tl.static_assert(BN == GROUP)
        scale = scale_of(tl.max(tl.abs(tl.where(inside[None, :], h, 0.0)), 1))
        tl.store(out_scale_ptr + row * tl.cdiv(N, GROUP) + col // GROUP, scale, mask=row < end_row)
        h = to_e4m3(h / scale[:, None], out_ptr.dtype.element_ty)
    tl.store(out_ptr + at, h.to(out_ptr.dtype.element_ty), mask=(row < end_row)[:, None] & inside[None, :])


@jit
def _activate(gate, up, ACT: tl.constexpr, LIMIT: tl.constexpr):
    """layers.activation.expert_activation; comparisons rather than min and max, which would hide a NaN."""
    if LIMIT is not None and ACT != "none" and ACT != "relu2":
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
    if ACT == "none":
        h = gate
    elif ACT == "relu2":
        h = tl.where(gate < 0, 0.0, gate * gate)
    elif ACT == "swiglu_oai":
        h = gate * tl.sigmoid(1.702 * gate) * (up + 1.0)
    else:
        h = activate(gate, ACT) * up
    return h


@jit
def _partial_at(partial_ptr, plane, row, column, num_rows, N):
    """Pointers into float32 partial sums [split * parts, num_rows, N]."""
    return partial_ptr + (row.to(tl.int64) + plane * num_rows)[:, None] * N + column[None, :]
