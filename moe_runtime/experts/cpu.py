"""Experts on CPUs: for every local slot that has rows, gather them and multiply twice.

Legend: S expert rows, n rows of one tile, D hidden, F expert intermediate size, p slots.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moe_runtime.layers.activation import activation_problem, get_activation

if TYPE_CHECKING:
    from moe_runtime.core import ExpertBatch
    from moe_runtime.experts.base import ExpertNeed, ExpertWeights

ROW_TILE = 1024
"""Most rows multiplied at once: enough to be bound by arithmetic, and it bounds the memory a hot slot takes."""


class CpuExperts:
    """See the module. Matrix products in the weights' type, as torch's CPU library does them."""

    name = "cpu"

    def supports(self, need: ExpertNeed) -> str | None:
        """None if it can, else why not."""
        if need.device_type != "cpu":
            return f"runs on cpu, not on {need.device_type}"
        if need.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"{need.dtype} is not one of float32, bfloat16, float16"
        if need.scheme is not None:
            return f"{need.scheme.name} weights are not supported"
        return activation_problem(need.activation)

    def __call__(self, batch: ExpertBatch, weights: ExpertWeights) -> torch.Tensor:
        """Returns y_SD in the dtype of batch.tokens_RD. Raises ConfigError on an unknown activation."""
        activation = get_activation(weights.activation)
        tokens_RD, row_index_S = batch.tokens_RD, batch.row_index_S
        y_SD = tokens_RD.new_empty(row_index_S.shape[0], tokens_RD.shape[1])
        end = 0
        for slot, num_rows in enumerate(batch.num_rows_p.tolist()):
            start, end = end, end + num_rows
            gate_up_DF, down_FD = weights.gate_up_pFD[slot].t(), weights.down_pDF[slot].t()
            for first in range(start, end, ROW_TILE):
                tile = slice(first, min(first + ROW_TILE, end))
                gate_nF, up_nF = tokens_RD.index_select(0, row_index_S[tile]).mm(gate_up_DF).chunk(2, dim=1)
                torch.mm(activation(gate_nF).mul_(up_nF), down_FD, out=y_SD[tile])
        assert end == y_SD.shape[0], f"slots have {end} rows, the batch {y_SD.shape[0]}"
        return y_SD
