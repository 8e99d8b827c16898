"""Waiting for peers without hanging: every wait has a deadline and ends in LockstepError."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import cycle

import torch.distributed as dist

from moe_runtime.errors import LockstepError

IsAlive = Callable[[int], bool]
"""Whether the process of a rank still runs; called now and then while waiting for any rank."""

# Looks at a flag before the first sleep. A look with its sched_yield takes about a microsecond, so peers that
# are in step are seen at once, and one that computes for long is waited for at little cost.
_SPINS = 2000
# Before those, by a rank that has prepared nothing for a longer wait yet: peers in step are seen after a few.
_QUICK_LOOKS = 200
_SHORTEST_SLEEP = 50e-6
_LONGEST_SLEEP = 1e-3
_SECONDS_BETWEEN_ALIVE_CHECKS = 0.02


def seen_soon(words: memoryview, expected: int) -> bool:
    """Whether words[0] becomes `expected` within a few looks at it; wait_until() is for those who get False."""
    # A rank that shares its core with the one it waits for gives the core away before it does anything else.
    give_way = os.sched_yield
    for _ in range(_QUICK_LOOKS):
        give_way()
        if words[0] == expected:
            return True
    return False


def wait_until(
    arrived: Callable[[], bool], peers: Sequence[int], what: str, timeout: float, is_alive: IsAlive
) -> None:
    """Return once arrived() holds. peers: the rank that is waited for, then all others that this rank works with.

    Raises LockstepError naming the rank as soon as any of the peers is dead, since the one waited for may itself wait
    for the dead one; or after `timeout` seconds, naming the first.
    """
    for _ in range(_SPINS):
        if arrived():
            return
        os.sched_yield()
    begin = time.monotonic()
    next_check = begin
    # One peer a look, in turn: asking for a process takes a while, and there may be many.
    watched = cycle(peers)
    sleep = _SHORTEST_SLEEP
    while not arrived():
        now = time.monotonic()
        if now >= next_check:
            next_check = now + _SECONDS_BETWEEN_ALIVE_CHECKS
            peer = next(watched)
            # A peer may end right after its last message, hence the second look.
            if not is_alive(peer) and not arrived():
                whose = "its" if peer == peers[0] else f"rank {peers[0]}'s"
                raise LockstepError(f"rank {peer} died while this rank waited for {whose} {what}")
        if now - begin > timeout:
            raise LockstepError(f"rank {peers[0]} sent no {what} for {timeout:g} s (step_timeout)")
        time.sleep(sleep)
        sleep = min(2 * sleep, _LONGEST_SLEEP)


def all_peers(rank: int, num_ranks: int, first: int) -> list[int]:
    """Every rank but `rank`, beginning with `first`."""
    return [first, *(peer for peer in range(num_ranks) if peer not in (rank, first))]


@contextmanager
def lockstep_errors(what: str) -> Iterator[None]:
    """Turn the RuntimeError of a failed collective (a lost connection, a timeout) into LockstepError."""
    try:
        yield
    except RuntimeError as error:
        raise LockstepError(f"{what} failed, a peer rank is dead or late: {error}") from error


def wait_work(work: dist.Work, what: str, timeout: float, device_type: str) -> None:
    """Wait for a collective. On CUDA only the stream waits: NCCL's own watchdog ends a rank whose peer is gone."""
    with lockstep_errors(what):
        if device_type == "cpu":
            work.wait(timedelta(seconds=timeout))
        else:
            work.wait()
