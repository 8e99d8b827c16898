"""What recording expert loads costs a step, by tokens on the rank: microseconds, medians.

    python benchmarks/bench_recorder.py --layers 58 --experts 256 --topk 8 --tokens 1,8,16,64,128,512

`told` is what the layers do (their choices and rows are noted), `added` what happens after the forward pass. The sums are
compared with plain counting first.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import torch

from moe_runtime.placement.recorder import LoadRecorder, PartTokens

REPEATS = 300
SLOTS = 32


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=58)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--topk", type=int, default=8)
    parser.add_argument(
        "--tokens", default="1,8,16,64,128,512", help="tokens of the rank's step, separated by commas"
    )
    parser.add_argument("--memory-mib", type=int, default=64)
    return parser


def measure(args: argparse.Namespace, num_tokens: int) -> tuple[float, float]:
    """Median microseconds (told, added) of a decode step."""
    recorder = LoadRecorder(
        args.layers,
        args.experts,
        args.topk,
        args.memory_mib << 20,
        torch.device("cpu"),
        [[[0]]] * args.layers,
    )
    ids = [torch.randint(0, args.experts, (num_tokens, args.topk)) for _ in range(args.layers)]
    rows = [torch.ones(SLOTS, dtype=torch.int64) for _ in range(args.layers)]
    part = [PartTokens(torch.ones(num_tokens, dtype=torch.int64))]
    told, added = [], []
    with torch.inference_mode():
        for _ in range(REPEATS):
            begin = time.perf_counter()
            recorder.begin_step(part)
            for chosen, computed in zip(ids, rows, strict=True):
                recorder.count(chosen)
                recorder.computed(computed)
            middle = time.perf_counter()
            recorder.end_step(1, 1, prefill=False)
            told.append(middle - begin)
            added.append(time.perf_counter() - middle)
    counted = torch.stack([torch.bincount(i.view(-1), minlength=args.experts) for i in ids])
    assert (recorder.arrays()["counts_WPLE"].sum(axis=(0, 1)) == REPEATS * counted.numpy()).all()
    return statistics.median(told) * 1e6, statistics.median(added) * 1e6


def main(argv: list[str]) -> int:
    """Print a table."""
    args = build_parser().parse_args(argv)
    torch.set_num_threads(1)
    print(f"{args.layers} layers, {args.experts} experts, top {args.topk}, one thread")
    print("tokens | told us | added us | together us")
    for num_tokens in map(int, args.tokens.split(",")):
        told, added = measure(args, num_tokens)
        print(f"{num_tokens:6} | {told:7.1f} | {added:8.1f} | {told + added:.1f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
