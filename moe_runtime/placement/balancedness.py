"""How evenly ranks are loaded, from the rows that each computed: the front-end's view of a running server.

balancedness of a set of steps = sum over steps and layers of the mean over ranks of expert rows
                               / sum over steps and layers of the most rows on any rank

A step's experts take as long as the fullest rank needs in each layer, so 1 / balancedness is how many times longer they take than
with a perfect balance. It is 1 if all ranks have equally many rows, 1 / N if one rank has them all.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from moe_runtime.placement.record import PHASES

WINDOW_STEPS = 256
"""Steps of a phase that `of` looks back on."""
_MISSING_STEPS = 4096
"""A step of which some rank has not told by so many steps later never will be complete."""


def balancedness(rows_SLN: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> float | None:
    """rows_SLN: rows that rank n computed for layer l in step s. None if there are no rows."""
    fullest = int(rows_SLN.max(axis=-1).sum()) if rows_SLN.size else 0
    return float(rows_SLN.mean(axis=-1).sum()) / fullest if fullest else None


class BalanceWatch:
    """Puts the ranks' rows together, step by step."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._steps: dict[int, dict[int, list[int]]] = {}
        """Those that some ranks have not told of: {step: {rank: rows by layer}}."""
        self._latest: tuple[deque[tuple[float, int]], ...] = tuple(deque(maxlen=WINDOW_STEPS) for _ in PHASES)
        """(sum over layers of the mean, of the most) of complete steps, by phase."""
        self.rows: list[list[int]] = [[0] * num_ranks for _ in PHASES]
        """Expert rows computed since the start, by phase and rank."""

    def see(self, rank: int, steps: list[tuple[int, int, list[int]]]) -> None:
        """News of one rank: (step, PHASES index, rows by layer)."""
        for step, phase, rows in steps:
            self.rows[phase][rank] += sum(rows)
            told = self._steps.setdefault(step, {})
            told[rank] = rows
            if len(told) == self._num_ranks:
                del self._steps[step]
                rows_NL = np.array(list(told.values()))
                self._latest[phase].append(
                    (float(rows_NL.mean(axis=0).sum()), int(rows_NL.max(axis=0).sum()))
                )
        if steps:
            for old in [step for step in self._steps if step < steps[-1][0] - _MISSING_STEPS]:
                del self._steps[old]

    def of(self, phase: str) -> float | None:
        """Balancedness of the latest steps of the phase; None before the first."""
        latest = self._latest[PHASES.index(phase)]
        fullest = sum(most for _, most in latest)
        return sum(mean for mean, _ in latest) / fullest if fullest else None
