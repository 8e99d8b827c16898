"""Messages of several MiB over shared memory, which torch copies and which go in rounds that stay in cache."""

from __future__ import annotations

import pytest
import torch

from moe_runtime.core import DispatchPlan
from moe_runtime.dispatch import peer_store
from moe_runtime.dispatch.one_sided import OneSidedDispatcher
from moe_runtime.native.build import load_native
from tests.helpers.dispatch_cases import exchange
from tests.helpers.spawn import run_ranks

HIDDEN = 1000


def rows_of(rank: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, slots (two of all ranks', distinct) and weights."""
    draw = torch.Generator().manual_seed(seed + rank)
    tokens = 1500 - 1400 * rank
    slots = torch.rand(tokens, 4, generator=draw).argsort(dim=1)[:, :2]
    return torch.randn(tokens, HIDDEN, generator=draw), slots, torch.rand(tokens, 2, generator=draw)


def send(rank: int, num_ranks: int, combine: str, buffer_bytes: int, stream: bool, seed: int) -> int:
    """stream: all large stores go past the caches."""
    native = load_native() if stream else None
    peer_store.CALLS_BETWEEN_TRIALS = 0
    dispatcher = OneSidedDispatcher(
        rank,
        num_ranks,
        exchange,
        hidden_size=HIDDEN,
        topk=2,
        dtype=torch.float32,
        buffer_bytes=buffer_bytes,
        step_timeout=60.0,
        is_alive=lambda peer: True,
        combine=combine,
        native=native,
    )
    everyone = [rows_of(r, seed) for r in range(num_ranks)]
    x, slots, weights = everyone[rank]
    plan = DispatchPlan(slots, weights, 2, num_ranks, rank, 1500)
    batch = dispatcher.dispatch(x, plan).wait()
    here = [(slots // 2 == rank).any(dim=1) for _, slots, _ in everyone]
    assert torch.equal(batch.tokens_RD, torch.cat([r[0][h] for r, h in zip(everyone, here, strict=True)]))
    out = dispatcher.combine(batch.tokens_RD[batch.row_index_S], batch, plan).wait()
    # Two terms: their order does not matter.
    assert torch.equal(out, weights[:, :1] * x + weights[:, 1:] * x)
    if native is not None and native.library is not None and rank == 0:
        assert dispatcher._stores_N[1].timed(streaming=True), "no store went past the caches"
    dispatcher.close()
    return dispatcher.traffic.rounds


@pytest.mark.parametrize(
    ("combine", "buffer_bytes", "stream", "least"),
    [
        ("exact", 32 << 20, True, 4),
        ("exact", 1 << 20, False, 12),
        ("per_rank", 32 << 20, False, 4),
        ("per_rank", 1 << 20, True, 12),
    ],
)
def test_long_messages_arrive_whole(
    combine: str, buffer_bytes: int, stream: bool, least: int, seed: int
) -> None:
    rounds = run_ranks(send, 2, combine, buffer_bytes, stream, seed)
    assert rounds[0] == rounds[1] > least
