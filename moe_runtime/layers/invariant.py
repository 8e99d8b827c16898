"""Computing on CPUs so that a row's bits follow from that row alone: not from other rows, its place, or the threads.

What makes torch's results depend on more, and what is done here about it:
- matrix libraries choose algorithms by the number of rows, and treat the rows of an incomplete tile differently: every
  product has one of three row counts, whole column tiles, and operands at aligned addresses;
- matrix libraries share a product between threads as they see fit: each product is computed by one thread;
- the last elements of an array, those that do not fill a vector register, go through other code: arrays are padded.
That the three row counts give the same bits is a property of the library, checked when a rank starts (`row_dependence`).

Legend: T rows, n rows of a tile, I inputs, O outputs.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

ROW_TILES = (64, 16, 8)
"""Rows of a product, largest first; the last tile is filled up with zeros."""
COLUMN_TILE = 1024
"""Most outputs of one product, so that threads can share a step of few rows."""
NARROWEST = 16
"""Fewest outputs of a product: for fewer than 10, MKL's float32 results depend on a row's place."""
ALIGNMENT_BYTES = 64
VECTOR_ELEMENTS = 64
"""A multiple of what torch's vectorised loops take at a time, for every type."""


@contextmanager
def one_thread() -> Iterator[None]:
    """Within it torch and its libraries use the calling thread only."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Workers:
    """Threads that share independent tasks; each task is computed by one of them, so their number changes no result."""

    def __init__(self, num_threads: int) -> None:
        self.num_threads = max(1, num_threads)
        self._pool: ThreadPoolExecutor | None = None
        if self.num_threads > 1:
            self._pool = ThreadPoolExecutor(
                self.num_threads - 1, "invariant", initializer=partial(torch.set_num_threads, 1)
            )

    def run(self, tasks: Sequence[Callable[[], None]]) -> None:
        """Call all tasks; returns when they are done. Raises what a task raises."""
        with one_thread():
            if self._pool is None or len(tasks) < 2:
                _call_all(tasks)
                return
            parts = [tasks[i :: self.num_threads] for i in range(self.num_threads)]
            others = [self._pool.submit(_call_all, part) for part in parts[1:] if part]
            _call_all(parts[0])
            for other in others:
                other.result()


@torch.inference_mode()
def _call_all(tasks: Sequence[Callable[[], None]]) -> None:
    for task in tasks:
        task()


def elementwise(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """function(x), for a function of each element alone. Same shape; x may be empty."""
    with one_thread():
        return function(_flat(x))[: x.numel()].view(x.shape)


def _flat(x: torch.Tensor) -> torch.Tensor:
    """x in one dimension, padded with zeros to whole vectors."""
    return pad(x.reshape(-1), (0, -x.numel() % VECTOR_ELEMENTS))


def gated(function: Callable[[torch.Tensor], torch.Tensor], gate_up: torch.Tensor) -> torch.Tensor:
    """function(gate_up) of (..., 2F) to (..., F), for one that combines element i of each half alone."""
    gate, up = gate_up.chunk(2, dim=-1)
    with one_thread():
        return function(torch.cat((_flat(gate), _flat(up))))[: gate.numel()].view(gate.shape)


def row_tiles(num_rows: int) -> list[tuple[slice, int]]:
    """Which rows, and the row count they are filled up to; largest tiles first."""
    tiles, first = [], 0
    for size in ROW_TILES:
        while num_rows - first >= size:
            tiles.append((slice(first, first + size), size))
            first += size
    if first < num_rows:
        tiles.append((slice(first, num_rows), ROW_TILES[-1]))
    return tiles


def linear(
    x: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None, workers: Workers
) -> torch.Tensor:
    """x W^T + b of (..., I), (..., O) in x's dtype. Any T, also 0."""
    num_outputs, num_inputs = weight_OI.shape
    x_TI = x.reshape(x.shape[:-1].numel(), num_inputs)
    y_TO = x.new_empty(x_TI.shape[0], num_outputs)
    tasks: list[Callable[[], None]] = []
    column_tiles = [
        slice(first, min(first + COLUMN_TILE, num_outputs)) for first in range(0, num_outputs, COLUMN_TILE)
    ]
    for rows, size in row_tiles(x_TI.shape[0]):
        tile_nI = _filled(x_TI[rows], size)
        for columns in column_tiles:
            bias = None if bias_O is None else bias_O[columns]
            tasks.append(partial(_product, tile_nI, weight_OI[columns], bias, y_TO[rows, columns]))
    workers.run(tasks)
    return y_TO.view(*x.shape[:-1], num_outputs)


def _product(
    tile_nI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None, out: torch.Tensor
) -> None:
    out.copy_(_tile_product(tile_nI, weight_OI, bias_O)[: out.shape[0], : out.shape[1]])


def _tile_product(
    tile_nI: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None
) -> torch.Tensor:
    """(n, O or NARROWEST)."""
    width = max(NARROWEST, weight_OI.shape[0])
    weight_OI = _filled(weight_OI, width)
    if bias_O is None:
        return torch.mm(tile_nI, weight_OI.t())
    return torch.addmm(pad(bias_O, (0, width - bias_O.shape[0])), tile_nI, weight_OI.t())


def _filled(rows: torch.Tensor, size: int) -> torch.Tensor:
    """The rows with zero rows up to `size`, contiguous and aligned; the tensor itself if it is so already."""
    if rows.shape[0] == size and rows.is_contiguous() and rows.data_ptr() % ALIGNMENT_BYTES == 0:
        return rows
    filled = rows.new_zeros(size, rows.shape[1])
    filled[: rows.shape[0]] = rows
    return filled


def row_dependence(
    product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], weight_OI: torch.Tensor
) -> str | None:
    """Whether product(x, weight) breaks the rule here, for a weight of this shape and type: None, or how.

    Compares a random tile of the largest row count with the same rows permuted and in the other row counts.
    """
    draw = torch.Generator().manual_seed(0)
    x_nI = torch.randn(ROW_TILES[0], weight_OI.shape[1], generator=draw).to(weight_OI.device, weight_OI.dtype)
    order = torch.randperm(ROW_TILES[0], generator=draw).to(weight_OI.device)
    for first in {0, (weight_OI.shape[0] - 1) // COLUMN_TILE * COLUMN_TILE}:
        part = weight_OI[first : first + COLUMN_TILE]
        whole = product(x_nI, part)
        for size in ROW_TILES:
            tiles = torch.cat([product(rows, part) for rows in torch.split(x_nI[order], size)])
            if not torch.equal(tiles, whole[order]):
                return (
                    f"products of {size} rows with a {weight_OI.dtype} weight of {tuple(weight_OI.shape)} depend on"
                    " more than the row on this machine"
                )
    return None
