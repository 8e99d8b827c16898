"""A peer that dies or is late ends in LockstepError on every survivor, and no shared memory is left behind."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_runtime.dispatch.base import Dispatcher
from moe_runtime.dispatch.collective import CollectiveDispatcher
from moe_runtime.dispatch.heap_shm import SHM_FOLDER, SharedHeap
from moe_runtime.dispatch.mailbox import LAST_EXCHANGE
from moe_runtime.dispatch.one_sided import OneSidedDispatcher
from moe_runtime.errors import BackendUnavailable
from tests.helpers.dispatch_cases import MAX_D, Case, exchange, expect, make_data
from tests.helpers.dispatch_cases import make as make_case_dispatcher
from tests.helpers.dispatch_faults import (
    NEVER,
    call_until_error,
    call_with_sleeper,
    call_with_victim,
    die,
    liveness,
    one_call,
)
from tests.helpers.spawn import Died, run_ranks

# Mostly milliseconds; the bound tells noticing a death from waiting for the step timeout.
AT_ONCE = 10.0


def make(kind: str, step_timeout: float) -> Dispatcher:
    assert dist.group.WORLD is not None
    if kind == "collective":
        return CollectiveDispatcher(dist.group.WORLD, step_timeout)
    return OneSidedDispatcher(
        dist.get_rank(),
        dist.get_world_size(),
        exchange,
        hidden_size=16,
        topk=2,
        dtype=torch.float32,
        buffer_bytes=1 << 16,
        step_timeout=step_timeout,
        is_alive=liveness(),
    )


def victim_dies(rank: int, num_ranks: int, kind: str, victim: int, inside: bool) -> tuple[str, float]:
    dispatcher = make(kind, NEVER)
    for _ in range(3):
        one_call(dispatcher, rank, num_ranks)
    return call_with_victim(dispatcher, rank, num_ranks, victim, inside)


@pytest.mark.parametrize("kind", ["collective", "one_sided"])
@pytest.mark.parametrize(("victim", "inside"), [(0, True), (2, False)])
def test_a_killed_rank_is_noticed_by_all(kind: str, victim: int, inside: bool) -> None:
    results = run_ranks(victim_dies, 3, kind, victim, inside, timeout=60, may_die=[victim])
    assert results[victim] == Died(-signal.SIGKILL)
    for rank in {0, 1, 2} - {victim}:
        message, seconds = results[rank]
        assert "dead or late" in message or "died" in message
        assert seconds < AT_ONCE
        if kind == "one_sided":
            assert f"rank {victim} died" in message


def one_is_late(rank: int, num_ranks: int, kind: str) -> str:
    return call_with_sleeper(make(kind, 1.0), rank, num_ranks, 4.0)


@pytest.mark.parametrize("kind", ["collective", "one_sided"])
def test_a_late_rank_is_an_error(kind: str) -> None:
    messages = run_ranks(one_is_late, 3, kind)
    assert messages[1] == "slept"
    for message in (messages[0], messages[2]):
        assert "dead or late" in message or "step_timeout" in message
        if kind == "one_sided":
            assert "rank 1" in message


def late_but_in_time(rank: int, num_ranks: int, kind: str) -> None:
    dispatcher = make(kind, NEVER)
    one_call(dispatcher, rank, num_ranks, lambda: time.sleep(1.5 if rank == 1 else 0.0))
    dispatcher.close()


@pytest.mark.parametrize("kind", ["collective", "one_sided"])
def test_a_rank_late_within_the_timeout_is_waited_for(kind: str) -> None:
    run_ranks(late_but_in_time, 2, kind)


def shared_memory_files() -> set[Path]:
    return set(SHM_FOLDER.glob("moe-runtime-*"))


def all_die(rank: int, num_ranks: int) -> None:
    dispatcher = make("one_sided", NEVER)
    one_call(dispatcher, rank, num_ranks)
    die()


def test_no_file_is_left_after_all_ranks_were_killed() -> None:
    before = shared_memory_files()
    assert run_ranks(all_die, 2, may_die=[0, 1]) == [Died(-signal.SIGKILL)] * 2
    assert shared_memory_files() <= before


def separate_folders(rank: int, num_ranks: int, base: str) -> tuple[str, list[str]]:
    """Each rank has a shared-memory folder of its own, as in containers of their own."""
    folder = Path(base) / str(rank)
    folder.mkdir()
    try:
        SharedHeap(rank, exchange, 4096, folder)
    except BackendUnavailable as error:
        return str(error), os.listdir(folder)
    return "no error", os.listdir(folder)


def test_ranks_that_do_not_share_memory_are_told_and_leave_no_file(tmp_path: Path) -> None:
    for message, left in run_ranks(separate_folders, 2, str(tmp_path)):
        assert message.startswith("rank 0: the shared memory of rank 1 cannot be opened")
        assert left == []


def signal_is_lost(rank: int, num_ranks: int) -> str:
    """Rank 1's third message to rank 0 is stored, but its flag never raised."""
    dispatcher: Any = make("one_sided", 2.0)
    one_call(dispatcher, rank, num_ranks)
    send, sent = dispatcher._mail[0].signal, []

    def losing(peer: int, *message: Any) -> None:
        sent.append(peer)
        if (rank, peer, sent.count(peer)) != (1, 0, 1):
            send(peer, *message)

    dispatcher._mail[0].signal = losing
    return call_until_error(dispatcher, rank, num_ranks)[0]


def test_a_lost_signal_is_an_error_on_every_rank() -> None:
    messages = run_ranks(signal_is_lost, 3)
    assert "rank 1" in messages[0]
    assert all("step_timeout" in message for message in messages)


def dies_while_storing(rank: int, num_ranks: int, after_signals: int, folder: str) -> tuple[str, float]:
    """Rank 1 has stored a message to one more peer than it has told. Who gets an error counts as gone, as a rank that leaves."""
    dispatcher: Any = make("one_sided", NEVER)
    for _ in range(3):
        one_call(dispatcher, rank, num_ranks)
    send, process_lives, sent = dispatcher._mail[0].signal, dispatcher._mail[0]._is_alive, []
    dispatcher._mail[0]._is_alive = lambda r: process_lives(r) and not (Path(folder) / str(r)).exists()

    def dying(peer: int, *message: Any) -> None:
        if len(sent) == after_signals:
            die()
        sent.append(peer)
        send(peer, *message)

    if rank == 1:
        dispatcher._mail[0].signal = dying
    result = call_until_error(dispatcher, rank, num_ranks)
    (Path(folder) / str(rank)).touch()
    return result


@pytest.mark.parametrize("after_signals", [0, 1, 3])
def test_death_between_store_and_signal(after_signals: int, tmp_path: Path) -> None:
    results = run_ranks(dies_while_storing, 3, after_signals, str(tmp_path), may_die=[1])
    assert results[1] == Died(-signal.SIGKILL)
    for message, seconds in (results[0], results[2]):
        assert "died" in message
        assert seconds < AT_ONCE


def numbers_wrap(rank: int, num_ranks: int) -> int:
    dispatcher: Any = make("one_sided", NEVER)
    dispatcher._mail[0]._exchange = LAST_EXCHANGE - 5
    for _ in range(10):
        one_call(dispatcher, rank, num_ranks)
    dispatcher.close()
    return int(dispatcher._mail[0]._exchange)


def test_exchange_numbers_wrap_around() -> None:
    assert run_ranks(numbers_wrap, 3) == [15] * 3


def full_buffer(rank: int, num_ranks: int, seed: int) -> int:
    """Every message fills its slab many times over, and ranks are late in turn."""
    dispatcher = make_case_dispatcher("one_sided-tiny", num_ranks)
    for turn in range(4):
        data = make_data(Case("", num_tokens=90, hidden=MAX_D, topk=4), num_ranks, seed + turn)
        if rank == turn % num_ranks:
            time.sleep(0.2)
        batch = dispatcher.dispatch(data.x[rank], data.plan(rank)).wait()
        out = dispatcher.combine(data.compute(batch, rank), batch, data.plan(rank)).wait()
        assert torch.equal(out, expect(data, rank).out)
    return int(dispatcher.traffic.rounds)


def test_a_full_buffer_only_takes_more_rounds(seed: int) -> None:
    assert min(run_ranks(full_buffer, 3, seed)) > 40
