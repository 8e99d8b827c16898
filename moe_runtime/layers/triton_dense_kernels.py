"""The dense product x W^T + b, whose rows do not depend on one another.

Legend: M rows, N outputs, K inputs; a program makes a tile of BM by BN, BK inputs at a time.
"""

import triton.language as tl

from moe_runtime.triton_support import jit

ROWS_TOGETHER = tl.constexpr(8)


@jit(do_not_specialize=["M"])
def linear(
    x_ptr, w_ptr, bias_ptr, out_ptr, M, N, K, x_stride,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """Grid (ceil(M / BM) * ceil(N / BN)). w: (N, K) and out: (M, N), contiguous. Sums are float32, over K in order, unsplit.

    Order: ROWS_TOGETHER row tiles innermost, so that programs that run together read the same weights.
    """
    tiles_m, tiles_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    first_m = tl.program_id(0) // (ROWS_TOGETHER * tiles_n) * ROWS_TOGETHER
    together = tl.minimum(tiles_m - first_m, ROWS_TOGETHER)
    within = tl.program_id(0) % (ROWS_TOGETHER * tiles_n)
    row = (first_m + within % together) * BM + tl.arange(0, BM)
    column = within // together * BN + tl.arange(0, BN)
    # Rows and columns beyond the last read ones that are there; nothing of them is stored.
    x_row = x_ptr + (row % M).to(tl.int64)[:, None] * x_stride
    w_row = w_ptr + (column % N).to(tl.int64)[:, None] * K
    total = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        at = k + tl.arange(0, BK)[None, :]
        if EVEN_K:
            x, w = tl.load(x_row + at), tl.load(w_row + at)
        else:
            x, w = tl.load(x_row + at, mask=at < K, other=0.0), tl.load(w_row + at, mask=at < K, other=0.0)
        total = tl.dot(x, w.T, total, input_precision="ieee")
    if bias_ptr is not None:
        total += tl.load(bias_ptr + column, mask=column < N, other=0.0).to(tl.float32)[None, :]
    inside = (row < M)[:, None] & (column < N)[None, :]
    tl.store(
        out_ptr + row.to(tl.int64)[:, None] * N + column[None, :],
        total.to(out_ptr.dtype.element_ty),
        mask=inside,
    )
