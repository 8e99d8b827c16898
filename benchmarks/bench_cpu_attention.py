"""Paged attention of one layer on a CPU: the C++ kernel, torch's, and what memory and arithmetic allow in the same run.

    python benchmarks/bench_cpu_attention.py --threads 2 --steps 1x1024,16x512,1024+0 [--out FILE]

A step is NxC, N sequences with one new token each after C cached ones, or Q+C, Q new tokens of one sequence after C cached ones. The
backends take turns, and medians are shown. The bound of a step is the longer of two times: reading each cached key and value once at the
rate at which torch sums an array of 1 GiB, and the products of causal attention at the rate of torch's product of two bfloat16
matrices of 2048 x 2048. Caches differ from layer to layer, so that they come from memory as in a served model.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from moe_runtime.attention.base import AttentionNeed, AttentionSpec
from moe_runtime.attention.cpu import CpuPagedAttention
from moe_runtime.attention.cpu_native import NativePagedAttention
from moe_runtime.attention.kv_cache import KVCache
from moe_runtime.core import ForwardBatch
from moe_runtime.layers.rope import Rotation
from moe_runtime.native.build import load_native

BLOCK_SIZE = 16


def build_parser() -> argparse.ArgumentParser:
    """The command line; the shape is that of model S (0.95 B parameters)."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps", default="1x1024,16x512,64x512,1x4096,16x4096,128+0,1024+0,512+3584", help="see above"
    )
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--instructions", default="auto", help="a value of --cpu-kernels")
    parser.add_argument("--out", type=Path, help="file for the results, as JSON")
    return parser


def spans_of(step: str) -> list[tuple[int, int]]:
    """(cached, new) of each sequence."""
    if "x" in step:
        number, cached = map(int, step.split("x"))
        return [(cached, 1)] * number
    new, cached = map(int, step.split("+"))
    return [(cached, new)]


def make_batch(spans: list[tuple[int, int]]) -> ForwardBatch:
    """Sequences whose blocks are scattered over a cache that has just enough."""
    width = max(-(-(cached + new) // BLOCK_SIZE) for cached, new in spans)
    tables_BM = torch.randperm(len(spans) * width).view(len(spans), width).int()
    positions = [torch.arange(cached, cached + new) for cached, new in spans]
    slots = [tables_BM[i, p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for i, p in enumerate(positions)]
    new = [n for _, n in spans]
    starts = torch.tensor([0, *new]).cumsum(0)
    return ForwardBatch(
        input_ids_T=torch.zeros(sum(new), dtype=torch.int64),
        positions_T=torch.cat(positions),
        slot_mapping_T=torch.cat(slots).long(),
        block_tables_BM=tables_BM,
        query_starts_B1=starts.int(),
        seq_lens_B=torch.tensor([sum(span) for span in spans], dtype=torch.int32),
        query_lens=new,
        seq_lens=[sum(span) for span in spans],
        logit_rows=starts[1:] - 1,
        max_num_tokens=sum(new),
    )


def seconds(run: Callable[[], object]) -> float:
    """Of one call."""
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def measure(args: argparse.Namespace, step: str) -> dict[str, float]:
    """Medians: `bound`, and each backend, in milliseconds a layer; the step's plan counts for each of args.layers."""
    spec = AttentionSpec(args.heads, args.kv_heads, args.head_dim, args.head_dim**-0.5)
    specs, spans = [spec] * args.layers, spans_of(step)
    batch, native = make_batch(spans), load_native(args.instructions)
    need = AttentionNeed("cpu", torch.bfloat16, tuple(specs), torch.bfloat16)
    if problem := NativePagedAttention.supports(need, native):
        raise SystemExit(f"cpu_native: {problem}")
    blocks = batch.block_tables_BM.numel()
    cache = KVCache.allocate(specs, blocks, BLOCK_SIZE, torch.bfloat16, "cpu")
    for tensor in (*cache.keys, *cache.values):
        tensor.normal_()
    backends: dict[str, Any] = {
        "cpu": CpuPagedAttention(cache, specs),
        "cpu_native": NativePagedAttention(cache, specs, native),
    }
    num_tokens = batch.num_tokens
    q, k, v = (
        torch.randn(num_tokens, heads, args.head_dim).bfloat16()
        for heads in (args.heads, args.kv_heads, args.kv_heads)
    )
    angle = torch.rand(num_tokens, 1, args.head_dim // 2)
    rotation = Rotation(angle.cos().bfloat16(), angle.sin().bfloat16())

    def run(backend: Any) -> None:
        plan = backend.plan(batch)
        for layer in range(args.layers):
            backend.run(q, k, v, rotation, layer, plan)

    pairs = sum(new * cached + new * (new + 1) // 2 for cached, new in spans)
    operations = 4 * args.heads * args.head_dim * pairs
    num_bytes = 2 * 2 * args.kv_heads * args.head_dim * sum(cached for cached, _ in spans)
    array, square = torch.ones(1 << 28), torch.randn(2048, 2048).bfloat16()
    times: dict[str, list[float]] = {name: [] for name in ("bound", *backends)}
    for backend in backends.values():
        run(backend)
    for _ in range(args.rounds):
        read = num_bytes * seconds(array.sum) / array.nbytes
        compute = operations * seconds(lambda: square @ square) / (2 * 2048**3)
        times["bound"].append(max(read, compute))
        for name, backend in backends.items():
            times[name].append(seconds(lambda backend=backend: run(backend)) / args.layers)  # type: ignore[misc]
    return {name: 1e3 * statistics.median(found) for name, found in times.items()}


def main() -> None:
    """Print a table, and write it if asked."""
    args = build_parser().parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    found = {}
    print(f"{'step':>10s} {'bound':>9s} {'cpu':>9s} {'cpu_native':>11s}   (ms a layer)")
    for step in args.steps.split(","):
        result = found[step] = measure(args, step)
        share, ratio = result["bound"] / result["cpu_native"], result["cpu"] / result["cpu_native"]
        print(
            f"{step:>10s} {result['bound']:9.3f} {result['cpu']:9.3f} {result['cpu_native']:11.3f}"
            f"   {share:4.0%} of the bound, {ratio:.2f} x cpu",
            flush=True,
        )
    if args.out:
        settings = {name: value for name, value in vars(args).items() if name != "out"}
        text = json.dumps({"settings": settings, "torch": torch.__version__, "milliseconds": found}, indent=1)
        args.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
