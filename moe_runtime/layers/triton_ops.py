"""Layer operations as Triton kernels: each one pass over its operands, with no intermediate in memory.

Results are those of `TorchOps` up to the order of float32 sums: everything is rounded where torch rounds it. A row's bits do not
depend on the other rows; in matrix products, which otherwise stay with torch (cuBLAS, hipBLAS), only if `deterministic`.
Legend: T tokens, D hidden, F intermediate.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

from moe_runtime.errors import ConfigError
from moe_runtime.layers import invariant, triton_dense
from moe_runtime.layers.activation import activation_problem
from moe_runtime.layers.ops import packed_after
from moe_runtime.quantization import GROUP, empty_packed_rows, unpack_rows
from moe_runtime.triton_support.availability import has_fp8, target_arch, triton_problem

if TYPE_CHECKING:
    from collections.abc import Callable

TILE = 4096
"""Elements that a program holds at once, unless a row has more."""


class TritonOps:
    """See the module and LayerOps. Works where `triton_problem` is None."""

    name = "triton"
    takes_int8 = False

    def __init__(self, deterministic: bool = False) -> None:
        self.deterministic = deterministic

    @staticmethod
    def supports(device_type: str, dtype: torch.dtype, activation: str) -> str | None:
        """None if it can serve a model of this dtype and dense activation, else why not."""
        if dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"{dtype} is not one of float32, bfloat16, float16"
        return activation_problem(activation) or triton_problem(device_type)

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See LayerOps."""
        assert scale is None, "see takes_int8"
        return (triton_dense.linear if self.deterministic else F.linear)(x, weight, bias)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See LayerOps. x may be a view whose rows lie apart, such as the heads of one fused projection."""
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        _norm(x, None, weight, eps, None, out)
        return out

    def add_rms_norm(
        self, x_TD: torch.Tensor, delta_TD: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See LayerOps."""
        total_TD, out_TD = (torch.empty(x_TD.shape, dtype=x_TD.dtype, device=x_TD.device) for _ in range(2))
        _norm(x_TD, delta_TD, weight, eps, total_TD, out_TD)
        return total_TD, out_TD

    def add_rms_norm_packed(
        self, x_TD: torch.Tensor, delta_TD: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See LayerOps. One kernel where the GPU has FP8."""
        if not has_fp8(target_arch(x_TD.device)):
            return packed_after(self.add_rms_norm(x_TD, delta_TD, weight, eps))
        total_TD, out_TD = (torch.empty(x_TD.shape, dtype=x_TD.dtype, device=x_TD.device) for _ in range(2))
        packed_TB = empty_packed_rows(x_TD)
        _norm(x_TD, delta_TD, weight, eps, total_TD, out_TD, packed_TB)
        return total_TD, out_TD, packed_TB

    def elementwise(self, function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        """See LayerOps."""
        return invariant.elementwise(function, x) if self.deterministic else function(x)

    def gated_activation(self, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
        """See LayerOps. Raises ConfigError for an activation that is not one of `layers.activation.ACTIVATIONS`."""
        from moe_runtime.layers.triton_ops_kernels import gated_activation

        problem = activation_problem(activation)
        if problem is not None:
            raise ConfigError(problem)
        width = gate_up.shape[-1] // 2
        rows = _as_rows(gate_up)
        out = torch.empty((*gate_up.shape[:-1], width), dtype=gate_up.dtype, device=gate_up.device)
        columns = min(1024, _power_of_two(width))
        height = TILE // 4 // columns
        if out.numel():
            gated_activation[(-(-rows.shape[0] // height), -(-width // columns))](
                rows, out, rows.shape[0], rows.stride(0),
                F=width, BR=height, BF=columns, ACTIVATION=activation, num_warps=4,
            )  # fmt: skip
        return out


def _norm(
    x: torch.Tensor,
    delta_TD: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    total_TD: torch.Tensor | None,
    out: torch.Tensor,
    packed_TB: torch.Tensor | None = None,
) -> None:
    from moe_runtime.layers.triton_ops_kernels import rms_norm

    if not x.numel():
        return
    if x.dim() == 3 and x.stride(2) == 1:
        rows, inner, outer_stride, inner_stride = x, x.shape[1], x.stride(0), x.stride(1)
    else:
        rows, inner, inner_stride = _as_rows(x), 1, 0
        outer_stride = rows.stride(0)
    delta = rows if delta_TD is None else _as_rows(delta_TD)
    width = x.shape[-1]
    values, scale = (None, None) if packed_TB is None else unpack_rows(packed_TB, width)
    # Scale groups are whole.
    tile = _power_of_two(width) if packed_TB is None else max(GROUP, _power_of_two(width))
    height = max(1, TILE // 4 // tile)
    num_rows = x.numel() // width
    rms_norm[(-(-num_rows // height),)](
        rows, delta, weight, out if total_TD is None else total_TD, out, values, scale,
        num_rows, outer_stride, inner_stride, delta.stride(0), eps, None if packed_TB is None else packed_TB.stride(0),
        INNER=inner, D=width, DP=tile, BR=height, ADD=delta_TD is not None,
        num_warps=min(16, max(4, tile * height // 512)),
    )  # fmt: skip


def _as_rows(x: torch.Tensor) -> torch.Tensor:
    """(rows, size) with adjacent elements; a copy only if there is no such view."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()
