"""One rank: nothing travels, tokens are only grouped by slot.

Legend: T tokens here, K experts per token, D hidden, S expert rows, p slots per rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from moe_runtime.core import DispatchPlan, ExpertBatch
from moe_runtime.dispatch.base import Done
from moe_runtime.dispatch.rows import Traffic, positions_of_pairs, sort_by_slot, sum_in_k_order


def unsupported(num_ranks: int) -> str | None:
    """Why the local dispatcher cannot serve this, or None."""
    return None if num_ranks == 1 else f"{num_ranks} ranks; it serves exactly 1"


@dataclass
class LocalDispatcher:
    """The dispatcher of a single rank. The batch's tokens are x itself, not a copy.

    Both ways of combining give the same bits here: the one rank's sum is the token's.

    On a GPU nothing is read by the host: S is then the capacity T * K, and expert rows beyond
    num_rows_p.sum() belong to pairs with slot -1; whatever is computed for them is dropped.
    """

    name: str = "local"
    traffic: Traffic = field(default_factory=Traffic)

    def dispatch(self, x_TD: torch.Tensor, plan: DispatchPlan) -> Done[ExpertBatch]:
        """The pairs (token, slot) sorted by slot, then token."""
        K = plan.global_slot_TK.shape[1]
        pair_S, num_rows_p = sort_by_slot(plan.global_slot_TK, plan.slots_per_rank)
        self.traffic.dispatches += 1
        return Done(
            ExpertBatch(
                tokens_RD=x_TD,
                row_index_S=torch.div(pair_S, K, rounding_mode="floor"),
                num_rows_p=num_rows_p,
                handle=pair_S,
            )
        )

    def combine(self, y_SD: torch.Tensor, batch: ExpertBatch, plan: DispatchPlan) -> Done[torch.Tensor]:
        """Sums each token's rows of y_SD with its routing weights, in float32 and in k order. Returns (T, D)."""
        pair_S: torch.Tensor = batch.handle
        slot_TK = plan.global_slot_TK
        all_present = pair_S.device.type == "cpu" and pair_S.shape[0] == slot_TK.numel()
        position_TK = positions_of_pairs(pair_S, slot_TK)
        self.traffic.combines += 1
        return Done(sum_in_k_order(y_SD, position_TK, plan.topk_weights_TK, all_present=all_present))

    def close(self) -> None:
        """Nothing to release."""
