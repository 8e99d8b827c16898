"""Token embedding."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from moe_runtime.layers.linear import weight


class Embedding(nn.Module):
    """Rows of a [V, D] table."""

    def __init__(self, vocab: int, hidden: int, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.weight = weight(vocab, hidden, dtype=dtype, device=device)

    def forward(self, ids_T: torch.Tensor) -> torch.Tensor:
        """ids_T: (T,) int64; returns (T, D)."""
        return F.embedding(ids_T, self.weight)
