"""A dispatcher whose batches are capacity-shaped, seen as one whose batches have exactly the rows that there are.

Lets the contract's tests for CPU dispatchers run on it unchanged. What lies behind the valid rows is NaN on the way back,
so that reading it shows.
"""

from __future__ import annotations

from typing import Any

import torch

from moe_runtime.core import DispatchPlan, ExpertBatch
from moe_runtime.dispatch.base import Deferred
from moe_runtime.dispatch.triton_one_sided import TritonOneSidedDispatcher
from moe_runtime.dispatch.triton_one_sided_virtual import VirtualRanks


def exact(batch: ExpertBatch) -> ExpertBatch:
    """The batch without its empty token rows and what follows its last expert row."""
    num_rows = int(batch.num_rows_p.sum())
    # A row that nobody sent has the record -1, token included.
    there_R = batch.handle.record_RX[:, 0] >= 0
    number_R = there_R.cumsum(0) - 1
    row_index_S = batch.row_index_S[:num_rows]
    assert bool(there_R[row_index_S].all()), "an expert row names a token row that nobody sent"
    return ExpertBatch(batch.tokens_RD[there_R], number_R[row_index_S], batch.num_rows_p, batch)


def padded(y_SD: torch.Tensor, batch: ExpertBatch) -> torch.Tensor:
    """Expert rows in the shape that the whole `batch` asks for, NaN behind the valid ones."""
    whole = torch.full((batch.row_index_S.shape[0], y_SD.shape[1]), torch.nan, dtype=y_SD.dtype)
    whole[: y_SD.shape[0]] = y_SD
    return whole


class ExactRows:
    """See the module. A Dispatcher."""

    def __init__(self, inner: TritonOneSidedDispatcher) -> None:
        self.name = f"exact({inner.name})"
        self.inner = inner
        self.traffic = inner.traffic

    def dispatch(self, x_TD: torch.Tensor, plan: DispatchPlan) -> Deferred[ExpertBatch]:
        pending = self.inner.dispatch(x_TD, plan)
        return Deferred(lambda: exact(pending.wait()))

    def combine(self, y_SD: torch.Tensor, batch: ExpertBatch, plan: DispatchPlan) -> Any:
        return self.inner.combine(padded(y_SD, batch.handle), batch.handle, plan)

    def close(self) -> None:
        self.inner.close()


def dispatch_exact(
    ranks: VirtualRanks, xs: list[torch.Tensor], plans: list[DispatchPlan]
) -> list[ExpertBatch]:
    """VirtualRanks.dispatch with exact batches."""
    return [exact(batch) for batch in ranks.dispatch(xs, plans)]


def combine_exact(
    ranks: VirtualRanks, ys: list[torch.Tensor], batches: list[ExpertBatch], plans: list[DispatchPlan]
) -> list[torch.Tensor]:
    """VirtualRanks.combine for batches of dispatch_exact."""
    whole = [batch.handle for batch in batches]
    return ranks.combine([padded(y, b) for y, b in zip(ys, whole, strict=True)], whole, plans)
