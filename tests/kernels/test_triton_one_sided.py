"""One-sided dispatch and combine over several ranks in one process, against loops; and the parts of the protocol."""

from __future__ import annotations

import importlib.util
import random
from typing import Any

import pytest
import torch

from moe_runtime.core import DispatchPlan
from moe_runtime.dispatch import heap_nvshmem
from moe_runtime.dispatch.triton_one_sided import TritonOneSidedDispatcher
from moe_runtime.dispatch.triton_one_sided_launch import as_words
from moe_runtime.dispatch.triton_one_sided_slabs import LATE, OTHER_CALL, Call, SlabLayout, fit_layout
from moe_runtime.dispatch.triton_one_sided_virtual import VirtualHeap, VirtualRanks
from moe_runtime.errors import BackendUnavailable, CapacityError, LockstepError
from tests.helpers.dispatch_cases import CASES, MAX_D, MAX_K, Case, expect, make_data
from tests.helpers.dispatch_contract import check_batch
from tests.helpers.exact_rows import combine_exact, dispatch_exact

CPU = torch.device("cpu")
BIG = 1 << 20


def virtual(num_ranks: int, bytes_per_rank: int = BIG, **changes: Any) -> VirtualRanks:
    widest: dict[str, Any] = {"hidden_size": MAX_D, "topk": MAX_K, "dtype": torch.float32, **changes}
    return VirtualRanks(num_ranks, bytes_per_rank, CPU, **widest)


def check_case(ranks: VirtualRanks, case: Case, combine: str, seed: int) -> None:
    num_ranks = len(ranks.dispatchers)
    data = make_data(case, num_ranks, seed)
    expected = [expect(data, rank) for rank in range(num_ranks)]
    plans = [data.plan(rank) for rank in range(num_ranks)]
    batches = dispatch_exact(ranks, data.x, plans)
    for batch, wanted in zip(batches, expected, strict=True):
        check_batch(batch, data, wanted, "one_sided")
    outs = combine_exact(ranks, [data.compute(b, r) for r, b in enumerate(batches)], batches, plans)
    for rank, out in enumerate(outs):
        assert out.dtype == case.dtype
        assert torch.equal(out, expected[rank].out if combine == "exact" else expected[rank].per_rank_out)


QUICK = ("bfloat16", "one rank has all", "nobody has any", "some padding", "a copy everywhere")


@pytest.mark.parametrize("combine", ["exact", "per_rank"])
@pytest.mark.parametrize(
    ("num_ranks", "names"),
    [
        (1, QUICK),
        (2, QUICK),
        (3, QUICK),
        *[pytest.param(n, tuple(c.name for c in CASES), marks=pytest.mark.slow) for n in (1, 2, 4)],
    ],
)
def test_virtual_ranks(num_ranks: int, names: tuple[str, ...], combine: str, seed: int) -> None:
    ranks = virtual(num_ranks, combine=combine)
    for index, case in enumerate(c for c in CASES if c.name in names):
        check_case(ranks, case, combine, seed + index)
    ranks.close()
    ranks.close()


@pytest.mark.parametrize("combine", ["exact", "per_rank"])
def test_more_tokens_than_the_slabs_hold(combine: str, seed: int) -> None:
    needed = fit_layout(2, BIG, 4 * 16, 2, combine == "per_rank", False)
    layout = fit_layout(
        2, needed.segment_bytes // needed.capacity * 5, 4 * 16, 2, combine == "per_rank", False
    )
    ranks = virtual(2, layout.segment_bytes, hidden_size=16, topk=2, combine=combine)
    assert 2 <= layout.capacity < 10
    check_case(ranks, Case("", hidden=16, num_tokens=31, padding=0.2), combine, seed)
    rounds = layout.num_rounds(max(x.shape[0] for x in make_data(Case("", num_tokens=31), 2, seed).x))
    assert {d.traffic.rounds for d in ranks.dispatchers} == {2 * rounds}
    assert rounds > 1


@pytest.mark.parametrize("row_bytes", [21, 42, 64 + 4])
def test_rows_of_bytes_travel_as_they_are(row_bytes: int, seed: int) -> None:
    """Rows quantised with their scales behind them; results come back in another type and width."""
    N, T, K, p, D = 2, 7, 3, 4, 16
    ranks = virtual(N, hidden_size=80, topk=K, dtype=torch.uint8)
    xs = [torch.randint(0, 256, (T, row_bytes), dtype=torch.uint8) for _ in range(N)]
    slots = [torch.stack([torch.randperm(N * p)[:K] for _ in range(T)]) for _ in range(N)]
    plans = [DispatchPlan(slots[r], torch.rand(T, K), p, N, r, T) for r in range(N)]
    batches = dispatch_exact(ranks, xs, plans)
    for rank, batch in enumerate(batches):
        rows = [
            xs[source][token]
            for slot in range(rank * p, rank * p + p)
            for source in range(N)
            for token in (slots[source] == slot).any(1).nonzero().flatten().tolist()
        ]
        assert torch.equal(batch.tokens_RD[batch.row_index_S], torch.stack(rows))
    # The first byte of a row as its result.
    ys = [b.tokens_RD[b.row_index_S, :1].float().expand(-1, D).contiguous() for b in batches]
    for rank, out in enumerate(combine_exact(ranks, ys, batches, plans)):
        total = torch.zeros(T, D)
        for k in range(K):
            total += plans[rank].topk_weights_TK[:, k : k + 1] * xs[rank][:, :1].float()
        assert torch.equal(out, total)


@pytest.mark.parametrize("last", [2**31 - 2, 2**32 - 2, 2**62])
def test_exchange_numbers_may_pass_any_power_of_two(last: int, seed: int) -> None:
    ranks = virtual(2)
    for dispatcher in ranks.dispatchers:
        dispatcher.kernels.epoch.fill_(last)
    for turn in range(2):
        check_case(ranks, CASES[1], "exact", seed + turn)


def test_results_outlive_later_calls(seed: int) -> None:
    ranks = virtual(2)
    data = [make_data(CASES[0], 2, seed + i) for i in range(3)]
    plans = [[d.plan(rank) for rank in range(2)] for d in data]
    batches = [dispatch_exact(ranks, d.x, p) for d, p in zip(data, plans, strict=True)]
    for i in (2, 0, 1):
        ys = [data[i].compute(batch, rank) for rank, batch in enumerate(batches[i])]
        outs = combine_exact(ranks, ys, batches[i], plans[i])
        assert all(torch.equal(out, expect(data[i], rank).out) for rank, out in enumerate(outs))


class Carrier:
    """Plays the network between virtual ranks whose memory is not mapped: copies outboxes as NVSHMEM's puts would."""

    def __init__(self, rank: int, segments: list[torch.Tensor], layout: SlabLayout) -> None:
        self._rank, self._segments, self._layout = rank, segments, layout

    def _copy(self, n: int, source: int, target: int, size: int) -> None:
        self._segments[n][target : target + size] = self._segments[self._rank][source : source + size]

    def _peers(self) -> list[int]:
        return [n for n in range(len(self._segments)) if n != self._rank]

    def put_messages(
        self, epoch: torch.Tensor, count_N: torch.Tensor, capacity: int, row_bytes: int, topk: int
    ) -> None:
        layout, half = self._layout, (int(epoch) + 1) % 2 * self._layout.parity_bytes
        assert int(count_N.max()) <= capacity
        for n in self._peers():
            for at, stride, size in (
                (layout.rows_at, layout.rows_bytes, row_bytes),
                (layout.records_at, layout.records_bytes, 4 * layout.record_words(topk)),
            ):
                source, target = layout.outbox_at + at + n * stride, half + at + self._rank * stride
                self._copy(n, source, target, int(count_N[n]) * size)

    def put_returns(
        self,
        epoch: torch.Tensor,
        record_RX: torch.Tensor,
        count_N: torch.Tensor,
        first: int,
        room: int,
        row_bytes: int,
        topk: int,
    ) -> None:
        layout, half = self._layout, (int(epoch) + 1) % 2 * self._layout.parity_bytes
        records = record_RX.view(len(self._segments), -1, record_RX.shape[1])
        for n in self._peers():
            for record in records[n, first : first + int(count_N[n])].tolist():
                ks = [k for k in range(topk) if record[1 + k] >= 0]
                for k in ks[:1] if layout.with_weights else ks:
                    place = layout.returns_at + (record[0] * topk + k) * row_bytes
                    self._copy(
                        n, layout.outbox_at + n * layout.returns_bytes + place, half + place, row_bytes
                    )

    def signal(self, epoch: torch.Tensor, count_N: torch.Tensor, call: int) -> None:
        number, layout = int(epoch) + 1, self._layout
        for n in self._peers():
            words = self._segments[n].view(torch.int64)
            header = layout.headers_at // 8 + (number % 2 * len(self._segments) + self._rank) * 2
            words[header], words[header + 1], words[self._rank] = count_N[n], call, number


@pytest.mark.parametrize("combine", ["exact", "per_rank"])
def test_messages_to_ranks_beyond_a_network_are_laid_out_in_the_outbox(combine: str, seed: int) -> None:
    segments = [torch.zeros(BIG, dtype=torch.uint8) for _ in range(3)]
    ranks = virtual(3, combine=combine)
    ranks.dispatchers = []
    for rank in range(3):
        heap = VirtualHeap(rank, segments)
        heap.addresses_N = torch.where(torch.arange(3) == rank, heap.addresses_N, 0)
        ranks.dispatchers.append(
            TritonOneSidedDispatcher(
                heap,
                hidden_size=MAX_D,
                topk=MAX_K,
                dtype=torch.float32,
                step_timeout=1.0,
                is_alive=lambda _: True,
                combine=combine,
                make_network=lambda layout, rank=rank: Carrier(rank, segments, layout),  # type: ignore[misc]
            )
        )
    for index, name in enumerate(("some padding", "bfloat16", "hot expert")):
        check_case(ranks, next(c for c in CASES if c.name == name), combine, seed + index)


def test_unmapped_memory_without_a_network_is_refused() -> None:
    heap = VirtualHeap(0, [torch.zeros(BIG, dtype=torch.uint8)] * 2)
    heap.addresses_N[1] = 0
    with pytest.raises(BackendUnavailable, match="not mapped"):
        TritonOneSidedDispatcher(
            heap,
            hidden_size=16,
            topk=2,
            dtype=torch.float32,
            step_timeout=1.0,
            is_alive=lambda _: True,
        )


def lone_dispatcher(num_ranks: int = 3) -> TritonOneSidedDispatcher:
    """Rank 0 of ranks that do nothing."""
    segments = [torch.zeros(BIG, dtype=torch.uint8) for _ in range(num_ranks)]
    return TritonOneSidedDispatcher(
        VirtualHeap(0, segments),
        hidden_size=16,
        topk=2,
        dtype=torch.float32,
        step_timeout=0.2,
        is_alive=lambda rank: True,
    )


def test_a_waiting_kernel_gives_up_and_says_why() -> None:
    dispatcher = lone_dispatcher()
    kernels, call = dispatcher.kernels, Call(1, 8, 64, 2).pack()
    dispatcher.check()
    kernels.signal(torch.zeros(3, dtype=torch.int32), call)
    own = dispatcher._heap.segment.view(torch.int64)  # type: ignore[union-attr]
    # Rank 1 is at this exchange with another call, rank 2 has sent nothing.
    own[kernels.layout.headers_at // 8 + (1 * 3 + 1) * 2 + 1] = Call(2, 8, 64, 2).pack()
    own[1] = 1
    own[kernels.layout.headers_at // 8 + (1 * 3 + 2) * 2] = 7  # left there by an older exchange
    kernels.wait(call)
    assert kernels.problem_N.tolist() == [0, OTHER_CALL, LATE]
    tokens, records, counts = torch.zeros(24, 16), torch.zeros(24, 5).int(), torch.full((3,), 9).int()
    kernels.receive(as_words(tokens), records, counts, 0, 8)
    assert counts.tolist() == [0, 0, 0]
    with pytest.raises(LockstepError, match=r"rank 1 is at another call, rank 2 sent nothing in time"):
        dispatcher.check()
    plan = DispatchPlan(torch.zeros(1, 2, dtype=torch.int64), torch.ones(1, 2), 1, 3, 0, 1)
    with pytest.raises(LockstepError):
        dispatcher.dispatch(torch.zeros(1, 16), plan)


def test_ranks_that_send_nothing_are_an_error() -> None:
    dispatcher = lone_dispatcher()
    plan = DispatchPlan(torch.zeros(1, 2, dtype=torch.int64), torch.ones(1, 2), 1, 3, 0, 1)
    pending = dispatcher.dispatch(torch.zeros(1, 16), plan)
    with pytest.raises(LockstepError, match="rank 1 sent no dispatch message"):
        pending.wait()


@pytest.mark.parametrize(("hidden", "topk"), [(17, 2), (16, 3)])
def test_more_than_announced_is_refused(hidden: int, topk: int) -> None:
    plan = DispatchPlan(torch.zeros(1, topk, dtype=torch.int64), torch.ones(1, topk), 1, 3, 0, 1)
    with pytest.raises(CapacityError, match="too small"):
        lone_dispatcher().dispatch(torch.zeros(1, hidden), plan)


@pytest.mark.skipif(importlib.util.find_spec("nvshmem") is not None, reason="nvshmem4py is installed")
def test_a_missing_nvshmem_is_named() -> None:
    assert "not cpu" in str(heap_nvshmem.unsupported("cpu"))
    assert "moe-runtime[nvshmem]" in str(heap_nvshmem.unsupported("cuda"))
    with pytest.raises(BackendUnavailable, match="nvshmem"):
        heap_nvshmem.NvshmemHeap(0, lambda text: [text], 64, torch.device("cuda", 0))


def test_layouts_fit_and_use_what_there_is(seed: int) -> None:
    for _ in range(200):
        N, topk, row_bytes = random.randint(1, 9), random.randint(1, 9), random.randint(1, 3000)
        with_weights, networked = random.random() < 0.5, random.random() < 0.3
        size = random.randint(1, 1 << 22)
        try:
            layout = fit_layout(N, size, row_bytes, topk, with_weights, networked)
        except CapacityError as error:
            needed = int(str(error).split("needs ")[1].split()[0])
            assert needed > size
            assert fit_layout(N, needed, row_bytes, topk, with_weights, networked).capacity >= 1
            continue
        assert layout.segment_bytes <= size
        more = type(layout)(N, layout.capacity + 1, row_bytes, topk, with_weights, networked)
        assert more.segment_bytes > size
        ends = [layout.headers_at, layout.rows_at, layout.records_at, layout.returns_at]
        assert all(end % 64 == 0 for end in [*ends, layout.parity_bytes])
        assert layout.returns_at + layout.returns_bytes == layout.rows_at + layout.parity_bytes
        if networked:
            outbox_end = layout.outbox_at + layout.returns_at + N * layout.returns_bytes
            assert layout.outbox_at + layout.rows_at >= layout.rows_at + 2 * layout.parity_bytes
            assert outbox_end <= layout.outbox_headers_at <= layout.segment_bytes - 16 * N


def test_calls_pack_into_a_word() -> None:
    for call in (Call(1, 0, 1, 1), Call(2, 2**26 - 1, 2**24 - 1, 2**10 - 1), Call(2, 7, 14336, 8)):
        assert 0 < call.pack() < 2**63
        assert Call.unpack(call.pack()) == call
    with pytest.raises(CapacityError, match="bytes per row"):
        Call(1, 1, 2**24, 1).pack()


@pytest.mark.parametrize(
    ("shape", "dtype", "words"),
    [
        ((3, 4), torch.float32, torch.int32),
        ((3, 7), torch.bfloat16, torch.int16),
        ((3, 7), torch.uint8, torch.uint8),
    ],
)
def test_rows_as_the_widest_words(shape: tuple[int, int], dtype: torch.dtype, words: torch.dtype) -> None:
    x = torch.zeros(shape, dtype=dtype)
    assert as_words(x).dtype == words
    # A row that begins off the words' boundary is copied in narrower ones.
    shifted = torch.zeros(65, dtype=torch.uint8)[1:].view(4, 16)
    assert as_words(shifted).dtype == torch.uint8
