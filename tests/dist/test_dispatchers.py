"""The Dispatcher contract, line by line, for every dispatcher at 1 to 4 ranks, against loops.

Every rank draws all ranks' data from one seed. The stand-in experts work element by element, so their results do not
depend on how rows are grouped and combined results must agree to the bit.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_runtime.dispatch.rows import Traffic
from tests.helpers.dispatch_cases import CASES, Case, expect, make, make_data, rounded
from tests.helpers.dispatch_contract import run_cases, run_many_calls
from tests.helpers.spawn import run_ranks


def conformance(rank: int, num_ranks: int, kind: str, seed: int) -> tuple[list[torch.Tensor], Traffic]:
    """All cases with one dispatcher: their results, and what travelled."""
    dispatcher = make(kind, num_ranks)
    traffic = dispatcher.inner.traffic if "fp8" in kind else dispatcher.traffic
    return run_cases(dispatcher, traffic, CASES, rank, num_ranks, kind, seed), traffic


def slow(*cases: tuple[str, int]) -> list[Any]:
    return [pytest.param(*case, marks=pytest.mark.slow) for case in cases]


KINDS = [
    ("local", 1),
    *[(kind, n) for kind in ("collective", "one_sided") for n in (1, 2, 3, 4)],
    *[(kind, n) for kind in ("collective-exact", "one_sided-tiny") for n in (2, 4)],
    *[("collective-device", 2), ("local-fp8", 1), ("one_sided-fp8", 2), ("one_sided-tiny-pair", 3)],
    *slow(("collective", 8), ("one_sided-tiny", 8), ("collective-device", 1), ("collective-device", 4)),
    *slow(("collective-fp8", 2), ("collective-exact-fp8", 3), ("collective-device-fp8", 4)),
]


@pytest.mark.parametrize(("kind", "num_ranks"), KINDS)
def test_contract(kind: str, num_ranks: int, seed: int) -> None:
    results = run_ranks(conformance, num_ranks, kind, seed)
    # Together the ranks' outputs are the loops' over all tokens: the same for every dispatcher and number of ranks.
    for index, case in enumerate(CASES):
        whole = torch.cat([outputs[index] for outputs, _ in results])
        data = make_data(case, 1, seed + index)
        assert torch.equal(whole, expect(rounded(data) if "fp8" in kind else data, 0).out), case.name
    check_rounds([t for _, t in results], kind)


PER_RANK = [
    *[("local", 1), ("one_sided", 2), ("one_sided-tiny", 4), ("collective", 3), ("collective-device", 2)],
    *slow(("one_sided", 1), ("one_sided", 3), ("one_sided", 4), ("one_sided-tiny", 8), ("one_sided-fp8", 3)),
    *slow(("collective", 1), ("collective", 2), ("collective-exact", 4), ("collective-exact-fp8", 2)),
    *slow(("collective-device", 1), ("collective-device", 3), ("collective-device-fp8", 4)),
]


@pytest.mark.parametrize(("kind", "num_ranks"), PER_RANK)
def test_contract_with_sums_per_rank(kind: str, num_ranks: int, seed: int) -> None:
    """run_case compares every dispatcher with the same loop, to the bit, so they agree with one another."""
    results = run_ranks(conformance, num_ranks, f"{kind}-per_rank", seed)
    check_rounds([t for _, t in results], kind)


def check_rounds(traffic: list[Traffic], kind: str) -> None:
    assert len({(t.dispatches, t.combines, t.rounds) for t in traffic}) == 1
    if "tiny" in kind:
        assert traffic[0].rounds > traffic[0].dispatches + traffic[0].combines + 20
    elif "local" not in kind:
        assert traffic[0].rounds == traffic[0].dispatches + traffic[0].combines


def many_calls(rank: int, num_ranks: int, kind: str, seed: int) -> None:
    run_many_calls(make(kind, num_ranks), rank, num_ranks, kind, seed, turns=30)


@pytest.mark.parametrize(
    ("kind", "num_ranks"),
    [
        ("local", 1),
        ("collective", 3),
        ("one_sided", 3),
        ("one_sided-tiny", 2),
        ("one_sided-tiny-pair", 3),
        ("collective-device", 2),
    ],
)
def test_many_calls_in_flight(kind: str, num_ranks: int, seed: int) -> None:
    run_ranks(many_calls, num_ranks, kind, seed)


def count_bytes(rank: int, num_ranks: int, seed: int) -> None:
    case = Case("", topk=4, hidden=10, num_tokens=50, padding=0.2)
    data = make_data(case, num_ranks, seed)
    expected = expect(data, rank)
    dispatcher = make("collective-exact", num_ranks)
    moved: list[int] = []
    traffic = dispatcher.traffic
    real = dist.all_to_all_single

    def counting(output: torch.Tensor, input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:  # noqa: A002
        moved.append(input.numel() * input.element_size())
        return real(output, input, *args, **kwargs)

    dist.all_to_all_single = counting
    try:
        plan = data.plan(rank)
        batch = dispatcher.dispatch(data.x[rank], plan).wait()
        dispatcher.combine(data.compute(batch, rank), batch, plan).wait()
    finally:
        dist.all_to_all_single = real
    own_rows = len([1 for source, _ in expected.received if source == rank])
    record = 4 * case.hidden + 4 * case.topk
    assert moved == [
        8 * num_ranks,
        (expected.sent_rows + own_rows) * record,
        sum(len(rows) for rows in expected.slot_rows) * 4 * case.hidden,
    ]
    assert traffic.bytes_sent == expected.sent_rows * record
    assert traffic.bytes_returned == expected.returned_rows * 4 * case.hidden
    assert traffic.bytes_sent + traffic.bytes_returned + traffic.bytes_local == sum(moved[1:])
    assert traffic.control_bytes == 8 * (num_ranks - 1)


def test_each_token_crosses_once_in_bytes(seed: int) -> None:
    run_ranks(count_bytes, 3, seed)


def count_local_bytes(rank: int, num_ranks: int, kind: str, seed: int) -> None:
    case = Case("", topk=4, hidden=10, num_tokens=50, padding=0.2)
    data = make_data(case, num_ranks, seed)
    expected = expect(data, rank)
    dispatcher = make(kind, num_ranks)
    try:
        plan = data.plan(rank)
        batch = dispatcher.dispatch(data.x[rank], plan).wait()
        dispatcher.combine(data.compute(batch, rank), batch, plan).wait()
    finally:
        dispatcher.close()
    own_rows = len([1 for source, _ in expected.received if source == rank])
    own_pairs = len([1 for rows in expected.slot_rows for source, _ in rows if source == rank])
    row = 4 * case.hidden
    if kind == "local":
        # Nothing is packed: all rows of x stay where they are, and no words are written beside them.
        assert dispatcher.traffic.bytes_local == (case.num_tokens + own_pairs) * row
    else:
        assert dispatcher.traffic.bytes_local == own_rows * (row + 4 * case.topk) + own_pairs * row


@pytest.mark.parametrize(("kind", "num_ranks"), [("local", 1), ("one_sided-tiny", 3), ("collective-exact", 2)])
def test_rows_that_stay_are_counted_in_bytes(kind: str, num_ranks: int, seed: int) -> None:
    run_ranks(count_local_bytes, num_ranks, kind, seed)
