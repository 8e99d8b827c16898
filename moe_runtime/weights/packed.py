"""int8 and int4 matrices whose values lie four or eight to a word of int32, as `pack-quantized` files of compressed-tensors have them.

A value is written as an unsigned number, larger by 128 or 8; the first of a row has the lowest bits of the row's first word, and a row whose
length fills no whole words ends with padding (`pack_to_int32` in compressed-tensors' compressors/pack_quantized/helpers.py).
safetensors is little-endian, so the bytes of a row are its values in order, two of int4 to a byte. Zero points of int4 are packed in the
same way, but down the columns: eight rows to a word.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from moe_runtime import int4
from moe_runtime.errors import CheckpointError
from moe_runtime.weights.safetensors_file import read_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from moe_runtime.quantization import QuantScheme
    from moe_runtime.weights.safetensors_file import StoredTensor

PACKED = {torch.int8: "I8 in I32", torch.uint8: "I4 in I32"}
"""For each payload, the type of a StoredTensor that stands for such a matrix; no file has it."""
VALUES_PER_WORD = {PACKED[torch.int8]: 4, PACKED[torch.uint8]: 8}
PAYLOAD, SHAPE, MATRIX = ".weight_packed", ".weight_shape", ".weight"
SHAPE_DTYPES = {"I64": torch.int64, "I32": torch.int32}
WORD, OFFSET = 4, 128


def unpacked(stored: Mapping[str, StoredTensor], scheme: QuantScheme) -> dict[str, StoredTensor]:
    """The tensors, with X.weight for every X.weight_packed and the X.weight_shape beside it: of the scheme's type of PACKED and the shape
    [out, in] that X.weight_shape holds, which is read for that.

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
            dtype = PACKED[scheme.payload]
            _check(packed, sizes, VALUES_PER_WORD[dtype])
            tensors[name + MATRIX] = replace(packed, dtype=dtype, shape=sizes)
    alone = min((name for name in tensors if name.endswith(SHAPE)), default=None)
    if alone is not None:
        raise CheckpointError(
            f"the checkpoint lacks {alone.removesuffix(SHAPE)}{PAYLOAD}, though it holds {alone}"
        )
    return tensors


def packed_width(width: int, dtype: str) -> int:
    """Bytes of a row of so many values, for a type of PACKED."""
    return -(-width // VALUES_PER_WORD[dtype]) * WORD


def unpack_rows(rows: torch.Tensor, width: int, dtype: str) -> torch.Tensor:
    """rows: uint8 [n, packed_width(width, dtype)], overwritten. Returns the payload of [n, width] values as a scheme has it."""
    if dtype == PACKED[torch.int8]:
        return rows.bitwise_xor_(OFFSET).view(torch.int8)[:, :width]
    pairs = torch.stack((rows & int4.LARGEST_CODE, rows >> 4), dim=-1)
    return int4.pack(pairs.view(rows.shape[0], 2 * rows.shape[1])[:, :width])


def zero_point_shape(num_out: int, groups: int) -> tuple[int, int]:
    """Of the words with the zero points of an int4 matrix."""
    return -(-num_out // VALUES_PER_WORD[PACKED[torch.uint8]]), groups


def unpack_zero_points(words: torch.Tensor, num_out: int) -> torch.Tensor:
    """words: int32 `zero_point_shape`. Returns int32 (num_out, groups), from 0 to 15."""
    rows = [words >> bits & int4.LARGEST_CODE for bits in range(0, 32, 4)]
    return torch.stack(rows, dim=1).view(-1, words.shape[1])[:num_out]


def _read_shape(tensor: StoredTensor, file: int) -> tuple[int, ...]:
    if tensor.dtype not in SHAPE_DTYPES or tensor.shape != (2,):
        raise CheckpointError(
            f"{tensor.name} in {tensor.path} has type {tensor.dtype} and shape {list(tensor.shape)}; the shape of a matrix is"
            f" two numbers of type {' or '.join(SHAPE_DTYPES)}"
        )
    raw = torch.empty(tensor.num_bytes, dtype=torch.uint8)
    read_bytes(file, tensor.offset, raw)
    return tuple(raw.view(SHAPE_DTYPES[tensor.dtype]).tolist())


def _check(packed: StoredTensor, shape: tuple[int, ...], values_per_word: int) -> None:
    num_out, num_in = shape
    words = (num_out, -(-num_in // values_per_word))
    if packed.dtype != "I32" or packed.shape != words:
        raise CheckpointError(
            f"{packed.name} in {packed.path} has type {packed.dtype} and shape {list(packed.shape)}, but a matrix of {list(shape)}"
            f" in {32 // values_per_word} bits has {list(words)} words of type I32"
        )
