"""What the tests of dying, late and silent ranks share: small calls whose results are known, and how long an error took."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from moe_runtime.core import DispatchPlan
from moe_runtime.dispatch.base import Dispatcher
from moe_runtime.errors import LockstepError

# Far above what noticing a death may take, far below what a hang would.
NEVER = 45.0


def liveness() -> Callable[[int], bool]:
    """is_alive over the default group's processes. A pidfd turns readable at death, also of an unreaped child."""
    pids: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    fds = [os.pidfd_open(pid) for pid in pids]

    def is_alive(rank: int) -> bool:
        poll = select.poll()
        poll.register(fds[rank], select.POLLIN)
        return not poll.poll(0)

    return is_alive


def one_call(
    dispatcher: Dispatcher, rank: int, num_ranks: int, between: Callable[[], None] = lambda: None
) -> None:
    """A dispatch that sends a token to every rank, `between`, then the combine; what arrives is checked."""
    x = torch.full((num_ranks, 16), float(rank + 1))
    slot_TK = torch.stack([torch.arange(num_ranks), torch.full((num_ranks,), -1)], dim=1)
    plan = DispatchPlan(slot_TK, torch.ones(num_ranks, 2), 1, num_ranks, rank, num_ranks)
    batch = dispatcher.dispatch(x, plan).wait()
    rows = batch.tokens_RD[batch.row_index_S]
    assert rows[:, 0].tolist() == [float(source + 1) for source in range(num_ranks)]
    between()
    assert torch.equal(dispatcher.combine(rows, batch, plan).wait(), x)


def call_until_error(dispatcher: Dispatcher, rank: int, num_ranks: int) -> tuple[str, float]:
    """The message of the LockstepError and the seconds that the failing call took."""
    end = time.monotonic() + NEVER
    begin = time.monotonic()
    try:
        while begin < end:
            begin = time.monotonic()
            one_call(dispatcher, rank, num_ranks)
    except LockstepError as error:
        return str(error), time.monotonic() - begin
    return "no error", NEVER


def die() -> None:
    """End this process as kill -9 does."""
    os.kill(os.getpid(), signal.SIGKILL)


def call_with_victim(
    dispatcher: Dispatcher, rank: int, num_ranks: int, victim: int, inside: bool
) -> tuple[str, float]:
    """`victim` dies between two calls, or `inside` one; what the others get, as of `call_until_error`."""
    if rank == victim:
        if not inside:
            die()
        one_call(dispatcher, rank, num_ranks, die)
    return call_until_error(dispatcher, rank, num_ranks)


def call_with_sleeper(dispatcher: Dispatcher, rank: int, num_ranks: int, seconds: float) -> str:
    """Rank 1 stays away for `seconds` after a first call; what the others are told."""
    one_call(dispatcher, rank, num_ranks)
    if rank == 1:
        time.sleep(seconds)
        return "slept"
    return call_until_error(dispatcher, rank, num_ranks)[0]
