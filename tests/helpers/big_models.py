"""Random checkpoints of hundreds of MiB, written straight to the file: quick, and never held as a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

from moe_runtime.models.registry import load_spec
from tests.helpers.tiny_models import FAMILIES, tiny_config

if TYPE_CHECKING:
    from pathlib import Path


def make_big(family: str, path: Path, seed: int, dtype: torch.dtype, **overrides: Any) -> int:
    """Write a checkpoint in the hub's layout; returns the bytes of its weights. `overrides` as for `tiny_config`."""
    config = tiny_config(family, seed, **overrides)
    config.dtype, config.architectures = dtype, [FAMILIES[family][1]]
    config.save_pretrained(path)
    spec, adapter = load_spec(path)
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    filled = set()
    for rule in adapter.rules(spec).rules:
        # Of several layouts for one place, the first.
        if rule.stacked or (rule.target, rule.first_row) in filled:
            continue
        filled.add((rule.target, rule.first_row))
        # The experts of a layer differ by their order of rows, which costs no random numbers.
        noise = torch.randn(rule.shape, generator=generator) / rule.shape[-1] ** 0.5
        base = (noise if len(rule.shape) > 1 else 1 + noise).to(dtype)
        for layer in rule.layers if rule.per_layer else (0,):
            for expert in range(spec.num_experts if rule.per_expert else 1):
                name = rule.source.format(layer=layer, expert=expert)
                tensors[name] = base.roll(expert + layer, 0).contiguous()
    save_file(tensors, path / "model.safetensors")
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
