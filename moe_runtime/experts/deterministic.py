"""Experts whose result for a row follows from that row and its expert alone, bit for bit; CPUs only.

Legend: S expert rows, D hidden, F expert intermediate size, p slots.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moe_runtime.layers.activation import expert_activation_problem

if TYPE_CHECKING:
    import torch

    from moe_runtime.core import ExpertBatch
    from moe_runtime.experts.base import ExpertNeed, ExpertWeights
    from moe_runtime.layers.deterministic_ops import DeterministicOps


class DeterministicExperts:
    """Each slot's rows go through the operations of the layers, whose products have fixed row counts."""

    name = "deterministic"

    def __init__(self, ops: DeterministicOps) -> None:
        self.ops = ops

    def supports(self, need: ExpertNeed) -> str | None:
        """None if it can, else why not."""
        if need.scheme is not None:
            return f"{need.scheme.name} weights are not supported; quantization must be none (or auto, of an unquantised checkpoint)"
        problem = self.ops.supports(need.device_type, need.dtype)
        return problem or expert_activation_problem(need.activation)

    def __call__(self, batch: ExpertBatch, weights: ExpertWeights) -> torch.Tensor:
        """Returns y_SD in the dtype of batch.tokens_RD. Raises ConfigError on an unknown activation."""
        y_SD = batch.tokens_RD.new_empty(batch.row_index_S.shape[0], batch.tokens_RD.shape[1])
        up_bias, down_bias = weights.gate_up_bias_pF, weights.down_bias_pD
        end = 0
        for slot, num_rows in enumerate(batch.num_rows_p.tolist()):
            start, end = end, end + num_rows
            if not num_rows:
                continue
            x_nD = batch.tokens_RD.index_select(0, batch.row_index_S[start:end])
            up = self.ops.linear(x_nD, weights.gate_up_pFD[slot], None if up_bias is None else up_bias[slot])
            h_nF = self.ops.expert_activation(up, weights.activation, weights.activation_limit)
            y_SD[start:end] = self.ops.linear(
                h_nF, weights.down_pDF[slot], None if down_bias is None else down_bias[slot]
            )
        assert end == y_SD.shape[0], f"slots have {end} rows, the batch {y_SD.shape[0]}"
        return y_SD
