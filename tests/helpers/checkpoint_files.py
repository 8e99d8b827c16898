"""Loading small checkpoints of one file, in one rank, and damaging them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from moe_runtime.models.quantized import with_weight_schemes
from moe_runtime.models.registry import load_spec
from moe_runtime.weights.loader import load_with_report

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from moe_runtime.models.decoder import Decoder
    from moe_runtime.weights.loader import LoadReport

FILE = "model.safetensors"
Tensors = dict[str, torch.Tensor]


def load(
    folder: Path,
    quantization: str = "auto",
    local_experts: list[list[int]] | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Decoder, LoadReport]:
    """local_experts: as of `load_weights`; None: all of them, in order."""
    spec, adapter = load_spec(folder)
    spec = with_weight_schemes(spec, quantization)
    held = local_experts or [list(range(spec.num_experts))] * spec.num_moe_layers
    return load_with_report(folder, spec, adapter, held, dtype, "cpu")


def edit(folder: Path, change: Callable[[Tensors], Any]) -> None:
    """Change the file's tensors."""
    tensors = load_file(folder / FILE)
    change(tensors)
    save_file(tensors, folder / FILE)


def drop(name: str) -> Callable[[Tensors], Any]:
    """For `edit`."""
    return lambda tensors: tensors.pop(name)


def put(name: str, value: torch.Tensor) -> Callable[[Tensors], Any]:
    """For `edit`."""
    return lambda tensors: tensors.update({name: value})


def reference(plain: Path) -> Any:
    """transformers' model, in float32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
    model.set_experts_implementation("eager")
    return model
