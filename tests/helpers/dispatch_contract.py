"""The Dispatcher contract as code: batches, results and traffic of any dispatcher against the loops of dispatch_cases.

`kind` is a name as for `dispatch_cases.make`; its words say what the dispatcher may do differently.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
import torch.distributed as dist

from moe_runtime.core import ExpertBatch
from moe_runtime.dispatch.base import Dispatcher
from moe_runtime.dispatch.checked import CheckedDispatcher
from moe_runtime.dispatch.rows import Traffic
from tests.helpers.dispatch_cases import TIMEOUT, Case, Data, Expected, expect, make_data, rounded


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


def run_cases(
    dispatcher: Dispatcher,
    traffic: Traffic,
    cases: Sequence[Case],
    rank: int,
    num_ranks: int,
    kind: str,
    seed: int,
) -> list[torch.Tensor]:
    """All cases twice with one dispatcher: wrapped in the checker and in inference mode, then bare. The bare ones' results."""
    checked = CheckedDispatcher(dispatcher, dist.group.WORLD, TIMEOUT)
    outputs = []
    for index, case in enumerate(cases):
        try:
            with torch.inference_mode():
                run_case(checked, traffic, make_data(case, num_ranks, seed + 100 + index), rank, kind)
            data = make_data(case, num_ranks, seed + index)
            outputs.append(run_case(dispatcher, traffic, data, rank, kind))
        except Exception as error:
            error.add_note(f"case {case.name!r}, seed {seed}")
            raise
    checked.close()
    checked.close()
    return outputs


def run_many_calls(
    dispatcher: Dispatcher, rank: int, num_ranks: int, kind: str, seed: int, turns: int
) -> None:
    """Changing sizes, results kept, two dispatches under way at once, waits in either order."""
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    draw = random.Random(seed)
    for turn in range(turns):
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
