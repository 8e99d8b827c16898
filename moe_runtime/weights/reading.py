"""From bytes of a checkpoint to rows of a parameter: as they are, or into or out of FP8 or int8, through one small buffer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moe_runtime.errors import CheckpointError
from moe_runtime.quantization import FP8, FP8_TENSOR
from moe_runtime.weights.packed import PACKED_INT8, packed_width, unpack_rows
from moe_runtime.weights.safetensors_file import DTYPES, QUANTISED_DTYPES, read_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import ExitStack
    from pathlib import Path

    from moe_runtime.quantization import QuantScheme
    from moe_runtime.weights.rules import Copy
    from moe_runtime.weights.scales import StoredScale

CHUNK_BYTES = 16 << 20
FP8_CHUNK_BYTES = 4 << 20
"""Read at once where FP8 or int8 is made or undone, which takes several float32 copies of what was read."""


class WeightReader:
    """Fills parameters from the files of one checkpoint, which stay open until `stack` is closed."""

    def __init__(self, stack: ExitStack, stored: QuantScheme | None, kept: QuantScheme | None) -> None:
        """stored: scheme of the quantised tensors in the files. kept: scheme of the parameters that come with a scale."""
        self._stack, self._stored, self._kept = stack, stored, kept
        self._descriptors: dict[Path, int] = {}
        self._buffer = torch.empty(CHUNK_BYTES, dtype=torch.uint8)

    def fill(self, copy: Copy, out: torch.Tensor, scale_out: torch.Tensor | None) -> None:
        """Fill `out`, contiguous rows of a parameter, converting to its type.

        scale_out: where the scales go, float32 [rows, columns] of the kept scheme, if `out` is quantised.
        """
        packed = copy.tensor.dtype == PACKED_INT8
        num_bytes = (
            packed_width(out.shape[1]) * out.shape[0] if packed else out.numel() * _dtype(copy).itemsize
        )
        if num_bytes != copy.num_bytes:
            raise CheckpointError(f"{copy.tensor.name} does not fit {copy.target}")
        if copy.scale is None and scale_out is None:
            self._read_plain(copy, out)
        elif copy.scale is None and scale_out is not None:
            self._quantize(copy, out, scale_out)
        elif copy.scale is not None and scale_out is None:
            self._dequantize(copy, copy.scale, out)
        elif copy.scale is not None and scale_out is not None:
            if packed:
                self._read_packed(copy, out)
            else:
                self._read_plain(copy, out)
            scale_out.copy_(self._read_scale(copy.scale).view(scale_out.shape))
        if scale_out is not None:
            _refuse_nan(copy, out, scale_out)

    def _read_plain(self, copy: Copy, out: torch.Tensor) -> None:
        flat, dtype = out.view(-1), _dtype(copy)
        if flat.device.type == "cpu" and flat.dtype == dtype:
            read_bytes(self._file(copy.tensor.path), copy.offset, flat.view(torch.uint8))
            return
        step = CHUNK_BYTES // dtype.itemsize
        for start in range(0, flat.numel(), step):
            part = flat[start : start + step]
            part.copy_(self._read(copy, start, part.numel()))

    def _read_packed(self, copy: Copy, out: torch.Tensor) -> None:
        for first, rows in self._row_chunks(copy, out.shape[1], 1):
            out[first : first + rows.shape[0]] = rows

    def _dequantize(self, copy: Copy, scale: StoredScale, out: torch.Tensor) -> None:
        assert self._stored is not None
        shape = self._stored.scale_shape(*out.shape)
        values = self._read_scale(scale).view(shape).to(out.device)
        for first, rows in self._row_chunks(copy, out.shape[1], self._stored.row_step):
            stop = first + rows.shape[0]
            out[first:stop] = self._stored.dequantize(
                rows.to(out.device), self._stored.scale_rows(values, first, stop)
            )

    def _quantize(self, copy: Copy, out: torch.Tensor, scale_out: torch.Tensor) -> None:
        assert self._kept is not None
        scheme, width = self._kept, out.shape[1]
        whole = scheme == FP8_TENSOR
        if whole:
            # The largest value must be known before the first payload, so the file is read twice.
            largest = torch.zeros_like(scale_out)
            for _, rows in self._row_chunks(copy, width, 1):
                torch.maximum(largest, scheme.largest(rows.to(out.device)), out=largest)
            scale_out.copy_(scheme.scale_of(largest))
        for first, rows in self._row_chunks(copy, width, scheme.row_step):
            values, stop = rows.to(out.device), first + rows.shape[0]
            scale = scheme.scale_rows(scale_out, first, stop)
            if not whole:
                scale.copy_(scheme.scale_of(scheme.largest(values)))
            out[first:stop] = scheme.encode(values, scale)

    def _row_chunks(self, copy: Copy, width: int, step: int) -> Iterator[tuple[int, torch.Tensor]]:
        """First row and rows [n, width] in the file's type, n a multiple of `step` but for the last; valid until the next."""
        stored_width = copy.num_bytes // copy.num_rows // _dtype(copy).itemsize
        size = max(step, FP8_CHUNK_BYTES // (stored_width * _dtype(copy).itemsize) // step * step)
        for first in range(0, copy.num_rows, size):
            num_rows = min(size, copy.num_rows - first)
            rows = self._read(copy, first * stored_width, num_rows * stored_width).view(num_rows, -1)
            yield first, unpack_rows(rows, width) if copy.tensor.dtype == PACKED_INT8 else rows

    def _read(self, copy: Copy, start: int, count: int) -> torch.Tensor:
        """Values start..start+count-1 of a copy in the file's type; valid until the next call."""
        dtype = _dtype(copy)
        num_bytes = count * dtype.itemsize
        if self._buffer.numel() < num_bytes:
            self._buffer = torch.empty(num_bytes, dtype=torch.uint8)
        chunk = self._buffer[:num_bytes]
        read_bytes(self._file(copy.tensor.path), copy.offset + start * dtype.itemsize, chunk)
        return chunk.view(dtype)

    def _read_scale(self, scale: StoredScale) -> torch.Tensor:
        """float32, flat."""
        raw = torch.empty(scale.num_bytes, dtype=torch.uint8)
        read_bytes(self._file(scale.tensor.path), scale.offset, raw)
        return raw.view((DTYPES | QUANTISED_DTYPES)[scale.tensor.dtype]).float()

    def _file(self, path: Path) -> int:
        if path not in self._descriptors:
            self._descriptors[path] = self._stack.enter_context(path.open("rb")).fileno()
        return self._descriptors[path]


def _refuse_nan(copy: Copy, payload: torch.Tensor, scale: torch.Tensor) -> None:
    """Kernels may move the bits of FP8 without asking whether they are a number; of int8 only scales may be none."""
    if payload.dtype != FP8:
        if not bool(scale.isfinite().all()):
            raise CheckpointError(f"{copy.tensor.name} in {copy.tensor.path} holds NaN or infinity")
        return
    for part in torch.split(payload.view(torch.uint8).view(-1), FP8_CHUNK_BYTES):
        if bool((part.bitwise_and(0x7F) == 0x7F).any()):
            raise CheckpointError(f"{copy.tensor.name} in {copy.tensor.path} holds NaN")


def _dtype(copy: Copy) -> torch.dtype:
    """Of the file's values; packed ones are read as bytes."""
    if copy.tensor.dtype == PACKED_INT8:
        return torch.uint8
    return (DTYPES | QUANTISED_DTYPES)[copy.tensor.dtype]
