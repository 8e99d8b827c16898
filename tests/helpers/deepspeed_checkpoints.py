"""Checkpoints in DeepSpeed-MoE's layout, made from the hub's without DeepSpeed: what `engine.save_checkpoint` writes."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file

if TYPE_CHECKING:
    from pathlib import Path

EXPERT = re.compile(r"(model\.layers\.(\d+)\.\w+)\.experts\.(\d+)\.(\w+)\.weight")
ROUTER = re.compile(r"(model\.layers\.\d+\.(?:mlp|block_sparse_moe))\.gate\.weight")


def hub_tensors(model: Path) -> dict[str, torch.Tensor]:
    return {k: v for path in sorted(model.glob("*.safetensors")) for k, v in load_file(path).items()}


def write_deepspeed(model: Path, folder: Path, tag: str | None = "global_step7") -> Path:
    """The hub checkpoint `model` as DeepSpeed would save it under `folder`; returns the folder of the tag."""
    made = folder / tag if tag else folder
    made.mkdir(parents=True)
    if tag:
        (folder / "latest").write_text(tag)
    main: dict[str, torch.Tensor] = {}
    experts: dict[tuple[int, int], dict[str, torch.Tensor]] = defaultdict(dict)
    for name, tensor in hub_tensors(model).items():
        if match := EXPERT.fullmatch(name):
            block, layer, expert, part = match.groups()
            key = f"{block}.moe.deepspeed_moe.experts.deepspeed_experts.{expert}.{part}.weight"
            experts[int(layer), int(expert)][key] = tensor
        elif match := ROUTER.fullmatch(name):
            main[f"{match[1]}.moe.deepspeed_moe.gate.wg.weight"] = tensor
        else:
            main[name] = tensor
    moe_layers = sorted({layer for layer, _ in experts})
    state: dict[str, Any] = {
        "module": main,
        "optimizer": None,
        "ds_version": "0.19.8",
        "ds_autoep_layers": None,
    }
    torch.save(state, made / "mp_rank_00_model_states.pt")
    for (layer, expert), tensors in experts.items():
        torch.save(tensors, expert_file(made, moe_layers.index(layer), expert))
    torch.save({"optimizer": None}, made / "expp_rank_0_mp_rank_00_optim_states.pt")
    return made


def expert_file(folder: Path, moe_layer: int, expert: int) -> Path:
    return folder / f"layer_{moe_layer}_expert_{expert}_mp_rank_00_model_states.pt"
