"""What each step asked of the experts, kept in bounded memory: always on, on every rank.

Choices are kept as the router left them until the step is over, and are then counted for all layers at once. Counts go into
`windows`. Nothing here makes the host wait for a device: that happens in `arrays` and `take_rows` alone.

Legend: T tokens of a part of the step, K experts per token, L MoE layers, E experts, P phases, p slots of this rank.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from moe_runtime.errors import ConfigError
from moe_runtime.placement.record import PHASES
from moe_runtime.placement.route_ring import RouteRing
from moe_runtime.placement.windows import MAX_TOKENS, LoadWindows, WindowFigures

if TYPE_CHECKING:
    from moe_runtime.placement.live_loads import LiveLoads
    from moe_runtime.placement.record import Array, RankSlots

PREFILL, DECODE = PHASES.index("prefill"), PHASES.index("decode")
KEPT_ROWS = 128
"""Steps whose rows are kept until `take_rows`."""
SCRATCH_IDS = 1 << 15
"""Choices that are counted at a time; they and the counts stay in the second-level cache of a CPU."""
MAX_WINDOWS = 100_000
"""History enough, also for the smallest model."""


@dataclass(frozen=True)
class PartTokens:
    """The tokens of one part of a step, in the order of the batch."""

    num_tokens: int
    """Without padding."""
    decode_T: torch.Tensor | None = None
    """int64 on the host: 1 for a token whose sequence computes just it and has its prompt behind it. None: all are of that kind."""
    sampled: tuple[tuple[int, int, int], ...] = ()
    """(first row, rows, number of the request) of requests whose routes are kept."""


class StepRows(NamedTuple):
    """Expert rows that this rank computed in one step."""

    step: int
    phase: int
    """PHASES index: prefill if any rank had a token of a prompt in the step."""
    rows: list[int]
    """By MoE layer."""


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
        self._num_layers, self._num_experts = num_layers, num_experts
        # What the current step's choices are counted with, and what was counted since the last `_settle`.
        self._ids = torch.zeros(SCRATCH_IDS, dtype=torch.int64, device=device)
        self._ones = torch.ones(SCRATCH_IDS, dtype=torch.int32, device=device)
        self._counts_LPE = torch.zeros(num_layers, len(PHASES), num_experts, dtype=torch.int32, device=device)
        self._decode_LE = self._counts_LPE[:, DECODE]
        routes_bytes = memory_bytes // 2 if routes_share else 0
        self.routes = RouteRing(num_layers, top_k, routes_bytes, routes_share)
        self.windows = self._make_windows(memory_bytes, memory_bytes - routes_bytes)
        self._parts: list[PartTokens] = []
        self._choices: list[torch.Tensor] = []
        self._rows: list[int | torch.Tensor] = []
        self._step = 0
        self.recording = True
        self.live: LiveLoads | None = None
        """Is given the counts too, whether they are recorded or not."""
        self.placements = [placement]
        """Those in force since `start`, oldest first."""
        self._kept_rows: deque[tuple[int, int, list[int] | torch.Tensor]] = deque(maxlen=KEPT_ROWS)
        self._window = WindowFigures()

    def _make_windows(self, memory_bytes: int, share_bytes: int) -> LoadWindows:
        """As many windows as share_bytes of memory_bytes hold beside what counting takes."""
        per_window = LoadWindows.bytes_per_window(self._num_layers, self._num_experts)
        working = self._working_bytes
        room = (share_bytes - working) // per_window // 2 * 2 if self._num_layers else 2
        if room < 2:
            least = (2 * per_window + working) * (memory_bytes // max(1, share_bytes))
            raise ConfigError(
                f"a record of expert loads needs room for two windows of {per_window} bytes, and {working} bytes to count with;"
                f" {memory_bytes} bytes are given; set expert_load_memory_mib to {-(-least // 2**20)} at least"
            )
        return LoadWindows(
            min(room, MAX_WINDOWS), self._num_layers, self._num_experts, self._counts_LPE.device
        )

    @property
    def _working_bytes(self) -> int:
        return self._ids.nbytes + self._ones.nbytes + self._counts_LPE.nbytes

    def start(self) -> None:
        """Forget what was recorded, and record."""
        self._settle(record=False)
        self.windows.clear()
        self._window = WindowFigures()
        self.placements = self.placements[-1:]
        self.routes.clear()
        self.recording = True

    def stop(self) -> None:
        """Record no more until `start`; what there is stays."""
        if self._window.num_steps:
            self._advance()
        self.recording = False

    def set_placement(self, slots: RankSlots) -> None:
        """Another placement is in force from the next step on; its windows are its own until windows are merged."""
        if self._window.num_steps:
            self._advance()
        self.placements.append(slots)

    def begin_step(self, parts: list[PartTokens]) -> None:
        """The tokens of the parts that will go through the layers, in that order in each layer."""
        self._parts, self._choices, self._rows = parts, [], []

    def count(self, topk_ids_TK: torch.Tensor) -> None:
        """A part's choice in a layer, without padding: layer by layer, in each of them the parts in turn.

        int64, contiguous, from 0 to E - 1; it must not change before `end_step`.
        """
        self._choices.append(topk_ids_TK)

    def computed(self, num_rows: int | torch.Tensor) -> None:
        """Expert rows of this rank in some layer, or int64 (p,) those of each slot; layer by layer, several times if it computes in parts."""
        self._rows.append(num_rows)

    def end_step(self, forward_us: int, wait_us: int, prefill: bool, max_num_tokens: int) -> None:
        """Add the step. `prefill`: whether any rank had a token of a prompt in it. max_num_tokens: of the rank that had most."""
        if self._rows:
            self._kept_rows.append((self._step, PREFILL if prefill else DECODE, _joined(self._rows)))
        if self.recording or self.live is not None:
            self._record(forward_us, wait_us, max_num_tokens)
        self._step += 1
        self._parts, self._choices, self._rows = [], [], []

    def take_rows(self) -> list[StepRows]:
        """Rows of the steps since the last call, or of the latest 128. Waits for the device."""
        taken = []
        for step, phase, rows in self._kept_rows:
            if isinstance(rows, torch.Tensor):
                by_layer = rows.view(self._num_layers, -1).sum(dim=1).tolist()
            else:
                parts = len(rows) // self._num_layers
                by_layer = (
                    rows if parts == 1 else [sum(rows[i : i + parts]) for i in range(0, len(rows), parts)]
                )
            taken.append(StepRows(step, phase, by_layer))
        self._kept_rows.clear()
        return taken

    @property
    def num_bytes(self) -> int:
        """What the record takes, however long it gets."""
        return self._working_bytes + self.windows.num_bytes + self.routes.num_bytes

    def arrays(self) -> dict[str, Array]:
        """The record as `record.write_rank` wants it. Copies."""
        if self._window.num_steps:
            self._settle(record=True)
        return self.windows.arrays(self._window, len(self.placements) - 1) | self.routes.arrays()

    def _record(self, forward_us: int, wait_us: int, max_num_tokens: int) -> None:
        if self.recording and self._window.most_tokens + max_num_tokens > MAX_TOKENS:
            self._advance()
        for i, part in enumerate(self._parts):
            choices = self._choices[i :: len(self._parts)]
            if part.num_tokens and choices:
                assert len(choices) == self._num_layers, f"{len(choices)} choices, {self._num_layers} layers"
                self._add(choices, part)
                if self.recording:
                    self.routes.add(self._step, part, choices)
        if self.recording:
            window, tokens = self._window, self._tokens()
            if not window.num_steps:
                window.first_step = self._step
            window.num_steps += 1
            window.tokens = (window.tokens[0] + tokens[0], window.tokens[1] + tokens[1])
            window.wait_us += wait_us
            window.forward_us += forward_us
            window.most_tokens += max_num_tokens
            if window.num_steps >= self.windows.stride:
                self._advance()
        if self.live is not None and self.live.closing:
            self._settle(record=self._window.num_steps > 0)

    def _tokens(self) -> tuple[int, int]:
        """The step's tokens by phase."""
        total = sum(part.num_tokens for part in self._parts)
        decode = sum(
            part.num_tokens if part.decode_T is None else int(part.decode_T.sum()) for part in self._parts
        )
        return (total - decode, decode)

    def _add(self, choices: list[torch.Tensor], part: PartTokens) -> None:
        """Count a part's choices of all layers."""
        size = choices[0].numel()
        counts_LX, offset = self._decode_LE, None
        if part.decode_T is not None:
            # Where the counts of each choice's phase begin within its layer's.
            offset = (part.decode_T * self._num_experts).repeat_interleave(choices[0].shape[1])
            counts_LX = self._counts_LPE.view(self._num_layers, -1)
            offset = offset.to(counts_LX.device, non_blocking=True)
        at_once = max(1, SCRATCH_IDS // size)
        for layer in range(0, self._num_layers, at_once):
            some = choices[layer : layer + at_once]
            for begin in range(0, size, SCRATCH_IDS):
                keys = self._scratch(some, slice(begin, begin + SCRATCH_IDS))
                if offset is not None:
                    keys += offset[begin : begin + SCRATCH_IDS]
                ones = self._ones[: keys.numel()].view(keys.shape)
                counts_LX[layer : layer + at_once].scatter_add_(1, keys, ones)

    def _scratch(self, choices: list[torch.Tensor], cut: slice) -> torch.Tensor:
        """(layers, pairs): joined in memory that is used again; fresh pages would cost more than the counting."""
        flat = [ids_TK.view(-1)[cut] for ids_TK in choices] if choices[0].numel() > SCRATCH_IDS else choices
        keys = self._ids[: len(flat) * flat[0].numel()].view(len(flat), *flat[0].shape)
        return torch.stack(flat, out=keys).view(len(flat), -1)

    def _settle(self, record: bool) -> None:
        """Give away what was counted: to the live windows and, if wanted, to the open one."""
        if self.live is not None:
            self.live.add(self._counts_LPE)
        if record:
            self.windows.add(self._counts_LPE)
        self._counts_LPE.zero_()

    def _advance(self) -> None:
        """End the current window and begin the next."""
        self._settle(record=True)
        self.windows.close(self._window, len(self.placements) - 1)
        self._window = WindowFigures()


def _joined(rows: list[int | torch.Tensor]) -> list[int] | torch.Tensor:
    """Rows of a step as one thing; the host reads nothing of a device."""
    tensors = [r for r in rows if isinstance(r, torch.Tensor)]
    if not tensors:
        return [r for r in rows if isinstance(r, int)]
    assert len(tensors) == len(rows), "rows of some layers are on a device, of others on the host"
    return torch.stack(tensors)
