"""The tiles that tuning tries, without those that a GPU cannot hold, and the search among them."""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING

from moe_runtime.experts.triton_config import (
    GemmShape,
    Gpu,
    GroupedGemmConfig,
    choose_config,
    fit,
    shared_bytes,
)

if TYPE_CHECKING:
    from collections.abc import Callable

Pair = tuple[GroupedGemmConfig, GroupedGemmConfig]
"""Tiles of the gate/up product and of the down product."""
MAX_ACCUMULATORS = 128
"""Registers that a thread may spend on sums, of 255: operands, addresses and the epilogue need the others."""


def candidates(shape: GemmShape, gpu: Gpu) -> list[GroupedGemmConfig]:
    """Tiles worth a try: the built-in ones first, then those most like them."""
    first = choose_config(shape, gpu)
    rows = -(-shape.num_rows // max(1, min(shape.num_slots, shape.num_rows)))
    middle = min(128, max(16, rows))
    tall = [m for m in (16, 32, 64, 128) if middle <= 4 * m and m < 4 * middle]
    both = (False, True) if gpu.wide_m else (False,)
    swaps = both if rows <= 64 else (False,)
    # Where every SM has a tile, cutting K only adds work.
    splits = sorted({1, 2, first.split_k}) if first.split_k > 1 else [1]
    found = {}
    for m, n, k, warps, stages, swap, tma, split, group in itertools.product(
        tall, (64, 128, 256), (32, 64, 128), (4, 8), (2, 3, 4), swaps, both, splits, (1, 8)
    ):
        config = GroupedGemmConfig(m, n, k, group, warps, stages, swap, split, tma)
        # What `fit` would change is another candidate already.
        if fit(config, shape, gpu) == config and _fits(config, shape, gpu):
            found[config] = _difference(config, first)
    found.pop(first, None)
    return [first, *sorted(found, key=lambda config: found[config])]


def _fits(config: GroupedGemmConfig, shape: GemmShape, gpu: Gpu) -> bool:
    sums = config.block_m * config.block_n // (32 * config.num_warps)
    # FP8 sums leave the tensor core every 128 values and so are there twice.
    registers = sums * (2 if shape.scheme is not None and shape.x_bytes == 1 else 1)
    idle = config.group_m > 1 and shape.num_rows <= config.block_m * shape.num_slots
    return registers <= MAX_ACCUMULATORS and shared_bytes(config, shape) <= gpu.shared_bytes and not idle


def _difference(config: GroupedGemmConfig, other: GroupedGemmConfig) -> int:
    """In how many settings two differ."""
    return sum(getattr(config, name) != getattr(other, name) for name in config.__dataclass_fields__)


def search(
    shapes: tuple[GemmShape, GemmShape], gpu: Gpu, measure: Callable[[Pair], float | None], until: float
) -> tuple[Pair, float, float]:
    """First the gate/up product's tiles, in half of the time, then the down product's.

    measure: milliseconds of both products, None where they do not run. until: as of time.monotonic(); the built-in pair is
    measured in any case. Returns the fastest pair, its time and the built-in pair's. Raises RuntimeError if the latter does not run.
    """
    options = [candidates(shape, gpu) for shape in shapes]
    best: Pair = (options[0][0], options[1][0])
    began = time.monotonic()
    built_in = measure(best)
    if built_in is None:
        raise RuntimeError(f"the built-in tiles do not run here: {best}")
    least = built_in
    for part, stop in ((0, (began + until) / 2), (1, until)):
        for config in options[part][1:]:
            if time.monotonic() >= stop:
                break
            pair = (config, best[1]) if part == 0 else (best[0], config)
            took = measure(pair)
            if took is not None and took < least:
                best, least = pair, took
    return best, least, built_in
