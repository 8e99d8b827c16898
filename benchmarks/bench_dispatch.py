"""Measure how tokens travel between CPU ranks: bytes against the formula, time against gloo and a plain copy.

    python benchmarks/bench_dispatch.py --ranks 2 4 8 --tokens 1 16 128 1024 4096 --json results.json

Every case is checked before it is timed: the combined result to the bit, and the bytes that the dispatcher counted while
it stored them against what the routing alone says,

    dispatch   pairs (token, other rank) x (row + 4 x words) + 64 x rounds x (N - 1)     words: K slots, per_rank also K weights
    combine    rows x row of the model's dtype               + 64 x rounds x (N - 1)     rows: pairs as above, or (token, k) for exact

(64 bytes: the header of a message). gloo's all_to_all_single and the copy move the same rows, own share included, in
the same run and in turns with the dispatcher. `dispatch` and `combine` are whole calls: planning, gathering rows, moving them,
grouping what came or summing it. `exchange` is the part of one_sided's dispatch that moves rows, planned beforehand, as gloo's
are: gather into the peers' memory, wait, copy out. The targets compare it with gloo. Times are the largest over ranks of each
rank's lowest tenth (10th percentile), in milliseconds: on a shared machine what is above it measures the others.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from math import comb
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from moe_runtime.core import DispatchPlan
from moe_runtime.dispatch.collective import CollectiveDispatcher
from moe_runtime.dispatch.combining import words_beside
from moe_runtime.dispatch.fp8_payload import Fp8Payload, pack_rows, row_bytes, unpack_rows
from moe_runtime.dispatch.mailbox import HEADER_BYTES, Call, segment_bytes
from moe_runtime.dispatch.one_sided import OneSidedDispatcher
from moe_runtime.dispatch.rows import plan_outgoing
from moe_runtime.topology import all_gather_text

TARGETS = {(2, 4 << 20): 1 / 4, (4, 64 << 10): 1 / 15}
"""(ranks, bytes a rank sends, own share included) -> largest share of gloo's time that one_sided's exchange may take."""
COLUMNS = (
    "ranks tokens dispatcher payload combine | KiB/rank dispatch exchange gloo exch/gloo copy exch_GB/s"
    " | KiB/rank combine gloo comb/gloo"
)


@dataclass(frozen=True)
class Case:
    dispatcher: str
    num_tokens: int
    payload: str
    combine: str
    target: float | None = None


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
    hidden: int
    topk: int
    experts: int
    dtype: torch.dtype

    def ranks_per_token(self, num_ranks: int) -> float:
        """Distinct ranks among K of E experts drawn without preference, E divisible by the ranks."""
        here = self.experts // num_ranks
        return num_ranks * (1 - comb(self.experts - here, self.topk) / comb(self.experts, self.topk))


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--ranks", type=int, nargs="+", default=[2, 4, 8], help="numbers of ranks (%(default)s)")
    add(
        "--tokens",
        type=int,
        nargs="+",
        default=[1, 16, 128, 1024, 4096],
        help="tokens per rank (%(default)s)",
    )
    add("--dispatchers", nargs="+", default=["one_sided"], choices=["one_sided", "collective"])
    add("--payloads", nargs="+", default=["model", "fp8"], choices=["model", "fp8"])
    add("--combines", nargs="+", default=["exact", "per_rank"], choices=["exact", "per_rank"])
    add("--hidden", type=int, default=512, help="elements of a row (%(default)s)")
    add("--topk", type=int, default=8, help="experts per token (%(default)s)")
    add("--experts", type=int, default=256, help="experts, divisible by every number of ranks (%(default)s)")
    add("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    add("--buffer-mib", type=int, default=64, help="shared memory per rank (%(default)s)")
    add("--seconds", type=float, default=1.0, help="measuring time per case (%(default)s)")
    add("--no-targets", action="store_true", help="leave out the cases that the targets are about")
    add("--json", type=Path, help="write results with versions and command to this file")
    return parser


def cases_of(args: argparse.Namespace, shape: Shape, num_ranks: int) -> list[Case]:
    cases = [
        Case(dispatcher, tokens, payload, combine)
        for dispatcher in args.dispatchers
        for tokens in args.tokens
        for payload in args.payloads
        for combine in args.combines
    ]
    for (ranks, num_bytes), share in TARGETS.items():
        if ranks == num_ranks and not args.no_targets:
            row = shape.hidden * shape.dtype.itemsize
            tokens = round(num_bytes / row / shape.ranks_per_token(num_ranks))
            cases.insert(0, Case("one_sided", tokens, "model", "exact", share))
    return cases


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
        return batch.tokens_RD[batch.row_index_S] * (2.0 ** (slot_S % 3 - 1)).to(self.shape.dtype)[:, None]

    def _expected(self) -> torch.Tensor:
        """The layer's result by the definition of the combine, over whole columns of (token, k)."""
        x, slot_TK = self.x, self.plan.global_slot_TK
        if self.case.payload == "fp8":
            x = unpack_rows(pack_rows(x), x.shape[1], x.dtype)
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
    rank: int, num_ranks: int, args: argparse.Namespace, shape: Shape, folder: str, results: Queue[Any]
) -> None:
    """One process: every case, rank 0 reports."""
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
    for case in cases_of(args, shape, num_ranks):
        result = bench.run(case)
        if rank == 0:
            results.put(result)
    dist.barrier()
    dist.destroy_process_group()


def table_row(r: Result) -> list[str]:
    c = r.case
    seconds = (r.dispatch_s, r.exchange_s, r.dispatch_gloo_s, r.copy_s, r.combine_s, r.combine_gloo_s)
    ms = ["-" if s is None else f"{1e3 * s:.3f}" for s in seconds]
    share = "-" if r.exchange_s is None else f"{r.exchange_s / r.dispatch_gloo_s:.3f}"
    speed = "-" if r.exchange_s is None else f"{r.moved_bytes / r.exchange_s / 1e9:.2f}"
    return [
        *[str(r.ranks), str(c.num_tokens), c.dispatcher, c.payload, c.combine, "|"],
        *[f"{r.bytes_sent / 1024:.1f}", *ms[:3], share, ms[3], speed, "|"],
        *[f"{r.bytes_returned / 1024:.1f}", *ms[4:], f"{r.combine_s / r.combine_gloo_s:.3f}"],
    ]


def print_row(cells: list[str]) -> None:
    print("  ".join(cell.rjust(10 if cell != "|" else 1) for cell in cells), flush=True)


def report(results: list[Result]) -> list[str]:
    """A line per target."""
    lines = []
    for r in results:
        if r.case.target is not None and r.exchange_s is not None:
            share = r.exchange_s / r.dispatch_gloo_s
            verdict = "met" if share <= r.case.target else "MISSED"
            size = f"{r.moved_bytes / 1024:.0f} KiB a rank, {r.ranks} ranks"
            lines.append(
                f"target {verdict}: {size}: 1/{1 / share:.1f} of gloo's time, wanted 1/{1 / r.case.target:.0f}"
            )
    return lines


def main() -> int:
    args = build_parser().parse_args()
    shape = Shape(args.hidden, args.topk, args.experts, getattr(torch, args.dtype))
    for num_ranks in args.ranks:
        if args.experts % num_ranks or args.experts < args.topk:
            sys.exit(
                f"error: --experts {args.experts} must be divisible by {num_ranks} ranks, and at least --topk"
            )
    print_row(COLUMNS.split())
    results: list[Result] = []
    for num_ranks in args.ranks:
        with tempfile.TemporaryDirectory() as folder:
            queue = mp.get_context("spawn").Queue()
            # Ends all ranks and raises if one fails.
            running = mp.spawn(rank_main, (num_ranks, args, shape, folder, queue), num_ranks, join=False)
            wanted = len(results) + len(cases_of(args, shape, num_ranks))
            finished = False
            while len(results) < wanted:
                finished = finished or running.join(timeout=0.1)
                while not queue.empty():
                    results.append(queue.get())
                    print_row(table_row(results[-1]))
            while not finished:
                finished = running.join()
    lines = report(results)
    print("\n".join(lines))
    if args.json:
        about = {
            "command": shlex.join(["python", *sys.argv]),
            "date": datetime.now().astimezone().isoformat(timespec="seconds"),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "cpus": len(os.sched_getaffinity(0)),
            "machine": platform.platform(),
            "load": os.getloadavg(),
            "targets": lines,
        }
        found = [
            asdict(r) | {"topk": args.topk, "hidden": args.hidden, "experts": args.experts} for r in results
        ]
        args.json.write_text(json.dumps(about | {"results": found}, indent=1) + "\n")
    return int(any("MISSED" in line for line in lines))


if __name__ == "__main__":
    start = time.time()
    code = main()
    print(f"{time.time() - start:.0f} s", file=sys.stderr)
    sys.exit(code)
