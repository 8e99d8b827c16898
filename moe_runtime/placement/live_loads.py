"""What this rank's tokens asked of the experts lately, in windows of steps that are the same on all ranks.

Legend: W windows, L MoE layers, P phases, E experts.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

NUM_WINDOWS = 8
"""Into which the steps that count are cut."""

Array = npt.NDArray[Any]


class LiveLoads:
    """`closing` and add(), used by the recorder, and step_done() are the step thread's; snapshot() is any thread's."""

    def __init__(self, num_layers: int, num_experts: int, window_size: int, device: torch.device) -> None:
        """`window_size`: steps that count, rounded up to NUM_WINDOWS windows."""
        self.window_steps = -(-window_size // NUM_WINDOWS)
        self._counts_LE = torch.zeros(num_layers, num_experts, dtype=torch.int64, device=device)
        self._num_steps = 0
        self._lock = threading.Lock()
        self._windows: deque[tuple[int, Array]] = deque(maxlen=NUM_WINDOWS)

    @property
    def closing(self) -> bool:
        """Whether the next step_done() ends a window: all counts of its steps must have been added before."""
        return (self._num_steps + 1) % self.window_steps == 0

    def add(self, counts_LPE: torch.Tensor) -> None:
        """Add choices counted by layer, phase and expert. No host synchronisation."""
        self._counts_LE += counts_LPE.sum(dim=1)

    def step_done(self) -> None:
        """A step's choices have all been added. Every rank calls it after every step."""
        self._num_steps += 1
        if self._num_steps % self.window_steps:
            return
        counts_LE = self._counts_LE.cpu().numpy().copy()
        self._counts_LE.zero_()
        with self._lock:
            self._windows.append((self._num_steps // self.window_steps, counts_LE))

    def snapshot(self) -> dict[int, Array]:
        """Finished windows by number, oldest first: int64 (L, E)."""
        with self._lock:
            return dict(self._windows)


def join_windows(ranks: list[dict[int, Array]]) -> Array:
    """int64 (W, L, E): sums over ranks of the windows that all of them have, oldest first; W may be 0."""
    common = sorted(set.intersection(*(set(windows) for windows in ranks)))
    shape = next((w.shape for windows in ranks for w in windows.values()), (0, 0))
    if not common:
        return np.zeros((0, *shape), dtype=np.int64)
    return np.stack([sum((windows[i] for windows in ranks), np.zeros(shape, np.int64)) for i in common])
