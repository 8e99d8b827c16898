"""What this rank's tokens asked of the experts lately, in windows of steps that are the same on all ranks.

A step is of the kind PREFILL if any rank had a token of a prompt in it, else DECODE: the first has many times as many tokens as the
second, so what they take is modelled apart (`LiveTraffic.by_kind`).

Legend: W windows, N source ranks, L MoE layers, P phases (of tokens) or kinds (of steps), E experts.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from moe_runtime.placement.record import PHASES
from moe_runtime.placement.recorder import DECODE, PREFILL
from moe_runtime.placement.traffic import Traffic

NUM_WINDOWS = 8
"""Into which the steps that count are cut."""

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class LiveWindow:
    """One rank's part of a window."""

    counts_LPE: Array
    """int64: (token, k) pairs of its tokens, by phase of the token."""
    steps_P: tuple[int, int]
    """Steps of either kind, the same on all ranks."""


class LiveLoads:
    """`closing` and add(), used by the recorder, and step_done() are the step thread's; snapshot() is any thread's."""

    def __init__(self, num_layers: int, num_experts: int, window_size: int, device: torch.device) -> None:
        """`window_size`: steps that count, rounded up to NUM_WINDOWS windows."""
        self.window_steps = -(-window_size // NUM_WINDOWS)
        shape = (num_layers, len(PHASES), num_experts)
        self._counts_LPE = torch.zeros(shape, dtype=torch.int64, device=device)
        self._num_steps = self._num_prefill = 0
        self._lock = threading.Lock()
        self._windows: deque[tuple[int, LiveWindow]] = deque(maxlen=NUM_WINDOWS)

    @property
    def closing(self) -> bool:
        """Whether the next step_done() ends a window: all counts of its steps must have been added before."""
        return (self._num_steps + 1) % self.window_steps == 0

    def add(self, counts_LPE: torch.Tensor) -> None:
        """Add choices counted by layer, phase and expert. No host synchronisation."""
        self._counts_LPE += counts_LPE

    def step_done(self, prefill: bool) -> None:
        """A step's choices have all been added; `prefill`: its kind. Every rank calls it after every step."""
        self._num_steps += 1
        self._num_prefill += prefill
        if self._num_steps % self.window_steps:
            return
        steps_P = (self._num_prefill, self.window_steps - self._num_prefill)
        window = LiveWindow(self._counts_LPE.cpu().numpy().copy(), steps_P)
        self._counts_LPE.zero_()
        self._num_prefill = 0
        with self._lock:
            self._windows.append((self._num_steps // self.window_steps, window))

    def snapshot(self) -> dict[int, LiveWindow]:
        """Finished windows by number, oldest first."""
        with self._lock:
            return dict(self._windows)


@dataclass(frozen=True)
class LiveTraffic:
    """Windows of all ranks, oldest first; there may be none."""

    counts_WNLPE: Array
    """int64 (token, k) pairs."""
    steps_WP: Array
    """int64."""

    @property
    def loads(self) -> Array:
        """int64 (W, L, E): sums over sources and phases."""
        loads_WLE: Array = self.counts_WNLPE.sum(axis=(1, 3))
        return loads_WLE

    def newest(self, num_windows: int) -> LiveTraffic:
        """Only the last of its windows, one or more."""
        return LiveTraffic(self.counts_WNLPE[-num_windows:], self.steps_WP[-num_windows:])

    def by_kind(self, top_k: int) -> Traffic:
        """Each window as up to two, of its steps with prompts and of those without; without those that have no tokens.

        Counts are by phase of the token, not by kind of step: decoding tokens are taken to be equally many in all steps of a window.
        """
        steps_WP = self.steps_WP
        total_W = steps_WP.sum(axis=1)
        prompts_WNLE, decode_WNLE = self.counts_WNLPE[:, :, :, PREFILL], self.counts_WNLPE[:, :, :, DECODE]
        beside_WNLE = decode_WNLE * steps_WP[:, PREFILL, None, None, None] // total_W[:, None, None, None]
        counts_XNLE = np.concatenate([prompts_WNLE + beside_WNLE, decode_WNLE - beside_WNLE])
        steps_X = np.concatenate([steps_WP[:, PREFILL], steps_WP[:, DECODE]])
        some_X = (steps_X > 0) & counts_XNLE.any(axis=(1, 2, 3))
        # Every layer sees all tokens.
        tokens_XN = -(-counts_XNLE[:, :, 0].sum(axis=2) // top_k)
        return Traffic(counts_XNLE[some_X], tokens_XN[some_X], steps_X[some_X])


def join_windows(ranks: list[dict[int, LiveWindow]]) -> LiveTraffic:
    """The windows that all ranks have."""
    common = sorted(set.intersection(*(set(windows) for windows in ranks)))
    shape = next((w.counts_LPE.shape for windows in ranks for w in windows.values()), (0, len(PHASES), 0))
    counts_WNLPE = np.zeros((len(common), len(ranks), *shape), dtype=np.int64)
    for place, number in enumerate(common):
        for rank, windows in enumerate(ranks):
            counts_WNLPE[place, rank] = windows[number].counts_LPE
    steps = [ranks[0][number].steps_P for number in common]
    return LiveTraffic(counts_WNLPE, np.array(steps, dtype=np.int64).reshape(-1, len(PHASES)))
