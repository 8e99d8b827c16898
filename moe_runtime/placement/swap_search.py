"""A plan near the current placement: per layer, swaps of two experts and moves of replicas while they relieve the fullest rank.

Few experts travel, since every step must take work from the rank that a layer waits for. Deterministic.

Legend: W windows, L MoE layers, E experts, N ranks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from moe_runtime.core import ExpertPlacement

Array = npt.NDArray[Any]
MIN_RELIEF = 0.005
"""Share of the fullest rank's rows that a swap must take from it."""


def improve(loads_WLE: Array, current: ExpertPlacement) -> ExpertPlacement:
    """As balancer.Plan. Every rank keeps as many experts as it has."""
    loads_LE = loads_WLE.sum(axis=0).astype(np.float64)
    layers = tuple(
        _improve_layer(loads_E, [list(rank) for rank in slots])
        for loads_E, slots in zip(loads_LE, current.slots, strict=True)
    )
    return replace(current, slots=layers)


def _improve_layer(loads_E: Array, slots: list[list[int]]) -> tuple[tuple[int, ...], ...]:
    num_ranks = len(slots)
    for _ in range(4 * len(loads_E)):
        counts_E = np.bincount([e for rank in slots for e in rank if e >= 0], minlength=len(loads_E))
        share_E = loads_E / counts_E
        rows_N = np.array([sum(share_E[e] for e in rank if e >= 0) for rank in slots])
        fullest = int(rows_N.argmax())
        best: tuple[float, int, int, int] | None = None
        for other in range(num_ranks):
            for i, expert in enumerate(slots[fullest]):
                for j, partner in enumerate(slots[other]):
                    if min(expert, partner) < 0 or expert in slots[other] or partner in slots[fullest]:
                        continue
                    change = share_E[expert] - share_E[partner]
                    worst = max(rows_N[fullest] - change, rows_N[other] + change)
                    if worst < rows_N[fullest] * (1 - MIN_RELIEF) and (best is None or worst < best[0]):
                        best = worst, other, i, j
        if best is None:
            break
        _, other, i, j = best
        slots[fullest][i], slots[other][j] = slots[other][j], slots[fullest][i]
    return tuple(tuple(rank) for rank in slots)
