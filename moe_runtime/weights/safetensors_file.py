"""Reading tensors of a safetensors file by byte range, into memory that is already there.

The format: 8 bytes little-endian header length, a JSON header (name -> dtype, shape, data_offsets), then the data.
Read with `preadv` rather than through a memory map, so that pages read do not stay in the process's resident memory and
the number of bytes read is exact.
"""

from __future__ import annotations

import json
import math
import os
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from moe_runtime.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

# The format's own limit; a larger number means that the file is not safetensors.
MAX_HEADER_BYTES = 100_000_000
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
FP8_PAYLOAD, INT8_PAYLOAD = "F8_E4M3", "I8"
QUANTISED_DTYPES = {
    FP8_PAYLOAD: torch.float8_e4m3fn,
    INT8_PAYLOAD: torch.int8,
    "F8_E8M0": torch.float8_e8m0fnu,
}
"""Of quantised weights and of scales that are powers of two."""
# Bits, for the size check of tensors whose type cannot be loaded.
BITS = {"BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "I16": 16, "U16": 16}
BITS |= {"F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64}


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies."""

    name: str
    path: Path
    dtype: str
    """safetensors' name, such as `BF16`."""
    shape: tuple[int, ...]
    offset: int
    """First byte in the file."""
    num_bytes: int


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a file, by name. Raises CheckpointError if the file is damaged, truncated or no safetensors."""
    try:
        file_bytes = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            if len(prefix) < 8:
                raise CheckpointError(f"{path} is truncated: {file_bytes} bytes are too few for a header")
            header_bytes = struct.unpack("<Q", prefix)[0]
            if header_bytes > MAX_HEADER_BYTES:
                raise CheckpointError(f"{path} is not a safetensors file")
            if 8 + header_bytes > file_bytes:
                raise CheckpointError(f"{path} is truncated: its header is incomplete")
            header = json.loads(file.read(header_bytes))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not a safetensors file: {error}") from error
    try:
        return _tensors(path, header, 8 + header_bytes, file_bytes)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} has a malformed safetensors header: {error!r}") from error


def _tensors(path: Path, header: dict[str, Any], start: int, file_bytes: int) -> dict[str, StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
    end = start
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        first, last = entry["data_offsets"]
        shape = tuple(int(n) for n in entry["shape"])
        bits = BITS.get(entry["dtype"])
        if first < 0 or last < first or (bits is not None and (last - first) * 8 != math.prod(shape) * bits):
            raise CheckpointError(f"{path} is damaged: the size of {name} does not fit its shape and type")
        end = max(end, start + last)
        tensors[name] = StoredTensor(name, path, entry["dtype"], shape, start + first, last - first)
    if end != file_bytes:
        state = "truncated" if end > file_bytes else "damaged"
        raise CheckpointError(f"{path} is {state}: it has {file_bytes} bytes, and its header says {end}")
    return tensors


def read_bytes(fd: int, offset: int, out: torch.Tensor) -> None:
    """Fill `out` (contiguous uint8 on the host) from the file's byte `offset`. Raises CheckpointError at its end."""
    view = out.numpy().data
    done = 0
    while done < len(view):
        count = os.preadv(fd, [view[done:]], offset + done)
        if count == 0:
            raise CheckpointError(f"a checkpoint file ended early at byte {offset + done}")
        done += count
