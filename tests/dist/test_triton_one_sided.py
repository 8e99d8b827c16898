"""One-sided Triton kernels between real processes over shared memory, in the interpreter: the contract, and faults."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from moe_runtime.core import DispatchPlan
from moe_runtime.dispatch.heap_shm import SHM_FOLDER, SharedHeap
from moe_runtime.dispatch.triton_one_sided import TritonOneSidedDispatcher
from moe_runtime.dispatch.triton_one_sided_slabs import fit_layout
from moe_runtime.errors import LockstepError
from tests.helpers.dispatch_cases import CASES, MAX_D, MAX_K, TIMEOUT, exchange
from tests.helpers.dispatch_contract import run_cases, run_many_calls
from tests.helpers.dispatch_faults import (
    NEVER,
    call_until_error,
    call_with_sleeper,
    call_with_victim,
    liveness,
    one_call,
)
from tests.helpers.exact_rows import ExactRows
from tests.helpers.spawn import Died, run_ranks

# Of noticing a death, rather than waiting for the step timeout.
AT_ONCE = 15.0


def make(
    num_ranks: int,
    *,
    tiny: bool = False,
    combine: str = "exact",
    step_timeout: float = TIMEOUT,
    is_alive: Callable[[int], bool] = lambda rank: True,
) -> ExactRows:
    """Over the default group; `tiny` has room for a few tokens a round."""
    needed = fit_layout(num_ranks, 1 << 30, 4 * MAX_D, MAX_K, combine == "per_rank", False)
    size = needed.segment_bytes // needed.capacity * (4 if tiny else 400) // 64 * 64
    return ExactRows(
        TritonOneSidedDispatcher(
            SharedHeap(dist.get_rank(), exchange, size),
            hidden_size=MAX_D,
            topk=MAX_K,
            dtype=torch.float32,
            step_timeout=step_timeout,
            is_alive=is_alive,
            combine=combine,
        )
    )


def conformance(
    rank: int, num_ranks: int, names: list[str], tiny: bool, combine: str, seed: int
) -> tuple[int, int]:
    """Those cases with one dispatcher; rounds, and calls."""
    dispatcher = make(num_ranks, tiny=tiny, combine=combine)
    cases = [case for case in CASES if case.name in names]
    traffic = dispatcher.traffic
    run_cases(dispatcher, traffic, cases, rank, num_ranks, f"one_sided-{combine}", seed)
    return traffic.rounds, traffic.dispatches + traffic.combines


ALL = [case.name for case in CASES]
QUICK = ["plain", "float16", "one rank has all", "nobody has any", "single token", "only padding"]
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("num_ranks", "names", "tiny", "combine"),
    [
        (2, QUICK, False, "exact"),
        (3, QUICK[:3], False, "per_rank"),
        (2, QUICK[:1], True, "exact"),
        *[pytest.param(n, ALL, False, c, marks=SLOW) for n, c in ((1, "exact"), (3, "per_rank"), (3, "exact"))],
        pytest.param(2, QUICK, True, "per_rank", marks=SLOW),
        pytest.param(4, QUICK[:1], True, "exact", marks=SLOW),
    ],
)
def test_contract(num_ranks: int, names: list[str], tiny: bool, combine: str, seed: int) -> None:
    results = run_ranks(conformance, num_ranks, names, tiny, combine, seed, timeout=200)
    assert len(set(results)) == 1
    rounds, calls = results[0]
    assert rounds > calls if tiny else rounds == calls


def many_calls(rank: int, num_ranks: int, seed: int) -> None:
    run_many_calls(make(num_ranks), rank, num_ranks, "one_sided", seed, turns=6)


def test_many_calls_in_flight(seed: int) -> None:
    run_ranks(many_calls, 2, seed)


def victim_dies(rank: int, num_ranks: int, victim: int, inside: bool) -> tuple[str, float]:
    dispatcher = make(num_ranks, step_timeout=NEVER, is_alive=liveness())
    one_call(dispatcher, rank, num_ranks)
    return call_with_victim(dispatcher, rank, num_ranks, victim, inside)


@pytest.mark.parametrize(("victim", "inside"), [(0, True), (2, False)])
def test_a_killed_rank_is_noticed_by_all(victim: int, inside: bool) -> None:
    before = set(SHM_FOLDER.glob("moe-runtime-*"))
    results = run_ranks(victim_dies, 3, victim, inside, timeout=60, may_die=[victim])
    assert results[victim] == Died(-signal.SIGKILL)
    for rank in {0, 1, 2} - {victim}:
        message, seconds = results[rank]
        assert f"rank {victim} died" in message
        assert seconds < AT_ONCE
    assert set(SHM_FOLDER.glob("moe-runtime-*")) <= before


def one_is_late(rank: int, num_ranks: int) -> str:
    return call_with_sleeper(make(num_ranks, step_timeout=1.0), rank, num_ranks, 4.0)


def test_a_late_rank_is_an_error() -> None:
    messages = run_ranks(one_is_late, 3)
    assert messages[1] == "slept"
    assert all("rank 1 sent no" in m and "step_timeout" in m for m in (messages[0], messages[2]))


def late_but_in_time(rank: int, num_ranks: int) -> None:
    dispatcher = make(num_ranks, step_timeout=NEVER)
    one_call(dispatcher, rank, num_ranks, lambda: time.sleep(1.5 if rank == 1 else 0.0))


def test_a_rank_late_within_the_timeout_is_waited_for() -> None:
    run_ranks(late_but_in_time, 2)


def signal_is_lost(rank: int, num_ranks: int) -> tuple[str, float]:
    """From the second call on, all that rank 1 stores for rank 0 goes elsewhere."""
    dispatcher = make(num_ranks, step_timeout=2.0)
    one_call(dispatcher, rank, num_ranks)
    nowhere = torch.zeros_like(dispatcher.inner._heap.segment)  # type: ignore[union-attr]
    if rank == 1:
        dispatcher.inner.kernels._addresses_N[0] = nowhere.data_ptr()
    return call_until_error(dispatcher, rank, num_ranks)


def test_a_lost_signal_is_an_error_on_every_rank() -> None:
    results = run_ranks(signal_is_lost, 3)
    assert "rank 1 sent no dispatch message" in results[0][0]
    # Rank 0 goes no further, so the others miss its combine message.
    for message, seconds in results[1:]:
        assert "rank 0 sent no combine message" in message
        assert seconds < AT_ONCE


def out_of_step(rank: int, num_ranks: int, change: str) -> str:
    dispatcher = make(num_ranks)
    plan = DispatchPlan(torch.zeros(2, 2, dtype=torch.int64), torch.ones(2, 2), 1, 2, rank, 2)
    batch = dispatcher.dispatch(torch.ones(2, 16), plan).wait()
    width = 24 if change == "width" and rank == 1 else 16
    try:
        if change == "kind" and rank == 1:
            dispatcher.dispatch(torch.ones(2, 16), plan).wait()
        else:
            dispatcher.combine(torch.ones(batch.row_index_S.shape[0], width), batch, plan).wait()
    except LockstepError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(("change", "words"), [("kind", ("dispatch", "combine")), ("width", ("64", "96"))])
def test_ranks_out_of_step_are_told(change: str, words: tuple[str, str]) -> None:
    for message in run_ranks(out_of_step, 2, change):
        assert all(word in message for word in ("rank 0", "rank 1", *words))
