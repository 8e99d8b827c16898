"""FP8 e4m3 inside kernels, also for GPUs without it. The oracle is moe_runtime.quantization."""

import triton.language as tl

from moe_runtime.triton_support import jit

FP8_MAX = tl.constexpr(448.0)


@jit
def scale_of(largest):
    """quantization._scale_of: the scale for a largest magnitude, 1 for zero."""
    return tl.where(largest > 0, tl.div_rn(largest, FP8_MAX), 1.0)


@jit
def to_e4m3(v, TYPE: tl.constexpr):
    """float32 to the nearest e4m3 value, in FP8 or, where hardware lacks that, in a wider TYPE. NaN stays."""
    v = tl.where(v > FP8_MAX, FP8_MAX, tl.where(v < -FP8_MAX, -FP8_MAX, v))
    if not TYPE.is_fp8():
        # Normal numbers keep 3 bits of mantissa, ties to even; those below 2^-6 are multiples of 2^-9, as sums near 2^14 are.
        bits = v.to(tl.int32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
        small = (v + 24576.0) - 24576.0
        v = tl.where(tl.abs(v) < 0.015625, small, tl.where(v == v, normal, v))
    return v.to(TYPE)


@jit
def decode_e4m3(bits, TYPE: tl.constexpr):
    """The value of e4m3 bytes without hardware support: as float16 bits they are 2^8 too small. NaN is not kept."""
    half = ((bits & 0x80).to(tl.uint16) << 8) | ((bits & 0x7F).to(tl.uint16) << 7)
    return (half.to(tl.float16, bitcast=True) * 256.0).to(TYPE)


@jit
def quantize_rows(
    x_ptr, q_ptr, scale_ptr, num_rows, num_in, group, x_stride, q_stride, scale_stride, BM: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """quantization.quantize_rows: program (i, g) rounds group g of BM rows; q holds FP8, or its values in a wider type."""
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    live = row < num_rows
    row = row.to(tl.int64)
    begin = tl.program_id(1) * group
    end = tl.minimum(begin + group, num_in)
    largest = tl.zeros((BM,), tl.float32)
    for k in range(begin, end, BLOCK):
        at = k + tl.arange(0, BLOCK)
        ok = live[:, None] & (at < end)[None, :]
        v = tl.load(x_ptr + row[:, None] * x_stride + at[None, :], mask=ok, other=0.0)
        largest = tl.maximum(largest, tl.max(tl.abs(v.to(tl.float32)), 1))
    scale = scale_of(largest)
    tl.store(scale_ptr + row * scale_stride + tl.program_id(1), scale, mask=live)
    for k in range(begin, end, BLOCK):
        at = k + tl.arange(0, BLOCK)
        ok = live[:, None] & (at < end)[None, :]
        v = tl.load(x_ptr + row[:, None] * x_stride + at[None, :], mask=ok, other=0.0).to(tl.float32)
        # Rounded division, as torch has it: whoever rounds a row, it is the same bits.
        q = to_e4m3(tl.div_rn(v, tl.broadcast_to(scale[:, None], (BM, BLOCK))), q_ptr.dtype.element_ty)
        tl.store(q_ptr + row[:, None] * q_stride + at[None, :], q, mask=ok)
