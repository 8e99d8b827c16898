"""Between `held` (which rank has a replica of which expert) and slots (which slot it is in).

Legend: L layers, N ranks, E experts, p slots per rank. `held` is bool (L, N, E).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def held_of(slots_LNp: Array, num_experts: int) -> Array:
    """bool (L, N, E) from int64 (L, N, p) with -1 for empty slots."""
    held_LNE = np.zeros((*slots_LNp.shape[:2], num_experts), dtype=bool)
    layer, rank, slot = np.nonzero(slots_LNp >= 0)
    held_LNE[layer, rank, slots_LNp[layer, rank, slot]] = True
    return held_LNE


def of_slots(values_LE: Array, slots_LNp: Array, empty: Any) -> Array:
    """(L, N, p): each slot's expert's value, `empty` where a slot is empty."""
    values_LNp = np.take_along_axis(values_LE[:, None], np.maximum(slots_LNp, 0), axis=2)
    return np.where(slots_LNp >= 0, values_LNp, empty)


def arrange(held_LNE: Array, current_LNp: Array | None = None) -> tuple[Array, int]:
    """Give replicas slots: those a rank has stay where they are, new ones fill its free slots in order.

    Returns int64 (L, N, p), -1 where empty, and the number of replicas that a rank did not have.
    """
    num_layers, num_ranks, num_experts = held_LNE.shape
    width = int(held_LNE.sum(axis=2).max())
    if current_LNp is None:
        current_LNp = np.full((num_layers, num_ranks, 0), -1, dtype=np.int64)
    slots_LNp = np.full((num_layers, num_ranks, max(width, current_LNp.shape[2])), -1, dtype=np.int64)
    stays_LNp = (current_LNp >= 0) & np.take_along_axis(held_LNE, np.maximum(current_LNp, 0), axis=2)
    slots_LNp[:, :, : current_LNp.shape[2]] = np.where(stays_LNp, current_LNp, -1)
    new_LNE = held_LNE & ~held_of(slots_LNp, num_experts)
    layer, rank, expert = np.nonzero(new_LNE)
    place = np.arange(len(expert))
    starts = np.flatnonzero(np.diff(layer * num_ranks + rank, prepend=-1))
    place -= np.repeat(starts, np.diff(starts, append=len(expert)))
    if current_LNp.shape[2]:
        free_first = np.argsort(slots_LNp >= 0, axis=2, kind="stable")
        place = free_first[layer, rank, place]
    slots_LNp[layer, rank, place] = expert
    return slots_LNp, len(expert)
