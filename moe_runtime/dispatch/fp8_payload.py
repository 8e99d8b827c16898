"""Rows that travel as FP8 with their scales, over any dispatcher: half the bytes of bfloat16.

    row    | D x float8 e4m3 | padding to 4 | G x float32 scales |     (quantization.pack_rows)

Rows are rounded before they leave, also where nothing travels: so the result depends on this setting, not on the dispatcher or the
number of ranks. A norm hands them out packed (`LayerOps.add_rms_norm_packed`); others are packed here. The batch has them as they
came (`ExpertBatch.scales`): experts that would round their input to FP8 in groups of 128 themselves compute the same bits as without
this setting. Results return in the model's dtype.

Legend: T tokens here, R token rows received, D hidden, G = ceil(D / 128) groups, S expert rows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from moe_runtime.core import RowScales
from moe_runtime.dispatch.base import Deferred
from moe_runtime.quantization import pack_rows, unpack_rows

if TYPE_CHECKING:
    from moe_runtime.core import DispatchPlan, ExpertBatch
    from moe_runtime.dispatch.base import Dispatcher, Pending
    from moe_runtime.dispatch.rows import Traffic


class Fp8Payload:
    """Wraps a dispatcher: what it is given travels as FP8. Combine is the wrapped dispatcher's own.

    packed_from: hidden size and dtype of the rows that come packed.
    """

    def __init__(self, inner: Dispatcher, packed_from: tuple[int, torch.dtype] | None = None) -> None:
        self.name = f"{inner.name}, fp8 payload"
        self.inner, self.packed_from = inner, packed_from

    @property
    def traffic(self) -> Traffic:
        """The wrapped dispatcher's."""
        return self.inner.traffic

    def dispatch(self, x_TD: torch.Tensor, plan: DispatchPlan) -> Pending[ExpertBatch]:
        """As the wrapped dispatcher's, of float rows or packed ones (uint8). The batch's tokens are FP8 with scales."""
        if x_TD.dtype == torch.uint8:
            assert self.packed_from is not None, "packed rows of an unknown hidden size"
            packed_TB, (hidden_size, dtype) = x_TD, self.packed_from
        else:
            packed_TB, hidden_size, dtype = pack_rows(x_TD), x_TD.shape[1], x_TD.dtype
        pending = self.inner.dispatch(packed_TB, plan)

        def finish() -> ExpertBatch:
            batch = pending.wait()
            values_RD, scale_RG = unpack_rows(batch.tokens_RD, hidden_size)
            return replace(batch, tokens_RD=values_RD, scales=RowScales(scale_RG, dtype))

        return Deferred(finish)

    def combine(self, y_SD: torch.Tensor, batch: ExpertBatch, plan: DispatchPlan) -> Pending[torch.Tensor]:
        """The wrapped dispatcher's."""
        return self.inner.combine(y_SD, batch, plan)

    def check(self) -> None:
        """The wrapped dispatcher's."""
        self.inner.check()

    def close(self) -> None:
        """Close the wrapped dispatcher."""
        self.inner.close()
