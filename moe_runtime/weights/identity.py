"""Which checkpoint a record or a placement belongs to."""

from __future__ import annotations

import hashlib
from pathlib import Path

from moe_runtime.errors import CheckpointError


def checkpoint_identity(folder: str | Path) -> str:
    """sha256, in hex, of the folder's config.json and of the names and sizes of its safetensors files.

    The same wherever the folder lies; takes no time. Raises CheckpointError if there is no config.json to read.
    """
    folder = Path(folder)
    try:
        digest = hashlib.sha256((folder / "config.json").read_bytes())
        files = sorted((path.name, path.stat().st_size) for path in folder.glob("*.safetensors"))
    except OSError as error:
        raise CheckpointError(f"{folder}: the checkpoint's files cannot be read: {error}") from error
    for name, size in files:
        digest.update(f"\n{name} {size}".encode())
    return digest.hexdigest()
