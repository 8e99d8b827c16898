"""The lockstep header: one small all-gather per step, from which every rank takes the same decision."""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from moe_runtime.errors import LockstepError

if TYPE_CHECKING:
    from moe_runtime.topology import Topology


class MoveVote(NamedTuple):
    """What a rank's header says of a move of experts."""

    move: int = 0
    """Number of the move it takes part in or, from rank 0, proposes; 0: none."""
    staged: int = 0
    """Changes of that move whose copies are there and verified."""
    failure: int = 0
    """Why it cannot go on with the move (`engine.mover.MoveFailure`); 0 if it can."""


@dataclass(frozen=True)
class Header:
    """What one rank says before a step."""

    step: int
    """Steps taken so far; must agree."""
    num_tokens: int
    """Tokens it will compute in this step; 0 takes part all the same."""
    first_tokens: int
    """How many of them are in the first half, if the step is cut in two (`overlap.half`)."""
    graph_ok: int
    """1 if it could replay a recorded decode step (`graphs.StepGraphs.fits`)."""
    has_work: int
    """1 if it has any sequence, even one that cannot run in this step."""
    last_tick: int
    """Number of the last front-end message seen."""
    stop: int
    """1 if it was told to stop."""
    prefill: int
    """1 if any of its tokens belongs to a prompt."""
    forward_us: int = 0
    """How long its last forward pass took; 0 once that has been told."""
    wait_us: int = 0
    """How long it waited for other ranks' rows in it."""
    experts_us: int = 0
    """How long it computed experts in it."""
    move: int = 0
    """This and the next two: see MoveVote."""
    staged: int = 0
    move_failure: int = 0


@dataclass(frozen=True)
class StepTimes:
    """Microseconds of a forward pass, put together from all ranks."""

    forward_us: int
    """Of the slowest rank."""
    wait_us: int
    """Of the rank that waited least: the last to come, which waits for rows on their way and for no rank."""
    experts_us: int
    """Of the busiest rank."""

    @property
    def compute_us(self) -> int:
        """What was not waiting."""
        return self.forward_us - self.wait_us


@dataclass(frozen=True)
class Agreement:
    """What follows from all headers; the same on every rank."""

    max_num_tokens: int
    max_halves: tuple[int, int]
    """Largest first and second half on any rank, if the step is cut in two."""
    graph_ok: bool
    """All could replay a recorded decode step, so all do."""
    any_work: bool
    max_tick: int
    same_tick: bool
    """All have seen the same front-end messages, so all may go idle."""
    stop: bool
    """All were told to stop."""
    prefill: bool
    """Some rank computes tokens of a prompt."""
    last_times: StepTimes | None
    """Of the step before, if its times have not been told yet."""
    move: int = 0
    """Number of the move of experts that is under way or begins now; 0: none."""
    staged: int = 0
    """Changes of it that every rank has staged."""
    move_failure: tuple[int, int] | None = None
    """A rank that cannot go on with it, and why."""
    min_tick: int = 0
    """Number of the last front-end message that all have seen."""


class Control:
    """Exchanges headers over gloo. Raises LockstepError when a peer has gone, is late, or is at another step."""

    def __init__(self, topology: Topology, step_timeout: float) -> None:
        """`step_timeout`: seconds that a peer may be late."""
        self._group = topology.control_group
        self._rank = topology.rank
        self._timeout = timedelta(seconds=step_timeout)
        self._rows = torch.empty(topology.world_size, len(fields(Header)), dtype=torch.int64)

    def exchange(self, header: Header) -> Agreement:
        """Collective."""
        own = torch.tensor(astuple(header), dtype=torch.int64)
        try:
            work = dist.all_gather(list(self._rows.unbind()), own, group=self._group, async_op=True)
            assert work is not None
            work.wait(self._timeout)
        except RuntimeError as error:
            raise LockstepError(
                f"rank {self._rank}, step {header.step}: a peer is gone or late ({error})"
            ) from error
        headers = [Header(*row) for row in self._rows.tolist()]
        if any(h.step != header.step for h in headers):
            raise LockstepError(f"ranks disagree about the step: {[h.step for h in headers]}")
        ticks = [h.last_tick for h in headers]
        return Agreement(
            max_num_tokens=max(h.num_tokens for h in headers),
            any_work=any(h.has_work for h in headers),
            max_tick=max(ticks),
            min_tick=min(ticks),
            same_tick=min(ticks) == max(ticks),
            stop=all(h.stop for h in headers),
            graph_ok=all(h.graph_ok for h in headers),
            prefill=any(h.prefill for h in headers),
            max_halves=(
                max(h.first_tokens for h in headers),
                max(h.num_tokens - h.first_tokens for h in headers),
            ),
            last_times=_slowest(headers),
            move=headers[0].move,
            staged=min(h.staged for h in headers),
            move_failure=next(((r, h.move_failure) for r, h in enumerate(headers) if h.move_failure), None),
        )


def _slowest(headers: list[Header]) -> StepTimes | None:
    # All ranks take every step, so all have times to tell, or none has.
    if not headers[0].forward_us:
        return None
    return StepTimes(
        forward_us=max(h.forward_us for h in headers),
        wait_us=min(h.wait_us for h in headers),
        experts_us=max(h.experts_us for h in headers),
    )
