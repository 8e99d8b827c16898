"""int4 checkpoints as LLM Compressor writes them (GPTQ and AWQ models too), and the same weights dequantised for transformers.

Quantised and packed here with Python's own numbers, so that the package's arithmetic is not its own witness.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from moe_runtime.quantization import QuantScheme, int4_scheme
from tests.helpers.fp8_checkpoints import ROUTERS, compressed, write_quantised

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True)
class Int4Format:
    """One way in which files store int4."""

    group: int
    """Values of a row that share a scale; 0: all."""
    zero_points: bool = False
    scale_dtype: torch.dtype = torch.bfloat16

    @property
    def config(self) -> dict[str, Any]:
        """The `quantization_config`."""
        config = copy.deepcopy(compressed("channel", None, ROUTERS, "int", "pack-quantized"))
        weights = config["config_groups"]["group_0"]["weights"]
        weights |= {"num_bits": 4, "symmetric": not self.zero_points, "zp_dtype": "torch.int8"}
        if self.group:
            weights |= {"strategy": "group", "group_size": self.group}
        return config

    @property
    def scheme(self) -> QuantScheme:
        """What the package calls it."""
        return int4_scheme(self.group, self.zero_points)


INT4_FORMATS = {
    "group128": Int4Format(128),
    "group64": Int4Format(64, scale_dtype=torch.float16),
    "group32": Int4Format(32, scale_dtype=torch.float32),
    "channel": Int4Format(0),
    "group32_zero_points": Int4Format(32, zero_points=True),
    "channel_zero_points": Int4Format(0, zero_points=True),
}


@dataclass(frozen=True)
class Quantised:
    """A matrix in lists of rows."""

    codes: list[list[int]]
    """From 0 to 15."""
    zeros: list[list[int]]
    """For each group of a row, the same."""
    scale: torch.Tensor
    """[out, groups]."""
    values: torch.Tensor
    """float32 [out, in]."""


def quantise(weight: torch.Tensor, form: Int4Format) -> Quantised:
    """Group by group; some values are cut off at the ends, so that all codes occur."""
    size = form.group or weight.shape[1]
    codes, zeros, scales, values = [], [], [], []
    for row in weight.tolist():
        groups = [row[at : at + size] for at in range(0, len(row), size)]
        found: list[tuple[list[int], int, float]] = []
        for group in groups:
            span = max(group) - min(group) if form.zero_points else 2 * max(abs(v) for v in group)
            scale = float(torch.tensor(span / 16 or 1.0).to(form.scale_dtype))
            zero = max(0, min(15, round(-min(group) / scale))) if form.zero_points else 8
            found.append(([max(0, min(15, round(v / scale) + zero)) for v in group], zero, scale))
        codes.append([code for group in found for code in group[0]])
        zeros.append([zero for _, zero, _ in found])
        scales.append([scale for *_, scale in found])
        values.append([(code - zero) * scale for group, zero, scale in found for code in group])
    return Quantised(codes, zeros, torch.tensor(scales).to(form.scale_dtype), torch.tensor(values))


def pack(rows: list[list[int]]) -> torch.Tensor:
    """int32 [rows, ceil(width / 8)]: eight to a word, the first in the lowest bits; zeros behind a row's end."""
    words = []
    for row in rows:
        padded = row + [0] * (-len(row) % 8)
        whole = [
            sum(code << 4 * i for i, code in enumerate(padded[at : at + 8]))
            for at in range(0, len(padded), 8)
        ]
        words.append([word - 2**32 if word >= 2**31 else word for word in whole])
    return torch.tensor(words, dtype=torch.int32)


def write_int4(folder: Path, form: Int4Format, target: Path, plain: Path) -> None:
    """From a checkpoint of one file: the same in int4 to `target`, and its dequantised values to `plain`."""

    def stored(name: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        made = quantise(weight, form)
        tensors = {f"{name}_packed": pack(made.codes), f"{name}_scale": made.scale}
        tensors[f"{name}_shape"] = torch.tensor(weight.shape)
        if form.zero_points:
            # Down the columns.
            columns = [list(column) for column in zip(*made.zeros, strict=True)]
            tensors[f"{name}_zero_point"] = pack(columns).T.contiguous()
        return tensors, made.values

    write_quantised(folder, form.config, target, plain, stored)
