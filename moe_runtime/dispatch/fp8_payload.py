"""Rows that travel as FP8 with their scales, over any dispatcher: half the bytes of bfloat16.

    row    | D x float8 e4m3 | padding to 4 | G x float32 scales |

Rows are rounded before they leave, also where nothing travels: so the result depends on this setting, not on the dispatcher or the
number of ranks. The batch has them as they came (`ExpertBatch.scales`): experts that would round their input to FP8 in groups of
128 themselves compute the same bits as without this setting. Results return in the model's dtype.

Legend: T tokens here, R token rows received, D hidden, G = ceil(D / 128) groups, S expert rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from moe_runtime.core import RowScales
from moe_runtime.dispatch.base import Deferred
from moe_runtime.quantization import FP8, GROUP, quantize_rows

if TYPE_CHECKING:
    from moe_runtime.core import DispatchPlan, ExpertBatch
    from moe_runtime.dispatch.base import Dispatcher, Pending
    from moe_runtime.dispatch.rows import Traffic

QuantizeInto = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
"""(x, values, scale): round x (T, D) into values (T, D) and scale (T, G), views whose rows lie apart."""


def row_bytes(hidden_size: int) -> int:
    """Bytes of a row of `hidden_size` values."""
    return _scales_at(hidden_size) + 4 * -(-hidden_size // GROUP)


def _scales_at(hidden_size: int) -> int:
    return -(-hidden_size // 4) * 4


def quantize_into(x: torch.Tensor, values: torch.Tensor, scale: torch.Tensor) -> None:
    """QuantizeInto by torch."""
    payload, scales = quantize_rows(x)
    values.copy_(payload)
    scale.copy_(scales)


def pack_rows(x_TD: torch.Tensor, quantize: QuantizeInto = quantize_into) -> torch.Tensor:
    """x_TD: float. Returns uint8 (T, row_bytes(D))."""
    T, D = x_TD.shape
    rows = torch.empty(T, row_bytes(D), dtype=torch.uint8, device=x_TD.device)
    rows[:, D : _scales_at(D)] = 0
    quantize(x_TD, *unpack_rows(rows, D))
    return rows


def unpack_rows(rows: torch.Tensor, hidden_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """rows: uint8 (R, row_bytes(hidden_size)). Returns FP8 (R, hidden_size) and float32 scales (R, G), views of them."""
    return rows[:, :hidden_size].view(FP8), rows[:, _scales_at(hidden_size) :].view(torch.float32)


class Fp8Payload:
    """Wraps a dispatcher: what it is given travels as FP8. Combine is the wrapped dispatcher's own."""

    def __init__(self, inner: Dispatcher, quantize: QuantizeInto = quantize_into) -> None:
        self.name = f"{inner.name}, fp8 payload"
        self.inner = inner
        self._quantize = quantize

    @property
    def traffic(self) -> Traffic:
        """The wrapped dispatcher's."""
        return self.inner.traffic

    def dispatch(self, x_TD: torch.Tensor, plan: DispatchPlan) -> Pending[ExpertBatch]:
        """As the wrapped dispatcher's. The batch's tokens are FP8 with scales."""
        hidden_size, dtype = x_TD.shape[1], x_TD.dtype
        pending = self.inner.dispatch(pack_rows(x_TD, self._quantize), plan)

        def finish() -> ExpertBatch:
            batch = pending.wait()
            values_RD, scale_RG = unpack_rows(batch.tokens_RD, hidden_size)
            return replace(batch, tokens_RD=values_RD, scales=RowScales(scale_RG, dtype))

        return Deferred(finish)

    def combine(self, y_SD: torch.Tensor, batch: ExpertBatch, plan: DispatchPlan) -> Pending[torch.Tensor]:
        """The wrapped dispatcher's."""
        return self.inner.combine(y_SD, batch, plan)

    def close(self) -> None:
        """Close the wrapped dispatcher."""
        self.inner.close()
