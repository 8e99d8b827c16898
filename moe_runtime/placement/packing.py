"""A first placement: how many replicas each expert gets, and a rank for each.

Legend: L layers, N ranks, E experts.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from moe_runtime.placement.problem import Problem

Array = npt.NDArray[Any]


def replica_counts(problem: Problem, load_LE: Array) -> Array:
    """int64 (L, E): each next replica goes to the expert with the largest load per replica that has not one on every rank."""
    start_E = np.maximum(problem.min_replicas, problem.pinned_NE.sum(axis=0))
    most = int((problem.room_N > 0).sum())
    count_LE = np.tile(start_E, (problem.num_layers, 1))
    share_LE = np.where(count_LE < most, load_LE / count_LE, -1.0)
    rows = np.arange(problem.num_layers)
    for _ in range(problem.num_slots - int(start_E.sum())):
        best_L = share_LE.argmax(axis=1)
        count_LE[rows, best_L] += 1
        count_L = count_LE[rows, best_L]
        share_LE[rows, best_L] = np.where(count_L < most, load_LE[rows, best_L] / count_L, -1.0)
    return count_LE


def pack(problem: Problem) -> Array:
    """bool (L, N, E): experts by falling share, each replica to the least loaded rank that has room and lacks the expert."""
    load_LE = problem.load_LE
    count_LE = replica_counts(problem, load_LE)
    share_LE = load_LE / count_LE
    num_layers, num_ranks = problem.num_layers, problem.num_ranks
    held_LNE = np.zeros((num_layers, num_ranks, problem.num_experts), dtype=bool)
    held_LNE[:] = problem.pinned_NE
    left_LE = count_LE - problem.pinned_NE.sum(axis=0)
    room_LN = np.tile(problem.room_N - problem.pinned_NE.sum(axis=1), (num_layers, 1))
    rank_load_LN = (held_LNE * share_LE[:, None, :]).sum(axis=2)
    order_LE = np.argsort(-share_LE, axis=1, kind="stable")
    rows = np.arange(num_layers)
    item_LS = np.take_along_axis(order_LE, _spread(np.take_along_axis(left_LE, order_LE, axis=1)), axis=1)
    for expert_L in item_LS.T:
        barred_LN = held_LNE[rows, :, expert_L] | (room_LN == 0)
        rank_L = np.where(barred_LN, np.inf, rank_load_LN).argmin(axis=1)
        held_LNE[rows, rank_L, expert_L] = True
        room_LN[rows, rank_L] -= 1
        rank_load_LN[rows, rank_L] += share_LE[rows, expert_L]
    return held_LNE


def _spread(count_LE: Array) -> Array:
    """int64 (L, S): index i repeated count[i] times, row by row; all rows have the same sum."""
    num_layers, num_experts = count_LE.shape
    return np.repeat(np.tile(np.arange(num_experts), num_layers), count_LE.ravel()).reshape(num_layers, -1)
