"""The layers seam: the operations of a decoder outside attention and experts, which may be fused or made invariant.

Chosen in `backends.py`, handed to the layers when they are built. `TorchOps` is the plain one and the oracle of the others.
Legend: T tokens, D hidden.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch.nn import functional as F

from moe_runtime.layers.activation import expert_activation
from moe_runtime.quantization import INT8_CHANNEL, pack_rows

if TYPE_CHECKING:
    from collections.abc import Callable


INT8_TILE = 1 << 18
"""Values of an int8 matrix brought back to the model's dtype at once, about: few enough to stay in a cache until they are multiplied."""


class LayerOps(Protocol):
    """All results have the dtype of the first argument. T may be 0."""

    name: str
    takes_int8: bool
    """Whether `linear` takes int8 weights."""

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x: (..., in), weight: (out, in). Returns (..., out).

        scale: float32 (out, 1), only if `takes_int8`: the weight is int8, and stands for itself times the scale (INT8_CHANNEL).
        """
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """weight * x / sqrt(mean(x^2) + eps) over the last axis; rounded to x's dtype before the weight is applied."""
        ...

    def add_rms_norm(
        self, x_TD: torch.Tensor, delta_TD: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns s = x + delta, rounded to x's dtype, and rms_norm(s)."""
        ...

    def add_rms_norm_packed(
        self, x_TD: torch.Tensor, delta_TD: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns what add_rms_norm does, and `quantization.pack_rows` of the norm: uint8 (T, row_bytes(D))."""
        ...

    def gated_activation(self, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
        """(..., 2F), gate then up, to (..., F): act(gate) * up."""
        ...

    def elementwise(self, function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        """function(x), for a function of each element alone that keeps the shape."""
        ...


def packed_after(
    results: tuple[torch.Tensor, torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """add_rms_norm_packed in two steps: `results` are those of add_rms_norm."""
    return *results, pack_rows(results[1])


class TorchOps:
    """Each operation as torch has it; any device."""

    name = "torch"
    takes_int8 = True

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See LayerOps. int8 is brought back to x's dtype and multiplied, some output channels after the other."""
        if scale is None:
            return F.linear(x, weight, bias)
        num_out, num_in = weight.shape
        out = x.new_empty(*x.shape[:-1], num_out)
        height = max(1, INT8_TILE // max(1, num_in))
        for first in range(0, num_out, height):
            tile = slice(first, first + height)
            values = INT8_CHANNEL.dequantize(weight[tile], scale[tile]).to(x.dtype)
            out[..., tile] = F.linear(x, values, None if bias is None else bias[tile])
        return out

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See LayerOps. Statistics in float32, as transformers has them."""
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        return weight * normed.to(x.dtype)

    def add_rms_norm(
        self, x_TD: torch.Tensor, delta_TD: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See LayerOps."""
        total = x_TD + delta_TD
        return total, self.rms_norm(total, weight, eps)

    def add_rms_norm_packed(
        self, x_TD: torch.Tensor, delta_TD: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See LayerOps."""
        return packed_after(self.add_rms_norm(x_TD, delta_TD, weight, eps))

    def gated_activation(self, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
        """See LayerOps. Raises ConfigError on an unknown activation."""
        return expert_activation(activation)(gate_up)

    def elementwise(self, function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        """See LayerOps."""
        return function(x)


TORCH_OPS = TorchOps()
