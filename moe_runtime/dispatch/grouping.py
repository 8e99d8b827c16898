"""Pairs (token, k) grouped by the slot that computes them.

Legend: T tokens, K experts per token, S = T * K pairs, p slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True)
class Grouping:
    """The S pairs ordered by (slot, token, k); those with slot -1 behind all others, in their order."""

    pair_S: torch.Tensor
    """int64: expert row -> pair, that is token * K + k."""
    position_TK: torch.Tensor
    """int64: pair -> expert row; -1 for slot -1."""
    num_rows_p: torch.Tensor
    """int64: pairs of each slot."""

    def expert_rows(self) -> torch.Tensor:
        """pair_S as far as it has slots; where the host reads nothing, on a GPU, all of it."""
        on_cpu = self.pair_S.device.type == "cpu"
        return self.pair_S[: int(self.num_rows_p.sum())] if on_cpu else self.pair_S


if TYPE_CHECKING:
    GroupPairs = Callable[[torch.Tensor, int], Grouping]
    """(slot_TK, num_slots) -> Grouping."""


def group_pairs(slot_TK: torch.Tensor, num_slots: int) -> Grouping:
    """slot_TK: int64, from -1 to num_slots - 1. No host synchronisation. T may be 0."""
    slot = slot_TK.reshape(-1)
    # Pairs without an expert sort behind the last slot.
    key = torch.where(slot >= 0, slot, num_slots)
    pair_S = key.argsort(stable=True)
    rows = torch.zeros(num_slots + 1, dtype=torch.int64, device=slot.device)
    rows.scatter_add_(0, key, torch.ones_like(key))
    position = torch.empty_like(slot)
    position[pair_S] = torch.arange(pair_S.shape[0], device=slot.device)
    position.masked_fill_(slot < 0, -1)
    return Grouping(pair_S=pair_S, position_TK=position.view(slot_TK.shape), num_rows_p=rows[:num_slots])
