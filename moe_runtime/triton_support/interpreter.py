"""Correct bfloat16 and FP8 arithmetic for Triton's CPU interpreter.

The interpreter keeps a bfloat16 as the 16 bits of a numpy uint16, and an FP8 as a uint8, and then computes with those
integers: every sum, product, comparison and dot of bfloat16 is silently wrong (triton issue 11584). It also truncates where a GPU
rounds to nearest even. Here such operands are widened to float32 first and results rounded as torch rounds them.

What it still cannot show: the programs of a grid run one after another, so races stay invisible; a TF32 product is a
float32 one; inline assembly and external functions do not exist.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter as stock

_TORCH = {
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
    tl.float16: torch.float16,
    tl.float32: torch.float32,
    tl.float64: torch.float64,
}
_STORED_AS_BITS = (tl.bfloat16, tl.float8e4nv, tl.float8e5)
_LARGEST = {tl.float8e4nv: 448.0, tl.float8e5: 57344.0}


def correct_interpreter() -> None:
    """Replace the interpreter's operations on types that it stores as bits. Idempotent."""
    builder: Any = stock.InterpreterBuilder
    if getattr(builder, "moe_runtime_corrected", False):
        return
    builder.moe_runtime_corrected = True
    for name in ("binary_op", "unary_op", "create_fma", "create_rsqrt", "ternary_op"):
        setattr(builder, name, _widened(getattr(builder, name)))
    builder.cast_impl = _cast_impl
    builder.create_fp_to_fp = _cast_impl
    builder.create_dot = _create_dot
    builder.create_atomic_rmw = _atomic_rmw(builder.create_atomic_rmw)
    stock.ReduceOps.apply_impl = _reduce(stock.ReduceOps.apply_impl)
    stock.ScanOps.apply_impl = _reduce(stock.ScanOps.apply_impl)


def _is_bits(handle: Any) -> bool:
    return handle.dtype.scalar in _STORED_AS_BITS


def _wide(handle: Any) -> np.ndarray:
    """The values of a handle; float32 where they were stored as bits."""
    if not _is_bits(handle):
        return handle.data
    bits = torch.from_numpy(np.array(handle.data))
    values: np.ndarray = bits.view(_TORCH[handle.dtype.scalar]).float().numpy()
    return values


def _narrow(values: np.ndarray, dtype: Any) -> np.ndarray:
    """Values as the interpreter stores `dtype`, rounded to nearest even; FP8 saturates as the GPU's conversion does."""
    tensor = torch.from_numpy(np.array(values))
    if dtype in _LARGEST:
        tensor = tensor.float().clamp(-_LARGEST[dtype], _LARGEST[dtype])
    tensor = tensor.to(_TORCH[dtype])
    if dtype in _STORED_AS_BITS:
        tensor = tensor.view(torch.uint16 if dtype == tl.bfloat16 else torch.uint8)
    stored: np.ndarray = tensor.numpy()
    return stored


def _widened(original: Any) -> Any:
    """An operation whose last argument may be a numpy function; bits are widened, and the result rounded back."""

    def operation(self: Any, *args: Any) -> Any:
        handles = [a for a in args if isinstance(a, stock.TensorHandle)]
        floats = handles[1:] if args[-1] is np.where else handles
        if not any(_is_bits(h) for h in floats) or args[-1] is np.where:
            return original(self, *args)
        dtype = floats[-1].dtype.scalar
        wide = [
            stock.TensorHandle(_wide(a), tl.float32 if _is_bits(a) else a.dtype)
            if isinstance(a, stock.TensorHandle)
            else a
            for a in args
        ]
        with np.errstate(all="ignore"):
            out = original(self, *wide).data
        return stock.TensorHandle(out if out.dtype == np.bool_ else _narrow(out, dtype), dtype)

    return operation


def _cast_impl(self: Any, src: Any, dst_type: Any, rounding_mode: Any = None) -> Any:
    source, target = src.dtype.scalar, dst_type.scalar
    if source == target:
        return src
    values = _wide(src)
    if target in _TORCH and source in _TORCH:
        return stock.TensorHandle(_narrow(values, target), target)
    if target in _STORED_AS_BITS:
        return stock.TensorHandle(_narrow(values.astype(np.float32), target), target)
    return stock.TensorHandle(values.astype(stock._get_np_dtype(dst_type)), target)


def _create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    dtype = d.dtype.scalar
    total = _wide(d)
    # In float64, since BLAS's float32 sums depend on where in the matrix a row is, which a GPU's do not.
    exact = np.float64 if np.issubdtype(total.dtype, np.floating) else total.dtype
    out = (np.matmul(_wide(a), _wide(b), dtype=exact) + total).astype(total.dtype)
    return stock.TensorHandle(_narrow(out, dtype) if dtype in _STORED_AS_BITS else out, dtype)


def _atomic_rmw(original: Any) -> Any:
    def operation(self: Any, rmw_op: Any, ptr: Any, val: Any, mask: Any, sem: Any, scope: Any) -> Any:
        if val.dtype.scalar != tl.bfloat16 or rmw_op != stock._ir.ATOMIC_OP.FADD:
            return original(self, rmw_op, ptr, val, mask, sem, scope)
        # Element by element, so that an address met twice takes both addends.
        old = np.zeros(ptr.data.shape, np.uint16)
        values, wanted = np.broadcast_to(_wide(val), old.shape), np.broadcast_to(mask.data, old.shape)
        one, none = np.ones(1, bool), np.zeros(1, np.uint16)
        for at in np.ndindex(old.shape):
            if wanted[at]:
                address = ptr.data[at].reshape(1)
                before = stock._interpreter.load(address, one, none, np.dtype(np.uint16))
                old[at] = before[0]
                after = _wide(stock.TensorHandle(before, tl.bfloat16)) + values[at]
                stock._interpreter.store(address, _narrow(after, tl.bfloat16), one)
        return stock.TensorHandle(old, tl.bfloat16)

    return operation


def _reduce(original: Any) -> Any:
    """Reductions and scans of bfloat16: in float32, rounded once at the end (a GPU may round in between)."""

    def apply_impl(self: Any, inputs: Any) -> Any:
        as_bits = [x.dtype.scalar in _STORED_AS_BITS for x in inputs]
        if not any(as_bits):
            return original(self, inputs)
        wide = tuple(
            self.to_tensor(_wide(x.handle), tl.float32) if b else x
            for x, b in zip(inputs, as_bits, strict=True)
        )
        results = original(self, wide)
        results = results if isinstance(results, list | tuple) else (results,)
        return [
            self.to_tensor(_narrow(r.handle.data, x.dtype.scalar), x.dtype.scalar) if b else r
            for r, x, b in zip(results, inputs, as_bits, strict=False)
        ] + list(results[len(inputs) :])

    return apply_impl
