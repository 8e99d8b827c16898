"""The experts seam: gate/up, activation and down projection of the local experts in one call.

Legend: R token rows, S expert rows, D hidden, F expert intermediate size, p slots on this rank.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Protocol

import torch

from moe_runtime.core import ExpertBatch
from moe_runtime.quantization import QuantScheme, dequantize_rows


@dataclass(frozen=True)
class ExpertWeights:
    """Weights of one layer's local slots, [slot, out, in]. Empty slots receive no rows, and may be written while others are read."""

    gate_up_pFD: torch.Tensor
    """[p, 2F, D]: rows 0..F-1 gate, F..2F-1 up; [p, F, D] for an activation without a gate. Under a scheme of its payload's type and shape."""
    down_pDF: torch.Tensor
    """[p, D, F]. Of the same kind."""
    activation: str
    """A name of `layers.activation`."""
    activation_limit: float | None = None
    """Gate values are cut above it, up values to [-limit, limit], before the activation; None: not at all."""
    gate_up_bias_pF: torch.Tensor | None = None
    """[p, 2F], in the model's dtype."""
    down_bias_pD: torch.Tensor | None = None
    scheme: QuantScheme | None = None
    gate_up_scale: torch.Tensor | None = None
    """scheme.scale_dtype [p, parts, *scheme.scale_shape(F, D)]; parts is 2, gate then up, or 1 without a gate."""
    down_scale: torch.Tensor | None = None
    """scheme.scale_dtype [p, *scheme.scale_shape(D, F)]."""
    quantize_activations: bool = False
    """Under an FP8 scheme: whether x and the activation's result are rounded to FP8 too (W8A8), or stay as they are (W8A16)."""

    @property
    def inner(self) -> int:
        """F."""
        if self.gate_up_scale is None:
            return self.down_pDF.shape[2]
        return self.gate_up_pFD.shape[1] // self.gate_up_scale.shape[1]

    @property
    def num_bytes(self) -> int:
        """Of all slots, with scales and biases."""
        tensors = (getattr(self, field.name) for field in fields(self))
        return sum(t.nbytes for t in tensors if isinstance(t, torch.Tensor))

    def dequantize_gate_up(self, slot: int) -> torch.Tensor:
        """A slot's [2F, D] (or [F, D]) in float32."""
        if self.scheme is None:
            return self.gate_up_pFD[slot].float()
        assert self.gate_up_scale is not None
        scale = self.gate_up_scale[slot]
        parts, hidden = self.gate_up_pFD[slot].chunk(scale.shape[0]), self.down_pDF.shape[1]
        return torch.cat([self.scheme.dequantize(w, s, hidden) for w, s in zip(parts, scale, strict=True)])

    def dequantize_down(self, slot: int) -> torch.Tensor:
        """A slot's [D, F] in float32."""
        if self.scheme is None:
            return self.down_pDF[slot].float()
        assert self.down_scale is not None
        return self.scheme.dequantize(self.down_pDF[slot], self.down_scale[slot], self.inner)


@dataclass(frozen=True)
class ExpertNeed:
    """What a kernel is asked to support."""

    device_type: str
    dtype: torch.dtype
    """The model's, in which token rows arrive."""
    activation: str
    scheme: QuantScheme | None = None


class ExpertKernel(Protocol):
    """Computes y[s] = down(act(gate x) * (up x)) for x = tokens[row_index[s]] with the weights of s's slot, and their biases.

    Tokens may come as FP8 with scales (`batch.scales`). A kernel that rounds x to FP8 in the same groups, for block weights, takes
    them as they are, which is what it would have made of the unrounded rows; others widen them first (`wide_tokens`).
    On a GPU S is a capacity: rows beyond num_rows_p.sum() may hold anything afterwards.
    """

    name: str

    def supports(self, need: ExpertNeed) -> str | None:
        """None if it can, else the reason why not, shown to the user."""
        ...

    def __call__(self, batch: ExpertBatch, weights: ExpertWeights) -> torch.Tensor:
        """Returns y_SD in batch.dtype."""
        ...


def wide_tokens(batch: ExpertBatch, dtype: torch.dtype) -> torch.Tensor:
    """The batch's token rows in `dtype`, (R, D): themselves, or what FP8 and scales stand for."""
    if batch.scales is None:
        return batch.tokens_RD.to(dtype)
    return dequantize_rows(batch.tokens_RD, batch.scales.scale_RG).to(dtype)
