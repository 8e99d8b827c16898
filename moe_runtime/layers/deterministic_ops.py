"""Layer operations whose results for a row follow from that row alone, bit for bit; CPUs only. See `invariant`.

Legend: T tokens, D hidden.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moe_runtime.layers import invariant
from moe_runtime.layers.activation import expert_activation, is_gated
from moe_runtime.layers.ops import packed_after

if TYPE_CHECKING:
    from collections.abc import Callable

    from moe_runtime.layers.invariant import Workers

MIN_ROWS = 8
"""Reductions get at least this many rows: torch reduces a single one as a whole array."""


class DeterministicOps:
    """LayerOps; see there. The number of workers changes no result."""

    name = "deterministic"
    takes_int8 = False

    def __init__(self, workers: Workers) -> None:
        self.workers = workers

    @staticmethod
    def supports(device_type: str, dtype: torch.dtype) -> str | None:
        """None if it can, else why not."""
        if device_type != "cpu":
            return f"runs on cpu, not on {device_type}"
        if dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"{dtype} is not one of float32, bfloat16, float16"
        return None

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See LayerOps."""
        assert scale is None, "see takes_int8"
        return invariant.linear(x, weight, bias, self.workers)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See LayerOps. Statistics in float32."""
        rows = x.reshape(x.shape[:-1].numel(), x.shape[-1]).float()
        num_rows = rows.shape[0]
        with invariant.one_thread():
            if num_rows < MIN_ROWS:
                rows = torch.cat((rows, rows.new_zeros(MIN_ROWS - num_rows, rows.shape[1])))
            scale = invariant.elementwise(torch.rsqrt, rows.pow(2).mean(-1, keepdim=True) + eps)
            normed = (rows * scale)[:num_rows]
            return weight * normed.to(x.dtype).view(x.shape)

    def add_rms_norm(
        self, x_TD: torch.Tensor, delta_TD: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See LayerOps."""
        total = x_TD + delta_TD
        return total, self.rms_norm(total, weight, eps)

    def add_rms_norm_packed(
        self, x_TD: torch.Tensor, delta_TD: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See LayerOps. Rounding to FP8 takes elements and the largest of a group, so rows cannot meet."""
        return packed_after(self.add_rms_norm(x_TD, delta_TD, weight, eps))

    def gated_activation(self, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
        """See LayerOps. Raises ConfigError on an unknown activation."""
        return self.expert_activation(gate_up, activation, None)

    def expert_activation(self, gate_up: torch.Tensor, activation: str, limit: float | None) -> torch.Tensor:
        """`layers.activation.expert_activation` of (..., 2F), or (..., F) if ungated."""
        function = expert_activation(activation, limit)
        return (
            invariant.gated(function, gate_up)
            if is_gated(activation)
            else self.elementwise(function, gate_up)
        )

    def elementwise(self, function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        """See LayerOps."""
        return invariant.elementwise(function, x)
