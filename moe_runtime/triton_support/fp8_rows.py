"""Rows of activations to FP8 as one Triton kernel. The oracle is `quantization.quantize_rows`, bit for bit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moe_runtime.quantization import GROUP

if TYPE_CHECKING:
    import torch


def quantize_rows(x: torch.Tensor, values: torch.Tensor, scale: torch.Tensor, group: int = GROUP) -> None:
    """Rounds x (rows, in) into `values` (rows, in), with float32 scales (rows, ceil(in / group)), one per `group` values of a row.

    values: FP8 where the GPU has it (NVIDIA: sm_89 or later), else a float type that will hold e4m3 values. The rows of all three may
    lie apart; within a row elements are adjacent.
    """
    from moe_runtime.triton_support.fp8_kernels import quantize_rows as kernel

    rows, width = x.shape
    assert x.stride(1) == values.stride(1) == 1, "elements of a row must be adjacent"
    if rows == 0 or width == 0:
        return
    block_m, block = (16, GROUP) if group == GROUP else (1, 1024)
    kernel[(-(-rows // block_m), scale.shape[1])](
        x, values, scale, rows, width, group, x.stride(0), values.stride(0), scale.stride(0), BM=block_m, BLOCK=block
    )  # fmt: skip
