"""FP8 checkpoints as the hub has them, made of unquantised ones, and the same weights dequantised for transformers.

int8 ones are in `int8_checkpoints`. Quantised and dequantised here block by block in plain loops, so that the package's own arithmetic is not its own witness.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file

from tests.helpers.checkpoint_files import FILE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LINEAR = re.compile(r".*\.(\w+_proj|w[123])\.weight")
"""Routers, gates of shared experts, embeddings and heads stay as they are, as in the hub's files."""
FP8 = torch.float8_e4m3fn


def compressed(
    strategy: str,
    inputs: dict[str, Any] | None,
    ignore: list[str],
    kind: str = "float",
    file_format: str = "",
) -> dict[str, Any]:
    """A `quantization_config` as LLM Compressor writes it; by default in the format that it takes for FP8."""
    number: dict[str, Any] = {"num_bits": 8, "type": kind, "symmetric": True, "actorder": None}
    number |= {"observer_kwargs": {}, "scale_dtype": None, "zp_dtype": None}
    weights = number | {"strategy": strategy, "dynamic": False, "group_size": None, "observer": "minmax"}
    weights["block_structure"] = [128, 128] if strategy == "block" else None
    group = {"targets": ["Linear"], "weights": weights, "output_activations": None, "format": None}
    group["input_activations"] = None if inputs is None else number | inputs
    return {
        "config_groups": {"group_0": group},
        "format": file_format or ("naive-quantized" if inputs is None else "float-quantized"),
        "global_compression_ratio": None,
        "ignore": ignore,
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "sparsity_config": {},
        "transform_config": {},
        "version": "0.12.2",
    }


@dataclass(frozen=True)
class Format:
    """One way in which the hub's files store FP8."""

    block: str
    """`block`, `channel` or `tensor`."""
    suffix: str
    config: dict[str, Any]
    scale_dtype: torch.dtype = torch.float32
    scalar_shape: tuple[int, ...] = ()
    """Of a scale per tensor."""
    extra: dict[str, torch.Tensor] = field(default_factory=dict)
    """Further tensors beside every quantised weight."""
    powers_of_two: bool = False
    """Scales are the next powers of two, as those made while loading."""


TOKEN = {"strategy": "token", "dynamic": True, "group_size": None, "block_structure": None}
ROUTERS = ["lm_head", "re:.*gate$"]
FORMATS = {
    "deepseek": Format(
        "block",
        "_scale_inv",
        {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": [
                "lm_head",
                "model.layers.0.mlp.gate",
                "model.layers.0.input_layernorm",
            ],
        },
    ),
    "autofp8": Format(
        "tensor",
        "_scale",
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
        extra={"input_scale": torch.tensor(0.5)},
    ),
    "ct_channel": Format(
        "channel", "_scale", compressed("channel", TOKEN, ROUTERS), scale_dtype=torch.bfloat16
    ),
    "ct_tensor": Format("tensor", "_scale", compressed("tensor", TOKEN, ROUTERS), scalar_shape=(1,)),
    "ct_block": Format("block", "_scale", compressed("block", None, ROUTERS)),
}

FORMATS["powers"] = replace(FORMATS["deepseek"], powers_of_two=True)


def blocks(shape: torch.Size, kind: str) -> Iterator[tuple[tuple[int, int], tuple[slice, slice]]]:
    """Index of each scale and the part of the matrix it is for."""
    rows, columns = shape
    high, wide = {"block": (128, 128), "channel": (1, columns), "tensor": (rows, columns)}[kind]
    for i, row in enumerate(range(0, rows, high)):
        for j, column in enumerate(range(0, columns, wide)):
            yield (i, j), (slice(row, row + high), slice(column, column + wide))


def quantise(weight: torch.Tensor, form: Format) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Payload, scale, and the values that they stand for, in float32."""
    places = list(blocks(weight.shape, form.block))
    scale = torch.zeros(places[-1][0][0] + 1, places[-1][0][1] + 1)
    payload, values = torch.zeros(weight.shape, dtype=FP8), torch.zeros(weight.shape)
    for index, part in places:
        largest = float(weight[part].abs().max())
        step = largest / 448 or 1.0
        if form.powers_of_two:
            step = 2.0 ** math.ceil(math.log2(step))
        scale[index] = torch.tensor(step).to(form.scale_dtype).float()
        payload[part] = (weight[part] / scale[index]).clamp(-448, 448).to(FP8)
        values[part] = payload[part].float() * scale[index]
    return payload, scale.to(form.scale_dtype), values


def write_fp8(folder: Path, form: Format, target: Path, plain: Path) -> None:
    """From a checkpoint of one file: the same in FP8 to `target`, and its dequantised values to `plain`."""

    def stored(name: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        payload, scale, values = quantise(weight, form)
        if form.block == "tensor":
            scale = scale.view(form.scalar_shape)
        extra = {f"{name.removesuffix('weight')}{e}": value.clone() for e, value in form.extra.items()}
        return {name: payload, name + form.suffix: scale, **extra}, values

    write_quantised(folder, form.config, target, plain, stored)


def write_quantised(
    folder: Path,
    config: dict[str, Any],
    target: Path,
    plain: Path,
    stored: Callable[[str, torch.Tensor], tuple[dict[str, torch.Tensor], torch.Tensor]],
) -> None:
    """From a checkpoint of one file: with its linear layers as `stored` has them, and with the values that those stand for.

    stored: from the name and the values of a matrix to what the file has instead, and to the values that it stands for.
    """
    for path in (target, plain):
        shutil.copytree(folder, path)
    quantised: dict[str, torch.Tensor] = {}
    dequantised: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(folder / FILE).items():
        if not LINEAR.fullmatch(name):
            quantised[name] = dequantised[name] = tensor
            continue
        tensors, values = stored(name, tensor.float())
        quantised |= tensors
        dequantised[name] = values.to(tensor.dtype)
    save_file(quantised, target / FILE)
    save_file(dequantised, plain / FILE)
    own = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(own | {"quantization_config": config}))
