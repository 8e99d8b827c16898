"""The experts chosen for every token of some requests: the latest ones, in bounded memory.

Legend: t tokens kept, T tokens of a part of a step, L MoE layers, K experts per token.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

    from moe_runtime.placement.record import Array

_ENTRY_BYTES = 8 + 1 + 4
"""Of a token beside its experts."""


class RouteRing:
    """Old tokens give way to new ones."""

    def __init__(self, num_layers: int, top_k: int, memory_bytes: int, share: float) -> None:
        """share: of requests, 0 to 1; which ones follows from their ids alone."""
        room = memory_bytes // (2 * num_layers * top_k + _ENTRY_BYTES) if share and num_layers else 0
        self._share = share
        self._ids_tLK = np.zeros((room, num_layers, top_k), dtype=np.int16)
        self._step_t = np.zeros(room, dtype=np.int64)
        self._phase_t = np.zeros(room, dtype=np.int8)
        self._request_t = np.zeros(room, dtype=np.int32)
        self.clear()

    def clear(self) -> None:
        """Forget all."""
        self._next = 0

    @property
    def num_bytes(self) -> int:
        """What it takes, however many tokens come."""
        return self._ids_tLK.nbytes + self._step_t.nbytes + self._phase_t.nbytes + self._request_t.nbytes

    def request_number(self, request_id: str) -> int | None:
        """The number under which the routes of this request are kept; None if they are not."""
        number = zlib.crc32(request_id.encode()) >> 1
        return number if number < self._share * 2**31 else None

    def add(
        self,
        step: int,
        decode_T: torch.Tensor,
        sampled: tuple[tuple[int, int, int], ...],
        ids_LTK: torch.Tensor,
    ) -> None:
        """Tokens of the `sampled` (first row, rows, request number). Copies from a device, which it waits for, only if there are any."""
        room = len(self._step_t)
        for first, total, number in sampled if room else ():
            count = min(total, room)
            rows = slice(first + total - count, first + total)
            ids_tLK = ids_LTK[:, rows].permute(1, 0, 2).cpu().numpy()
            place = (self._next + np.arange(count)) % room
            self._ids_tLK[place] = ids_tLK
            self._step_t[place] = step
            self._phase_t[place] = decode_T[rows].numpy()
            self._request_t[place] = number
            self._next += count

    def arrays(self) -> dict[str, Array]:
        """Oldest token first, by the names of `record.RANK_ARRAYS`."""
        room = len(self._step_t)
        kept = min(self._next, room)
        place = (self._next - kept + np.arange(kept)) % max(1, room)
        return {
            "routes_step_t": self._step_t[place],
            "routes_phase_t": self._phase_t[place],
            "routes_request_t": self._request_t[place],
            "routes_topk_ids_tLK": self._ids_tLK[place],
        }
