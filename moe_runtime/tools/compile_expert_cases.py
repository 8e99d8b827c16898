"""The forms of the experts' kernels that the compile gate launches; see compile_cases.

Legend: K experts per token, p slots per rank, R token rows, S expert rows, D hidden, F expert intermediate size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from moe_runtime.core import ExpertBatch, RowScales
from moe_runtime.experts.base import ExpertWeights
from moe_runtime.experts.triton_grouped import TritonExperts
from moe_runtime.quantization import (
    FP8,
    FP8_BLOCK,
    FP8_CHANNEL,
    FP8_TENSOR,
    QuantScheme,
    row_bytes,
    unpack_rows,
)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True)
class Experts:
    """A rank's experts of one layer."""

    p: int
    D: int
    F: int
    K: int
    """Of the model: S = R * K is what arrives at most."""
    dtype: torch.dtype = BF16
    activation: str = "silu"
    limit: float | None = None
    scheme: QuantScheme | None = None
    rounds: bool = False
    """Whether activations are FP8 too."""
    biases: bool = False


def expert_launches() -> list[tuple[str, Callable[[], None]]]:
    """Names and calls: bf16 and the FP8 formats over three models' shapes; then what else the kernels distinguish."""
    qwen = Experts(128, 2048, 768, 8)
    deepseek = Experts(32, 7168, 2048, 8)
    fp8 = replace(deepseek, scheme=FP8_BLOCK, rounds=True)
    rows = {"decode": 8, "batch": 256, "prefill": 8192}
    everything, ends = tuple(rows), ("decode", "prefill")
    shapes = {
        "Qwen3-30B-A3B bf16": (qwen, ends),
        "Mixtral-8x7B bf16": (Experts(8, 4096, 14336, 2), ends),
        "DeepSeek-V3 EP8 bf16": (deepseek, everything),
        "DeepSeek-V3 EP8 fp8_block": (fp8, everything),
        "Qwen3-30B-A3B fp8_block": (replace(qwen, scheme=FP8_BLOCK, rounds=True), ends),
        "Qwen3-30B-A3B fp8_channel": (replace(qwen, scheme=FP8_CHANNEL, rounds=True), ends),
        "Qwen3-30B-A3B fp8_tensor": (replace(qwen, scheme=FP8_TENSOR, rounds=True), ends),
        "Qwen3-30B-A3B fp8_block W8A16": (replace(qwen, scheme=FP8_BLOCK), ends),
        "gpt-oss-120b bf16": (
            Experts(128, 2880, 2880, 4, activation="swiglu_oai", limit=7.0, biases=True),
            ("prefill",),
        ),
        "Qwen3-30B-A3B fp16": (replace(qwen, dtype=FP16), ("prefill",)),
        "Qwen3-30B-A3B fp32": (replace(qwen, dtype=FP32), ("prefill",)),
        "Nemotron-H bf16 relu2": (Experts(128, 2688, 1856, 6, activation="relu2"), ("prefill",)),
    }
    cases: list[tuple[str, Callable[[], None]]] = [
        (f"experts {name} {phase}", partial(_experts, shape, rows[phase]))
        for name, (shape, phases) in shapes.items()
        for phase in phases
    ]
    cases += [
        (f"experts {name} deterministic", partial(_experts, shapes[name][0], 256, True))
        for name in ("Qwen3-30B-A3B bf16", "Qwen3-30B-A3B fp8_block")
    ]
    cases += [
        (
            f"experts DeepSeek-V3 EP8 fp8_block {phase} of fp8 rows",
            partial(_experts, fp8, rows[phase], packed=True),
        )
        for phase in ends
    ]
    return cases


def _experts(shape: Experts, num_rows: int, deterministic: bool = False, packed: bool = False) -> None:
    """packed: rows come as FP8 with scales, as the payload's packing has them."""
    parts = 1 if shape.activation == "relu2" else 2
    stored = shape.dtype if shape.scheme is None else FP8
    scales = shape.scheme.scale_shape if shape.scheme is not None else None
    weights = ExpertWeights(
        gate_up_pFD=torch.empty(shape.p, parts * shape.F, shape.D, dtype=stored),
        down_pDF=torch.empty(shape.p, shape.D, shape.F, dtype=stored),
        activation=shape.activation,
        activation_limit=shape.limit,
        gate_up_bias_pF=torch.empty(shape.p, parts * shape.F, dtype=shape.dtype) if shape.biases else None,
        down_bias_pD=torch.empty(shape.p, shape.D, dtype=shape.dtype) if shape.biases else None,
        scheme=shape.scheme,
        gate_up_scale=torch.empty(shape.p, parts, *scales(shape.F, shape.D)) if scales else None,
        down_scale=torch.empty(shape.p, *scales(shape.D, shape.F)) if scales else None,
        quantize_activations=shape.rounds,
    )
    tokens_RD, row_scales = torch.empty(num_rows, shape.D, dtype=shape.dtype), None
    if packed:
        rows = torch.empty(num_rows, row_bytes(shape.D), dtype=torch.uint8)
        tokens_RD, scale_RG = unpack_rows(rows, shape.D)
        row_scales = RowScales(scale_RG, shape.dtype)
    batch = ExpertBatch(
        tokens_RD=tokens_RD,
        row_index_S=torch.empty(num_rows * shape.K, dtype=torch.int64),
        num_rows_p=torch.empty(shape.p, dtype=torch.int64),
        scales=row_scales,
    )
    TritonExperts(torch.device("cpu"), deterministic)(batch, weights)
