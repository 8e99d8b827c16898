"""One rank: nothing travels, tokens are only grouped by slot.

Legend: T tokens here, K experts per token, D hidden, S expert rows, p slots per rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from moe_runtime.core import DispatchPlan, ExpertBatch
from moe_runtime.dispatch.base import Done
from moe_runtime.dispatch.grouping import Grouping, group_pairs
from moe_runtime.dispatch.rows import Traffic, sum_in_k_order

if TYPE_CHECKING:
    from moe_runtime.dispatch.grouping import GroupPairs


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

    group: GroupPairs = group_pairs
    name: str = "local"
    traffic: Traffic = field(default_factory=Traffic)

    def dispatch(self, x_TD: torch.Tensor, plan: DispatchPlan) -> Done[ExpertBatch]:
        """The pairs (token, slot) sorted by slot, then token."""
        grouping = self.group(plan.global_slot_TK, plan.slots_per_rank)
        pair_S = grouping.expert_rows()
        self.traffic.dispatches += 1
        self.traffic.bytes_local += x_TD.nbytes
        return Done(
            ExpertBatch(
                tokens_RD=x_TD,
                row_index_S=torch.div(pair_S, plan.global_slot_TK.shape[1], rounding_mode="floor"),
                num_rows_p=grouping.num_rows_p,
                handle=grouping,
                num_rows=pair_S.shape[0] if pair_S.device.type == "cpu" else None,
            )
        )

    def combine(self, y_SD: torch.Tensor, batch: ExpertBatch, plan: DispatchPlan) -> Done[torch.Tensor]:
        """Sums each token's rows of y_SD with its routing weights, in float32 and in k order. Returns (T, D)."""
        grouping: Grouping = batch.handle
        rows = batch.row_index_S
        all_present = rows.device.type == "cpu" and rows.shape[0] == plan.global_slot_TK.numel()
        self.traffic.combines += 1
        self.traffic.bytes_local += y_SD.nbytes
        return Done(sum_in_k_order(y_SD, grouping.position_TK, plan.topk_weights_TK, all_present=all_present))

    def check(self) -> None:
        """There are no peers."""

    def close(self) -> None:
        """Nothing to release."""
