"""Dense products on a CPU, bfloat16 and int8 weights in turns: the C++ kernel, torch's products, and what the layers take by default.

    python benchmarks/bench_cpu_dense.py --threads 2 --matrices 1536x1024,100000x1024 --rows 1,4,16,64,128,256,1024 [--out FILE]

Each matrix is there many times, so that it comes from memory as in a served model; medians over rounds are shown. Results are first compared with
a product in float32 of the dequantised weights. The bound is the longer of two times: reading the matrix once at the rate at which torch sums an array of
1 GiB, and its operations at the rate of torch's product of two bfloat16 matrices of 2048 x 2048.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from moe_runtime.layers.cpu_native import NativeOps
from moe_runtime.layers.ops import TORCH_OPS, LayerOps
from moe_runtime.native.build import load_native
from moe_runtime.quantization import INT8_CHANNEL

if TYPE_CHECKING:
    from collections.abc import Callable

NO_LIMIT = 1 << 60


class Matrix(NamedTuple):
    """One weight in both forms."""

    wide: torch.Tensor
    payload: torch.Tensor
    scale: torch.Tensor


def build_parser() -> argparse.ArgumentParser:
    """The command line; the default shapes are those of model S."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--matrices", default="1536x1024,1024x1024", help="out x in, separated by commas")
    parser.add_argument("--rows", default="1,4,16,64,128,256,1024", help="token rows, separated by commas")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--mib", type=int, default=256, help="bfloat16 matrices of one shape take about so much"
    )
    parser.add_argument("--instructions", default="auto", help="a value of --cpu-kernels")
    parser.add_argument("--out", type=Path, help="file for the results, as JSON")
    return parser


def make_matrices(num_out: int, num_in: int, mib: int) -> list[Matrix]:
    """As many as fill the memory given."""
    count = max(1, (mib << 20) // (2 * num_out * num_in))
    wide = [torch.randn(num_out, num_in).div_(num_in**0.5).bfloat16() for _ in range(count)]
    return [Matrix(w, *INT8_CHANNEL.quantize_weight(w)) for w in wide]


def check(ops: LayerOps, matrix: Matrix, x: torch.Tensor) -> None:
    """Raises AssertionError."""
    for found, weight in (
        (ops.linear(x, matrix.wide), matrix.wide.float()),
        (ops.linear(x, matrix.payload, None, matrix.scale), matrix.payload.float() * matrix.scale),
    ):
        torch.testing.assert_close(found.float(), x.float() @ weight.T, rtol=2**-7, atol=2e-2)


def seconds(run: Callable[[], object]) -> float:
    """Of one call."""
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def measure(
    ways: dict[str, LayerOps], matrices: list[Matrix], x: torch.Tensor, rounds: int
) -> dict[str, float]:
    """Medians of one product in milliseconds: the bounds, and each way with each form of weights."""
    array, square = torch.ones(1 << 28), torch.randn(2048, 2048).bfloat16()
    values, times = matrices[0].wide.numel(), {}  # type: int, dict[str, list[float]]

    def all_of(ops: LayerOps, quantised: bool) -> float:
        def run() -> None:
            for wide, payload, scale in matrices:
                ops.linear(x, payload, None, scale) if quantised else ops.linear(x, wide)

        return seconds(run) / len(matrices)

    for _ in range(rounds):
        read, operations = seconds(array.sum) / array.nbytes, seconds(lambda: square @ square) / 2048**3
        for form, size in (("bfloat16", 2), ("int8", 1)):
            bound = max(values * size * read, values * x.shape[0] * operations)
            times.setdefault(f"bound {form}", []).append(bound)
            for name, ops in ways.items():
                times.setdefault(f"{name} {form}", []).append(all_of(ops, form == "int8"))
    return {name: 1e3 * statistics.median(found) for name, found in times.items()}


def main() -> None:
    """Print a line per shape and number of rows, and write all if asked."""
    args = build_parser().parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    native = load_native(args.instructions)
    problem = NativeOps.supports("cpu", torch.bfloat16, native)
    if problem is not None:
        raise SystemExit(f"cpu_native ({args.instructions}): {problem}")
    always = NativeOps(native)
    always.max_rows = always.max_int8_rows = NO_LIMIT
    ways: dict[str, LayerOps] = {"default": NativeOps(native), "c++": always, "torch": TORCH_OPS}
    results = {}
    for shape in args.matrices.split(","):
        num_out, num_in = map(int, shape.split("x"))
        matrices = make_matrices(num_out, num_in, args.mib)
        for num_rows in map(int, args.rows.split(",")):
            x = torch.randn(num_rows, num_in).bfloat16()
            for ops in ways.values():
                check(ops, matrices[0], x)
            found = results[f"{shape}, {num_rows} rows"] = measure(ways, matrices, x, args.rounds)
            shown = "  ".join(f"{name} {ms:.3f}" for name, ms in found.items())
            print(f"{shape}, {num_rows} rows, ms: {shown}", flush=True)
    if args.out:
        settings = {name: value for name, value in vars(args).items() if name != "out"}
        text = json.dumps(
            {"settings": settings, "torch": torch.__version__, "milliseconds": results}, indent=1
        )
        args.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
