"""One MoE layer across ranks: dispatch, experts, combine. The only place where the three meet.

A pass through a layer has three stages, between which rows travel and the caller may do something else:

    begin     rows leave for their experts         | under way: dispatch
    compute   rows arrive, experts, results leave  | under way: combine
    finish    results arrive

With `chunks` > 1 the rows of a pass are cut into that many parts, and part i + 1 travels while part i computes.
Two transfers are under way at a time at most.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch

from moe_runtime.core import Routing
from moe_runtime.dispatch.base import ChooseReplicas, Dispatcher, plan_dispatch
from moe_runtime.profiling.timeline import EXPERTS, WAIT, Timeline

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from moe_runtime.core import DispatchPlan, ExpertBatch, LayerPlacement
    from moe_runtime.dispatch.base import Pending
    from moe_runtime.experts.base import ExpertKernel, ExpertWeights


@dataclass(frozen=True)
class MoeInput:
    """What goes through one MoE layer."""

    moe_layer: int
    """In model order, counting MoE layers only."""
    x_TD: torch.Tensor
    """Normed hidden states. They must not change until compute() has returned."""
    route: Callable[[], Routing]
    """The router, for these hidden states; called once."""
    weights: ExpertWeights
    """Of this rank's slots."""
    max_num_tokens: int
    """Largest T on any rank."""
    meanwhile: Callable[[], torch.Tensor] | None = None
    """A shared expert: computed while rows travel, its (T, D) added to the output."""
    packed_TB: torch.Tensor | None = None
    """x_TD as packed FP8 rows (`quantization.pack_rows`), which then travel in its stead. May not change either."""


class MoePass(Protocol):
    """A pass through a MoE layer that has begun; compute() and then finish() are called once each."""

    def compute(self) -> None:
        """Receive rows, compute the local experts, send the results."""
        ...

    def finish(self) -> torch.Tensor:
        """The layer's output, (T, D)."""
        ...


class RoutedExperts(Protocol):
    """What runs the routed experts of any MoE layer: collective over the ranks, also with T = 0."""

    @property
    def takes_packed(self) -> bool:
        """Whether rows travel as FP8: then they should come packed, since a norm can make them in passing."""
        ...

    def begin(self, work: MoeInput) -> MoePass:
        """Send rows to their experts."""
        ...


class ExpertWatch(Protocol):
    """Is told which experts are chosen, and how many rows are computed here; layer by layer."""

    def count(self, topk_ids_TK: torch.Tensor) -> None:
        """The choice for the tokens of a pass: int64 expert ids."""
        ...

    def computed(self, num_rows: int | torch.Tensor) -> None:
        """Expert rows computed here, or int64 (p,) those of each local slot; once for each part of a pass."""
        ...


@dataclass(frozen=True)
class ExpertParallelMoe:
    """Runs the routed experts of any MoE layer. Holds what knows of ranks, so that models need not."""

    dispatcher: Dispatcher
    kernel: ExpertKernel
    placements: Sequence[LayerPlacement]
    """One per MoE layer, in model order. Replaced between steps when experts move."""
    rank: int
    timeline: Timeline = field(default_factory=Timeline)
    """Is told what took how long."""
    chunks: int = 1
    """Parts in which the rows of a pass travel."""
    choose: ChooseReplicas = plan_dispatch
    """Picks the copy of an expert that computes a pair."""
    recorder: ExpertWatch | None = None
    takes_packed: bool = False
    """See RoutedExperts: whether the dispatcher has an FP8 payload."""

    def begin(self, work: MoeInput) -> ExpertParallelPass:
        """See RoutedExperts."""
        self.timeline.lap("attention", moe_layer=work.moe_layer, tokens=work.x_TD.shape[0])
        placement = self.placements[work.moe_layer]
        routing = work.route()
        self.timeline.lap("router", moe_layer=work.moe_layer)
        if self.recorder is not None:
            self.recorder.count(routing.topk_ids_TK)
        rows = work.x_TD if work.packed_TB is None else work.packed_TB
        parts = [
            _Part(rows_TD, self.choose(part, placement, self.rank, limit), work.moe_layer)
            for rows_TD, part, limit in cut_rows(rows, routing, work.max_num_tokens, self.chunks)
        ]
        return ExpertParallelPass(self, work.weights, parts, work.meanwhile)


def cut_rows(
    x_TD: torch.Tensor, routing: Routing, max_num_tokens: int, chunks: int
) -> list[tuple[torch.Tensor, Routing, int]]:
    """Rows, their routing and the most rows on any rank, for each of `chunks` parts; as many parts on every rank.

    Each rank cuts its own rows evenly, so a rank with few has empty parts at the end.
    """
    if chunks == 1:
        return [(x_TD, routing, max_num_tokens)]
    size, limit = -(-x_TD.shape[0] // chunks), -(-max_num_tokens // chunks)
    cuts = [slice(i * size, (i + 1) * size) for i in range(chunks)]
    ids, scales = routing.topk_ids_TK, routing.topk_weights_TK
    return [(x_TD[cut], Routing(ids[cut], scales[cut]), limit) for cut in cuts]


@dataclass
class _Part:
    """Rows that travel together: on their way out, then on their way back."""

    x_TD: torch.Tensor
    plan: DispatchPlan
    moe_layer: int
    sent: Pending[ExpertBatch] | None = None
    returned: Pending[torch.Tensor] | None = None
    track: int = 0
    """Of the timeline, while under way."""


class ExpertParallelPass:
    """See MoePass."""

    def __init__(
        self,
        moe: ExpertParallelMoe,
        weights: ExpertWeights,
        parts: list[_Part],
        meanwhile: Callable[[], torch.Tensor] | None,
    ) -> None:
        self._dispatcher, self._kernel, self._timeline = moe.dispatcher, moe.kernel, moe.timeline
        self._recorder = moe.recorder
        self._weights, self._parts = weights, parts
        for part in parts[:2]:
            self._send(part)
        self._beside: torch.Tensor | None = None
        if meanwhile is not None:
            self._beside = meanwhile()
            self._timeline.lap("shared expert", moe_layer=parts[0].moe_layer)

    def compute(self) -> None:
        """See MoePass. A part leaves when the one before it has arrived."""
        for i, part in enumerate(self._parts):
            assert part.sent is not None
            batch = part.sent.wait()
            self._arrived(part, "dispatch")
            if i and i + 1 < len(self._parts):
                self._send(self._parts[i + 1])
            y_SD = self._kernel(batch, self._weights)
            self._timeline.lap(EXPERTS, moe_layer=part.moe_layer, rows=y_SD.shape[0])
            if self._recorder is not None:
                self._recorder.computed(batch.num_rows_p if batch.num_rows is None else batch.num_rows)
            part.returned = self._dispatcher.combine(y_SD, batch, part.plan)
            self._left(part, "combine")

    def finish(self) -> torch.Tensor:
        """See MoePass."""
        outs = []
        for part in self._parts:
            assert part.returned is not None
            outs.append(part.returned.wait())
            self._arrived(part, "combine")
        out_TD = outs[0] if len(outs) == 1 else torch.cat(outs)
        return out_TD if self._beside is None else out_TD + self._beside

    def _send(self, part: _Part) -> None:
        part.sent = self._dispatcher.dispatch(part.x_TD, part.plan)
        self._left(part, "dispatch")

    def _left(self, part: _Part, what: str) -> None:
        self._timeline.lap(what, moe_layer=part.moe_layer)
        part.track = self._timeline.depart()

    def _arrived(self, part: _Part, what: str) -> None:
        self._timeline.arrive(part.track, f"{what} under way", moe_layer=part.moe_layer)
        self._timeline.lap(WAIT, moe_layer=part.moe_layer)
