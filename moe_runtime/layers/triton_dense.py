"""The dense product as a Triton kernel, for `--deterministic`: a row's bits follow from that row, the weight and the GPU's kind.

Libraries choose algorithms, and how to split K, by the number of rows; here tiles are a function of the weight alone, and
nothing is split.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moe_runtime.triton_support.availability import target_arch

WIDE = 8192
"""Outputs from which on a weight has enough tiles of 128 for any GPU."""


@dataclass(frozen=True)
class DenseTiles:
    """How a product is cut; powers of two of at least 16."""

    rows: int
    outputs: int
    inputs: int
    num_warps: int
    num_stages: int


def dense_tiles(num_out: int, dtype: torch.dtype, arch: int | str) -> DenseTiles:
    """Tiles for a weight with `num_out` outputs, on an architecture as of `target_arch`."""
    stages = 2 if isinstance(arch, str) else 4
    if dtype == torch.float32:
        # Without tensor cores: small tiles, whose operands stay in registers.
        return DenseTiles(32, 64, 32, 4, 2)
    return DenseTiles(64, 128 if num_out >= WIDE else 64, 64, 4, stages)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x: (..., in), weight: (out, in) contiguous, one of float32, bfloat16, float16. Returns (..., out) in x's dtype."""
    from moe_runtime.layers.triton_dense_kernels import linear as kernel

    num_out, num_in = weight.shape
    assert weight.is_contiguous()
    assert x.dtype == weight.dtype, f"{x.dtype} times {weight.dtype}"
    rows = x.reshape(x.shape[:-1].numel(), num_in)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    out = torch.empty((*x.shape[:-1], num_out), dtype=x.dtype, device=x.device)
    tiles = dense_tiles(num_out, x.dtype, target_arch(x.device))
    if out.numel():
        kernel[(-(-rows.shape[0] // tiles.rows) * -(-num_out // tiles.outputs),)](
            rows, weight, bias, out, rows.shape[0], num_out, num_in, rows.stride(0),
            BM=tiles.rows, BN=tiles.outputs, BK=tiles.inputs, EVEN_K=num_in % tiles.inputs == 0,
            num_warps=tiles.num_warps, num_stages=tiles.num_stages,
        )  # fmt: skip
    return out
