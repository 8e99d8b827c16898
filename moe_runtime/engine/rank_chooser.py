"""Which rank gets a request: the one with the least left to do, as far as the front-end knows."""

from __future__ import annotations

from dataclasses import dataclass

from moe_runtime.engine.messages import RankStats
from moe_runtime.errors import OverloadedError, RequestError


@dataclass
class RankLoad:
    """What the front-end has sent to a rank and not seen finished."""

    num_sequences: int = 0
    num_tokens: int = 0
    """Prompt tokens not known to be done, and output tokens still allowed."""


class RankChooser:
    """Least outstanding tokens first; of equals, the next in turn."""

    def __init__(self, num_ranks: int, max_running: int, max_queued: int | None) -> None:
        """`max_queued` sequences may wait per rank beside `max_running`; None: any number."""
        self.loads = [RankLoad() for _ in range(num_ranks)]
        self.stats = [RankStats() for _ in range(num_ranks)]
        """Latest gauges by rank."""
        self._max_running = max_running
        self._max_queued = max_queued
        self._next = 0

    def choose(self, pinned: int | None) -> int:
        """The rank for a request, or `pinned` itself.

        Raises RequestError if there is no such rank, OverloadedError if too many requests wait.
        """
        num_ranks = len(self.loads)
        if pinned is not None:
            if isinstance(pinned, bool) or not 0 <= pinned < num_ranks:
                raise RequestError(
                    f"routed_dp_rank={pinned!r}: ranks are 0 to {num_ranks - 1}", "routed_dp_rank"
                )
            if self._is_full(pinned):
                raise OverloadedError(
                    f"{self._max_queued} requests are waiting for rank {pinned} (max_queued_requests)"
                )
            return pinned
        in_turn = [(self._next + i) % num_ranks for i in range(num_ranks)]
        free = [rank for rank in in_turn if not self._is_full(rank)]
        if not free:
            raise OverloadedError(
                f"{self._max_queued} requests are waiting on every rank (max_queued_requests)"
            )
        best = min(free, key=lambda rank: self.loads[rank].num_tokens)
        self._next = (best + 1) % num_ranks
        return best

    def _is_full(self, rank: int) -> bool:
        if self._max_queued is None:
            return False
        num = self.loads[rank].num_sequences
        # The rank may run fewer than it could for want of memory. Its count may be old, hence the bound by our own.
        waiting = max(num - self._max_running, min(self.stats[rank].num_waiting, num))
        return waiting >= self._max_queued
