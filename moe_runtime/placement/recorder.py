"""What each step asked of the experts, kept in bounded memory: always on, on every rank.

Counts go into windows of equally many steps. When all windows are used, each pair of neighbours becomes one of twice as many
steps; so the record reaches back to its start, its memory never grows, and the number of windows stays between half of the room
and all of it. Merging happens once in (room / 2) windows, that is ever more rarely.

Nothing here makes the host wait for a device: counts are added where the router left its choice, and are read by `arrays` alone.

Legend: T tokens of a part of the step, K experts per token, L MoE layers, E experts, P phases, W windows, p slots of this rank.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from moe_runtime.errors import ConfigError
from moe_runtime.placement.record import PHASES
from moe_runtime.placement.route_ring import RouteRing

if TYPE_CHECKING:
    from moe_runtime.placement.record import Array, RankSlots

DECODE = PHASES.index("decode")
KEPT_ROWS = 128
"""Steps whose rows are kept until `take_rows`."""


_WINDOW = np.dtype(
    [
        ("first_step", np.int64),
        ("num_steps", np.int64),
        ("end_time", np.float64),
        ("placement", np.int32),
        ("tokens", np.int64, (len(PHASES),)),
        ("wait_us", np.int64),
        ("forward_us", np.int64),
    ]
)


@dataclass(frozen=True)
class PartTokens:
    """The tokens of one part of a step, in the order of the batch."""

    decode_T: torch.Tensor
    """int64 on the host: 1 for a token whose sequence computes just it and has its prompt behind it."""
    sampled: tuple[tuple[int, int, int], ...] = ()
    """(first row, rows, number of the request) of requests whose routes are kept."""


class StepRows(NamedTuple):
    """Expert rows that this rank computed in one step."""

    step: int
    phase: int
    """PHASES index: prefill if any rank had a token of a prompt in the step."""
    rows: list[int]
    """By MoE layer."""


@dataclass
class _Window:
    """The current window's figures; see `record.LoadRecord`."""

    first_step: int = 0
    num_steps: int = 0
    tokens: tuple[int, int] = (0, 0)
    wait_us: int = 0
    forward_us: int = 0


class LoadRecorder:
    """One rank's record. `begin_step`, then `count` and `computed` from the MoE layers, then `end_step`."""

    def __init__(
        self,
        num_layers: int,
        num_experts: int,
        top_k: int,
        memory_bytes: int,
        device: torch.device,
        placement: RankSlots,
        routes_share: float = 0.0,
    ) -> None:
        """memory_bytes: for windows and, if routes_share > 0, the routes of that share of requests (half each).

        Raises ConfigError if it has no room for two windows.
        """
        # Expert -1, which is none, counts in front of expert 0 and is never read.
        self._width = num_experts + 1
        routes_bytes = memory_bytes // 2 if routes_share else 0
        window_bytes = 4 * len(PHASES) * num_layers * self._width
        room = (memory_bytes - routes_bytes) // window_bytes // 2 * 2
        self.routes = RouteRing(num_layers, top_k, routes_bytes, routes_share)
        if room < 2 and num_layers:
            raise ConfigError(
                f"a record of expert loads needs room for two windows of {window_bytes} bytes, {memory_bytes} are given;"
                f" set expert_load_memory_mib to {-(-2 * window_bytes * (2 if routes_share else 1) // 2**20)} at least"
            )
        # 10^5 windows are history enough, also for the smallest model.
        room = min(room, 100_000) if num_layers else 2
        self._counts = torch.zeros(
            room, len(PHASES), num_layers, self._width, dtype=torch.int32, device=device
        )
        self._windows = np.zeros(room, dtype=_WINDOW)
        self._layer_offset_L11 = (torch.arange(num_layers, device=device) * self._width + 1).view(-1, 1, 1)
        self._parts: list[PartTokens] = []
        self._ids: list[torch.Tensor] = []
        self._rows: list[torch.Tensor] = []
        self._keys = torch.empty(0, dtype=torch.int64, device=device)
        self._ones = torch.ones(0, dtype=torch.int32, device=device)
        self._num_layers = num_layers
        self._step = 0
        self.recording = True
        self.placements = [placement]
        """Those in force since `start`, oldest first."""
        self._kept_rows: deque[tuple[int, int, torch.Tensor]] = deque(maxlen=KEPT_ROWS)
        self.start()

    def start(self) -> None:
        """Forget what was recorded, and record."""
        self._counts.zero_()
        self._windows[:] = 0
        self._used, self._stride, self._window = 0, 1, _Window()
        self.placements = self.placements[-1:]
        self.routes.clear()
        self.recording = True

    def stop(self) -> None:
        """Record no more until `start`; what there is stays."""
        self.recording = False

    def set_placement(self, slots: RankSlots) -> None:
        """Another placement is in force from the next step on; its windows are its own until windows are merged."""
        if self._window.num_steps:
            self._advance()
        self.placements.append(slots)

    def begin_step(self, parts: list[PartTokens]) -> None:
        """The tokens of the parts that will go through the layers, in that order in each layer."""
        self._parts, self._ids, self._rows = parts, [], []

    def count(self, topk_ids_TK: torch.Tensor) -> None:
        """A part's choice in a layer: layer by layer, in each of them the parts in turn."""
        self._ids.append(topk_ids_TK)

    def computed(self, num_rows_p: torch.Tensor) -> None:
        """Rows of this rank's slots in some layer; layer by layer, several times if it computes in parts."""
        self._rows.append(num_rows_p)

    def end_step(self, forward_us: int, wait_us: int, prefill: bool) -> None:
        """Add the step. `prefill`: whether any rank had a token of a prompt in it."""
        if self._rows:
            phase = PHASES.index("prefill") if prefill else DECODE
            self._kept_rows.append((self._step, phase, torch.stack(self._rows)))
        if self.recording:
            self._record(forward_us, wait_us)
        self._step += 1
        self._parts, self._ids, self._rows = [], [], []

    def take_rows(self) -> list[StepRows]:
        """Rows of the steps since the last call, or of the latest 128. Waits for the device."""
        kept = [
            StepRows(step, phase, rows_xp.view(self._num_layers, -1).sum(dim=1).tolist())
            for step, phase, rows_xp in self._kept_rows
        ]
        self._kept_rows.clear()
        return kept

    @property
    def num_bytes(self) -> int:
        """What the record takes, however long it gets."""
        return self._counts.nbytes + self._windows.nbytes + self.routes.num_bytes

    def arrays(self) -> dict[str, Array]:
        """The record as `record.write_rank` wants it."""
        used = self._used
        if self._window.num_steps:
            self._close_window()
            used += 1
        windows = self._windows[:used]
        counts = self._counts[:used, :, :, 1:].cpu().numpy()
        return {
            "first_step_W": windows["first_step"].copy(),
            "num_steps_W": windows["num_steps"].copy(),
            "end_time_W": windows["end_time"].copy(),
            "placement_W": windows["placement"].copy(),
            "counts_WPLE": counts,
            "tokens_WP": windows["tokens"].copy(),
            "wait_us_W": windows["wait_us"].copy(),
            "forward_us_W": windows["forward_us"].copy(),
            **self.routes.arrays(),
        }

    def _record(self, forward_us: int, wait_us: int) -> None:
        tokens = [0, 0]
        for i, part in enumerate(self._parts):
            num_tokens, num_decode = len(part.decode_T), int(part.decode_T.sum())
            tokens[DECODE] += num_decode
            tokens[1 - DECODE] += num_tokens - num_decode
            ids = self._ids[i :: len(self._parts)]
            if num_tokens and ids:
                assert len(ids) == self._num_layers, f"{len(ids)} choices for {self._num_layers} layers"
                ids_LTK = self._stack(ids)
                self.routes.add(self._step, part.decode_T, part.sampled, ids_LTK)
                self._add(ids_LTK, part.decode_T, num_decode)
        window = self._window
        if not window.num_steps:
            window.first_step = self._step
        window.num_steps += 1
        window.tokens = (window.tokens[0] + tokens[0], window.tokens[1] + tokens[1])
        window.wait_us += wait_us
        window.forward_us += forward_us
        if window.num_steps == self._stride:
            self._advance()

    def _stack(self, ids: list[torch.Tensor]) -> torch.Tensor:
        """(L, T, K), in memory that is used again: fresh pages would cost more than the counting."""
        size = len(ids) * ids[0].numel()
        if self._keys.numel() < size:
            self._keys = ids[0].new_empty(size)
            self._ones = torch.ones(size, dtype=torch.int32, device=ids[0].device)
        stacked = self._keys[:size].view(len(ids), *ids[0].shape)
        return torch.stack(ids, out=stacked)

    def _add(self, ids_LTK: torch.Tensor, decode_T: torch.Tensor, num_decode: int) -> None:
        keys = ids_LTK.add_(self._layer_offset_L11)
        phase_size = self._num_layers * self._width
        if num_decode == len(decode_T):
            keys += phase_size * DECODE
        elif num_decode:
            keys += (decode_T.to(keys.device, non_blocking=True) * (phase_size * DECODE)).view(1, -1, 1)
        self._counts[self._used].view(-1).scatter_add_(0, keys.view(-1), self._ones[: keys.numel()])

    def _close_window(self) -> None:
        """Put the current window's figures beside its counts."""
        window = self._window
        self._windows[self._used] = (
            window.first_step,
            window.num_steps,
            time.time(),
            len(self.placements) - 1,
            window.tokens,
            window.wait_us,
            window.forward_us,
        )

    def _advance(self) -> None:
        """End the current window and begin the next."""
        self._close_window()
        self._window = _Window()
        self._used += 1
        room = len(self._windows)
        if self._used < room:
            return
        half = room // 2
        for i in range(half):
            self._counts[i] = self._counts[2 * i] + self._counts[2 * i + 1]
        self._counts[half:] = 0
        first, second = self._windows[::2], self._windows[1::2].copy()
        second["first_step"] = first["first_step"]
        for name in ("num_steps", "tokens", "wait_us", "forward_us"):
            second[name] += first[name]
        self._windows[:half], self._windows[half:] = second, 0
        self._used, self._stride = half, 2 * self._stride
