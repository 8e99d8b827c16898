"""What --deterministic costs: times of an engine with and of one without, side by side.

    python benchmarks/bench_deterministic.py --model demo --ep 1 --result result.json

Both engines are started before anything is timed and take turns, so that what else the machine does slows both. Each
time is the least of --repeats. A decode step's time is that of generating 1 + --output-len tokens less that of
generating one, divided by --output-len. Prompts are random tokens; prefixes are not cached.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shlex
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import torch

from moe_runtime import LLM, SamplingParams, __version__


def build_parser() -> argparse.ArgumentParser:
    """The flags."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo")
    parser.add_argument("--ep", type=int, default=1)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument(
        "--batches", type=int, nargs="+", default=[1, 16], help="sequences of the decode steps"
    )
    parser.add_argument("--output-len", type=int, default=16, help="decode steps timed together")
    parser.add_argument("--prefill-len", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--result", type=Path, help="JSON file to write")
    return parser


def seconds(llm: LLM, prompts: list[list[int]], num_tokens: int) -> float:
    """Time of generating `num_tokens` tokens greedily for each of `prompts`, given as ids."""
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    begin = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - begin


def measure(engines: dict[str, LLM], args: argparse.Namespace, batch: int | None) -> dict[str, float]:
    """Least seconds of a decode step of `batch` sequences, or of a prefill (None), for each engine."""
    draw = random.Random(args.seed)
    vocab = len(next(iter(engines.values())).get_tokenizer())
    length, batch_size = (args.prefill_len, 1) if batch is None else (16, batch)
    first: dict[str, list[float]] = {name: [] for name in engines}
    whole: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(args.repeats):
        prompts = [[draw.randrange(vocab) for _ in range(length)] for _ in range(batch_size)]
        for name, llm in engines.items():
            first[name].append(seconds(llm, prompts, 1))
            if batch is not None:
                whole[name].append(seconds(llm, prompts, 1 + args.output_len))
    if batch is None:
        return {name: min(times) for name, times in first.items()}
    return {name: (min(whole[name]) - min(first[name])) / args.output_len for name in engines}


def main() -> None:
    """Print the table, write the JSON file."""
    args = build_parser().parse_args()
    rows = []
    with ExitStack() as stack:
        engines = {
            name: stack.enter_context(
                LLM(
                    model=args.model, ep=args.ep, dtype=args.dtype, deterministic=name == "deterministic",
                    enable_prefix_caching=False, max_model_len=args.prefill_len + args.output_len + 1,
                    max_num_batched_tokens=args.prefill_len, num_kv_blocks=256, block_size=16, log_level="warning",
                )
            )
            for name in ("default", "deterministic")
        }  # fmt: skip
        for llm in engines.values():
            seconds(llm, [[1] * args.prefill_len], 2)
        print("| step | default, ms | deterministic, ms | ratio |\n|---|---|---|---|")
        for batch in (*args.batches, None):
            what = f"prefill of {args.prefill_len}" if batch is None else f"decode of {batch}"
            times = measure(engines, args, batch)
            default_ms, invariant_ms = times["default"] * 1e3, times["deterministic"] * 1e3
            ratio = invariant_ms / default_ms
            print(f"| {what} | {default_ms:.1f} | {invariant_ms:.1f} | {ratio:.2f} |", flush=True)
            rows.append(
                {"step": what, "default_ms": round(default_ms, 2), "deterministic_ms": round(invariant_ms, 2),
                 "ratio": round(ratio, 2)}
            )  # fmt: skip
    if args.result:
        about = {
            "command": shlex.join(["python", *sys.argv]),
            "version": __version__,
            "torch": torch.__version__,
            "cpus": os.cpu_count(),
            "load_average": os.getloadavg(),
            "platform": platform.platform(),
        }
        args.result.write_text(json.dumps({**about, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
