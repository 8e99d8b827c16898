"""The layers seam: the operations of a decoder outside attention and experts, which may be fused or made invariant.

Chosen in `backends.py`, handed to the layers when they are built. `TorchOps` is the plain one and the oracle of the others.
Legend: T tokens, D hidden.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch.nn import functional as F

from moe_runtime.layers.activation import expert_activation
from moe_runtime.quantization import pack_rows

if TYPE_CHECKING:
    from collections.abc import Callable


class LayerOps(Protocol):
    """All results have the dtype of the first argument. T may be 0."""

    name: str

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x: (..., in), weight: (out, in). Returns (..., out)."""
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

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """See LayerOps."""
        return F.linear(x, weight, bias)

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
