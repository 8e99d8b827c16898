"""Experts as their formula says, one expert row at a time in float32: the oracle for the other kernels.

y = W_down (act(W_gate x + b_gate) * (W_up x + b_up)) + b_down, the gated linear unit of arXiv 2002.05202.

Legend: S expert rows, D hidden, F expert intermediate size, p slots.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moe_runtime.experts.base import wide_tokens
from moe_runtime.layers.activation import expert_activation, expert_activation_problem
from moe_runtime.quantization import GROUP, dequantize_rows

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
        return expert_activation_problem(need.activation)

    def __call__(self, batch: ExpertBatch, weights: ExpertWeights) -> torch.Tensor:
        """Returns y_SD in batch.dtype. Raises ConfigError on an unknown activation."""
        activation = expert_activation(weights.activation, weights.activation_limit)
        tokens_RD, token_of_row = wide_tokens(batch, torch.float32), batch.row_index_S.tolist()
        y_SD = tokens_RD.new_empty(len(token_of_row), tokens_RD.shape[1], dtype=batch.dtype)
        row = 0
        for slot, num_rows in enumerate(batch.num_rows_p.tolist()):
            gate_up_FD, down_DF = weights.dequantize_gate_up(slot), weights.dequantize_down(slot)
            for _ in range(num_rows):
                x_D = _rounded(tokens_RD[token_of_row[row]], weights)
                gate_up_F = gate_up_FD @ x_D
                if weights.gate_up_bias_pF is not None:
                    gate_up_F = gate_up_F + weights.gate_up_bias_pF[slot].float()
                y_D = down_DF @ _rounded(activation(gate_up_F), weights)
                if weights.down_bias_pD is not None:
                    y_D = y_D + weights.down_bias_pD[slot].float()
                y_SD[row] = y_D
                row += 1
        assert row == len(token_of_row), f"slots have {row} rows, the batch {len(token_of_row)}"
        return y_SD


def _rounded(x: torch.Tensor, weights: ExpertWeights) -> torch.Tensor:
    """What x becomes by going through FP8, if the weights ask for that."""
    if weights.scheme is None or not weights.quantize_activations:
        return x
    group = GROUP if weights.scheme.name == "fp8_block" else max(1, x.shape[0])
    return dequantize_rows(*weights.scheme.quantize_rows(x[None]), group)[0]
