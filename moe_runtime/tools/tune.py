"""Find the fastest tiles of the grouped GEMM on this GPU and write them where they are looked for.

    python -m moe_runtime.tools.tune --num-experts 128 --hidden-size 2048 --intermediate-size 768

The file is written after each number of tokens; a later run goes on where this one stopped. The space of tiles is in tune_space.

Legend: T tokens, K expert rows per token, S = T * K expert rows, D hidden, F expert intermediate size, p slots.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tqdm import tqdm

from moe_runtime.core import ExpertBatch
from moe_runtime.errors import ConfigError
from moe_runtime.experts.base import ExpertWeights
from moe_runtime.experts.triton_config import PROFILES, profile_name, read_table, to_json
from moe_runtime.experts.triton_grouped import compute_experts, gemm_shapes, gpu_of
from moe_runtime.quantization import FP8, FP8_BLOCK, FP8_CHANNEL
from moe_runtime.tools.tune_space import Pair, search
from moe_runtime.triton_support import availability

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from moe_runtime.experts.triton_config import Gpu

    Timer = Callable[[Callable[[], object]], float]
    """Milliseconds of a call."""

logger = logging.getLogger(__name__)

TOKENS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 1536, 2048, 3072, 4096)
KINDS = ("fp8_w8a8", "fp8_w8a16", "float32")
TOLERANCE = 0.1
"""Largest difference of a candidate's result from the built-in tiles', over the largest value: rounding to FP8 takes some of it."""


@dataclass(frozen=True)
class Job:
    """The weights to tune for, as the table's name has them."""

    num_experts: int
    """Slots on one rank."""
    hidden_size: int
    intermediate_size: int
    kind: str | None = None
    """One of KINDS; None: bf16."""
    block: bool = False
    """Whether FP8 scales are per 128 x 128 block rather than per channel."""
    top_k: int = 8
    """Expert rows per token on this rank."""

    def file_name(self, device: str) -> str:
        """Of the table for a GPU of this name."""
        return profile_name(self.num_experts, self.intermediate_size, device, self.kind, self.block)


def make_weights(job: Job, device: torch.device) -> ExpertWeights:
    """Random gated experts; under FP8 with scales that keep results near 1."""
    p, D, F = job.num_experts, job.hidden_size, job.intermediate_size
    fp8 = job.kind is not None and job.kind.startswith("fp8")
    stored = FP8 if fp8 else torch.float32 if job.kind == "float32" else torch.bfloat16
    scheme = (FP8_BLOCK if job.block else FP8_CHANNEL) if fp8 else None

    def matrices(rows: int, columns: int) -> torch.Tensor:
        """One slot at a time: float32 values of all of them might not fit."""
        made = torch.empty(p, rows, columns, dtype=stored, device=device)
        for slot in made:
            slot.copy_(torch.randn(rows, columns, device=device) * (1.0 if fp8 else columns**-0.5))
        return made

    scales: list[torch.Tensor | None] = [None, None]
    if scheme is not None:
        shapes = (p, 2, *scheme.scale_shape(F, D)), (p, *scheme.scale_shape(D, F))
        sizes = D**-0.5, F**-0.5
        scales = [torch.full(shape, size, device=device) for shape, size in zip(shapes, sizes, strict=True)]
    return ExpertWeights(
        gate_up_pFD=matrices(2 * F, D), down_pDF=matrices(D, F), activation="silu", scheme=scheme,
        gate_up_scale=scales[0], down_scale=scales[1], quantize_activations=job.kind == "fp8_w8a8",
    )  # fmt: skip


def make_batch(job: Job, num_tokens: int, device: torch.device) -> ExpertBatch:
    """Random tokens, each to top_k different slots, all slots alike."""
    chosen_TK = torch.rand(num_tokens, job.num_experts, device=device).topk(job.top_k, dim=1).indices
    order_S = chosen_TK.flatten().argsort(stable=True)
    dtype = torch.float32 if job.kind == "float32" else torch.bfloat16
    return ExpertBatch(
        tokens_RD=torch.randn(num_tokens, job.hidden_size, device=device).to(dtype),
        row_index_S=order_S // job.top_k,
        num_rows_p=torch.bincount(chosen_TK.flatten(), minlength=job.num_experts),
    )


def tune_tokens(
    weights: ExpertWeights, batch: ExpertBatch, gpu: Gpu, timer: Timer, until: float
) -> tuple[Pair, float, float]:
    """The fastest pair of tiles found by `until` (time.monotonic), its milliseconds, and those of the built-in pair."""
    expected: list[torch.Tensor] = []

    def measure(pair: Pair) -> float | None:
        """None: these tiles do not compile, do not fit, or give another result."""
        try:
            result = compute_experts(batch, weights, pair, gpu)
            if not expected:
                expected.append(result)
            if not _agrees(result, expected[0]):
                logger.warning("left out, since its result is wrong: %s", pair)
                return None
            return timer(lambda: compute_experts(batch, weights, pair, gpu))
        except Exception as error:  # noqa: BLE001
            # What Triton raises for tiles that a GPU cannot take is not one class. A fault of the GPU itself raises again here.
            if batch.tokens_RD.device.type == "cuda":
                torch.cuda.synchronize()
            logger.debug("left out: %s: %s", pair, error)
            return None

    return search(gemm_shapes(batch, weights, gpu), gpu, measure, until)


def _agrees(result: torch.Tensor, expected: torch.Tensor) -> bool:
    difference = (result.float() - expected.float()).abs().max()
    # A NaN makes this false.
    return bool(difference <= TOLERANCE * expected.float().abs().max().clamp(min=1.0))


def tune(
    job: Job,
    device: torch.device,
    gpu: Gpu,
    path: Path,
    tokens: Sequence[int],
    minutes: float,
    again: bool,
    timer: Timer,
) -> int:
    """Fill the table at `path`; how many numbers of tokens were tuned. Raises ConfigError if a file there is no table."""
    content = _read(path)
    todo = [n for n in tokens if again or str(n) not in content]
    if not todo:
        return 0
    weights = make_weights(job, device)
    end = time.monotonic() + 60 * minutes
    with tqdm(todo, desc="Tuning", unit="size", dynamic_ncols=True) as bar:
        for done, num_tokens in enumerate(bar):
            left = end - time.monotonic()
            if done and left <= 0:
                return done
            batch = make_batch(job, num_tokens, device)
            until = time.monotonic() + left / (len(todo) - done)
            (gate_up, down), best, built_in = tune_tokens(weights, batch, gpu, timer, until)
            content[str(num_tokens)] = {**to_json(gate_up), "down": to_json(down)}
            _write(path, content)
            bar.write(f"{num_tokens:6} tokens: {best:.4f} ms, built-in tiles {built_in:.4f} ms")
    return len(todo)


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    read_table(path)
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def _write(path: Path, content: dict[str, Any]) -> None:
    import triton

    numbers = sorted((key for key in content if key != "triton_version"), key=int)
    ordered = {"triton_version": triton.__version__, **{key: content[key] for key in numbers}}
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(ordered, indent=4) + "\n", encoding="utf-8")
    part.replace(path)


def time_on_gpu(function: Callable[[], object]) -> float:
    """Median of a replayed graph, so that launching from Python does not count."""
    from triton import testing

    milliseconds: float = testing.do_bench_cudagraph(function, rep=10, return_mode="median")
    return milliseconds


def main(argv: list[str] | None = None) -> int:
    """0 if the table is complete, 1 if time ran out, 2 without a GPU or on wrong arguments."""
    args = _parse(argv)
    if not torch.cuda.is_available():
        print("tune: no GPU: tiles are chosen by their time on one", file=sys.stderr)  # noqa: T201
        return 2
    device = torch.device("cuda", torch.cuda.current_device())
    name = availability.device_name(device)
    assert name is not None
    path = args.out / args.job.file_name(name)
    try:
        done = tune(
            args.job, device, gpu_of(device), path, args.tokens, args.minutes, args.again, time_on_gpu
        )
        missing = [n for n in args.tokens if str(n) not in _read(path)]
    except ConfigError as e:
        print(f"tune: {e}", file=sys.stderr)  # noqa: T201
        return 2
    print(f"{path}: {done} sizes tuned" + (f"; the same command goes on with {missing}" if missing else ""))  # noqa: T201
    return int(bool(missing))


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tune", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--num-experts", type=int, required=True, help="slots on one rank: experts / ranks, and copies"
    )
    parser.add_argument("--hidden-size", type=int, required=True)
    parser.add_argument("--intermediate-size", type=int, required=True, help="of one expert")
    parser.add_argument("--dtype", choices=KINDS, help="default: bf16")
    parser.add_argument(
        "--block", action="store_true", help="FP8 scales per 128 x 128 block, not per channel"
    )
    parser.add_argument("--top-k", type=int, default=8, help="expert rows per token on one rank (default 8)")
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=TOKENS, help=f"default: {' '.join(map(str, TOKENS))}"
    )
    parser.add_argument("--minutes", type=float, default=30.0, help="time in all (default 30)")
    parser.add_argument("--out", type=Path, default=PROFILES, help=f"folder (default {PROFILES})")
    parser.add_argument("--again", action="store_true", help="tune also what the file has already")
    args = parser.parse_args(argv)
    for flag in ("num_experts", "hidden_size", "intermediate_size", "top_k", "minutes"):
        if getattr(args, flag) <= 0:
            parser.error(f"--{flag.replace('_', '-')} {getattr(args, flag)}: must be positive")
    if min(args.tokens) < 1:
        parser.error(f"--tokens {min(args.tokens)}: must be positive")
    if args.block and args.dtype not in ("fp8_w8a8", "fp8_w8a16"):
        parser.error(f"--block needs --dtype fp8_w8a8 or fp8_w8a16, not {args.dtype}")
    if args.top_k > args.num_experts:
        parser.error(
            f"--top-k {args.top_k}: a token goes to an expert once, and there are {args.num_experts}"
        )
    args.job = Job(
        args.num_experts, args.hidden_size, args.intermediate_size, args.dtype, args.block, args.top_k
    )  # fmt: skip
    return args


if __name__ == "__main__":
    sys.exit(main())
