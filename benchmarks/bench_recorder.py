"""What recording expert loads costs a step, by tokens on the rank, in microseconds.

    python benchmarks/bench_recorder.py --layers 58 --experts 256 --topk 8 --tokens 1,16,64,256,1024

Steps of decoding, or with --mixed steps whose tokens are half of prompts. `told` is what happens before and in the layers (the
step's tokens are described, their choices and rows noted), `added` what happens after the forward pass: medians. `mean` and `worst` are of
both together, over all steps; the steps fill the record, so that merging windows is part of them. Choices differ from step to step.
The sums are compared with plain counting at the end.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time

import torch

from moe_runtime.core import SamplingParams, ScheduledSequence, Sequence, StepPlan
from moe_runtime.engine.model_runner import part_tokens
from moe_runtime.placement.recorder import LoadRecorder

BATCHES = 24
"""Different choices, used in turn."""


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=58)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--topk", type=int, default=8)
    parser.add_argument(
        "--tokens", default="1,16,64,256,1024", help="tokens of the rank's step, separated by commas"
    )
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--mixed", action="store_true", help="half of the tokens are of prompts")
    parser.add_argument("--memory-mib", type=int, default=64)
    parser.add_argument("--routes-share", type=float, default=0.0)
    return parser


def decoding(num_tokens: int, num_prompts: int) -> StepPlan:
    """A step of so many sequences with a token each; the first num_prompts of them are still in their prompts."""
    sequences = [
        Sequence(
            f"request-{i}", [1, 2, 3] if i < num_prompts else [1], SamplingParams(), output_token_ids=[4]
        )
        for i in range(num_tokens)
    ]
    return StepPlan(tuple(ScheduledSequence(s, 1, 1) for s in sequences))


def measure(args: argparse.Namespace, num_tokens: int) -> tuple[float, float, float, float]:
    """Microseconds (told, added, mean, worst) of a step."""
    recorder = LoadRecorder(
        args.layers,
        args.experts,
        args.topk,
        args.memory_mib << 20,
        torch.device("cpu"),
        [[[0]]] * args.layers,
        args.routes_share,
    )
    batches = [
        [torch.randint(0, args.experts, (num_tokens, args.topk)) for _ in range(args.layers)]
        for _ in range(BATCHES)
    ]
    plan = decoding(num_tokens, num_tokens // 2 if args.mixed else 0)
    told, added = [], []
    with torch.inference_mode():
        for step in range(args.steps):
            begin = time.perf_counter()
            recorder.begin_step([part_tokens(plan, recorder.routes, prefill=args.mixed)])
            for chosen in batches[step % BATCHES]:
                recorder.count(chosen)
                recorder.computed(num_tokens)
            middle = time.perf_counter()
            recorder.end_step(1, 1, args.mixed, num_tokens)
            told.append(middle - begin)
            added.append(time.perf_counter() - middle)
    counted = [torch.stack([torch.bincount(i.view(-1), minlength=args.experts) for i in b]) for b in batches]
    total = sum(counts * len(range(b, args.steps, BATCHES)) for b, counts in enumerate(counted))
    assert isinstance(total, torch.Tensor)
    assert (recorder.arrays()["counts_WPLE"].sum(axis=(0, 1)) == total.numpy()).all()
    both = [a + b for a, b in zip(told, added, strict=True)]
    figures = (statistics.median(told), statistics.median(added), statistics.fmean(both), max(both))
    return tuple(f * 1e6 for f in figures)  # type: ignore[return-value]


def main(argv: list[str]) -> int:
    """Print a table."""
    args = build_parser().parse_args(argv)
    torch.set_num_threads(1)
    # A full collection, of what was imported above all, takes 90 ms and is not the recorder's.
    gc.freeze()
    print(f"{args.layers} layers, {args.experts} experts, top {args.topk}, one thread, {args.steps} steps")
    print("tokens | told us | added us | median us | mean us | worst us")
    for num_tokens in map(int, args.tokens.split(",")):
        told, added, mean, worst = measure(args, num_tokens)
        print(
            f"{num_tokens:6} | {told:7.1f} | {added:8.1f} | {told + added:9.1f} | {mean:7.1f} | {worst:.0f}",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
