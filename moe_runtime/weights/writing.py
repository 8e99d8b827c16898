"""Writing checkpoint folders: safetensors shards with their index, and a folder that is never there in part."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch


def build_folder(target: Path, build: Callable[[Path], None]) -> None:
    """Have `build` fill a folder beside `target`, then put it in place in one step, replacing what was there.

    If `build` raises, `target` stays as it was. The folder that holds `target` must exist. Raises OSError.
    """
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}.building-", dir=target.parent))
    try:
        made = work / "model"
        made.mkdir()
        build(made)
        for path in [*made.iterdir(), made]:
            _fsync(path)
        if target.exists():
            # Renamed into the work folder, which is removed below; whoever has the old files mapped keeps them.
            target.rename(work / "replaced")
        made.rename(target)
        _fsync(target.parent)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_shards(
    folder: Path, tensors: Iterator[tuple[str, torch.Tensor]], shard_bytes: int
) -> Iterator[int]:
    """Writes safetensors shards of at most `shard_bytes` (or one tensor) and their index; holds one shard in memory.

    Yields the bytes taken in so far, once per tensor.
    """
    from safetensors.torch import save_file

    shards: list[list[str]] = []
    shard: dict[str, torch.Tensor] = {}
    total = shard_size = 0

    def flush() -> None:
        save_file(shard, folder / f"part-{len(shards)}", metadata={"format": "pt"})
        shards.append(list(shard))
        shard.clear()

    for name, tensor in tensors:
        if shard and shard_size + tensor.nbytes > shard_bytes:
            flush()
            shard_size = 0
        shard[name] = tensor
        shard_size += tensor.nbytes
        total += tensor.nbytes
        yield total
    flush()
    weight_map = {}
    for i, names in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        # save_file makes files that only their owner may read.
        (folder / f"part-{i}").rename(folder / file).chmod(0o644)
        weight_map.update(dict.fromkeys(names, file))
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    write_json(folder / "model.safetensors.index.json", index)


def write_json(path: Path, value: Any) -> None:
    """Write a value as indented UTF-8. Raises OSError."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
