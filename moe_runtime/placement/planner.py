"""Plan where experts go: loads in, placement out. Pure and deterministic, on the CPU.

Legend: W windows, L layers, N ranks, E experts, p slots per rank. `held` is bool (L, N, E).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from moe_runtime.core import ExpertPlacement
from moe_runtime.errors import ConfigError
from moe_runtime.placement import deepseek
from moe_runtime.placement.cost import Cluster, Cost
from moe_runtime.placement.packing import pack, replica_counts
from moe_runtime.placement.refine import level, relabel, with_mean
from moe_runtime.placement.problem import Problem, check_current, make_problem

Array = npt.NDArray[Any]
ROUNDS = 12
MAX_WINDOWS=8
RELABEL=20
ALGORITHMS = ("ours", "deepseek", "contiguous")


@dataclass(frozen=True)
class PlanResult:
    """A plan and what it takes."""

    placement: ExpertPlacement
    moved_slots: int
    """Replicas that a rank gets and did not have; all of them without a current placement."""
    notes: tuple[str, ...]
    """What a person should know, in sentences."""


def plan(
    loads_WLE: Array,
    cluster: Cluster,
    cost: Cost | None = None,
    *,
    num_slots: int,
    algorithm: str = "ours",
    current: ExpertPlacement | None = None,
    coactivation_LEE: Array | None = None,
    max_slots_per_rank: int | Sequence[int] | None = None,
    failed_ranks: Sequence[int] = (),
    pinned: Sequence[tuple[int, int]] = (),
    cover_loss: bool = False,
    max_moved: float | None = None,
    num_groups: int = 1,
) -> PlanResult:
    """Where to put `num_slots` replicas (of all ranks together; any number from the number of experts).

    loads_WLE: (token, k) pairs per window, MoE layer and expert, oldest first; any unit. One window may come as (L, E).
    Raises ConfigError that says which argument cannot be met, and what could.
    """
    if algorithm not in ALGORITHMS:
        raise ConfigError(f"unknown placement algorithm {algorithm!r}; choose from {', '.join(ALGORITHMS)}")
    problem = make_problem(
        loads_WLE,
        cluster,
        num_slots=num_slots,
        max_slots_per_rank=max_slots_per_rank,
        failed_ranks=failed_ranks,
        pinned=pinned,
        cover_loss=cover_loss,
    )
    current_LNp = None if current is None else check_current(current, problem)
    notes: list[str] = []
    if algorithm == "deepseek":
        held_LNE = _deepseek(problem, num_groups, notes)
    else:
        held_LNE = _ours(problem)
    slots_LNp, moved = arrange(held_LNE, current_LNp)
    version = 0 if current is None else current.version + 1
    placement = ExpertPlacement(
        slots=tuple(tuple(tuple(rank) for rank in layer) for layer in slots_LNp.tolist()),
        num_experts=problem.num_experts,
        version=version,
    )
    return PlanResult(placement, moved, tuple(notes))


def _ours(problem: Problem) -> Array:
    load_LE = problem.load_LE
    count_LE = replica_counts(problem, load_LE)
    held_LNE = pack(problem, load_LE, count_LE)
    slots_LNp, _ = arrange(held_LNE, None)
    share_VLE = with_mean(few_windows(problem.loads_WLE)) / count_LE.astype(np.float32)
    movable_LE = (count_LE == 1) & ~problem.pinned_NE.any(axis=0)
    movable_LNp = (slots_LNp >= 0) & np.take_along_axis(movable_LE[:, None], np.maximum(slots_LNp, 0), axis=2)
    level(slots_LNp, share_VLE, movable_LNp, rounds=ROUNDS)
    held_LNE = np.zeros_like(held_LNE)
    layer, rank, slot = np.nonzero(slots_LNp >= 0)
    held_LNE[layer, rank, slots_LNp[layer, rank, slot]] = True
    movable_LE = np.tile(~problem.pinned_NE.any(axis=0), (len(held_LNE), 1))
    relabel(held_LNE, share_VLE, count_LE, movable_LE, rounds=RELABEL)
    return held_LNE


def few_windows(loads_WLE: Array) -> Array:
    """At most MAX_WINDOWS windows: adjacent ones averaged."""
    num = len(loads_WLE)
    if num <= MAX_WINDOWS:
        return loads_WLE
    edges = np.linspace(0, num, MAX_WINDOWS + 1).astype(int)
    return np.stack([loads_WLE[a:b].mean(axis=0) for a, b in pairwise(edges)])


def _deepseek(problem: Problem, num_groups: int, notes: list[str]) -> Array:
    cluster = problem.cluster
    plain = (
        problem.room_N.min() == problem.room_N.max()
        and not problem.pinned_NE.any()
        and problem.min_replicas == 1
    )
    if not plain:
        raise ConfigError(
            "algorithm 'deepseek' knows no failed ranks, pinned experts, coverage, or ranks with different numbers of slots; choose 'ours'"
        )
    arrays = deepseek.rebalance_experts(
        problem.load_LE, problem.num_slots, num_groups, cluster.num_nodes, problem.num_ranks
    )
    slots = arrays.slot_to_expert_LS.reshape(problem.num_layers, problem.num_ranks, -1)
    held_LNE = np.zeros((problem.num_layers, problem.num_ranks, problem.num_experts), dtype=bool)
    np.put_along_axis(held_LNE, slots, True, axis=2)
    twice = problem.num_layers * problem.num_slots - int(held_LNE.sum())
    if twice:
        notes.append(f"EPLB put an expert twice on one rank {twice} times; the second slot stays empty")
    return held_LNE


def arrange(held_LNE: Array, current_LNp: Array | None) -> tuple[Array, int]:
    """Give replicas slots: those a rank has stay where they are, new ones fill its free slots in order.

    Returns int64 (L, N, p), -1 where empty, and the number of replicas that a rank did not have.
    """
    num_layers, num_ranks, _ = held_LNE.shape
    width = int(held_LNE.sum(axis=2).max())
    slots_LNp = np.full((num_layers, num_ranks, width), -1, dtype=np.int64)
    new_LNE = held_LNE
    if current_LNp is not None:
        wider = max(width, current_LNp.shape[2])
        slots_LNp = np.full((num_layers, num_ranks, wider), -1, dtype=np.int64)
        stays = (current_LNp >= 0) & np.take_along_axis(held_LNE, np.maximum(current_LNp, 0), axis=2)
        slots_LNp[:, :, : current_LNp.shape[2]] = np.where(stays, current_LNp, -1)
        new_LNE = held_LNE.copy()
        layer, rank, slot = np.nonzero(stays)
        new_LNE[layer, rank, current_LNp[layer, rank, slot]] = False
    free_first = np.argsort(slots_LNp >= 0, axis=2, kind="stable")
    layer, rank, expert = np.nonzero(new_LNE)
    place = new_LNE.cumsum(axis=2)[layer, rank, expert] - 1
    slots_LNp[layer, rank, free_first[layer, rank, place]] = expert
    return slots_LNp, len(expert)
