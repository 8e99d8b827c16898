"""Experts as their formula says, one expert row at a time in float32: the oracle for the other kernels.

y = W_down (act(W_gate x) * (W_up x)), the gated linear unit of arXiv 2002.05202.

Legend: S expert rows, D hidden, F expert intermediate size, p slots.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moe_runtime.layers.activation import activation_problem, get_activation

if TYPE_CHECKING:
    from moe_runtime.core import ExpertBatch
    from moe_runtime.experts.base import ExpertNeed, ExpertWeights


class ReferenceExperts:
    """See the module. Slow on purpose; any device, any float type, computed in float32."""

    name = "reference"

    def supports(self, need: ExpertNeed) -> str | None:
        """None if it can, else why not."""
        if not need.dtype.is_floating_point:
            return f"{need.dtype} is not a floating-point type"
        return activation_problem(need.activation)

    def __call__(self, batch: ExpertBatch, weights: ExpertWeights) -> torch.Tensor:
        """Returns y_SD in the dtype of batch.tokens_RD. Raises ConfigError on an unknown activation."""
        activation = get_activation(weights.activation)
        tokens_RD, token_of_row = batch.tokens_RD, batch.row_index_S.tolist()
        y_SD = tokens_RD.new_empty(len(token_of_row), tokens_RD.shape[1])
        row = 0
        for slot, num_rows in enumerate(batch.num_rows_p.tolist()):
            gate_FD, up_FD = weights.gate_up_pFD[slot].float().chunk(2)
            down_DF = weights.down_pDF[slot].float()
            for _ in range(num_rows):
                x_D = tokens_RD[token_of_row[row]].float()
                y_SD[row] = down_DF @ (activation(gate_FD @ x_D) * (up_FD @ x_D))
                row += 1
        assert row == len(token_of_row), f"slots have {row} rows, the batch {len(token_of_row)}"
        return y_SD
