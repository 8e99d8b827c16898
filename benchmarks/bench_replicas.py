"""What choosing copies at run time costs a MoE layer, and what it gains: rows on the fullest rank.

    python benchmarks/bench_replicas.py --ranks 2,4 --experts 64,256 --tokens 16,256

For a hot routing (Zipf) with one spare slot in eight: microseconds of `static`, `random` and `dynamic` per layer on the slowest
rank (median), with counts exchanged through shared memory, and the fullest rank's rows over the mean. Nothing is dispatched.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from moe_runtime.core import Routing
from moe_runtime.dispatch.base import ChooseReplicas, plan_dispatch
from moe_runtime.dispatch.mailbox import segment_bytes
from moe_runtime.dispatch.one_sided import OneSidedDispatcher
from moe_runtime.placement.layout import contiguous, layer_placement
from moe_runtime.replicas import ChooseByCounts, choose_randomly
from moe_runtime.topology import all_gather_text

TOPK, REPEATS = 8, 50
WAYS = ("static", "random", "dynamic")


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", default="2,4", help="numbers of ranks, separated by commas")
    parser.add_argument("--experts", default="64,256", help="numbers of experts")
    parser.add_argument("--tokens", default="16,256", help="tokens on each rank")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="JSON file for the results")
    return parser


def routing_of(num_tokens: int, num_experts: int, seed: int) -> Routing:
    """Experts drawn by Zipf's law with exponent 0.8, each at most once for a token."""
    draw = np.random.default_rng(seed)
    log_share = -0.8 * np.log(np.arange(1, num_experts + 1))
    # Gumbel's trick: the largest of log share + noise are a draw without replacement.
    keys = log_share + draw.gumbel(size=(num_tokens, num_experts))
    ids = np.argsort(-keys, axis=1)[:, :TOPK].copy()
    return Routing(torch.from_numpy(ids), torch.ones(ids.shape))


def rank_main(
    rank: int, num_ranks: int, meet: str, args: argparse.Namespace, num_experts: int, num_tokens: int
) -> None:
    """Measure on one rank; rank 0 prints."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=num_ranks)
    group = dist.group.WORLD
    assert group is not None
    dispatcher = OneSidedDispatcher(
        rank, num_ranks, lambda text: all_gather_text(group, text),
        hidden_size=num_experts, topk=TOPK, dtype=torch.float32,
        buffer_bytes=segment_bytes(num_ranks, 64, 4 * num_experts, TOPK), step_timeout=60, is_alive=lambda _: True,
    )  # fmt: skip
    placement = layer_placement(contiguous(1, num_experts, num_ranks, num_experts // 8), 0, rank)
    routing = routing_of(num_tokens, num_experts, args.seed + rank)
    ways: dict[str, ChooseReplicas] = dict(
        zip(WAYS, (plan_dispatch, choose_randomly, ChooseByCounts(dispatcher.share)), strict=True)
    )
    line = {"ranks": num_ranks, "experts": num_experts, "tokens": num_tokens}
    for name, choose in ways.items():
        times = []
        for _ in range(REPEATS):
            dist.barrier()
            begin = time.perf_counter()
            plan = choose(routing, placement, rank, num_tokens)
            times.append(time.perf_counter() - begin)
        rows_N = torch.bincount(plan.global_slot_TK.view(-1) // plan.slots_per_rank, minlength=num_ranks)
        dist.all_reduce(rows_N)
        slowest = torch.tensor([statistics.median(times) * 1e6])
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        line |= {
            f"{name}_us": round(slowest.item(), 1),
            f"{name}_imbalance": round(float(rows_N.max() / rows_N.double().mean()), 3),
        }
    if rank == 0:
        print(" | ".join(str(v) for v in line.values()), flush=True)
        if args.output:
            with args.output.open("a") as file:
                file.write(json.dumps(line) + "\n")
    dispatcher.close()
    dist.barrier()
    dist.destroy_process_group()


def main(argv: list[str]) -> int:
    """Run all cases."""
    args = build_parser().parse_args(argv)
    print("ranks | experts | tokens | " + " | ".join(f"{way} us | {way} fullest/mean" for way in WAYS))
    for num_ranks in map(int, args.ranks.split(",")):
        for num_experts in map(int, args.experts.split(",")):
            for num_tokens in map(int, args.tokens.split(",")):
                with tempfile.TemporaryDirectory() as folder:
                    mp.spawn(
                        rank_main, (num_ranks, f"{folder}/meet", args, num_experts, num_tokens), num_ranks
                    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
