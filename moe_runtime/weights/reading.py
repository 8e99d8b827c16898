"""From bytes of a checkpoint to rows of a parameter: as they are, or into or out of FP8, int8 or int4, through one small buffer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moe_runtime.errors import CheckpointError
from moe_runtime.quantization import FP8, FP8_TENSOR
from moe_runtime.weights.packed import VALUES_PER_WORD, packed_width, unpack_rows, unpack_zero_points
from moe_runtime.weights.safetensors_file import DTYPES, QUANTISED_DTYPES, read_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import ExitStack
    from pathlib import Path

    from moe_runtime.quantization import QuantScheme
    from moe_runtime.weights.rules import Copy
    from moe_runtime.weights.safetensors_file import StoredTensor

CHUNK_BYTES = 16 << 20
FP8_CHUNK_BYTES = 4 << 20
"""Read at once where FP8, int8 or int4 is made or undone, which takes several float32 copies of what was read."""


class WeightReader:
    """Fills parameters from the files of one checkpoint, which stay open until `stack` is closed."""

    def __init__(self, stack: ExitStack, stored: QuantScheme | None) -> None:
        """stored: scheme of the quantised tensors in the files."""
        self._stack, self._stored = stack, stored
        self._descriptors: dict[Path, int] = {}
        self._buffer = torch.empty(CHUNK_BYTES, dtype=torch.uint8)

    def fill(
        self, copy: Copy, out: torch.Tensor, kept: QuantScheme | None, scale_out: torch.Tensor | None
    ) -> None:
        """Fill `out`, contiguous rows of a parameter, converting to its type.

        kept: the scheme of `out`, if it is quantised. scale_out: where the scales go then, [rows, columns] of kept.scale_dtype.
        """
        packed = copy.tensor.dtype in VALUES_PER_WORD
        width = packed_width(copy.width, copy.tensor.dtype) if packed else copy.width * _dtype(copy).itemsize
        if width * copy.num_rows != copy.num_bytes or out.shape[0] != copy.num_rows:
            raise CheckpointError(f"{copy.tensor.name} does not fit {copy.target}")
        if copy.scale is None and scale_out is None:
            self._read_plain(copy, out)
        elif copy.scale is None and scale_out is not None:
            assert kept is not None
            self._quantize(copy, out, kept, scale_out)
        elif copy.scale is not None and scale_out is None:
            self._dequantize(copy, out)
        elif copy.scale is not None and scale_out is not None:
            if packed:
                self._read_packed(copy, out)
            else:
                self._read_plain(copy, out)
            assert self._stored is not None
            scale_out.copy_(self._read_scales(copy, self._stored))
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
        for first, rows in self._row_chunks(copy, 1):
            out[first : first + rows.shape[0]] = rows

    def _dequantize(self, copy: Copy, out: torch.Tensor) -> None:
        assert self._stored is not None
        values = self._read_scales(copy, self._stored).to(out.device)
        for first, rows in self._row_chunks(copy, self._stored.row_step):
            stop = first + rows.shape[0]
            out[first:stop] = self._stored.dequantize(
                rows.to(out.device), self._stored.scale_rows(values, first, stop), copy.width
            )

    def _quantize(self, copy: Copy, out: torch.Tensor, scheme: QuantScheme, scale_out: torch.Tensor) -> None:
        whole = scheme == FP8_TENSOR
        if whole:
            # The largest value must be known before the first payload, so the file is read twice.
            largest = torch.zeros_like(scale_out)
            for _, rows in self._row_chunks(copy, 1):
                torch.maximum(largest, scheme.largest(rows.to(out.device)), out=largest)
            scale_out.copy_(scheme.scale_of(largest))
        for first, rows in self._row_chunks(copy, scheme.row_step):
            values, stop = rows.to(out.device), first + rows.shape[0]
            scale = scheme.scale_rows(scale_out, first, stop)
            if not whole:
                scale.copy_(scheme.scales_for(values))
            out[first:stop] = scheme.encode(values, scale)

    def _row_chunks(self, copy: Copy, step: int) -> Iterator[tuple[int, torch.Tensor]]:
        """First row and rows [n, width] in the file's type, n a multiple of `step` but for the last; valid until the next. Packed
        ones as the stored scheme's payload."""
        stored_width = copy.num_bytes // copy.num_rows // _dtype(copy).itemsize
        size = max(step, FP8_CHUNK_BYTES // (stored_width * _dtype(copy).itemsize) // step * step)
        for first in range(0, copy.num_rows, size):
            num_rows = min(size, copy.num_rows - first)
            rows = self._read(copy, first * stored_width, num_rows * stored_width).view(num_rows, -1)
            packed = copy.tensor.dtype in VALUES_PER_WORD
            yield first, unpack_rows(rows, copy.width, copy.tensor.dtype) if packed else rows

    def _read(self, copy: Copy, start: int, count: int) -> torch.Tensor:
        """Values start..start+count-1 of a copy in the file's type; valid until the next call."""
        dtype = _dtype(copy)
        num_bytes = count * dtype.itemsize
        if self._buffer.numel() < num_bytes:
            self._buffer = torch.empty(num_bytes, dtype=torch.uint8)
        chunk = self._buffer[:num_bytes]
        read_bytes(self._file(copy.tensor.path), copy.offset + start * dtype.itemsize, chunk)
        return chunk.view(dtype)

    def _read_scales(self, copy: Copy, scheme: QuantScheme) -> torch.Tensor:
        """float32 [scheme.scale_shape]: the scales, then the zero points if there are any."""
        assert copy.scale is not None
        dtype = (DTYPES | QUANTISED_DTYPES)[copy.scale.tensor.dtype]
        rows, columns = scheme.scale_shape(copy.num_rows, copy.width)
        raw = self._read_whole(copy.scale.tensor, copy.scale.offset, copy.scale.num_bytes)
        if copy.zero_points is None:
            return raw.view(dtype).float().view(rows, columns)
        words = self._read_whole(copy.zero_points, copy.zero_points.offset, copy.zero_points.num_bytes)
        zeros = unpack_zero_points(words.view(torch.int32).view(copy.zero_points.shape), rows)
        return torch.cat((raw.view(dtype).float().view(rows, columns // 2), zeros.float()), dim=1)

    def _read_whole(self, tensor: StoredTensor, offset: int, num_bytes: int) -> torch.Tensor:
        raw = torch.empty(num_bytes, dtype=torch.uint8)
        read_bytes(self._file(tensor.path), offset, raw)
        return raw

    def _file(self, path: Path) -> int:
        if path not in self._descriptors:
            self._descriptors[path] = self._stack.enter_context(path.open("rb")).fileno()
        return self._descriptors[path]


def _refuse_nan(copy: Copy, payload: torch.Tensor, scale: torch.Tensor) -> None:
    """Kernels may move the bits of FP8 without asking whether they are a number; of integers only scales may be none."""
    if payload.dtype != FP8:
        if not bool(scale.isfinite().all()):
            raise CheckpointError(f"{copy.tensor.name} in {copy.tensor.path} holds NaN or infinity")
        return
    for part in torch.split(payload.view(torch.uint8).view(-1), FP8_CHUNK_BYTES):
        if bool((part.bitwise_and(0x7F) == 0x7F).any()):
            raise CheckpointError(f"{copy.tensor.name} in {copy.tensor.path} holds NaN")


def _dtype(copy: Copy) -> torch.dtype:
    """Of the file's values; packed ones are read as bytes."""
    if copy.tensor.dtype in VALUES_PER_WORD:
        return torch.uint8
    return (DTYPES | QUANTISED_DTYPES)[copy.tensor.dtype]
