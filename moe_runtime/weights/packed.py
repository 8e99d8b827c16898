"""int8 matrices whose values lie four to a word of int32, as `pack-quantized` files of compressed-tensors have them.

A value is written as an unsigned byte, larger by 128; the first of a row has the lowest bits of the row's first word, and a row whose
length is no multiple of four ends with padding (`pack_to_int32` in compressed-tensors' compressors/pack_quantized/helpers.py).
safetensors is little-endian, so the bytes of a row are its values in order.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from moe_runtime.errors import CheckpointError
from moe_runtime.weights.safetensors_file import read_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from moe_runtime.weights.safetensors_file import StoredTensor

PACKED_INT8 = "I8 in I32"
"""Type of a StoredTensor that stands for such a matrix; no file has it."""
PAYLOAD, SHAPE, MATRIX = ".weight_packed", ".weight_shape", ".weight"
SHAPE_DTYPES = {"I64": torch.int64, "I32": torch.int32}
WORD, OFFSET = 4, 128


def unpacked(stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The tensors, with X.weight for every X.weight_packed and the X.weight_shape beside it: of type PACKED_INT8 and the shape [out, in]
    that X.weight_shape holds, which is read for that.

    Raises CheckpointError naming a matrix that is there in both forms, lacks its shape or has nothing else, or has words that do not fit it.
    """
    names = [name.removesuffix(PAYLOAD) for name in stored if name.endswith(PAYLOAD)]
    tensors = {name: tensor for name, tensor in stored.items() if not name.endswith(PAYLOAD)}
    with ExitStack() as stack:
        files: dict[Path, int] = {}
        for name in names:
            shape = tensors.pop(name + SHAPE, None)
            if shape is None:
                raise CheckpointError(f"the checkpoint lacks {name}{SHAPE}, the shape of {name}{PAYLOAD}")
            if name + MATRIX in tensors:
                raise CheckpointError(
                    f"the checkpoint holds the same weights twice: {name}{MATRIX}, {name}{PAYLOAD}"
                )
            if shape.path not in files:
                files[shape.path] = stack.enter_context(shape.path.open("rb")).fileno()
            packed = stored[name + PAYLOAD]
            sizes = _read_shape(shape, files[shape.path])
            _check(packed, sizes)
            tensors[name + MATRIX] = replace(packed, dtype=PACKED_INT8, shape=sizes)
    alone = min((name for name in tensors if name.endswith(SHAPE)), default=None)
    if alone is not None:
        raise CheckpointError(
            f"the checkpoint lacks {alone.removesuffix(SHAPE)}{PAYLOAD}, though it holds {alone}"
        )
    return tensors


def packed_width(width: int) -> int:
    """Bytes of a row of so many values."""
    return -(-width // WORD) * WORD


def unpack_rows(rows: torch.Tensor, width: int) -> torch.Tensor:
    """rows: uint8 [n, packed_width(width)], overwritten. Returns int8 [n, width], a view of it."""
    return rows.bitwise_xor_(OFFSET).view(torch.int8)[:, :width]


def _read_shape(tensor: StoredTensor, file: int) -> tuple[int, ...]:
    if tensor.dtype not in SHAPE_DTYPES or tensor.shape != (2,):
        raise CheckpointError(
            f"{tensor.name} in {tensor.path} has type {tensor.dtype} and shape {list(tensor.shape)}; the shape of a matrix is"
            f" two numbers of type {' or '.join(SHAPE_DTYPES)}"
        )
    raw = torch.empty(tensor.num_bytes, dtype=torch.uint8)
    read_bytes(file, tensor.offset, raw)
    return tuple(raw.view(SHAPE_DTYPES[tensor.dtype]).tolist())


def _check(packed: StoredTensor, shape: tuple[int, ...]) -> None:
    num_out, num_in = shape
    words = (num_out, packed_width(num_in) // WORD)
    if packed.dtype != "I32" or packed.shape != words:
        raise CheckpointError(
            f"{packed.name} in {packed.path} has type {packed.dtype} and shape {list(packed.shape)}, but a matrix of {list(shape)}"
            f" in 8 bits has {list(words)} words of type I32"
        )
