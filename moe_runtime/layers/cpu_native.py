"""Dense products of few rows and norms on CPUs in C++ (moe_runtime/native/dense.cpp); the rest as torch has it.

Torch's bfloat16 product of few rows reads a matrix at a fraction of the memory's rate, and its norm is seven operations.

Legend: R rows.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch

from moe_runtime.layers.ops import TorchOps
from moe_runtime.native.build import most_rows

if TYPE_CHECKING:
    from moe_runtime.native.build import Native

MAX_ROWS = 128
"""With more rows torch's product is at least as fast, measured on a CPU with AVX512-BF16."""
MAX_INT8_ROWS = 512
"""The same for int8 weights, which torch brings back to bfloat16 first."""


class _LinearCall(ctypes.Structure):
    """LinearCall of native/dense.cpp, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "w", "scales", "bias", "out")),
        *((name, ctypes.c_int64) for name in ("rows", "x_stride", "depth", "columns")),
        ("num_threads", ctypes.c_int32),
    )


class _NormCall(ctypes.Structure):
    """NormCall of native/dense.cpp, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "delta", "weight", "sum", "out")),
        *((name, ctypes.c_int64) for name in ("outer", "inner", "outer_stride", "inner_stride", "size")),
        ("eps", ctypes.c_float),
        ("num_threads", ctypes.c_int32),
    )


class NativeOps(TorchOps):
    """See the module. bfloat16 only; as many threads as torch uses, and the same ones."""

    name = "cpu_native"

    def __init__(self, native: Native) -> None:
        self.native = native
        self.max_rows, self.max_int8_rows = most_rows(MAX_ROWS), most_rows(MAX_INT8_ROWS)

    @staticmethod
    def supports(device_type: str, dtype: torch.dtype, native: Native) -> str | None:
        """None if it can, else why not."""
        if device_type != "cpu":
            return f"runs on cpu, not on {device_type}"
        if dtype != torch.bfloat16:
            return f"{dtype} is not bfloat16"
        return native.problem

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See LayerOps."""
        columns, depth = weight.shape
        num_rows = x.numel() // depth if depth else 0
        stored = torch.bfloat16 if scale is None else torch.int8
        wanted = [(x, torch.bfloat16), (weight, stored), (bias, torch.bfloat16), (scale, torch.float32)]
        plain = all(m is None or (m.dtype == dtype and (m is x or m.is_contiguous())) for m, dtype in wanted)
        max_rows = self.max_rows if scale is None else self.max_int8_rows
        if not plain or not num_rows or num_rows > max_rows:
            return super().linear(x, weight, bias, scale)
        x_RD = x.reshape(num_rows, depth)
        if x_RD.stride(1) != 1:
            x_RD = x_RD.contiguous()
        out = x.new_empty(*x.shape[:-1], columns)
        call = _LinearCall(
            x_RD.data_ptr(), weight.data_ptr(), _pointer(scale), _pointer(bias), out.data_ptr(), num_rows,
            x_RD.stride(0), depth, columns, torch.get_num_threads(),
        )  # fmt: skip
        self._library().moe_runtime_linear(ctypes.addressof(call))
        return out

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See LayerOps."""
        return self._norm(x, None, weight, eps)[1]

    def add_rms_norm(
        self, x_TD: torch.Tensor, delta_TD: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See LayerOps."""
        return self._norm(x_TD, delta_TD.contiguous(), weight, eps)

    def _norm(
        self, x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x + delta (x without one) and its norm, both as x."""
        assert x.dtype == weight.dtype == torch.bfloat16, f"{x.dtype}, {weight.dtype}"
        assert delta is None or (delta.dtype, delta.shape) == (x.dtype, x.shape)
        if x.stride(-1) != 1 or x.dim() > 3:
            x = x.contiguous()
        rows = x if x.dim() == 3 else x.reshape(-1, 1, x.shape[-1])
        total, out = (x if delta is None else torch.empty_like(delta)), x.new_empty(x.shape)
        call = _NormCall(
            rows.data_ptr(), _pointer(delta), weight.data_ptr(), total.data_ptr(), out.data_ptr(), *rows.shape[:2], *rows.stride()[:2], rows.shape[2], eps, torch.get_num_threads(),
        )  # fmt: skip
        self._library().moe_runtime_norm(ctypes.addressof(call))
        return total, out

    def _library(self) -> ctypes.CDLL:
        assert self.native.library is not None, self.native.problem
        return self.native.library


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
