"""One rank: nothing travels, tokens are only grouped by slot.

Legend: T tokens here, K experts per token, D hidden, S expert rows, p slots per rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from moe_runtime.core import DispatchPlan, ExpertBatch
from moe_runtime.dispatch.base import Done
from moe_runtime.dispatch.rows import Traffic, sum_in_k_order


def unsupported(num_ranks: int) -> str | None:
    """Why the local dispatcher cannot serve this, or None."""
    return None if num_ranks == 1 else f"{num_ranks} ranks; it serves exactly 1"


@dataclass
class LocalDispatcher:
    """The dispatcher of a single rank. The batch's tokens are x itself, not a copy.

    On a GPU nothing is read by the host: S is then the capacity T * K, and expert rows beyond
    num_rows_p.sum() belong to pairs with slot -1; whatever is computed for them is dropped.
    """

    name: str = "local"
    traffic: Traffic = field(default_factory=Traffic)

    def dispatch(self, x_TD: torch.Tensor, plan: DispatchPlan) -> Done[ExpertBatch]:
        """The pairs (token, slot) sorted by slot, then token."""
        slot = plan.global_slot_TK.reshape(-1)
        p, K = plan.slots_per_rank, plan.global_slot_TK.shape[1]
        # Pairs without an expert sort behind the last slot.
        key = torch.where(slot >= 0, slot, p)
        pair_S = key.argsort(stable=True)
        num_rows_p = torch.zeros(p + 1, dtype=torch.int64, device=slot.device)
        num_rows_p = num_rows_p.scatter_add_(0, key, torch.ones_like(key))[:p]
        if slot.device.type == "cpu":
            pair_S = pair_S[: int(num_rows_p.sum())]
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
        position = torch.full_like(slot_TK, -1).view(-1)
        position[pair_S] = torch.arange(pair_S.shape[0], device=pair_S.device)
        if pair_S.device.type != "cpu":
            position.masked_fill_(slot_TK.reshape(-1) < 0, -1)
        self.traffic.combines += 1
        position_TK = position.view(slot_TK.shape)
        return Done(sum_in_k_order(y_SD, position_TK, plan.topk_weights_TK, all_present=all_present))

    def close(self) -> None:
        """Nothing to release."""
