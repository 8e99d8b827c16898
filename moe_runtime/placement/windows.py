"""Counts in windows of steps, in a fixed amount of memory and without long pauses.

When all windows are used, new ones become twice as long, and each of them takes the place that the merging of the two oldest
neighbours not merged yet has freed. By the time that all are merged, all are of the new length, and it goes on like this:

    room 4, steps of each window     1 1 1 1  ->  2 1 1 2  ->  2 2 2 2  ->  4 2 2 4  -> ...

So the record reaches back to its start, and one pair at most is merged at a time. Nothing here depends on what a rank counted:
the windows of all ranks are the same if they are told of the same steps.

Legend: W windows, L MoE layers, P phases, E experts.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from moe_runtime.placement.record import PHASES

if TYPE_CHECKING:
    from moe_runtime.placement.record import Array

MAX_TOKENS = 2**31 - 1
"""Of a rank in a window: no expert can be chosen more often, so that int32 holds every count."""

_FIGURES = np.dtype(
    [
        ("first_step", np.int64),
        ("num_steps", np.int64),
        ("end_time", np.float64),
        ("placement", np.int32),
        ("tokens", np.int64, (len(PHASES),)),
        ("wait_us", np.int64),
        ("forward_us", np.int64),
        ("most_tokens", np.int64),
    ]
)


@dataclass
class WindowFigures:
    """A window's figures; see `record.LoadRecord`."""

    first_step: int = 0
    num_steps: int = 0
    tokens: tuple[int, int] = (0, 0)
    wait_us: int = 0
    forward_us: int = 0
    most_tokens: int = 0
    """The sum over steps of the tokens of the rank that had most: alike on all ranks, whose windows must be the same."""


class LoadWindows:
    """`add` counts to the open window, `close` it with its figures; whoever calls closes it after `stride` steps."""

    def __init__(self, room: int, num_layers: int, num_experts: int, device: torch.device) -> None:
        """room: windows, a multiple of 2."""
        assert room >= 2, f"{room} windows"
        assert room % 2 == 0, f"{room} windows"
        shape = (room, num_layers, len(PHASES), num_experts)
        # Written to at once: pages that are touched for the first time in a step would cost that step as much as the counting.
        self._counts = torch.empty(shape, dtype=torch.int32, device=device).zero_()
        self._figures = np.zeros(room, dtype=_FIGURES)
        self.clear()

    @staticmethod
    def bytes_per_window(num_layers: int, num_experts: int) -> int:
        """What one takes."""
        return 4 * len(PHASES) * num_layers * num_experts + _FIGURES.itemsize

    def clear(self) -> None:
        """Forget all."""
        self.stride = 1
        self._order: list[int] = []
        """Places of the closed windows, oldest first."""
        self._open: int | None = None
        """Place of the open window, once it has counts."""
        self._position = self._pairs_left = 0
        """In `_order`: the next pair to merge; how many pairs must be merged before windows become longer again."""

    @property
    def num_bytes(self) -> int:
        """What they take, however many steps come."""
        return int(self._counts.nbytes + self._figures.nbytes)

    def add(self, counts_LPE: torch.Tensor) -> None:
        """Add int32 counts to the open window."""
        if self._open is None:
            self._open = self._place()
            self._counts[self._open].copy_(counts_LPE)
        else:
            self._counts[self._open].add_(counts_LPE)

    def close(self, figures: WindowFigures, placement: int) -> None:
        """The open window, to which counts were added, is complete. placement: see LoadRecord.placement_W."""
        assert self._open is not None
        self._figures[self._open] = self._row(figures, placement)
        self._order.append(self._open)
        self._open = None
        if len(self._order) == len(self._figures) and not self._pairs_left:
            self._position, self._pairs_left = 0, len(self._figures) // 2
            self.stride *= 2

    def arrays(self, figures: WindowFigures, placement: int) -> dict[str, Array]:
        """Copies of all windows by the names of `record.RANK_ARRAYS`; `figures` are those of the open one, if it has counts."""
        order = list(self._order)
        if self._open is not None:
            self._figures[self._open] = self._row(figures, placement)
            order.append(self._open)
        rows = self._figures[order]
        counts_WLPE = self._counts[torch.tensor(order, dtype=torch.int64, device=self._counts.device)]
        return {
            "first_step_W": rows["first_step"].copy(),
            "num_steps_W": rows["num_steps"].copy(),
            "end_time_W": rows["end_time"].copy(),
            "placement_W": rows["placement"].copy(),
            "counts_WPLE": counts_WLPE.cpu().numpy().transpose(0, 2, 1, 3),
            "tokens_WP": rows["tokens"].copy(),
            "wait_us_W": rows["wait_us"].copy(),
            "forward_us_W": rows["forward_us"].copy(),
        }

    @staticmethod
    def _row(figures: WindowFigures, placement: int) -> tuple[Any, ...]:
        f = figures
        times = (f.wait_us, f.forward_us)
        return (f.first_step, f.num_steps, time.time(), placement, f.tokens, *times, f.most_tokens)

    def _place(self) -> int:
        """A free place. Merges a pair of windows if there is none; forgets the oldest if the pair is too much for int32."""
        if len(self._order) < len(self._figures):
            return len(self._order)
        self._pairs_left -= 1
        into, gone = self._order[self._position : self._position + 2]
        first, second = self._figures[into], self._figures[gone]
        if first["most_tokens"] + second["most_tokens"] > MAX_TOKENS:
            self._position += 1
            return self._order.pop(0)
        self._counts[into].add_(self._counts[gone])
        second["first_step"] = first["first_step"]
        for name in ("num_steps", "tokens", "wait_us", "forward_us", "most_tokens"):
            second[name] += first[name]
        self._figures[into] = second
        self._position += 1
        return self._order.pop(self._position)
