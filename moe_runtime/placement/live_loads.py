"""What this rank's tokens asked of the experts lately, in windows of steps that are the same on all ranks.

Legend: T tokens, K experts per token, W windows, L MoE layers, E experts.
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
    """add(), called by the recorder, and step_done() are the step thread's; snapshot() is any thread's."""

    def __init__(self, num_layers: int, num_experts: int, window_size: int, device: torch.device) -> None:
        """`window_size`: steps that count, rounded up to NUM_WINDOWS windows."""
        self.window_steps = -(-window_size // NUM_WINDOWS)
        # Column 0 takes the padding.
        self._counts_LE1 = torch.zeros(num_layers, num_experts + 1, dtype=torch.int64, device=device)
        self._ones = torch.ones(0, dtype=torch.int64, device=device)
        self._num_steps = 0
        self._lock = threading.Lock()
        self._windows: deque[tuple[int, Array]] = deque(maxlen=NUM_WINDOWS)

    def add(self, keys: torch.Tensor) -> None:
        """Count choices: int64, each MoE layer * (E + 1) + 1 + expert, where expert -1 is none. No host synchronisation."""
        if self._ones.shape[0] < keys.shape[0]:
            self._ones = self._ones.new_ones(keys.shape[0])
        self._counts_LE1.view(-1).scatter_add_(0, keys, self._ones[: keys.shape[0]])

    def step_done(self) -> None:
        """A step's choices have all been added. Every rank calls it after every step."""
        self._num_steps += 1
        if self._num_steps % self.window_steps:
            return
        counts_LE = self._counts_LE1[:, 1:].cpu().numpy().copy()
        self._counts_LE1.zero_()
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
