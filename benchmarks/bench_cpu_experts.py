"""The experts of one step on a CPU: the C++ kernel, torch's products, and what memory and arithmetic allow in the same run.

    python benchmarks/bench_cpu_experts.py --threads 2 --tokens 1,4,16,64,1024 [--out FILE]

Every layer has weights of its own, so that they come from memory as in a served model. Kernels and bounds take turns, and medians
are shown. The bound of a step is the longer of two times: reading each weight that a row needs once, at the rate at which torch
sums an array of 1 GiB, and its operations at the rate of torch's product of two bfloat16 matrices of 2048 x 2048.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from moe_runtime.core import ExpertBatch
from moe_runtime.experts.base import ExpertKernel, ExpertNeed, ExpertWeights
from moe_runtime.experts.cpu import CpuExperts
from moe_runtime.experts.cpu_native import NativeExperts
from moe_runtime.native.build import load_native
from moe_runtime.quantization import FP8_BLOCK, FP8_CHANNEL, FP8_TENSOR

SCHEMES = (FP8_BLOCK, FP8_CHANNEL, FP8_TENSOR)


def build_parser() -> argparse.ArgumentParser:
    """The command line; the shape is that of model S (0.95 B parameters)."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", default="1,4,16,64,1024", help="tokens of a step, separated by commas")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--topk", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--inner", type=int, default=512)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--instructions", default="auto", help="values of --cpu-kernels, separated by commas")
    parser.add_argument("--scheme", choices=[s.name for s in SCHEMES], help="FP8 weights; default: bfloat16")
    parser.add_argument("--out", type=Path, help="file for the results, as JSON")
    return parser


def make_layers(args: argparse.Namespace) -> list[ExpertWeights]:
    """Random weights of every layer."""

    scheme = next((s for s in SCHEMES if s.name == args.scheme), None)

    def layer() -> ExpertWeights:
        gate_up = torch.randn(args.experts, 2, args.inner, args.hidden, dtype=torch.bfloat16)
        down = torch.randn(args.experts, args.hidden, args.inner, dtype=torch.bfloat16)
        gate_up, down = gate_up.div_(args.hidden**0.5), down.div_(args.inner**0.5)
        if scheme is None:
            return ExpertWeights(gate_up.flatten(1, 2), down, "silu")
        (gate_up, gate_up_scale), (down, down_scale) = map(scheme.quantize_weight, (gate_up, down))
        return ExpertWeights(
            gate_up.flatten(1, 2),
            down,
            "silu",
            scheme=scheme,
            gate_up_scale=gate_up_scale,
            down_scale=down_scale,
        )

    return [layer() for _ in range(args.layers)]


def make_batch(args: argparse.Namespace, num_tokens: int) -> ExpertBatch:
    """Tokens that choose experts at random."""
    ids = torch.rand(num_tokens, args.experts).topk(args.topk).indices.flatten()
    return ExpertBatch(
        tokens_RD=torch.randn(num_tokens, args.hidden).bfloat16(),
        row_index_S=ids.argsort(stable=True) // args.topk,
        num_rows_p=torch.bincount(ids, minlength=args.experts),
    )


def seconds(run: Callable[[], object]) -> float:
    """Of one call."""
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def make_kernels(names: str) -> dict[str, ExpertKernel]:
    """torch's, and the C++ kernel for each instruction set."""
    kernels: dict[str, ExpertKernel] = {"cpu": CpuExperts()}
    for name in names.split(","):
        native = NativeExperts(load_native(name))
        problem = native.supports(ExpertNeed("cpu", torch.bfloat16, "silu"))
        if problem is not None:
            raise SystemExit(f"cpu_native ({name}): {problem}")
        kernels[f"cpu_native {native.native.instructions}"] = native
    return kernels


def measure(
    args: argparse.Namespace, num_tokens: int, layers: list[ExpertWeights], kernels: dict[str, ExpertKernel]
) -> dict[str, float]:
    """Medians: `bound`, and each kernel, in milliseconds a step."""
    batches = [make_batch(args, num_tokens) for _ in layers]
    matrix_values = 3 * args.hidden * args.inner
    num_bytes = (
        layers[0].down_pDF.element_size()
        * matrix_values
        * sum(int((b.num_rows_p > 0).sum()) for b in batches)
    )
    operations = 2 * matrix_values * sum(b.row_index_S.shape[0] for b in batches)
    array, square = torch.ones(1 << 28), torch.randn(2048, 2048).bfloat16()
    times: dict[str, list[float]] = {name: [] for name in ("bound", *kernels)}

    def step(kernel: ExpertKernel) -> None:
        for batch, weights in zip(batches, layers, strict=True):
            kernel(batch, weights)

    for kernel in kernels.values():
        step(kernel)
    for _ in range(args.rounds):
        read = num_bytes * seconds(array.sum) / array.nbytes
        compute = operations * seconds(lambda: square @ square) / (2 * 2048**3)
        times["bound"].append(max(read, compute))
        for name, kernel in kernels.items():
            times[name].append(seconds(lambda kernel=kernel: step(kernel)))  # type: ignore[misc]
    return {name: 1e3 * statistics.median(found) for name, found in times.items()}


def main() -> None:
    """Print a table, and write it if asked."""
    args = build_parser().parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    kernels, layers = make_kernels(args.instructions), make_layers(args)
    found = {}
    for num_tokens in map(int, args.tokens.split(",")):
        result = found[num_tokens] = measure(args, num_tokens, layers, kernels)
        print(f"{num_tokens:5d} tokens: bound {result['bound']:.2f} ms")
        for name in kernels:
            share, ratio = result["bound"] / result[name], result["cpu"] / result[name]
            print(
                f"      {name:24s} {result[name]:9.2f} ms, {share:4.0%} of the bound, {ratio:.2f} x cpu",
                flush=True,
            )
    if args.out:
        settings = {name: value for name, value in vars(args).items() if name != "out"}
        text = json.dumps({"settings": settings, "torch": torch.__version__, "milliseconds": found}, indent=1)
        args.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
