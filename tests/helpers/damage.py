"""Checkpoints made wrong on purpose."""

from __future__ import annotations

import json
import os
import shutil
import struct
from pathlib import Path
from typing import Any

WEIGHTS = "model.safetensors"


def copy_of(folder: Path, target: Path, **config: Any) -> Path:
    """A copy with some fields of config.json changed."""
    shutil.copytree(folder, target)
    path = target / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return target


def read_safetensors(path: Path) -> tuple[dict[str, Any], bytes]:
    """Header and data."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def write_safetensors(path: Path, header: dict[str, Any], data: bytes) -> None:
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def without_last_tensor(folder: Path) -> str:
    """Take the last tensor out of a checkpoint of one file; its name."""
    header, data = read_safetensors(folder / WEIGHTS)
    name = max(header.keys() - {"__metadata__"}, key=lambda n: header[n]["data_offsets"][0])
    begin, _ = header.pop(name)["data_offsets"]
    write_safetensors(folder / WEIGHTS, header, data[:begin])
    return name


def truncated_shard_of(folder: Path, part: str) -> str:
    """Move the tensors whose names hold `part` to a shard of their own, and cut off its end. Its name."""
    header, data = read_safetensors(folder / WEIGHTS)
    header.pop("__metadata__", None)
    weight_map = {}
    for shard, inside in (("one.safetensors", False), ("other.safetensors", True)):
        names = [name for name in header if (part in name) == inside]
        moved: dict[str, Any] = {}
        body = b""
        for name in names:
            begin, end = header[name]["data_offsets"]
            moved[name] = header[name] | {"data_offsets": [len(body), len(body) + end - begin]}
            body += data[begin:end]
        write_safetensors(folder / shard, moved, body)
        weight_map |= dict.fromkeys(names, shard)
    (folder / WEIGHTS).unlink()
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": weight_map}))
    os.truncate(folder / shard, (folder / shard).stat().st_size - 5)
    return shard


def blow_up(folder: Path, num_bytes: int) -> None:
    """Make vocabulary and embeddings so large that each takes `num_bytes` of float32. The file has a hole for data."""
    config = json.loads((folder / "config.json").read_text())
    header, data = read_safetensors(folder / WEIGHTS)
    rows = num_bytes // (4 * config["hidden_size"])
    size = 4 * config["hidden_size"] * rows
    end = len(data)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        header[name] |= {"shape": [rows, config["hidden_size"]], "data_offsets": [end, end + size]}
        end += size
    write_safetensors(folder / WEIGHTS, header, data)
    os.truncate(folder / WEIGHTS, (folder / WEIGHTS).stat().st_size + 2 * size)
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": rows}))
