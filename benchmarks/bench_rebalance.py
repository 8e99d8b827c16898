"""How much longer steps take while experts move: p50 and p99 of step times, with and without a move under way.

    python benchmarks/bench_rebalance.py --model demo --ep 2 --steps 600 --result result.json

Sequences decode on every rank all the time; the time between two tokens of one of them is that of a step. In turn, for a
quarter of the steps each, nothing moves, and experts go to random other ranks, one move after another; so what else the machine does
slows both. A step counts as one with a move if any part of it was. No prompt is computed while steps are timed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import random
import shlex
import sys
import time
from contextlib import aclosing
from pathlib import Path
from statistics import quantiles
from typing import Any

import torch

from moe_runtime import SamplingParams, __version__
from moe_runtime.config import EngineConfig, EplbConfig
from moe_runtime.engine.async_llm import AsyncLLM

TURNS = 4
Slots = list[list[list[int]]]


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo")
    parser.add_argument("--ep", type=int, default=2)
    parser.add_argument("--steps", type=int, default=600, help="steps timed with a move, and as many without")
    parser.add_argument("--sequences", type=int, default=4, help="per rank")
    parser.add_argument("--max-bytes-per-step", type=int, default=EplbConfig().max_bytes_per_step)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--result", type=Path, help="JSON file to write")
    return parser


def shuffled(placement: Slots, draw: random.Random) -> Slots:
    """As many experts on each rank, at random."""
    layers = []
    for layer in placement:
        sizes = [sum(e >= 0 for e in rank) for rank in layer]
        everyone = set().union(*layer) - {-1}
        while True:
            ranks = [draw.sample(sorted(everyone), size) for size in sizes]
            if set().union(*ranks) == everyone:
                break
        layers.append(ranks)
    return layers


class Stopwatch:
    """Times between the tokens of one sequence at a time, by whether experts moved."""

    def __init__(self) -> None:
        self.seconds: dict[bool, list[float]] = {False: [], True: []}
        self.moving = self.moved_since_last = False
        self._last: float | None = None

    def tick(self) -> None:
        now = time.perf_counter()
        if self._last is not None:
            self.seconds[self.moved_since_last or self.moving].append(now - self._last)
        self._last, self.moved_since_last = now, self.moving

    def restart(self) -> None:
        """What comes next is not one step after what came last."""
        self._last, self.moved_since_last = None, self.moving

    def begin_move(self) -> None:
        self.moving = self.moved_since_last = True


async def load(llm: AsyncLLM, args: argparse.Namespace, watch: Stopwatch, over: asyncio.Event) -> None:
    """Waves of sequences on all ranks; all begin and end together. The first sequence of each wave is timed."""
    draw = random.Random(args.seed)
    prompt_len = 8
    length = llm.max_model_len - prompt_len
    params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True, detokenize=False)

    async def sequence(rank: int, timed: bool) -> None:
        prompt = [draw.randrange(llm.vocab_size) for _ in range(prompt_len)]
        num_tokens = 0
        async with aclosing(llm.stream(prompt, params, routed_dp_rank=rank)) as deltas:  # type: ignore[type-var]
            async for _ in deltas:
                if over.is_set():
                    return
                num_tokens += 1
                # Prompts of the others may still be computed beside the first steps.
                if timed and num_tokens > 2 * args.sequences:
                    watch.tick()

    while not over.is_set():
        watch.restart()
        await asyncio.gather(
            *(sequence(rank, rank == i == 0) for rank in range(args.ep) for i in range(args.sequences))
        )


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    draw = random.Random(args.seed)
    eplb = {"max_bytes_per_step": args.max_bytes_per_step, "step_interval": 10**9}
    config = EngineConfig(
        model=args.model, ep=args.ep, enable_eplb=True, eplb_config=json.dumps(eplb), max_model_len=512,
        max_num_seqs=args.sequences, enable_prefix_caching=False, overlap="off", log_level="warning",
    )  # fmt: skip
    llm = await AsyncLLM.from_config(config)
    watch, over, moves = Stopwatch(), asyncio.Event(), 0
    loading = asyncio.create_task(load(llm, args, watch, over))
    try:
        # Warm-up.
        while len(watch.seconds[False]) < 50:
            await asyncio.sleep(0.05)
        watch.seconds[False].clear()
        for turn in range(1, TURNS + 1):
            wanted = args.steps * turn // TURNS
            while len(watch.seconds[False]) < wanted:
                await asyncio.sleep(0.05)
            while len(watch.seconds[True]) < wanted:
                placement = llm.placements[0]
                assert placement is not None
                watch.begin_move()
                outcome = await llm.rebalance(shuffled(placement.slots, draw), timeout=600)
                watch.moving = False
                assert outcome.result == "applied", outcome
                moves += 1
        stats = [rank.eplb for rank in llm.stats]
    finally:
        over.set()
        await asyncio.gather(loading, return_exceptions=True)
        await llm.close()
    return {
        "moves": moves,
        "moved_bytes": [s.moved_bytes for s in stats if s is not None],
        "stalls_ms": [round(1e3 * s.stalls_s.total, 2) for s in stats if s is not None],
        "without": summary(watch.seconds[False]),
        "with": summary(watch.seconds[True]),
    }


def summary(seconds: list[float]) -> dict[str, float]:
    cuts = quantiles(seconds, n=100, method="inclusive")
    return {
        "steps": len(seconds),
        "p50_ms": round(1e3 * cuts[49], 2),
        "p90_ms": round(1e3 * cuts[89], 2),
        "p99_ms": round(1e3 * cuts[98], 2),
        "max_ms": round(1e3 * max(seconds), 2),
    }


def main() -> None:
    args = build_parser().parse_args()
    result = asyncio.run(measure(args))
    for name in ("without", "with"):
        row = result[name]
        print(f"{name:>8} a move: " + "  ".join(f"{key} {value}" for key, value in row.items()))
    result["p99_ratio"] = round(result["with"]["p99_ms"] / result["without"]["p99_ms"], 3)
    print(
        f"p99 with / without: {result['p99_ratio']};  {result['moves']} moves, {result['moved_bytes']} bytes fetched by rank,"
        f" {result['stalls_ms']} ms of changing maps"
    )
    if args.result:
        result["command"] = shlex.join(["python", *sys.argv])
        result["versions"] = {
            "moe_runtime": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        }
        args.result.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
