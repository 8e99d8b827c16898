"""Random steps to be recorded, and what loops count of them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from moe_runtime.placement.placement_log import KEPT_PLACEMENTS
from moe_runtime.placement.recorder import SCRATCH_IDS, LoadRecorder, PartTokens
from moe_runtime.placement.windows import LoadWindows

L, E, K = 3, 5, 2
PLACEMENT = [[[0, 1, 2, 3, 4]]] * L
ROUTE_BYTES = 2 * L * K + 13


WORKING = SCRATCH_IDS * (8 + 4) + 4 * 2 * L * E + KEPT_PLACEMENTS * 2 * L * E
"""What counting takes: choices of int64, ones of int32, the counts of a window; and what placements take."""


def make(windows: int, share: float = 0.0, routes: int = 0) -> LoadRecorder:
    """Room for so many windows; with a share, for so many routes at least."""
    memory = windows * LoadWindows.bytes_per_window(L, E) + WORKING
    if share:
        memory = 2 * max(memory, routes * ROUTE_BYTES)
    return LoadRecorder(L, E, K, memory, torch.device("cpu"), PLACEMENT, share)


class Step:
    """A random step in one or two parts."""

    def __init__(self, draw: random.Random, num_parts: int) -> None:
        sizes = [draw.choice([0, 1, 4, 9]) for _ in range(num_parts)]
        # Steps that only decode are told and counted in a way of their own.
        least = draw.randrange(2)
        self.decode = [[draw.randint(least, 1) for _ in range(size)] for size in sizes]
        self.ids = [
            [[[draw.randrange(E) for _ in range(K)] for _ in range(size)] for _ in range(L)] for size in sizes
        ]
        self.sampled = [((0, size, 7),) if size and draw.random() < 0.5 else () for size in sizes]
        self.rows_on_device = draw.random() < 0.5

    def play(self, recorder: LoadRecorder, prefill: bool = False) -> None:
        recorder.begin_step(
            [
                PartTokens(len(d), None if all(d) else torch.tensor(d, dtype=torch.int64), s)
                for d, s in zip(self.decode, self.sampled, strict=True)
            ]
        )
        for layer in range(L):
            for ids in self.ids:
                recorder.count(torch.tensor(ids[layer], dtype=torch.int64).view(-1, K))
                recorder.computed(torch.tensor([layer, 1]) if self.rows_on_device else layer + 1)
        recorder.end_step(10, 3, prefill, sum(map(len, self.decode)))

    def counts(self) -> np.ndarray[Any, Any]:
        counts = np.zeros((2, L, E), dtype=np.int64)
        for decode, ids in zip(self.decode, self.ids, strict=True):
            for layer in range(L):
                for phase, token in zip(decode, ids[layer], strict=True):
                    for expert in token:
                        counts[phase, layer, expert] += 1
        return counts
