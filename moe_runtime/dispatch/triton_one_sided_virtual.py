"""Several ranks in one process and on one device: the same kernels, with a table of addresses that all lie here.

For checks of the kernels where there is one GPU, or none. The ranks go through each phase one after another, so no
kernel ever waits for stores that have not been launched.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch

from moe_runtime.core import DispatchPlan, ExpertBatch
from moe_runtime.dispatch.triton_one_sided import TritonOneSidedDispatcher
from moe_runtime.dispatch.triton_one_sided_transfer import Transfer

V = TypeVar("V")


class VirtualHeap:
    """Rank `rank`'s view of segments that all lie in this process. A SymmetricHeap."""

    def __init__(self, rank: int, segments: Sequence[torch.Tensor]) -> None:
        """segments: every rank's uint8 segment, zero, on one device, aligned to 64 bytes."""
        self.rank = rank
        self.num_ranks = len(segments)
        self.segment = segments[rank]
        addresses = [segment.data_ptr() for segment in segments]
        self.addresses_N = torch.tensor(addresses, dtype=torch.int64, device=self.segment.device)
        # The others' memory must live as long as it can be written.
        self._segments = segments

    def close(self) -> None:
        """Drop the memory. Idempotent."""
        self._segments = ()


class VirtualRanks:
    """N dispatchers in one process, each call made by all of them together."""

    def __init__(
        self,
        num_ranks: int,
        bytes_per_rank: int,
        device: torch.device,
        *,
        hidden_size: int,
        topk: int,
        dtype: torch.dtype,
        combine: str = "exact",
        in_flight: int = 1,
        step_timeout: float = 10.0,
    ) -> None:
        """As TritonOneSidedDispatcher; bytes_per_rank: a multiple of 64."""
        with torch.inference_mode(False):
            segments = [
                torch.zeros(bytes_per_rank, dtype=torch.uint8, device=device) for _ in range(num_ranks)
            ]
        self.dispatchers = [
            TritonOneSidedDispatcher(
                VirtualHeap(rank, segments),
                hidden_size=hidden_size,
                topk=topk,
                dtype=dtype,
                step_timeout=step_timeout,
                is_alive=lambda _: True,
                combine=combine,
                in_flight=in_flight,
            )
            for rank in range(num_ranks)
        ]

    def dispatch(self, xs: Sequence[torch.Tensor], plans: Sequence[DispatchPlan]) -> list[ExpertBatch]:
        """What every rank receives, given every rank's x_TD and plan."""
        pairs = zip(self.dispatchers, xs, plans, strict=True)
        return _together([d.dispatch(x, plan) for d, x, plan in pairs])

    def combine(
        self, ys: Sequence[torch.Tensor], batches: Sequence[ExpertBatch], plans: Sequence[DispatchPlan]
    ) -> list[torch.Tensor]:
        """Every rank's out_TD, given every rank's y_SD."""
        quads = zip(self.dispatchers, ys, batches, plans, strict=True)
        return _together([d.combine(y, batch, plan) for d, y, batch, plan in quads])

    def close(self) -> None:
        """Give the memory back. Idempotent."""
        for dispatcher in self.dispatchers:
            dispatcher.close()


def _together(transfers: Sequence[Transfer[V]]) -> list[V]:
    for _ in range(transfers[0].num_rounds):
        for transfer in transfers:
            transfer.advance()
    return [transfer.wait() for transfer in transfers]
