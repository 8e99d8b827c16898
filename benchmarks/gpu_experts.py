"""Stage 1 of gpu_check: the grouped GEMM against the experts' formula. Legend: D hidden, F expert intermediate size, S expert rows."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.gpu_cases import BF16, Env, close, expert_batch, expert_weights, valid_rows
from moe_runtime.experts.reference import ReferenceExperts
from moe_runtime.experts.triton_config import GroupedGemmConfig
from moe_runtime.experts.triton_grouped import TritonExperts, compute_experts, gpu_of
from moe_runtime.quantization import FP8_BLOCK, FP8_CHANNEL, FP8_TENSOR, QuantScheme

Rows = Iterator[dict[str, Any]]
WIDE_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
FP8_TOLERANCE = 6e-2
"""Of activations rounded to FP8: a value next to a tie may round the other way, half a step of 1/8."""


def experts_wide(env: Env) -> Rows:
    """Built-in tiles for few, some and many rows per slot; every way to write an activation."""
    for dtype in (BF16, torch.float16, torch.float32):
        yield from _experts(env, dtype, None, False)
    for activation, limit in (
        ("gelu_pytorch_tanh", None),
        ("swiglu_oai", 7.0),
        ("relu2", None),
        ("silu", 1.0),
    ):
        yield from _experts(env, BF16, None, False, activation, limit, sizes=1)


def experts_fp8_block(env: Env) -> Rows:
    """FP8 with a scale for each 128 x 128 block: activations rounded too, and not."""
    for rounds in (True, False):
        yield from _experts(env, BF16, FP8_BLOCK, rounds)


def experts_fp8_other(env: Env) -> Rows:
    """FP8 with a scale per channel and per tensor."""
    for rounds in (True, False):
        yield from _experts(env, BF16, FP8_CHANNEL, rounds)
    yield from _experts(env, BF16, FP8_TENSOR, True, sizes=1)


def _experts(
    env: Env,
    dtype: torch.dtype,
    scheme: QuantScheme | None,
    rounds: bool,
    activation: str = "silu",
    limit: float | None = None,
    sizes: int = 3,
) -> Rows:
    kernel = TritonExperts(env.device)
    shapes = [(160, 136), (201, 157), (128, 130)] if env.small else [(512, 384), (201, 157), (1024, 640)]
    per_slot = [5, 20, 40] if env.small else [10, 50, 300]
    for (hidden, inner), most in list(zip(shapes, per_slot, strict=True))[-sizes:]:
        weights = expert_weights(
            env.device, 4, hidden, inner, dtype, scheme, rounds, activation, bias=True, limit=limit
        )
        batch = expert_batch(env.device, [0, most, 1, random.randint(0, most)], hidden, dtype, 11)
        what = f"{scheme.name if scheme else dtype} {activation} D={hidden} F={inner} rows<={most} rounds={rounds}"
        yield _compare(what, kernel(batch, weights), batch, weights)


def _compare(what: str, y_SD: torch.Tensor, batch: Any, weights: Any) -> dict[str, Any]:
    valid = valid_rows(batch)
    expected = ReferenceExperts()(valid, weights)
    tolerance = FP8_TOLERANCE if weights.quantize_activations else WIDE_TOLERANCE[y_SD.dtype]
    return close(what, y_SD[: expected.shape[0]], expected, tolerance)


TILES = {
    "rows on M": GroupedGemmConfig(64, 128, 64),
    "big": GroupedGemmConfig(128, 256, 64, num_warps=8),
    "weights on M": GroupedGemmConfig(16, 128, 64, swap_ab=True),
    "split": GroupedGemmConfig(32, 64, 32, split_k=4),
    "descriptors": GroupedGemmConfig(128, 128, 64, num_warps=8, use_tma=True),
    "descriptors, weights on M, split": GroupedGemmConfig(16, 128, 64, swap_ab=True, use_tma=True, split_k=2),
}


def expert_tiles(env: Env) -> Rows:
    """Every variant of the grouped GEMM, on shapes that descriptors take and others; empty and single slots."""
    gpu = gpu_of(env.device)
    for name, config in TILES.items():
        for hidden, inner in ((256, 128), (201, 157)):
            weights = expert_weights(env.device, 4, hidden, inner, BF16, bias=True)
            batch = expert_batch(env.device, [0, 35, 1, 0], hidden, BF16, 9)
            yield _compare(
                f"{name} D={hidden} F={inner}",
                compute_experts(batch, weights, (config, config), gpu),
                batch,
                weights,
            )
    weights = expert_weights(env.device, 3, 128, 64)
    for counts, tokens in (([0, 0, 0], 4), ([0, 0, 0], 0), ([0, 90, 0], 5)):
        batch = expert_batch(env.device, counts, 128, BF16, tokens)
        yield _compare(f"rows {counts}", TritonExperts(env.device)(batch, weights), batch, weights)
