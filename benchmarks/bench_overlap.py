"""What overlap of computing and travel gains or costs, for networks of several latencies.

    python benchmarks/bench_overlap.py --ep 2 --delays-ms 0 20 --ways off on chunks auto --result result.json

Each run starts the engine anew and computes the same prompts: a prefill of --num-prompts prompts, then decoding of
as many sequences. Latency is --dispatch-delay-ms (one_sided dispatcher on CPUs). Before anything is timed, the tokens
of every way are compared with those without overlap; how many sequences differ is part of the result.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import torch

from moe_runtime import LLM, SamplingParams, __version__


def build_parser() -> argparse.ArgumentParser:
    """The flags."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo")
    parser.add_argument("--ep", type=int, default=2)
    parser.add_argument("--delays-ms", type=float, nargs="+", default=[0.0, 20.0])
    parser.add_argument("--ways", nargs="+", default=["off", "on", "chunks", "auto"])
    parser.add_argument("--num-prompts", type=int, default=32)
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--batched-tokens", type=int, default=256, help="token budget of a step per rank")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--result", type=Path, help="JSON file to write")
    return parser


def measure(args: argparse.Namespace, way: str, delay_ms: float) -> tuple[dict[str, Any], list[list[int]]]:
    """Times of one engine, and the tokens it generated."""
    draw = random.Random(args.seed)
    with LLM(
        model=args.model, ep=args.ep, overlap=way, dispatch_delay_ms=delay_ms, enable_prefix_caching=False,
        max_model_len=args.input_len + args.output_len, max_num_batched_tokens=args.batched_tokens,
        dispatcher="one_sided", log_level="warning",
    ) as llm:  # fmt: skip
        vocab = len(llm.get_tokenizer())

        def prompts() -> list[list[int]]:
            return [[draw.randrange(vocab) for _ in range(args.input_len)] for _ in range(args.num_prompts)]

        def timed(output_len: int) -> tuple[float, list[list[int]]]:
            params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
            ids, begin = prompts(), time.perf_counter()
            outputs = llm.generate(ids, params, use_tqdm=False)
            return time.perf_counter() - begin, [o.outputs[0].token_ids for o in outputs]

        _, tokens = timed(args.output_len)
        prefill_s, _ = timed(1)
        both_s, _ = timed(args.output_len)
        stats = llm.stats[0]
    return {
        "way": way,
        "delay_ms": delay_ms,
        "prefill_s": round(prefill_s, 3),
        "decode_s": round(both_s - prefill_s, 3),
        "steps": stats.steps,
        "two_batch_steps": stats.two_batch_steps,
        "chunked_steps": stats.chunked_steps,
    }, tokens


def main() -> None:
    """Print the table, write the JSON file."""
    args = build_parser().parse_args()
    rows = []
    expected: list[list[int]] | None = None
    print(
        f"{'delay':>8} {'way':>7} {'prefill s':>10} {'decode s':>9} {'two-batch':>10} {'chunked':>8} {'steps':>6} {'differ':>7}"
    )
    for delay_ms in args.delays_ms:
        for way in args.ways:
            row, tokens = measure(args, way, delay_ms)
            expected = expected or tokens
            row["sequences_that_differ"] = sum(a != b for a, b in zip(expected, tokens, strict=True))
            rows.append(row)
            print(
                f"{delay_ms:>5} ms {way:>7} {row['prefill_s']:>10} {row['decode_s']:>9} {row['two_batch_steps']:>10}"
                f" {row['chunked_steps']:>8} {row['steps']:>6} {row['sequences_that_differ']:>7}",
                flush=True,
            )
    if args.result:
        versions = {
            "moe_runtime": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        }
        command = shlex.join(["python", *sys.argv])
        args.result.write_text(json.dumps({"command": command, "versions": versions, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
