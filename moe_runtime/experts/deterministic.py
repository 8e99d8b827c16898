"""Routing and experts whose result for a row follows from that row (and its expert) alone, bit for bit; CPUs only.

Legend: T tokens, E experts, K experts per token, S expert rows, D hidden, F expert intermediate size, p slots.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad

from moe_runtime.core import Routing
from moe_runtime.experts import router
from moe_runtime.experts.base import wide_tokens
from moe_runtime.layers.activation import expert_activation_problem
from moe_runtime.layers.invariant import VECTOR_ELEMENTS, one_thread

if TYPE_CHECKING:
    from moe_runtime.core import ExpertBatch
    from moe_runtime.experts.base import ExpertNeed, ExpertWeights
    from moe_runtime.experts.router import RoutingMethod
    from moe_runtime.layers.deterministic_ops import DeterministicOps


def route(
    logits_TE: torch.Tensor,
    method: RoutingMethod,
    bias_E: torch.Tensor | None = None,
    weights_dtype: torch.dtype = torch.float32,
) -> Routing:
    """`router.route`, see there, of the logits with zero rows up to a multiple of a vector, by one thread.

    Then sigmoid, softplus and square root never meet an incomplete vector, and no sum is of a single row.
    """
    num_tokens = logits_TE.shape[0]
    with one_thread():
        filled_TE = pad(logits_TE, (0, 0, 0, -num_tokens % VECTOR_ELEMENTS))
        routing = router.route(filled_TE, method, bias_E, weights_dtype)
    return Routing(routing.topk_ids_TK[:num_tokens], routing.topk_weights_TK[:num_tokens])


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
        """Returns y_SD in batch.dtype. Raises ConfigError on an unknown activation."""
        tokens_RD = wide_tokens(batch, batch.dtype)
        y_SD = tokens_RD.new_empty(batch.row_index_S.shape[0], tokens_RD.shape[1])
        up_bias, down_bias = weights.gate_up_bias_pF, weights.down_bias_pD
        end = 0
        for slot, num_rows in enumerate(batch.num_rows_p.tolist()):
            start, end = end, end + num_rows
            if not num_rows:
                continue
            x_nD = tokens_RD.index_select(0, batch.row_index_S[start:end])
            up = self.ops.linear(x_nD, weights.gate_up_pFD[slot], None if up_bias is None else up_bias[slot])
            h_nF = self.ops.expert_activation(up, weights.activation, weights.activation_limit)
            y_SD[start:end] = self.ops.linear(
                h_nF, weights.down_pDF[slot], None if down_bias is None else down_bias[slot]
            )
        assert end == y_SD.shape[0], f"slots have {end} rows, the batch {y_SD.shape[0]}"
        return y_SD
