"""Matrix products with weights, and the gated MLP made of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from moe_runtime.layers.ops import LayerOps
    from moe_runtime.quantization import QuantScheme


def weight(*shape: int, dtype: torch.dtype, device: torch.device | str) -> nn.Parameter:
    """An uninitialised inference parameter; the weight loader fills it."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype, device=device), requires_grad=False)


class Linear(nn.Module):
    """y = x W^T + b with W of [out, in], in the model's dtype or as a scheme that `ops` takes stores it."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        dtype: torch.dtype,
        device: torch.device | str,
        ops: LayerOps,
        bias: bool = False,
        scheme: QuantScheme | None = None,
    ) -> None:
        super().__init__()
        self.ops = ops
        stored = dtype if scheme is None else scheme.payload
        self.weight = weight(out_features, in_features, dtype=stored, device=device)
        self.weight_scale: nn.Parameter | None = None
        if scheme is not None:
            shape = scheme.scale_shape(out_features, in_features)
            self.weight_scale = weight(*shape, dtype=torch.float32, device=device)
        self.bias = weight(out_features, dtype=dtype, device=device) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: (..., in); returns (..., out) in the same dtype."""
        return self.ops.linear(x, self.weight, self.bias, self.weight_scale)


class GatedMlp(nn.Module):
    """down(act(gate x) * (up x)), gate and up stacked in one matrix: rows 0..F-1 gate, F..2F-1 up."""

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        activation: str,
        dtype: torch.dtype,
        device: torch.device | str,
        ops: LayerOps,
        scheme: QuantScheme | None = None,
    ) -> None:
        super().__init__()
        self.gate_up = Linear(hidden, 2 * intermediate, dtype, device, ops, scheme=scheme)
        self.down = Linear(intermediate, hidden, dtype, device, ops, scheme=scheme)
        self.activation, self.ops = activation, ops

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        """x_TD: (T, D); returns (T, D)."""
        return self.down(self.ops.gated_activation(self.gate_up(x_TD), self.activation))
