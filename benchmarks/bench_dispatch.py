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
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

import torch
import torch.multiprocessing as mp

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.dispatch_ranks import Case, Result, Shape, rank_main

TARGETS = {(2, 4 << 20): 1 / 4, (4, 64 << 10): 1 / 15}
"""(ranks, bytes a rank sends, own share included) -> largest share of gloo's time that one_sided's exchange may take."""
COLUMNS = (
    "ranks tokens dispatcher payload combine | KiB/rank dispatch exchange gloo exch/gloo copy exch_GB/s"
    " | KiB/rank combine gloo comb/gloo"
)


def build_parser() -> argparse.ArgumentParser:
    """The flags."""
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
    """What the flags ask for, and the targets of that number of ranks."""
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


def table_row(r: Result) -> list[str]:
    """A cell for each of COLUMNS."""
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
    """One line, its cells right-aligned."""
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
    """Returns the exit status: 1 if a target was missed."""
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
        cases = cases_of(args, shape, num_ranks)
        with tempfile.TemporaryDirectory() as folder:
            queue = mp.get_context("spawn").Queue()
            # Ends all ranks and raises if one fails.
            running = mp.spawn(
                rank_main, (num_ranks, args, shape, cases, folder, queue), num_ranks, join=False
            )
            wanted = len(results) + len(cases)
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
