"""Root-mean-square normalisation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from moe_runtime.layers.linear import weight

if TYPE_CHECKING:
    import torch

    from moe_runtime.layers.ops import LayerOps


class RmsNorm(nn.Module):
    """y = weight * x / sqrt(mean(x^2) + eps) over the last axis (Zhang and Sennrich, 2019)."""

    def __init__(
        self, size: int, eps: float, dtype: torch.dtype, device: torch.device | str, ops: LayerOps
    ) -> None:
        super().__init__()
        self.weight = weight(size, dtype=dtype, device=device)
        self.eps, self.ops = eps, ops

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (..., size) in the model's dtype; the result has the same shape and dtype."""
        return self.ops.rms_norm(x, self.weight, self.eps)

    def after_adding(self, x_TD: torch.Tensor, delta_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns x + delta and its norm, both (T, D)."""
        return self.ops.add_rms_norm(x_TD, delta_TD, self.weight, self.eps)

    def packed_after_adding(
        self, x_TD: torch.Tensor, delta_TD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The same, and the norm as packed FP8 rows (`quantization.pack_rows`)."""
        return self.ops.add_rms_norm_packed(x_TD, delta_TD, self.weight, self.eps)
