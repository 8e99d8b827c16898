"""The experts seam: gate/up, activation and down projection of the local experts in one call.

Legend: R token rows, S expert rows, D hidden, F expert intermediate size, p slots on this rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from moe_runtime.core import ExpertBatch


@dataclass(frozen=True)
class ExpertWeights:
    """Weights of one layer's local slots, [slot, out, in]. Empty slots hold zeros and receive no rows."""

    gate_up_pFD: torch.Tensor
    """[p, 2F, D]: rows 0..F-1 gate, F..2F-1 up."""
    down_pDF: torch.Tensor
    """[p, D, F]."""
    activation: str
    """transformers' name: `silu`, `gelu`, `gelu_pytorch_tanh`, `relu`."""


@dataclass(frozen=True)
class ExpertNeed:
    """What a kernel is asked to support."""

    device_type: str
    dtype: torch.dtype
    activation: str


class ExpertKernel(Protocol):
    """Computes y[s] = down(act(gate x) * (up x)) for x = tokens[row_index[s]] with the weights of s's slot."""

    name: str

    def supports(self, need: ExpertNeed) -> str | None:
        """None if it can, else the reason why not, shown to the user."""
        ...

    def __call__(self, batch: ExpertBatch, weights: ExpertWeights) -> torch.Tensor:
        """Returns y_SD in the dtype of batch.tokens_RD."""
        ...
