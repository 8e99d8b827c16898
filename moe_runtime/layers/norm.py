"""Root-mean-square normalisation."""

from __future__ import annotations

import torch
from torch import nn

from moe_runtime.layers.linear import weight


class RmsNorm(nn.Module):
    """y = weight * x / sqrt(mean(x^2) + eps) over the last axis (Zhang and Sennrich, 2019).

    Statistics in float32; the result is rounded to x's dtype *before* the weight is applied, as transformers does.
    """

    def __init__(self, size: int, eps: float, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.weight = weight(size, dtype=dtype, device=device)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (..., size) in the model's dtype; the result has the same shape and dtype."""
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x.dtype)
