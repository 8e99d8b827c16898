"""int8 checkpoints as LLM Compressor writes them, made of unquantised ones, and the same weights dequantised for transformers.

Quantised and packed here with Python's own numbers, so that the package's arithmetic is not its own witness.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from tests.helpers.fp8_checkpoints import ROUTERS, TOKEN, compressed, write_quantised

if TYPE_CHECKING:
    from pathlib import Path

STATIC = {"strategy": "tensor", "dynamic": False, "group_size": None, "block_structure": None}


@dataclass(frozen=True)
class Int8Format:
    """One way in which files store int8."""

    config: dict[str, Any]
    packed: bool = False
    static: bool = False
    """Whether there are scales for activations."""
    scale_dtype: torch.dtype = torch.bfloat16


INT8_FORMATS = {
    "w8a8": Int8Format(compressed("channel", TOKEN, ROUTERS, "int", "int-quantized")),
    "w8a8_static": Int8Format(
        compressed("channel", STATIC, ROUTERS, "int", "int-quantized"), static=True, scale_dtype=torch.float32
    ),
    "w8a16_naive": Int8Format(compressed("channel", None, ROUTERS, "int", "naive-quantized")),
    "w8a16_packed": Int8Format(compressed("channel", None, ROUTERS, "int", "pack-quantized"), packed=True),
}


def quantise_rows(
    weight: torch.Tensor, scale_dtype: torch.dtype
) -> tuple[list[list[int]], torch.Tensor, torch.Tensor]:
    """Codes from -128 to 127, scales [out, 1], and the values that they stand for, in float32."""
    codes, scales, values = [], [], []
    for row in weight.tolist():
        scale = float(torch.tensor(max(abs(v) for v in row) / 127.5 or 1.0).to(scale_dtype))
        codes.append([max(-128, min(127, round(v / scale))) for v in row])
        scales.append([scale])
        values.append([code * scale for code in codes[-1]])
    return codes, torch.tensor(scales).to(scale_dtype), torch.tensor(values)


def pack(codes: list[list[int]]) -> torch.Tensor:
    """int32 [out, ceil(in / 4)]: each value plus 128, four to a word, the first in the lowest bits; zeros behind a row's end."""
    words = []
    for row in codes:
        unsigned = [code + 128 for code in row]
        unsigned += [0] * (-len(row) % 4)
        whole = [
            sum(byte << 8 * i for i, byte in enumerate(unsigned[at : at + 4]))
            for at in range(0, len(unsigned), 4)
        ]
        words.append([word - 2**32 if word >= 2**31 else word for word in whole])
    return torch.tensor(words, dtype=torch.int32)


def write_int8(folder: Path, form: Int8Format, target: Path, plain: Path) -> None:
    """From a checkpoint of one file: the same in int8 to `target`, and its dequantised values to `plain`."""

    def stored(name: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        codes, scale, values = quantise_rows(weight, form.scale_dtype)
        tensors = {f"{name}_scale": scale}
        if form.packed:
            tensors |= {f"{name}_packed": pack(codes), f"{name}_shape": torch.tensor(weight.shape)}
        else:
            tensors[name] = torch.tensor(codes, dtype=torch.int8)
        if form.static:
            tensors[f"{name.removesuffix('weight')}input_scale"] = torch.tensor(0.5)
        return tensors, values

    write_quantised(folder, form.config, target, plain, stored)
