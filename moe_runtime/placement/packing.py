"""A first placement: how many replicas each expert gets, and a rank for each.

Replicas are what the run-time split balances with: load can flow from one rank to another where they share an expert, and on through
further ranks. The fullest rank of a batch is lowest if no group of ranks holds much load that cannot flow out of it (the cut condition of
maximum flow). So replicated experts are laid out along rings through all ranks: the first ring has neighbours 0-1-2-.., the next ones
other strides, together a circulant graph, which has no small cuts. Experts with one replica then level the load.

Legend: L layers, N ranks, E experts, S replicas of a layer. `held` is bool (L, N, E): whether a rank has a replica of an expert.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from moe_runtime.errors import ConfigError
from moe_runtime.placement.problem import Problem

Array = npt.NDArray[Any]


def replica_counts(problem: Problem, load_LE: Array) -> Array:
    """int64 (L, E): each next replica goes to the expert with the largest load per replica that has not one on every rank.

    This makes the largest load per replica as small as can be (greedy apportionment, as in EPLB).
    """
    start_E = np.maximum(problem.min_replicas, problem.pinned_NE.sum(axis=0))
    most = int((problem.room_N > 0).sum())
    count_LE = np.tile(start_E, (problem.num_layers, 1))
    share_LE = np.where(count_LE < most, load_LE / count_LE, -1.0)
    rows = np.arange(problem.num_layers)
    for _ in range(problem.num_slots - int(start_E.sum())):
        best_L = share_LE.argmax(axis=1)
        count_L = count_LE[rows, best_L] + 1
        count_LE[rows, best_L] = count_L
        share_LE[rows, best_L] = np.where(count_L < most, load_LE[rows, best_L] / count_L, -1.0)
    return count_LE


def pack(problem: Problem, load_LE: Array, count_LE: Array) -> Array:
    """bool (L, N, E): replicated experts along rings of ranks, then the others by falling load onto the ranks with the least."""
    share_LE = load_LE / count_LE
    held_LNE = np.zeros((problem.num_layers, problem.num_ranks, problem.num_experts), dtype=bool)
    held_LNE[:] = problem.pinned_NE
    room_LN = np.tile(problem.room_N - problem.pinned_NE.sum(axis=1), (problem.num_layers, 1))
    _lay_rings(held_LNE, room_LN, count_LE, share_LE, problem.pinned_NE)
    _level_singles(held_LNE, room_LN, count_LE, share_LE)
    return held_LNE


def _strides(num_ranks: int) -> list[int]:
    """Steps of successive rings: 1, then those prime to the number of ranks, nearest to its golden section first."""
    golden = num_ranks * (3 - math.sqrt(5)) / 2
    others = [s for s in range(2, num_ranks // 2 + 1) if math.gcd(s, num_ranks) == 1]
    return [1, *sorted(others, key=lambda s: abs(s - golden))]


def _ring_places(alive: Array, num_ranks: int) -> Array:
    """int64 (rings, N): the place of each rank on each ring; ranks that hold nothing come last."""
    n = len(alive)
    place_RN = []
    for stride in _strides(n):
        place_N = np.full(num_ranks, num_ranks)
        place_N[alive[np.arange(n) * stride % n]] = np.arange(n)
        place_RN.append(place_N)
    return np.array(place_RN)


def _lay_rings(
    held_LNE: Array, room_LN: Array, count_LE: Array, share_LE: Array, pinned_NE: Array
) -> None:
    """Place all replicas of replicated experts: each expert on consecutive places of a ring, from the last place of the one before."""
    alive = np.flatnonzero(room_LN.any(axis=0))
    num_alive = len(alive)
    place_RN = _ring_places(alive, room_LN.shape[1])
    missing_LE = np.where(count_LE > 1, count_LE - held_LNE.sum(axis=1), 0)
    order_LE = _hot_and_mild_in_turn(count_LE > 1, share_LE)
    expert_LS, first_LS = _as_list(missing_LE, order_LE)
    rows = np.arange(len(count_LE))
    ring_L, at_L = np.zeros_like(rows), np.zeros_like(rows)  # ring, and place on it, of the last replica
    for expert_L, first_L in zip(expert_LS.T, first_LS.T, strict=True):
        want_L = np.where(first_L, at_L, at_L + 1)  # the place after the last of a ring is the first of the next: the same rank
        ring_L, want_L = _onto_next_ring(ring_L, want_L, np.zeros_like(rows), place_RN, num_alive)
        ahead_LN = (place_RN[ring_L] - want_L[:, None]) % num_alive
        barred_LN = held_LNE[rows, :, expert_L] | (room_LN <= 0)
        ahead_LN = np.where(barred_LN, num_alive, ahead_LN)
        rank_L = ahead_LN.argmin(axis=1)
        step_L = ahead_LN[rows, rank_L]
        for layer in np.flatnonzero((expert_L >= 0) & (step_L == num_alive)):
            make_way(held_LNE[layer], room_LN[layer], pinned_NE, int(expert_L[layer]))
        placed = np.flatnonzero((expert_L >= 0) & (step_L < num_alive))
        held_LNE[placed, rank_L[placed], expert_L[placed]] = True
        room_LN[placed, rank_L[placed]] -= 1
        ring_L, at_L = _onto_next_ring(ring_L, want_L + step_L % num_alive, rank_L, place_RN, num_alive)


def _onto_next_ring(ring_L: Array, at_L: Array, rank_L: Array, place_RN: Array, num_alive: int) -> tuple[Array, Array]:
    """Past the end of a ring, go on from where `rank_L` is on the next one (place 0 is the same rank on all)."""
    next_L = np.where(at_L >= num_alive, (ring_L + 1) % len(place_RN), ring_L)
    return next_L, np.where(at_L >= num_alive, place_RN[next_L, rank_L] % num_alive, at_L)


def _hot_and_mild_in_turn(chosen_LE: Array, share_LE: Array) -> Array:
    """int64 (L, E): chosen experts first, the largest share, the smallest, the second largest and so on, so that neighbours even out."""
    key_LE = np.where(chosen_LE, share_LE, -1.0)
    order_LE = np.argsort(-key_LE, axis=1, kind="stable")
    num_chosen_L1 = chosen_LE.sum(axis=1, keepdims=True)
    i = np.arange(chosen_LE.shape[1])
    turn_LE = np.where(i % 2 == 0, i // 2, num_chosen_L1 - 1 - i // 2)
    return np.take_along_axis(order_LE, np.where(i < num_chosen_L1, turn_LE, i), axis=1)


def _as_list(missing_LE: Array, order_LE: Array) -> tuple[Array, Array]:
    """Experts in order, each as often as replicas are missing, padded with -1; and whether an entry is its expert's first. (L, S)."""
    times_LE = np.take_along_axis(missing_LE, order_LE, axis=1)
    total_L = times_LE.sum(axis=1)
    width = int(total_L.max(initial=0))
    expert_LS = np.full((len(total_L), width), -1, dtype=np.int64)
    expert_LS[np.arange(width) < total_L[:, None]] = np.repeat(order_LE.ravel(), times_LE.ravel())
    first_LS = np.ones(expert_LS.shape, dtype=bool)
    first_LS[:, 1:] = expert_LS[:, 1:] != expert_LS[:, :-1]
    return expert_LS, first_LS


def _level_singles(held_LNE: Array, room_LN: Array, count_LE: Array, share_LE: Array) -> None:
    """Place experts of one replica in rounds: every rank with the most room gets one, the least loaded rank the hottest."""
    num_layers, num_ranks, num_experts = held_LNE.shape
    load_LN = np.einsum("lne,le->ln", held_LNE, share_LE)
    single_LE = (count_LE == 1) & ~held_LNE.any(axis=1)
    order_LE = np.argsort(-np.where(single_LE, share_LE, -1.0), axis=1, kind="stable")
    left_L = single_LE.sum(axis=1)
    next_L = np.zeros(num_layers, dtype=np.int64)
    while left_L.any():
        takes_LN = room_LN == room_LN.max(axis=1, keepdims=True)  # those with more room take part in more rounds
        rank_LN = np.argsort(np.where(takes_LN, load_LN, np.inf), axis=1, kind="stable")
        num_L = np.minimum(takes_LN.sum(axis=1), left_L)
        layer, place = np.nonzero(np.arange(num_ranks) < num_L[:, None])
        rank, expert = rank_LN[layer, place], order_LE[layer, next_L[layer] + place]
        held_LNE[layer, rank, expert] = True
        room_LN[layer, rank] -= 1
        load_LN[layer, rank] += share_LE[layer, expert]
        next_L += num_L
        left_L -= num_L


def make_way(held_NE: Array, room_N: Array, pinned_NE: Array, expert: int) -> None:
    """Place one replica of `expert` although all ranks with room have it, by moving other replicas on along a shortest chain.

    Raises ConfigError if no chain exists: then no placement with so many replicas of it does.
    """
    start = [int(r) for r in np.flatnonzero(~held_NE[:, expert])]
    came: dict[int, tuple[int, int]] = {r: (expert, -1) for r in start}
    queue = list(start)
    for rank in queue:
        if room_N[rank] > 0:
            room_N[rank] -= 1
            while rank != -1:
                moving, before = came[rank]
                held_NE[rank, moving] = True
                if before != -1:
                    held_NE[before, moving] = False
                rank = before
            return
        for other in range(len(room_N)):
            free = held_NE[rank] & ~held_NE[other] & ~pinned_NE[rank]
            if other not in came and free.any():
                came[other] = (int(free.argmax()), rank)
                queue.append(other)
    raise ConfigError(f"expert {expert} cannot have another replica: no rank that lacks it can make way; give more slots")
