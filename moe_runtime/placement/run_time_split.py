"""How ranks choose among an expert's copies, as a record names it, and what that comes to in one step.

Legend: N source ranks, E experts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from moe_runtime.placement.split import SPLITS

if TYPE_CHECKING:
    import numpy.typing as npt

WEIGHT_ROWS = 32
"""Rows per expert below which a CPU core spends more time on reading the expert's weights than on computing with them, roughly:
bytes of a weight x operations a second / (2 x bytes a second); 17 for float32 on AVX-512, 75 for bfloat16 on AMX."""
WORTH_ASKING = 64
"""Tokens on the fullest rank below which telling counts takes a CPU longer than a better split saves (bench_replicas.py)."""
RUN_TIME_SPLITS = ("auto", "dynamic", "static", "random")
"""What ranks do (`ep_dispatch_algorithm`): `dynamic` is waterfill or one_replica by the step's counts; `auto` is dynamic too, but
static in steps with fewer than WORTH_ASKING tokens on every rank."""
ALL_SPLITS = (*SPLITS, "dynamic", "auto")


def split_of(counts_NE: npt.NDArray[Any], num_steps: int = 1) -> str:
    """The method of placement.split that `dynamic` uses for these counts, of the mean step if they are of several."""
    active = np.count_nonzero(counts_NE.sum(axis=0))
    return "one_replica" if counts_NE.sum() < WEIGHT_ROWS * active * num_steps else "waterfill"


def asks(split: str, fullest_tokens: int, num_steps: int = 1) -> bool:
    """Whether ranks tell one another their counts in layers with replicas; arguments as in `method_of`."""
    return split in ("waterfill", "one_replica", "dynamic") or (
        split == "auto" and fullest_tokens >= WORTH_ASKING * num_steps
    )


def method_of(split: str, counts_NE: npt.NDArray[Any], fullest_tokens: int, num_steps: int = 1) -> str:
    """The method of placement.split that a split (of ALL_SPLITS) comes to in a layer of a step, the mean one of several.

    fullest_tokens: of the rank that has most in these steps.
    """
    if split == "auto" and not asks(split, fullest_tokens, num_steps):
        return "static"
    return split_of(counts_NE, num_steps) if split in ("auto", "dynamic") else split
