"""The experts chosen for every token of some requests: the latest ones, in bounded memory.

Legend: t tokens kept, T tokens of a part of a step, L MoE layers, K experts per token.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import numpy as np
import torch

from moe_runtime.placement.record import PHASES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moe_runtime.placement.record import Array
    from moe_runtime.placement.recorder import PartTokens

DECODE = PHASES.index("decode")
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

    @property
    def keeps_any(self) -> bool:
        """Whether any request's routes are kept."""
        return len(self._step_t) > 0

    def request_number(self, request_id: str) -> int | None:
        """The number under which the routes of this request are kept; None if they are not."""
        number = zlib.crc32(request_id.encode()) >> 1
        return number if number < self._share * 2**31 else None

    def add(self, step: int, part: PartTokens, choices: Sequence[torch.Tensor]) -> None:
        """Tokens of the part's sampled requests; choices: (T, K) of each layer. Copies from a device, which it waits for, only if there are any."""
        room = len(self._step_t)
        if not room or not part.sampled:
            return
        rows_t = np.concatenate([np.arange(first, first + total) for first, total, _ in part.sampled])[-room:]
        numbers_t = np.repeat([s[2] for s in part.sampled], [s[1] for s in part.sampled])[-room:]
        begin = int(rows_t.min())
        within = slice(begin, int(rows_t.max()) + 1)
        ids_tLK = torch.stack([ids_TK[within] for ids_TK in choices], dim=1).cpu().numpy()[rows_t - begin]
        place_t = (self._next + np.arange(len(rows_t))) % room
        self._ids_tLK[place_t] = ids_tLK
        self._step_t[place_t] = step
        self._phase_t[place_t] = DECODE if part.decode_T is None else part.decode_T.numpy()[rows_t]
        self._request_t[place_t] = numbers_t
        self._next += len(rows_t)

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
