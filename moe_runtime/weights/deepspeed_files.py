"""The files of a DeepSpeed-MoE checkpoint: which there have to be, and reading them without running code.

The only module that may call `torch.load`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from moe_runtime.errors import CheckpointError

MAIN_FILE = "mp_rank_00_model_states.pt"
EXPERT_FILE = re.compile(r"layer_(\d+)_expert_(\d+)_mp_rank_00_model_states\.pt")


def tag_folder(source: Path) -> Path:
    """The folder with the files: `source`, or the one that its file `latest` names. Raises CheckpointError."""
    if not source.is_dir():
        raise CheckpointError(f"{source}: no such folder")
    latest = source / "latest"
    folder = source / latest.read_text(encoding="utf-8").strip() if latest.is_file() else source
    if (folder / MAIN_FILE).is_file():
        return folder
    if any(folder.glob("zero_pp_rank_*_model_states.pt")):
        raise CheckpointError(
            f"{folder} was saved under ZeRO stage 3, which cuts every tensor into pieces; DeepSpeed-MoE checkpoints of"
            " stages 0 to 2 can be converted"
        )
    raise CheckpointError(
        f"{folder} has no {MAIN_FILE}: give the folder of one tag of a DeepSpeed checkpoint, or the folder above it that"
        " has a file `latest`"
    )


def expert_files(folder: Path, num_moe_layers: int, num_experts: int) -> dict[tuple[int, int], Path]:
    """(MoE layer counted from 0, expert) -> file, in order. Raises CheckpointError unless they are exactly those."""
    found: dict[tuple[int, int], Path] = {}
    for path in folder.glob("*_model_states.pt"):
        match = EXPERT_FILE.fullmatch(path.name)
        if match:
            found[int(match[1]), int(match[2])] = path
        elif path.name != MAIN_FILE:
            raise CheckpointError(
                f"{path}: only checkpoints without tensor or pipeline parallelism can be converted; those have"
                f" {MAIN_FILE} and layer_*_expert_*_mp_rank_00_model_states.pt"
            )
    wanted = [(m, e) for m in range(num_moe_layers) for e in range(num_experts)]
    says = f"config.json asks for {num_moe_layers} MoE layers of {num_experts} experts"
    for moe_layer, expert in wanted:
        if (moe_layer, expert) not in found:
            name = f"layer_{moe_layer}_expert_{expert}_mp_rank_00_model_states.pt"
            raise CheckpointError(f"{folder} lacks {name}: {says}")
    surplus = sorted(set(found) - set(wanted))
    if surplus:
        raise CheckpointError(f"{found[surplus[0]]} is one too many: {says}")
    return {place: found[place] for place in wanted}


def load(path: Path) -> dict[str, Any]:
    """A file's contents, mapped rather than read. Nothing but tensors and plain values is unpickled: no code can run.

    Raises CheckpointError naming the file.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        summary = str(error).strip().partition("\n")[0]
        raise CheckpointError(f"{path} cannot be read as tensors and plain values only: {summary}") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} holds a {type(state).__name__}, not tensors by name")
    return state


def holds_weights(name: str) -> bool:
    """Whether a file of this name is converted."""
    return name == MAIN_FILE or EXPERT_FILE.fullmatch(name) is not None
