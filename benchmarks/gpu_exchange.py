"""Stage 1 of gpu_check: one-sided dispatch and combine. Legend: T tokens, K experts per token, N ranks, p slots, S expert rows."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.gpu_cases import BF16, Env, Skip, close, same

Rows = Iterator[dict[str, Any]]


def virtual_ranks(env: Env) -> Rows:
    """One-sided dispatch and combine, every rank in this process; more tokens than a buffer holds."""
    from moe_runtime.dispatch.triton_one_sided_virtual import VirtualRanks

    hidden = 48 if env.small else 2048
    sizes = ((1, 5), (3, 9)) if env.small else ((1, 64), (2, 1), (4, 300), (8, 700))
    for num_ranks, tokens in sizes:
        for combine in ("exact", "per_rank"):
            ranks = VirtualRanks(
                num_ranks,
                1 << (20 if env.small else 27),
                env.device,
                hidden_size=hidden,
                topk=4,
                dtype=BF16,
                combine=combine,
            )
            for turn in range(3):
                what = f"N={num_ranks} T<={tokens} {combine} call {turn}"
                yield _exchange(env, what, ranks.dispatch, ranks.combine, num_ranks, tokens, hidden, combine)
            for dispatcher in ranks.dispatchers:
                dispatcher.check()
            ranks.close()


def nvshmem_one_rank(env: Env) -> Rows:
    """The same kernels on a heap that NVSHMEM allocated, with one rank."""
    from moe_runtime.dispatch import heap_nvshmem
    from moe_runtime.dispatch.triton_one_sided import TritonOneSidedDispatcher

    reason = heap_nvshmem.unsupported(env.device.type)
    if reason is not None:
        raise Skip(reason)
    heap = heap_nvshmem.NvshmemHeap(0, lambda text: [text], 1 << 26, env.device)
    dispatcher = TritonOneSidedDispatcher(
        heap, hidden_size=1024, topk=4, dtype=BF16, step_timeout=10.0, is_alive=lambda _: True
    )
    yield _exchange(
        env, "N=1",
        lambda xs, plans: [dispatcher.dispatch(xs[0], plans[0]).wait()],
        lambda ys, batches, plans: [dispatcher.combine(ys[0], batches[0], plans[0]).wait()],
        1, 200, 1024, "exact",
    )  # fmt: skip
    dispatcher.check()
    dispatcher.close()


def _exchange(
    env: Env,
    what: str,
    dispatch: Callable[..., list[Any]],
    combine: Callable[..., list[torch.Tensor]],
    num_ranks: int,
    tokens: int,
    hidden: int,
    mode: str,
) -> dict[str, Any]:
    """Sends random tokens, multiplies each slot's rows by the slot's own factor, and returns them."""
    from moe_runtime.core import DispatchPlan

    p, K, device = 4, 4, env.device
    lengths = [random.randint(0, tokens) for _ in range(num_ranks - 1)] + [tokens]
    xs = [torch.randn(n, hidden, device=device).to(BF16) for n in lengths]
    slots = [torch.rand(n, num_ranks * p, device=device).topk(K, 1).indices for n in lengths]
    for slot_TK in slots:
        slot_TK[torch.rand(slot_TK.shape, device=device) < 0.1] = -1
    # Powers of two, so that a product is exact.
    factor = 2.0 ** torch.randint(-2, 3, (num_ranks * p,), device=device)
    plans = [
        DispatchPlan(s, torch.rand(s.shape, device=device), p, num_ranks, rank, max(lengths)) for rank, s in enumerate(slots)
    ]  # fmt: skip
    batches = dispatch(xs, plans)
    ys = []
    for rank, batch in enumerate(batches):
        wanted = [
            [x[(slot_TK == slot).any(1)] for x, slot_TK in zip(xs, slots, strict=True)]
            for slot in range(rank * p, rank * p + p)
        ]
        same(
            f"{what}: rows per slot", batch.num_rows_p.cpu(), torch.tensor([sum(map(len, w)) for w in wanted])
        )
        rows = batch.tokens_RD[batch.row_index_S[: int(batch.num_rows_p.sum())]]
        same(f"{what}: rows of rank {rank}", rows, torch.cat([row for w in wanted for row in w]))
        of_row = torch.repeat_interleave(factor[rank * p : rank * p + p], batch.num_rows_p)
        y_SD = torch.full((batch.row_index_S.shape[0], hidden), torch.nan, dtype=BF16, device=device)
        y_SD[: rows.shape[0]] = (rows.float() * of_row[:, None]).to(BF16)
        ys.append(y_SD)
    outs = combine(ys, batches, plans)
    expected = [
        x.float() * (plan.topk_weights_TK * torch.where(slot_TK >= 0, factor[slot_TK.clamp(min=0)], 0.0)).sum(1, keepdim=True)
        for x, slot_TK, plan in zip(xs, slots, plans, strict=True)
    ]  # fmt: skip
    # Partial sums of per_rank are rounded to bf16 on their way.
    tolerance = 2**-8 if mode == "exact" else 2**-6
    return close(what, torch.cat(outs), torch.cat(expected), tolerance)
