"""Rows that travel as FP8 with their scales, over any dispatcher: half the bytes of bfloat16.

    row   | D x float8 e4m3 | padding to 4 | ceil(D / 128) x float32 scales |

Rows are rounded before they leave and come out in the model's dtype again, also where nothing travels: so the result
depends on this setting, not on the dispatcher or the number of ranks. Results return in the model's dtype.

Legend: T tokens here, R token rows received, D hidden, S expert rows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from moe_runtime.dispatch.base import Deferred
from moe_runtime.quantization import FP8, GROUP, dequantize_rows, quantize_rows

if TYPE_CHECKING:
    from moe_runtime.core import DispatchPlan, ExpertBatch
    from moe_runtime.dispatch.base import Dispatcher, Pending
    from moe_runtime.dispatch.rows import Traffic


def _scales_at(hidden_size: int) -> int:
    return -(-hidden_size // 4) * 4


def row_bytes(hidden_size: int) -> int:
    """Bytes of a row of `hidden_size` values."""
    return _scales_at(hidden_size) + 4 * -(-hidden_size // GROUP)


def pack_rows(x_TD: torch.Tensor) -> torch.Tensor:
    """x_TD: float. Returns uint8 (T, row_bytes(D))."""
    payload, scale = quantize_rows(x_TD)
    at = _scales_at(x_TD.shape[1])
    rows = torch.zeros(x_TD.shape[0], at + 4 * scale.shape[1], dtype=torch.uint8, device=x_TD.device)
    rows[:, : x_TD.shape[1]] = payload.view(torch.uint8)
    rows[:, at:].view(torch.float32).copy_(scale)
    return rows


def unpack_rows(rows: torch.Tensor, hidden_size: int, dtype: torch.dtype) -> torch.Tensor:
    """rows: uint8 (R, row_bytes(hidden_size)). Returns (R, hidden_size) in `dtype`."""
    scale = rows[:, _scales_at(hidden_size) :].view(torch.float32)
    return dequantize_rows(rows[:, :hidden_size].view(FP8), scale).to(dtype)


class Fp8Payload:
    """Wraps a dispatcher: what it is given travels as FP8. Combine is the wrapped dispatcher's own."""

    def __init__(self, inner: Dispatcher) -> None:
        self.name = f"{inner.name}, fp8 payload"
        self.inner = inner

    @property
    def traffic(self) -> Traffic:
        """The wrapped dispatcher's."""
        return self.inner.traffic

    def dispatch(self, x_TD: torch.Tensor, plan: DispatchPlan) -> Pending[ExpertBatch]:
        """As the wrapped dispatcher's. The batch's tokens have the dtype of x_TD, rounded through FP8."""
        hidden_size, dtype = x_TD.shape[1], x_TD.dtype
        pending = self.inner.dispatch(pack_rows(x_TD), plan)

        def finish() -> ExpertBatch:
            batch = pending.wait()
            return replace(batch, tokens_RD=unpack_rows(batch.tokens_RD, hidden_size, dtype))

        return Deferred(finish)

    def combine(self, y_SD: torch.Tensor, batch: ExpertBatch, plan: DispatchPlan) -> Pending[torch.Tensor]:
        """The wrapped dispatcher's."""
        return self.inner.combine(y_SD, batch, plan)

    def close(self) -> None:
        """Close the wrapped dispatcher."""
        self.inner.close()
