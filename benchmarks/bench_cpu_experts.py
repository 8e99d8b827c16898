"""The experts of one step on a CPU: the C++ kernel, torch's products, and what memory and arithmetic allow in the same run.

    python benchmarks/bench_cpu_experts.py --threads 2 --tokens 1,4,16,64,1024 [--scheme bfloat16,int8_channel] [--out FILE]

Every layer has weights of its own, so that they come from memory as in a served model. Kernels and bounds take turns, and medians
are shown. The bound of a step is the longer of two times: reading each weight that a row needs once, with its scales, at the rate at which torch
sums an array of 1 GiB, and its operations at the rate of torch's product of two bfloat16 matrices of 2048 x 2048.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import torch

from moe_runtime.core import ExpertBatch
from moe_runtime.experts.base import ExpertKernel, ExpertNeed, ExpertWeights
from moe_runtime.experts.cpu import CpuExperts
from moe_runtime.experts.cpu_native import NativeExperts
from moe_runtime.native.build import load_native
from moe_runtime.quantization import (
    FP8_BLOCK,
    FP8_CHANNEL,
    FP8_TENSOR,
    INT4_MADE,
    INT8_CHANNEL,
    QuantScheme,
)

SCHEMES: dict[str, QuantScheme | None] = {"bfloat16": None} | {
    s.name: s for s in (FP8_BLOCK, FP8_CHANNEL, FP8_TENSOR, INT8_CHANNEL, INT4_MADE)
}


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
    parser.add_argument(
        "--scheme", default="bfloat16", help=f"of the weights, separated by commas: {', '.join(SCHEMES)}"
    )
    parser.add_argument("--out", type=Path, help="file for the results, as JSON")
    return parser


def make_layers(args: argparse.Namespace, scheme: QuantScheme | None) -> list[ExpertWeights]:
    """Weights of every layer, each in memory of its own; the values are random, and the same in all."""

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

    first = layer()
    tensors = {f.name: v for f in fields(first) if isinstance(v := getattr(first, f.name), torch.Tensor)}
    return [replace(first, **{n: t.clone() for n, t in tensors.items()}) for _ in range(args.layers)]  # type: ignore[arg-type]


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
    args: argparse.Namespace,
    num_tokens: int,
    layers: dict[str, list[ExpertWeights]],
    kernels: dict[str, ExpertKernel],
) -> dict[str, dict[str, float]]:
    """Medians for each scheme: `bound`, and each kernel, in milliseconds a step."""
    batches = [make_batch(args, num_tokens) for _ in range(args.layers)]
    matrix_values = 3 * args.hidden * args.inner
    num_values = matrix_values * sum(int((b.num_rows_p > 0).sum()) for b in batches)
    operations = 2 * matrix_values * sum(b.row_index_S.shape[0] for b in batches)
    array, square = torch.ones(1 << 28), torch.randn(2048, 2048).bfloat16()
    times: dict[str, dict[str, list[float]]] = {s: {name: [] for name in ("bound", *kernels)} for s in layers}

    def step(kernel: ExpertKernel, scheme: str) -> None:
        for batch, weights in zip(batches, layers[scheme], strict=True):
            kernel(batch, weights)

    for scheme in layers:
        for kernel in kernels.values():
            step(kernel, scheme)
    for _ in range(args.rounds):
        read = num_values * seconds(array.sum) / array.nbytes
        compute = operations * seconds(lambda: square @ square) / (2 * 2048**3)
        for scheme, found in times.items():
            bytes_per_value = layers[scheme][0].num_bytes / (args.experts * matrix_values)
            found["bound"].append(max(read * bytes_per_value, compute))
            for name, kernel in kernels.items():
                found[name].append(seconds(lambda k=kernel, s=scheme: step(k, s)))  # type: ignore[misc]
    return {s: {name: 1e3 * statistics.median(t) for name, t in found.items()} for s, found in times.items()}


def main() -> None:
    """Print a table, and write it if asked."""
    args = build_parser().parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    unknown = set(args.scheme.split(",")) - SCHEMES.keys()
    if unknown:
        raise SystemExit(f"--scheme: {', '.join(unknown)} is not one of {', '.join(SCHEMES)}")
    kernels = make_kernels(args.instructions)
    layers = {name: make_layers(args, SCHEMES[name]) for name in args.scheme.split(",")}
    found = {}
    for num_tokens in map(int, args.tokens.split(",")):
        found[num_tokens] = measure(args, num_tokens, layers, kernels)
        for scheme, result in found[num_tokens].items():
            print(f"{num_tokens:5d} tokens, {scheme}: bound {result['bound']:.2f} ms")
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
