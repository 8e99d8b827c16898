"""A new plan that keeps most of the current one: repair what must change, then the exchanges that gain most for what they move.

Legend: L layers, N ranks, E experts, V windows, the last of them the mean. `held` is bool (L, N, E).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from moe_runtime.errors import ConfigError
from moe_runtime.placement.fullest import fullest_rank
from moe_runtime.placement.problem import Problem
from moe_runtime.placement.refine import level, with_mean
from moe_runtime.placement.slots import arrange, held_of, of_slots

Array = npt.NDArray[Any]
ROUNDS = 12
HYSTERESIS = 1.2
"""An expert's replica goes to another expert if a replica then carries this many times more."""


def replan(problem: Problem, held_LNE: Array, windows_WLE: Array, max_moves: int) -> tuple[Array, int]:
    """The new `held`, and how many replicas had to move anyway (repairs, beyond `max_moves`).

    Three ways to spend the moves are worked out; each layer takes the one that lowers its fullest rank (after the run-time split, mean
    over the windows) most per replica moved, the layers that gain most first, until the moves are spent. Others stay as they are.
    """
    start_LNE = held_LNE.copy()
    load_LE = problem.load_LE
    for layer in np.flatnonzero(_broken(problem, start_LNE)):
        _repair(problem, start_LNE[layer], load_LE[layer])
    _fill(problem, start_LNE)
    forced = int((start_LNE & ~held_LNE).sum())
    if max_moves < 2:
        return start_LNE, forced
    # Single replicas that leave their ring cut it; with two rings and more the graph stays connected.
    two_rings = problem.num_slots - problem.num_experts >= 2 * int((problem.room_N > 0).sum())
    spends = (None, _promote, _transfer) if two_rings else (None, _promote)
    ways_CLNE = np.repeat(start_LNE[None], len(spends), axis=0)
    for way_LNE, spend in zip(ways_CLNE, spends, strict=True):
        if spend is not None:
            spend(problem, way_LNE, max_moves)
    _level(problem, ways_CLNE, start_LNE, windows_WLE, 2 * max_moves)  # more than can be taken: a choice
    return _best_ways(start_LNE, ways_CLNE, windows_WLE, max_moves), forced


def fill_by_room(problem: Problem) -> Array:
    """A `held` that obeys every constraint, rank by rank where there is room: for limits so uneven that no packing has the replica
    counts that loads ask for.
    """
    held_LNE = np.zeros((problem.num_layers, problem.num_ranks, problem.num_experts), dtype=bool)
    for layer in range(problem.num_layers):
        _repair(problem, held_LNE[layer], problem.load_LE[layer])
    _fill(problem, held_LNE)
    return held_LNE


def _level(problem: Problem, ways_CLNE: Array, start_LNE: Array, windows_WLE: Array, budget: int) -> None:
    """Exchange experts that have one replica, in all ways at once; `budget` replicas may move in each, what moved before included."""
    num_ways = len(ways_CLNE)
    used_C = (ways_CLNE & ~start_LNE).sum(axis=(1, 2, 3))
    held_LNE = ways_CLNE.reshape(-1, *ways_CLNE.shape[2:])
    count_LE = held_LNE.sum(axis=1)
    windows_WLE = np.tile(windows_WLE, (1, num_ways, 1))
    share_VLE = with_mean(windows_WLE) / count_LE.astype(np.float32)
    slots_LNp, _ = arrange(held_LNE)
    movable_LE = ~problem.pinned_NE.any(axis=0) & (count_LE == 1)
    movable_LNp = of_slots(movable_LE, slots_LNp, False)
    level(slots_LNp, share_VLE, movable_LNp, rounds=ROUNDS, budget_G=budget - used_C)
    ways_CLNE[:] = held_of(slots_LNp, problem.num_experts).reshape(ways_CLNE.shape)


def _best_ways(start_LNE: Array, ways_CLNE: Array, windows_WLE: Array, max_moves: int) -> Array:
    """Per layer the way that gains most per move, while moves last."""
    every_LNE = np.concatenate([start_LNE[None], ways_CLNE]).reshape(-1, *start_LNE.shape[1:])
    fullest_CL = fullest_rank(every_LNE, np.tile(windows_WLE, (1, 1 + len(ways_CLNE), 1)))
    fullest_CL = fullest_CL.reshape(1 + len(ways_CLNE), -1)
    gain_CL = fullest_CL[0] - fullest_CL[1:]
    moves_CL = (ways_CLNE & ~start_LNE).sum(axis=(2, 3))
    held_LNE = start_LNE.copy()
    taken = np.zeros(len(held_LNE), dtype=bool)
    left = max_moves
    for at in np.argsort(-(gain_CL / np.maximum(moves_CL, 1)).ravel(), kind="stable"):
        way, layer = divmod(int(at), len(held_LNE))
        if gain_CL[way, layer] > 0 and not taken[layer] and moves_CL[way, layer] <= left:
            held_LNE[layer] = ways_CLNE[way, layer]
            taken[layer] = True
            left -= int(moves_CL[way, layer])
    return held_LNE


def _broken(problem: Problem, held_LNE: Array) -> Array:
    """bool (L,): layers that `_repair` would change."""
    broken_L = (held_LNE.sum(axis=2) > problem.room_N).any(axis=1)
    broken_L |= (held_LNE.sum(axis=1) < problem.min_replicas).any(axis=1)
    broken_L |= (problem.pinned_NE & ~held_LNE).any(axis=(1, 2))
    return broken_L


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
        f"expert {expert} finds no rank that has room or can spare a replica: give more slots, raise max_slots_per_rank,"
        " or plan without the current placement"
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


def _promote(problem: Problem, held_LNE: Array, max_moves: int) -> int:
    """Let busy experts change places with less busy ones that have more replicas, the largest ratio first; how many replicas moved.

    The graph of shared experts stays. Changes held_LNE.
    """
    rows = np.arange(problem.num_layers)
    free_E = ~problem.pinned_NE.any(axis=0)
    used = 0
    while used < max_moves:
        count_LE = held_LNE.sum(axis=1)
        share_LE = np.where(
            free_E & (count_LE < count_LE.max(axis=1, keepdims=True)), problem.load_LE / count_LE, -1.0
        )
        hot_L = share_LE.argmax(axis=1)
        more_LE = free_E & (count_LE > count_LE[rows, hot_L][:, None])
        cold_L = np.where(more_LE, problem.load_LE, np.inf).argmin(axis=1)
        ratio_L = problem.load_LE[rows, hot_L] / np.maximum(problem.load_LE[rows, cold_L], 1e-9)
        ratio_L = np.where(more_LE[rows, cold_L] & (share_LE[rows, hot_L] > 0), ratio_L, 0.0)
        hot_LN, cold_LN = held_LNE[rows, :, hot_L], held_LNE[rows, :, cold_L]
        order = np.argsort(-ratio_L, kind="stable")
        fits = np.cumsum((hot_LN != cold_LN).sum(axis=1)[order]) <= max_moves - used
        layers = order[(ratio_L[order] > HYSTERESIS) & fits]
        if not len(layers):
            return used
        used += int((hot_LN != cold_LN)[layers].sum())
        held_LNE[layers, :, hot_L[layers]] = cold_LN[layers]
        held_LNE[layers, :, cold_L[layers]] = hot_LN[layers]
    return used


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
