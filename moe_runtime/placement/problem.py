"""What a plan has to respect, checked once: room on each rank, ranks that failed, pinned experts, coverage.

Legend: W windows, L layers, N ranks, E experts. `held` is bool (L, N, E): whether a rank has a replica of an expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from moe_runtime.core import ExpertPlacement
from moe_runtime.errors import ConfigError
from moe_runtime.placement.cost import Cluster

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Problem:
    """Loads and constraints of one plan. Made by `make_problem`, which checks them."""

    loads_WLE: Array
    """float64, each window scaled to a mean of 1 per expert and layer."""
    cluster: Cluster
    room_N: Array
    """int64: replicas that each rank holds, in every layer; 0 for failed ranks."""
    pinned_NE: Array
    """bool: replicas that must be there, in every layer."""
    min_replicas: int

    @property
    def num_layers(self) -> int:
        return int(self.loads_WLE.shape[1])

    @property
    def num_experts(self) -> int:
        return int(self.loads_WLE.shape[2])

    @property
    def num_ranks(self) -> int:
        return len(self.room_N)

    @property
    def num_slots(self) -> int:
        return int(self.room_N.sum())

    @property
    def load_LE(self) -> Array:
        """Mean over windows."""
        mean_LE: Array = self.loads_WLE.mean(axis=0)
        return mean_LE


def make_problem(
    loads_WLE: Array,
    cluster: Cluster,
    *,
    num_slots: int,
    max_slots_per_rank: int | Sequence[int] | None = None,
    failed_ranks: Sequence[int] = (),
    pinned: Sequence[tuple[int, int]] = (),
    cover_loss: bool = False,
) -> Problem:
    """Check everything a plan is asked to respect; see `planner.plan`. Raises ConfigError."""
    loads = scaled_loads(loads_WLE)
    num_experts = loads.shape[2]
    alive_N = _alive(cluster.num_ranks, failed_ranks)
    min_replicas = 2 if cover_loss else 1
    if cover_loss and alive_N.sum() < 2:
        raise ConfigError(f"cover_loss needs at least 2 ranks that work; there is {int(alive_N.sum())}")
    least = num_experts * min_replicas
    if num_slots < least:
        why = ", each twice so that a rank may be lost" if cover_loss else ""
        raise ConfigError(
            f"num_slots={num_slots} is too few for {num_experts} experts{why}: at least {least}"
        )
    room_N = _room(num_slots, _limits(max_slots_per_rank, alive_N, num_experts))
    if room_N.sum() < least:
        raise ConfigError(
            f"max_slots_per_rank={max_slots_per_rank!r} leaves {int(room_N.sum())} slots on the {int(alive_N.sum())} ranks"
            f" that work; {num_experts} experts need at least {least}"
        )
    return Problem(loads, cluster, room_N, _pinned(pinned, num_experts, room_N, min_replicas), min_replicas)


def scaled_loads(loads_WLE: Array) -> Array:
    """Each window and layer scaled to a mean of 1 per expert; windows without load anywhere do not count. Raises ConfigError."""
    loads = np.asarray(loads_WLE, dtype=np.float64)
    if loads.ndim == 2:
        loads = loads[None]
    if loads.ndim != 3 or 0 in loads.shape:
        raise ConfigError(
            f"loads must have the axes (windows, layers, experts), none empty; the shape is {loads.shape}"
        )
    if not np.isfinite(loads).all() or (loads < 0).any():
        raise ConfigError("loads must be finite and not negative")
    total_WL1 = loads.sum(axis=2, keepdims=True)
    some_W = total_WL1.any(axis=(1, 2))
    if not some_W.any():
        return np.ones((1, *loads.shape[1:]))
    # A layer without load in a window counts as balanced there.
    return np.where(total_WL1 > 0, loads / np.where(total_WL1 > 0, total_WL1, 1.0) * loads.shape[2], 1.0)[
        some_W
    ]


def _alive(num_ranks: int, failed_ranks: Sequence[int]) -> Array:
    alive_N = np.ones(num_ranks, dtype=bool)
    for rank in failed_ranks:
        if not 0 <= rank < num_ranks:
            raise ConfigError(f"failed rank {rank} does not exist; ranks are 0 to {num_ranks - 1}")
        alive_N[rank] = False
    if not alive_N.any():
        raise ConfigError("all ranks have failed; a plan needs at least one that works")
    return alive_N


def _limits(max_slots_per_rank: int | Sequence[int] | None, alive_N: Array, num_experts: int) -> Array:
    """Most replicas each rank may hold."""
    if max_slots_per_rank is None:
        given = np.full(len(alive_N), num_experts)
    else:
        given = np.asarray(max_slots_per_rank, dtype=np.int64)
        if given.ndim > 1 or (given.ndim == 1 and len(given) != len(alive_N)) or (given < 0).any():
            raise ConfigError(
                f"max_slots_per_rank={max_slots_per_rank!r} must be one number from 0, or one for each of {len(alive_N)} ranks"
            )
        given = np.broadcast_to(given, alive_N.shape)
    return np.minimum(given, num_experts) * alive_N


def _room(num_slots: int, limit_N: Array) -> Array:
    """Deal slots out as evenly as the limits allow, the first ranks getting one more; what no rank may hold is left out."""
    room_N = np.zeros_like(limit_N)
    left = min(num_slots, int(limit_N.sum()))
    while left:
        open_N = np.flatnonzero(room_N < limit_N)
        each = max(left // len(open_N), 1)
        add = np.minimum(limit_N[open_N] - room_N[open_N], each)[:left]
        room_N[open_N[: len(add)]] += add
        left -= int(add.sum())
    return room_N


def _pinned(pinned: Sequence[tuple[int, int]], num_experts: int, room_N: Array, min_replicas: int) -> Array:
    pinned_NE = np.zeros((len(room_N), num_experts), dtype=bool)
    for expert, rank in pinned:
        if not 0 <= expert < num_experts:
            raise ConfigError(f"pinned expert {expert} does not exist; experts are 0 to {num_experts - 1}")
        if not 0 <= rank < len(room_N):
            raise ConfigError(f"expert {expert} is pinned to rank {rank}; ranks are 0 to {len(room_N) - 1}")
        pinned_NE[rank, expert] = True
        if pinned_NE[rank].sum() > room_N[rank]:
            raise ConfigError(
                f"{int(pinned_NE[rank].sum())} experts are pinned to rank {rank}, which has {int(room_N[rank])} slots"
                + (" because it failed" if room_N[rank] == 0 else "")
            )
    extra = np.maximum(min_replicas, pinned_NE.sum(axis=0)).sum()
    if extra > room_N.sum():
        raise ConfigError(
            f"the pinned experts and one of each other need {int(extra)} slots; there are {int(room_N.sum())}"
        )
    return pinned_NE


def check_current(current: ExpertPlacement, problem: Problem) -> Array:
    """The current placement as int64 (L, N, p). Raises ConfigError if it is not one of this model on these ranks."""
    slots_LNp = np.asarray(current.slots, dtype=np.int64)
    wanted = (problem.num_layers, problem.num_ranks)
    if slots_LNp.ndim != 3 or slots_LNp.shape[:2] != wanted or current.num_experts != problem.num_experts:
        raise ConfigError(
            f"the current placement has (layers, ranks, slots) = {slots_LNp.shape} and {current.num_experts} experts; the loads have"
            f" {wanted[0]} layers and {problem.num_experts} experts, the cluster {wanted[1]} ranks"
        )
    if slots_LNp.min() < -1 or slots_LNp.max() >= problem.num_experts:
        raise ConfigError(f"the current placement has experts outside -1 to {problem.num_experts - 1}")
    return slots_LNp
