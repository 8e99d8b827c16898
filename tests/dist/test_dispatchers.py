"""The Dispatcher contract, line by line, for every dispatcher at 1 to 4 ranks, against loops.

Every rank draws all ranks' data from one seed. The stand-in experts work element by element, so their results do not
depend on how rows are grouped and combined results must agree to the bit.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_runtime.core import ExpertBatch
from moe_runtime.dispatch.base import Dispatcher
from moe_runtime.dispatch.checked import CheckedDispatcher
from moe_runtime.dispatch.rows import Traffic
from tests.helpers.dispatch_cases import (
    CASES,
    TIMEOUT,
    Case,
    Data,
    Expected,
    expect,
    make,
    make_data,
    rounded,
)
from tests.helpers.spawn import run_ranks


def check_batch(batch: ExpertBatch, data: Data, expected: Expected, kind: str) -> None:
    assert batch.num_rows_p.tolist() == [len(rows) for rows in expected.slot_rows]
    assert batch.tokens_RD.dtype == data.case.dtype
    assert batch.tokens_RD.is_contiguous()
    wanted = [data.x[source][token] for rows in expected.slot_rows for source, token in rows]
    got = batch.tokens_RD[batch.row_index_S]
    assert got.shape[0] == len(wanted)
    if wanted:
        assert torch.equal(got, torch.stack(wanted))
    # A token comes once, however many of its experts live here.
    if not sends_all(kind):
        assert batch.tokens_RD.shape[0] == len(expected.received)


def sends_all(kind: str) -> bool:
    """Whether the batch holds rows that nobody computes."""
    return "local" in kind or "device" in kind


def expected_returned(kind: str, data: Data, expected: Expected, rank: int) -> int:
    """Rows that go back to other ranks."""
    if "per_rank" in kind and "local" not in kind:
        return len([1 for source, _ in expected.received if source != rank])
    return expected.returned_rows


def run_case(dispatcher: Dispatcher, traffic: Traffic, data: Data, rank: int, kind: str) -> torch.Tensor:
    sent_data = data
    if "fp8" in kind:
        data = rounded(data)
    expected = expect(data, rank)
    plan = data.plan(rank)
    sent, returned = traffic.rows_sent, traffic.rows_returned
    batch = dispatcher.dispatch(sent_data.x[rank], plan).wait()
    check_batch(batch, data, expected, kind)
    out = dispatcher.combine(data.compute(batch, rank), batch, plan).wait()
    assert out.dtype == data.case.dtype
    assert out.shape == data.x[rank].shape
    assert torch.equal(out, expected.per_rank_out if "per_rank" in kind else expected.out)
    if "per_rank" in kind:
        # Products and sums round to float32, each partial sum and the total to the rows' type.
        tolerance = 2 * data.case.topk * torch.finfo(torch.float32).eps
        tolerance += (len(data.x) + 1) / 2 * torch.finfo(data.case.dtype).eps
        assert ((out.double() - expected.float_out).abs() <= tolerance * expected.largest).all()
    if "device" not in kind:
        assert traffic.rows_sent - sent == expected.sent_rows
        assert traffic.rows_returned - returned == expected_returned(kind, data, expected, rank)
    return out


def conformance(rank: int, num_ranks: int, kind: str, seed: int) -> tuple[list[torch.Tensor], Traffic]:
    """All cases twice with one dispatcher: wrapped in the checker and in inference mode, then bare."""
    dispatcher = make(kind, num_ranks)
    traffic = dispatcher.inner.traffic if "fp8" in kind else dispatcher.traffic
    checked = CheckedDispatcher(dispatcher, dist.group.WORLD, TIMEOUT)
    outputs = []
    for index, case in enumerate(CASES):
        try:
            with torch.inference_mode():
                run_case(checked, traffic, make_data(case, num_ranks, seed + 100 + index), rank, kind)
            data = make_data(case, num_ranks, seed + index)
            outputs.append(run_case(dispatcher, traffic, data, rank, kind))
        except Exception as error:
            error.add_note(f"case {case.name!r}, seed {seed}")
            raise
    checked.check()
    checked.close()
    checked.close()
    return outputs, traffic


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
    """Changing sizes, results kept, two dispatches under way at once, waits in either order."""
    dispatcher = make(kind, num_ranks)
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    draw = random.Random(seed)
    for turn in range(30):
        cases = [Case("", num_tokens=draw.randrange(25), hidden=draw.choice([5, 16])) for _ in range(2)]
        datas = [make_data(case, num_ranks, seed + 2 * turn + i) for i, case in enumerate(cases)]
        plans = [data.plan(rank) for data in datas]
        pending = [dispatcher.dispatch(d.x[rank], p) for d, p in zip(datas, plans, strict=True)]
        order = [0, 1] if draw.random() < 0.5 else [1, 0]
        batches, outs = {}, {}
        if draw.random() < 0.5:
            batches = {i: pending[i].wait() for i in order}
        for i in order:
            # Else the first one's rows go home while the second one's are still on their way.
            if i not in batches:
                batches[i] = pending[i].wait()
            y = datas[i].compute(batches[i], rank)
            outs[i] = dispatcher.combine(y, batches[i], plans[i])
        for i in reversed(order):
            out, expected = outs[i].wait(), expect(datas[i], rank)
            assert torch.equal(out, expected.out), f"turn {turn}, {seed=}"
            check_batch(batches[i], datas[i], expected, kind)
            kept.append((out, expected.out))
    for out, wanted in kept:
        assert torch.equal(out, wanted)
    dispatcher.close()


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
    assert traffic.control_bytes == 8 * (num_ranks - 1)


def test_each_token_crosses_once_in_bytes(seed: int) -> None:
    run_ranks(count_bytes, 3, seed)
