"""Which placements were in force while loads were recorded: a bounded number of them, each under a number that never changes.

Legend: L MoE layers, N ranks, p slots per rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from moe_runtime.placement.record import NO_PLACEMENT

if TYPE_CHECKING:
    from collections.abc import Iterable

    from moe_runtime.placement.record import Array, RankSlots

KEPT_PLACEMENTS = 16


class PlacementLog:
    """The placement in force and the latest of those before it."""

    def __init__(self, slots: RankSlots) -> None:
        """slots: what is in force. All placements noted later must have its shape."""
        self.current = 0
        """Number of the placement in force."""
        self._kept: dict[int, Array] = {0: _compact(slots)}
        """int16 (L, N, p), by number, oldest first."""

    @property
    def num_bytes(self) -> int:
        """What the log takes when it is full."""
        return KEPT_PLACEMENTS * self._kept[self.current].nbytes

    def note(self, slots: RankSlots, wanted: Iterable[int]) -> None:
        """Another placement is in force, unless it is the same. wanted: numbers that windows refer to; the others are forgotten first."""
        compact = _compact(slots)
        if np.array_equal(compact, self._kept[self.current]):
            return
        if len(self._kept) == KEPT_PLACEMENTS:
            still = set(wanted)
            del self._kept[next((n for n in self._kept if n not in still), next(iter(self._kept)))]
        self.current += 1
        self._kept[self.current] = compact

    def forget_past(self) -> None:
        """Keep what is in force only."""
        self._kept = {self.current: self._kept[self.current]}

    def slots(self) -> list[RankSlots]:
        """Those kept, oldest first."""
        return [kept.tolist() for kept in self._kept.values()]

    def indices(self, numbers_W: Array) -> Array:
        """int32 (W,): where in `slots` each of these numbers is; NO_PLACEMENT for those forgotten, and for NO_PLACEMENT."""
        place = {number: index for index, number in enumerate(self._kept)}
        return np.array([place.get(n, NO_PLACEMENT) for n in numbers_W.tolist()], dtype=np.int32)


def _compact(slots: RankSlots) -> Array:
    return np.array(slots, dtype=np.int16)
