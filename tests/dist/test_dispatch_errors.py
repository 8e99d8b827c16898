"""Ranks out of step and buffers too small: every rank is told, in words that help."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_runtime.core import DispatchPlan
from moe_runtime.dispatch.checked import CheckedDispatcher
from moe_runtime.dispatch.mailbox import segment_bytes
from moe_runtime.dispatch.one_sided import OneSidedDispatcher
from moe_runtime.errors import CapacityError, LockstepError
from tests.helpers.dispatch_cases import MAX_D, TIMEOUT, Case, exchange, make, make_data
from tests.helpers.spawn import run_ranks


def out_of_step(rank: int, num_ranks: int, seed: int, make_one: str, change: str) -> str:
    data = make_data(Case("", num_tokens=9, topk=2), num_ranks, seed)
    inner = make(make_one, num_ranks)
    dispatcher: Any = (
        inner if make_one == "one_sided" else CheckedDispatcher(inner, dist.group.WORLD, TIMEOUT)
    )
    plan, x = data.plan(rank), data.x[rank]
    batch = dispatcher.dispatch(x, plan).wait()
    try:
        if change == "kind" and rank == 1:
            dispatcher.dispatch(x, plan).wait()
        elif change == "hidden" and rank == 1:
            y = torch.zeros(batch.row_index_S.shape[0], 40)
            dispatcher.combine(y, batch, plan).wait()
        else:
            dispatcher.combine(data.compute(batch, rank), batch, plan).wait()
    except LockstepError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("kind", ["collective", "one_sided"])
@pytest.mark.parametrize("change", ["kind", "hidden"])
def test_ranks_out_of_step_are_told(kind: str, change: str, seed: int) -> None:
    for message in run_ranks(out_of_step, 2, seed, kind, change):
        assert "rank 0" in message
        assert "rank 1" in message
        assert ("dispatch" in message and "combine" in message) if change == "kind" else "40" in message


def refused(rank: int, num_ranks: int, buffer_bytes: int, hidden: int) -> str:
    try:
        OneSidedDispatcher(
            rank,
            num_ranks,
            exchange,
            hidden_size=hidden,
            topk=2,
            dtype=torch.float32,
            buffer_bytes=buffer_bytes,
            step_timeout=TIMEOUT,
            is_alive=lambda rank: True,
        )
    except CapacityError as error:
        return str(error)
    return "no error"


def test_buffer_too_small_for_one_row_names_the_size() -> None:
    needed = segment_bytes(3, 1, 4 * 1000, 2)
    for message in run_ranks(refused, 3, 4096, 1000):
        assert str(needed) in message


def test_shared_memory_that_cannot_be_reserved_is_an_error_on_every_rank() -> None:
    too_much = 1 << 46
    for message in run_ranks(refused, 2, too_much, 16):
        assert "dispatch_buffer_mib" in message
        assert "rank" in message


def too_wide(rank: int, num_ranks: int) -> str:
    dispatcher = make("one_sided-tiny", num_ranks)
    x = torch.zeros(1, 100 * MAX_D)
    plan = DispatchPlan(torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1), 1, num_ranks, rank, 1)
    try:
        dispatcher.dispatch(x, plan)
    except CapacityError as error:
        return str(error)
    return "no error"


def test_a_row_wider_than_announced_is_an_error() -> None:
    assert all("too small" in message for message in run_ranks(too_wide, 2))
