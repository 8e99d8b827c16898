"""The kernels of TritonOps: norms and gated activations, a few rows a program, sums in float32.

A row's result does not depend on the other rows. Legend: D row size, DP its next power of two, BR rows of a program.
"""

import triton.language as tl

from moe_runtime.triton_support import jit
from moe_runtime.triton_support.activation_kernels import activate
from moe_runtime.triton_support.fp8_kernels import scale_of, to_e4m3

GROUP = tl.constexpr(128)


@jit
def _store_fp8(
    x, values_ptr, scale_ptr, row, live, row_bytes, D: tl.constexpr, DP: tl.constexpr, BR: tl.constexpr
):  # fmt: skip
    """Rows x (BR, DP) float32 as quantization.pack_rows has them: FP8 values, a float32 scale per GROUP. Zero beyond D."""
    GROUPS: tl.constexpr = DP // GROUP
    grouped = tl.reshape(x, (BR, GROUPS, GROUP))
    scale = scale_of(tl.max(tl.abs(grouped), 2))
    # Rounded division, as torch has it.
    q = tl.div_rn(grouped, tl.broadcast_to(scale[:, :, None], (BR, GROUPS, GROUP)))
    q = to_e4m3(tl.reshape(q, (BR, DP)), values_ptr.dtype.element_ty)
    column, group = tl.arange(0, DP)[None, :], tl.arange(0, GROUPS)[None, :]
    tl.store(values_ptr + row[:, None] * row_bytes + column, q, mask=live[:, None] & (column < D))
    inside = live[:, None] & (group * GROUP < D)
    tl.store(scale_ptr + row[:, None] * (row_bytes // 4) + group, scale, mask=inside)


@jit(do_not_specialize=["num_rows"])
def rms_norm(
    x_ptr, delta_ptr, weight_ptr, total_ptr, out_ptr, values_ptr, scale_ptr, num_rows, stride_outer, stride_inner, delta_stride,
    eps, row_bytes,
    INNER: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BR: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Grid (ceil(num_rows / BR)). Row r is at x + r // INNER * stride_outer + r % INNER * stride_inner; results are contiguous.

    ADD: delta is added to x first, and the sum written to total. values, scale: where not None, the norm in FP8 too, in rows of
    row_bytes, a multiple of 4.
    """
    row = tl.program_id(0) * BR + tl.arange(0, BR)
    live = row < num_rows
    row = row.to(tl.int64)
    column = tl.arange(0, DP)[None, :]
    inside = live[:, None] & (column < D)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    at = (row // INNER * stride_outer + row % INNER * stride_inner)[:, None] + column
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        delta = tl.load(delta_ptr + row[:, None] * delta_stride + column, mask=inside, other=0.0)
        rounded = (x + delta.to(tl.float32)).to(dtype)
        tl.store(total_ptr + row[:, None] * D + column, rounded, mask=inside)
        x = rounded.to(tl.float32)
    normed = x * tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
    weight = tl.load(weight_ptr + column, mask=column < D, other=0.0).to(tl.float32)
    # Rounded before and after the weight, as torch does it step by step.
    out = (normed.to(dtype).to(tl.float32) * weight).to(dtype)
    tl.store(out_ptr + row[:, None] * D + column, out, mask=inside)
    if values_ptr is not None:
        rounded = tl.where(column < D, out.to(tl.float32), 0.0)
        _store_fp8(rounded, values_ptr, scale_ptr, row, live, row_bytes, D, DP, BR)


@jit(do_not_specialize=["num_rows"])
def gated_activation(
    x_ptr,
    out_ptr,
    num_rows,
    stride,
    F: tl.constexpr,
    BR: tl.constexpr,
    BF: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """Grid (ceil(num_rows / BR), ceil(F / BF)): act(gate) * up of rows (gate, up) of 2 F; out is contiguous."""
    row = (tl.program_id(0) * BR + tl.arange(0, BR))[:, None]
    column = (tl.program_id(1) * BF + tl.arange(0, BF))[None, :]
    inside = (row < num_rows) & (column < F)
    row = row.to(tl.int64)
    gate = tl.load(x_ptr + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * stride + F + column, mask=inside, other=0.0).to(tl.float32)
    activated = activate(gate, ACTIVATION).to(x_ptr.dtype.element_ty).to(tl.float32)
    tl.store(out_ptr + row * F + column, (activated * up).to(out_ptr.dtype.element_ty), mask=inside)
