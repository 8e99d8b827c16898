"""The ranks' side of bench_dispatch: every case checked, then timed, in processes of their own.

Legend: T tokens of this rank, K experts per token, E experts, N ranks, M pairs (token, other rank), S expert rows, R received
rows, p slots of this rank, D elements of a row.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from math import comb
from multiprocessing.queues import Queue
from typing import Any

import torch
import torch.distributed as dist

from moe_runtime.core import DispatchPlan
from moe_runtime.dispatch.collective import CollectiveDispatcher
from moe_runtime.dispatch.combining import words_beside
from moe_runtime.dispatch.fp8_payload import Fp8Payload
from moe_runtime.dispatch.mailbox import HEADER_BYTES, Call, segment_bytes
from moe_runtime.dispatch.one_sided import OneSidedDispatcher
from moe_runtime.dispatch.rows import plan_outgoing
from moe_runtime.experts.base import wide_tokens
from moe_runtime.native.build import load_native
from moe_runtime.quantization import dequantize_rows, pack_rows, row_bytes, unpack_rows
from moe_runtime.topology import all_gather_text


@dataclass(frozen=True)
class Case:
    """What is measured with every number of ranks."""

    dispatcher: str
    num_tokens: int
    """Of each rank."""
    payload: str
    combine: str
    target: float | None = None
    """Largest share of gloo's time that the exchange may take."""


@dataclass
class Result:
    """Bytes go to other ranks; those that gloo and the copy move include the own share. Seconds."""

    ranks: int
    case: Case
    bytes_sent: int
    bytes_returned: int
    expected_bytes_sent: float
    """What uniform routing gives on average: tokens x remote ranks of a token x bytes of a row with its words."""
    moved_bytes: int
    dispatch_s: float
    exchange_s: float | None
    """None for other dispatchers than one_sided."""
    dispatch_gloo_s: float
    copy_s: float
    combine_s: float
    combine_gloo_s: float


@dataclass(frozen=True)
class Shape:
    """Of the MoE layer."""

    hidden: int
    """Elements of a row."""
    topk: int
    """Experts per token."""
    experts: int
    dtype: torch.dtype

    def ranks_per_token(self, num_ranks: int) -> float:
        """Distinct ranks among K of E experts drawn without preference, E divisible by the ranks."""
        here = self.experts // num_ranks
        return num_ranks * (1 - comb(self.experts - here, self.topk) / comb(self.experts, self.topk))


class Bench:
    """One rank's side. All ranks make the same calls."""

    def __init__(self, rank: int, num_ranks: int, args: argparse.Namespace, shape: Shape) -> None:
        self.rank, self.num_ranks, self.args, self.shape = rank, num_ranks, args, shape
        assert dist.group.WORLD is not None
        self.group = dist.group.WORLD

    def run(self, case: Case) -> Result:
        """Check, then time."""
        self.case = case
        draw = torch.Generator().manual_seed(1000 * self.rank + case.num_tokens)
        T, K, E = case.num_tokens, self.shape.topk, self.shape.experts
        self.x = torch.randn(T, self.shape.hidden, generator=draw).to(self.shape.dtype)
        # A permutation per token: K distinct experts, uniform.
        slots = torch.rand(T, E, generator=draw).argsort(dim=1)[:, :K].contiguous()
        weights = torch.rand(T, K, generator=draw)
        self.plan = DispatchPlan(slots, weights, E // self.num_ranks, self.num_ranks, self.rank, T)
        self.outer, self.inner = self._make()
        try:
            return self._measure(*self._check())
        finally:
            self.outer.close()

    def _make(self) -> tuple[Any, Any]:
        case, args, shape = self.case, self.args, self.shape
        inner: Any
        if case.dispatcher == "collective":
            inner = CollectiveDispatcher(self.group, 60.0, case.combine, padded_message_bytes=0)
        else:
            words = 2 * shape.topk
            widest = max(shape.hidden * shape.dtype.itemsize, row_bytes(shape.hidden))
            inner = OneSidedDispatcher(
                self.rank,
                self.num_ranks,
                lambda text: all_gather_text(self.group, text),
                hidden_size=shape.hidden,
                topk=shape.topk,
                dtype=shape.dtype,
                buffer_bytes=max(args.buffer_mib << 20, segment_bytes(self.num_ranks, 1, widest, words)),
                step_timeout=60.0,
                is_alive=lambda rank: True,
                combine=case.combine,
                native=load_native(),
            )
        return (Fp8Payload(inner) if case.payload == "fp8" else inner), inner

    def _check(self) -> tuple[torch.Tensor, int, int]:
        """The dispatch's expert results, and the bytes of dispatch and combine; AssertionError if anything is wrong."""
        traffic, plan = self.inner.traffic, self.plan
        batch = self.outer.dispatch(self.x, plan).wait()
        control, rounds = traffic.control_bytes, traffic.rounds
        y = self._experts(batch)
        out = self.outer.combine(y, batch, plan).wait()
        assert torch.equal(out, self._expected()), f"rank {self.rank}: wrong result in {self.case}"
        rank_TK = plan.global_slot_TK // plan.slots_per_rank
        pairs_N = torch.stack([(rank_TK == n).any(dim=1).sum() for n in range(self.num_ranks)]).tolist()
        expert_rows_N = torch.bincount(rank_TK.view(-1), minlength=self.num_ranks).tolist()
        # What this rank returns is what the others sent here: ask them.
        asked = pairs_N if self.case.combine == "per_rank" else expert_rows_N
        returned = sum(json.loads(t)[self.rank] for t in self._gather(asked)) - asked[self.rank]
        model_row = self.shape.hidden * self.shape.dtype.itemsize
        sent = (sum(pairs_N) - pairs_N[self.rank]) * self._record_bytes()
        assert traffic.bytes_sent == sent, f"dispatch moved {traffic.bytes_sent} bytes, not {sent}"
        assert traffic.bytes_returned == returned * model_row, f"combine moved {traffic.bytes_returned} bytes"
        others = self.num_ranks - 1
        expected = HEADER_BYTES * rounds * others if self.case.dispatcher == "one_sided" else 8 * others
        assert control == expected, f"{control} bytes of headers, not {expected}"
        self.pairs_N, self.expert_rows_N = pairs_N, expert_rows_N
        return y, sent, returned * model_row

    def _record_bytes(self) -> int:
        hidden = self.shape.hidden
        row = row_bytes(hidden) if self.case.payload == "fp8" else hidden * self.shape.dtype.itemsize
        return row + 4 * self.shape.topk * (2 if self.case.combine == "per_rank" else 1)

    def _gather(self, numbers: list[int]) -> list[str]:
        return all_gather_text(self.group, json.dumps(numbers))

    def _experts(self, batch: Any) -> torch.Tensor:
        """Slot s doubles or halves s % 3 - 1 times, which no dtype rounds."""
        slot_S = torch.repeat_interleave(torch.arange(len(batch.num_rows_p)), batch.num_rows_p)
        slot_S = slot_S + self.rank * self.plan.slots_per_rank
        rows = wide_tokens(batch, batch.dtype)[batch.row_index_S]
        return rows * (2.0 ** (slot_S % 3 - 1)).to(self.shape.dtype)[:, None]

    def _expected(self) -> torch.Tensor:
        """The layer's result by the definition of the combine, over whole columns of (token, k)."""
        x, slot_TK = self.x, self.plan.global_slot_TK
        if self.case.payload == "fp8":
            x = dequantize_rows(*unpack_rows(pack_rows(x), x.shape[1])).to(x.dtype)
        rank_TK = slot_TK // self.plan.slots_per_rank
        groups = range(self.num_ranks) if self.case.combine == "per_rank" else [None]
        total = torch.zeros(x.shape)
        for group in groups:
            part = torch.zeros(x.shape)
            for k in range(slot_TK.shape[1]):
                row = x.float() * 2.0 ** (slot_TK[:, k : k + 1] % 3 - 1)
                product = self.plan.topk_weights_TK[:, k : k + 1] * row
                part += (
                    product if group is None else torch.where(rank_TK[:, k : k + 1] == group, product, 0.0)
                )
            total = part if group is None else total + part.to(x.dtype).float()
        return total.to(x.dtype)

    def _measure(self, y: torch.Tensor, bytes_sent: int, bytes_returned: int) -> Result:
        case, plan = self.case, self.plan
        model_row = self.shape.hidden * self.shape.dtype.itemsize
        record = self._record_bytes()
        rows_back = self.expert_rows_N if case.combine == "exact" else self.pairs_N
        batch = None

        def dispatch() -> None:
            nonlocal batch
            batch = self.outer.dispatch(self.x, plan).wait()

        def combine() -> None:
            self.outer.combine(y, batch, plan).wait()

        moved = sum(self.pairs_N) * record
        a, b = torch.ones(moved, dtype=torch.uint8), torch.ones(moved, dtype=torch.uint8)
        steps = {
            "dispatch": dispatch,
            "combine": combine,
            **({"exchange": self._exchange()} if case.dispatcher == "one_sided" else {}),
            "dispatch_gloo": self._gloo([n * record for n in self.pairs_N]),
            # The other way round: what a rank gets back is what it sent for.
            "combine_gloo": self._gloo([n * model_row for n in rows_back], back=True),
            "copy": lambda: b.copy_(a),
        }
        seconds = time_in_turns(steps, self.args.seconds, self.group)
        everyone = [json.loads(t) for t in all_gather_text(self.group, json.dumps(seconds))]
        worst: dict[str, Any] = {f"{name}_s": max(one[name] for one in everyone) for name in steps}
        worst.setdefault("exchange_s", None)
        remote = self.shape.ranks_per_token(self.num_ranks) * (self.num_ranks - 1) / self.num_ranks
        expected = case.num_tokens * remote * record
        return Result(self.num_ranks, case, bytes_sent, bytes_returned, expected, moved, **worst)

    def _exchange(self) -> Callable[[], object]:
        """one_sided's way of a dispatch's rows, planned: the dispatcher's own code, without what is around it."""
        plan = self.plan
        outgoing = plan_outgoing(plan.global_slot_TK.numpy(), plan.num_ranks, plan.slots_per_rank)
        weights = plan.topk_weights_TK.numpy() if self.case.combine == "per_rank" else None
        words = words_beside(outgoing, weights)
        rows = pack_rows(self.x) if self.case.payload == "fp8" else self.x
        call = Call(1, plan.max_num_tokens, rows.shape[1], rows.element_size(), words.shape[1])
        one_sided = self.inner
        return lambda: one_sided._finish(
            one_sided._post(rows, outgoing.token_M, words, outgoing.rows_N, call)
        )

    def _gloo(self, sizes: list[int], back: bool = False) -> Callable[[], object]:
        """all_to_all_single of sizes[n] bytes to rank n; `back`: of as many bytes as each of those had come from there."""
        theirs = [json.loads(t)[self.rank] for t in self._gather(sizes)]
        sent_N, received_N = (theirs, sizes) if back else (sizes, theirs)
        sent = torch.ones(sum(sent_N), dtype=torch.uint8)
        received = torch.empty(sum(received_N), dtype=torch.uint8)
        return lambda: dist.all_to_all_single(received, sent, received_N, sent_N, group=self.group)


def time_in_turns(
    steps: dict[str, Callable[[], object]], seconds: float, group: dist.ProcessGroup
) -> dict[str, float]:
    """The lowest tenth of the times of each step. A few calls of one, then of the next, and again, so that all see the same machine."""
    # Dispatch and combine take turns, as in a layer.
    pair, others = ["dispatch", "combine"], [name for name in steps if name not in ("dispatch", "combine")]
    times: dict[str, list[float]] = {name: [] for name in steps}
    begin = time.perf_counter()
    turn = 0
    while turn < 3 or _agreed(time.perf_counter() - begin < seconds, group):
        for names in (pair, *([name] for name in others)):
            dist.barrier(group=group)
            for call in range(12):
                for name in names:
                    start = time.perf_counter()
                    steps[name]()
                    # The first call of a turn meets cold caches and ranks that leave the barrier one by one.
                    if call:
                        times[name].append(time.perf_counter() - start)
        turn += 1
    return {name: sorted(all_times)[len(all_times) // 10] for name, all_times in times.items()}


def _agreed(go_on: bool, group: dist.ProcessGroup) -> bool:
    """Rank 0's wish, so that all make the same number of turns."""
    wish = torch.tensor([int(go_on)])
    dist.broadcast(wish, 0, group=group)
    return bool(wish.item())


def rank_main(
    rank: int,
    num_ranks: int,
    args: argparse.Namespace,
    shape: Shape,
    cases: list[Case],
    folder: str,
    results: Queue[Any],
) -> None:
    """One process: every case, of which rank 0 puts a Result each. `folder`: where the ranks meet."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meet",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(minutes=5),
    )
    bench = Bench(rank, num_ranks, args, shape)
    for case in cases:
        result = bench.run(case)
        if rank == 0:
            results.put(result)
    dist.barrier()
    dist.destroy_process_group()
