"""A new plan that keeps most of the current one: repair what must change, then the exchanges that gain most for what they move.

Legend: L layers, N ranks, E experts, V windows, the last of them the mean. `held` is bool (L, N, E).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from moe_runtime.errors import ConfigError
from moe_runtime.placement.problem import Problem
from moe_runtime.placement.refine import relabel, with_mean

Array = npt.NDArray[Any]
ROUNDS = 40
HYSTERESIS = 1.3
"""An expert's replica goes to another expert if a replica then carries this many times more."""


def replan(problem: Problem, held_LNE: Array, windows_WLE: Array, max_moves: int) -> tuple[Array, int]:
    """The new `held`, and how many replicas had to move anyway (repairs, beyond `max_moves`)."""
    before_LNE = held_LNE
    held_LNE = held_LNE.copy()
    for layer in range(problem.num_layers):
        _repair(problem, held_LNE[layer], problem.load_LE[layer])
    _fill(problem, held_LNE)
    forced = int((held_LNE & ~before_LNE).sum())
    # Replicas follow the load first: which experts share ranks matters more than how level the even shares are.
    used = _transfer(problem, held_LNE, max_moves)
    count_LE = held_LNE.sum(axis=1)
    share_VLE = with_mean(windows_WLE) / count_LE.astype(np.float32)
    movable_LE = np.tile(~problem.pinned_NE.any(axis=0), (problem.num_layers, 1))
    relabel(held_LNE, share_VLE, count_LE, movable_LE, rounds=ROUNDS, budget=max_moves - used)
    return held_LNE, forced


def _repair(problem: Problem, held_NE: Array, load_E: Array) -> None:
    """Make one layer obey room, pins and the least number of replicas."""
    for rank in range(problem.num_ranks):
        for expert in np.flatnonzero(problem.pinned_NE[rank] & ~held_NE[rank]):
            held_NE[rank, expert] = True
        while held_NE[rank].sum() > problem.room_N[rank]:
            held_NE[rank, _least_missed(problem, held_NE, load_E, rank)] = False
    for expert in np.argsort(-load_E, kind="stable"):
        while held_NE[:, expert].sum() < problem.min_replicas:
            rank = _rank_for(problem, held_NE, load_E, expert)
            if held_NE[rank].sum() >= problem.room_N[rank]:
                held_NE[rank, _least_missed(problem, held_NE, load_E, rank)] = False
            held_NE[rank, expert] = True


def _least_missed(problem: Problem, held_NE: Array, load_E: Array, rank: int) -> int:
    """The expert of a rank whose replica there is least needed."""
    count_E = held_NE.sum(axis=0)
    # An expert's last replicas are kept as long as the rank has others: they count as infinitely loaded, in order of load.
    need_E = np.where(count_E > problem.min_replicas, load_E / np.maximum(count_E - 1, 1), 1e12 + load_E)
    need_E = np.where(held_NE[rank] & ~problem.pinned_NE[rank], need_E, np.inf)
    return int(need_E.argmin())


def _rank_for(problem: Problem, held_NE: Array, load_E: Array, expert: int) -> int:
    """A rank that lacks the expert and has room, or can spare a replica."""
    count_E = held_NE.sum(axis=0)
    room_N = problem.room_N - held_NE.sum(axis=1)
    lacks_N = ~held_NE[:, expert] & (problem.room_N > 0)
    spare_N = (held_NE & (count_E > problem.min_replicas) & ~problem.pinned_NE).any(axis=1)
    load_N = (held_NE * (load_E / np.maximum(count_E, 1))).sum(axis=1)
    for may_N in (lacks_N & (room_N > 0), lacks_N & spare_N):
        if may_N.any():
            return int(np.where(may_N, load_N, np.inf).argmin())
    raise ConfigError(
        f"expert {expert} finds no place when the current placement is kept; plan without it (current=None)"
    )


def _fill(problem: Problem, held_LNE: Array) -> None:
    """Free slots get further replicas of the experts with the largest shares."""
    rows = np.arange(problem.num_layers)
    alive = problem.room_N > 0
    load_LE = problem.load_LE
    while True:
        room_LN = problem.room_N - held_LNE.sum(axis=2)
        free_L = (room_LN > 0).any(axis=1)
        if not free_L.any():
            return
        count_LE = held_LNE.sum(axis=1)
        fits_LNE = ~held_LNE & (room_LN > 0)[:, :, None]
        share_LE = np.where(fits_LNE.any(axis=1) & (count_LE < alive.sum()), load_LE / count_LE, -1.0)
        expert_L = share_LE.argmax(axis=1)
        load_LN = np.matmul(held_LNE, (load_LE / count_LE)[:, :, None])[:, :, 0]
        rank_L = np.where(fits_LNE[rows, :, expert_L], load_LN, np.inf).argmin(axis=1)
        held_LNE[rows[free_L], rank_L[free_L], expert_L[free_L]] = True


def _transfer(problem: Problem, held_LNE: Array, max_moves: int) -> int:
    """Give slots of experts that need fewer replicas to those that need more, the largest difference first; how many."""
    rows = np.arange(problem.num_layers)
    load_LE, most = problem.load_LE, int((problem.room_N > 0).sum())
    used = 0
    while used < max_moves:
        count_LE = held_LNE.sum(axis=1)
        share_LE = load_LE / count_LE
        hot_L = np.where(count_LE < most, share_LE, -1.0).argmax(axis=1)
        may_LNE = held_LNE & ~problem.pinned_NE & (count_LE > problem.min_replicas)[:, None, :]
        may_LNE &= ~held_LNE[rows, :, hot_L][:, :, None]
        left_LE = np.where(may_LNE.any(axis=1), load_LE / np.maximum(count_LE - 1, 1), np.inf)
        cold_L = left_LE.argmin(axis=1)
        ratio_L = share_LE[rows, hot_L] / np.maximum(left_LE[rows, cold_L], 1e-9)
        order = np.argsort(-ratio_L, kind="stable")[: max_moves - used]
        layers = order[ratio_L[order] > HYSTERESIS]
        if not len(layers):
            return used
        load_LN = np.matmul(held_LNE, share_LE[:, :, None])[:, :, 0]
        rank_L = np.where(may_LNE[rows, :, cold_L], load_LN, np.inf).argmin(axis=1)
        held_LNE[layers, rank_L[layers], cold_L[layers]] = False
        held_LNE[layers, rank_L[layers], hot_L[layers]] = True
        used += len(layers)
    return used
