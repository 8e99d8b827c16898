"""Bringing experts together that the same tokens choose, so that a token travels to fewer ranks.

The measure is  balance weight * sum over windows and ranks of squared load  -  co-activation within ranks, and within nodes with a
weight of its own. Exchanges are made as in `refine.level`, but every pair of ranks meets in turn (a round-robin tournament).

Legend: V windows, the last of them the mean; L layers, N ranks, E experts, P pairs of ranks, p slots per rank.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from moe_runtime.placement.cost import Cluster
from moe_runtime.placement.packing import strides

Array = npt.NDArray[Any]
SWEEPS = 4
NODE_WEIGHT = 4.0
"""What a node's worth of distance costs beside a rank's: links between nodes are several times slower."""
ALL_RINGS = 1 << 30


def gather(
    slots_LNp: Array,
    share_VLE: Array,
    movable_LNp: Array,
    coactivation_LEE: Array,
    cluster: Cluster,
    weight: float,
) -> None:
    """Exchange movable replicas so that co-activated experts share ranks and loads stay level; changes slots_LNp.

    coactivation_LEE: from `scaled`. weight: of balance.
    """
    num_ranks = slots_LNp.shape[1]
    share_LEV = np.ascontiguousarray(share_VLE.transpose(1, 2, 0))
    node_N = np.arange(num_ranks) // cluster.ranks_per_node
    movable_LNp = movable_LNp.copy()
    for _ in range(SWEEPS):
        some = False
        for a_P, b_P in tournament(num_ranks):
            some |= _meet(slots_LNp, share_LEV, movable_LNp, coactivation_LEE, node_N, a_P, b_P, weight)
        if not some:
            return


def scaled(coactivation_LEE: Array) -> Array:
    """float32 with a zero diagonal, so scaled that a token's choices have a mean of 1 per expert."""
    together = coactivation_LEE.astype(np.float64) * (1.0 - np.eye(coactivation_LEE.shape[1]))
    mean_L11 = together.sum(axis=2, keepdims=True).mean(axis=1, keepdims=True)
    return (together / np.where(mean_L11 > 0, mean_L11, 1.0)).astype(np.float32)


def tournament(num_ranks: int) -> list[tuple[Array, Array]]:
    """Rounds in which every rank meets every other once (circle method), as index arrays (P,), (P,)."""
    even = num_ranks + num_ranks % 2
    rounds = []
    circle = np.arange(1, even)
    for turn in range(even - 1):
        players = np.concatenate([[0], np.roll(circle, turn)])
        a_P, b_P = players[: even // 2], players[::-1][: even // 2]
        real = (a_P < num_ranks) & (b_P < num_ranks)
        rounds.append((a_P[real], b_P[real]))
    return rounds


def _meet(
    slots_LNp: Array,
    share_LEV: Array,
    movable_LNp: Array,
    together_LEE: Array,
    node_N: Array,
    a_P: Array,
    b_P: Array,
    weight: float,
) -> bool:
    """Every pair of ranks makes its best exchange; whether there was one."""
    num_layers, _, width = slots_LNp.shape
    l2 = np.arange(num_layers)[:, None, None]
    pull_LEN = _pull(slots_LNp, together_LEE, node_N)
    slots_a, slots_b = slots_LNp[:, a_P], slots_LNp[:, b_P]
    expert_a, expert_b = np.maximum(slots_a, 0), np.maximum(slots_b, 0)
    barred_a = ~movable_LNp[:, a_P] | _has(slots_b, slots_a)
    barred_b = ~movable_LNp[:, b_P] | _has(slots_a, slots_b)
    load_LNV = (share_LEV[l2, np.maximum(slots_LNp, 0)] * (slots_LNp >= 0)[..., None]).sum(axis=2)
    gap = (load_LNV[:, a_P] - load_LNV[:, b_P])[:, :, None]
    given, taken = share_LEV[l2, expert_a], share_LEV[l2, expert_b]
    of_a = weight * 2 * (given * (given - gap)).sum(axis=3)
    of_b = weight * 2 * (taken * (taken + gap)).sum(axis=3)
    a1, b1 = a_P[None, :, None], b_P[None, :, None]
    of_a += pull_LEN[l2, expert_a, a1] - pull_LEN[l2, expert_a, b1]
    of_b += pull_LEN[l2, expert_b, b1] - pull_LEN[l2, expert_b, a1]
    change = weight * 2 * np.matmul(given, -2 * taken.swapaxes(2, 3))
    change += np.where(barred_a, np.inf, of_a)[..., :, None] + np.where(barred_b, np.inf, of_b)[..., None, :]
    apart = 1.0 + NODE_WEIGHT * (node_N[a_P] != node_N[b_P])
    pair = together_LEE[l2[..., None], expert_a[..., :, None], expert_b[..., None, :]]
    change += 2 * apart[None, :, None, None] * pair
    change = change.reshape(num_layers, len(a_P), width * width)
    best = change.argmin(axis=2)
    layer, p = np.nonzero(np.take_along_axis(change, best[..., None], axis=2)[..., 0] < -1e-5)
    i, j = best[layer, p] // width, best[layer, p] % width
    for array in (slots_LNp, movable_LNp):
        array[layer, a_P[p], i], array[layer, b_P[p], j] = array[layer, b_P[p], j], array[layer, a_P[p], i]
    return len(layer) > 0


def _pull(slots_LNp: Array, together_LEE: Array, node_N: Array) -> Array:
    """float32 (L, E, N): co-activation of an expert with what each rank holds, and with what its node holds."""
    held_LNE = np.zeros((*slots_LNp.shape[:2], together_LEE.shape[1]), dtype=np.float32)
    layer, rank, slot = np.nonzero(slots_LNp >= 0)
    held_LNE[layer, rank, slots_LNp[layer, rank, slot]] = 1.0
    pull_LEN = np.matmul(together_LEE, held_LNE.swapaxes(1, 2))
    if node_N[-1] > 0:
        same_NN = (node_N[:, None] == node_N).astype(np.float32)
        pull_LEN = pull_LEN + NODE_WEIGHT * np.matmul(pull_LEN, same_NN)
    return pull_LEN


def _has(slots: Array, experts: Array) -> Array:
    """bool like `experts`: whether the pair's other rank holds the expert too."""
    return (experts[..., :, None] == slots[..., None, :]).any(axis=-1)


def add_spares(held_LNE: Array, room_LN: Array, load_LE: Array, coactivation_LEE: Array, rings: int) -> None:
    """Fill the ranks' free slots: hot experts, more akin to what the rank holds than to what they share their home with.

    The first `rings` of each rank come from the neighbour on a ring: as in `packing`, sharing along rings lets load flow between all
    ranks. Others, and experts whose share is more than half a rank's load, may come from any rank. Changes held_LNE and room_LN.
    """
    together = coactivation_LEE  # from `scaled`
    rows = np.arange(len(held_LNE))
    alive = np.flatnonzero(room_LN.any(axis=0) | held_LNE.any(axis=(0, 2)))
    half_L1 = load_LE.sum(axis=1, keepdims=True) / len(alive) / 2
    count_LE = held_LNE.sum(axis=1)
    home_LE = 1.0 + (np.matmul(held_LNE.astype(np.float32), together) * held_LNE).sum(axis=1) / count_LE
    steps = strides(len(alive))
    for turn in range(held_LNE.shape[2]):
        if not (room_LN > 0).any():
            return
        for at, rank in enumerate(alive):
            neighbour = alive[(at + steps[turn % len(steps)]) % len(alive)]
            share_LE = load_LE / count_LE
            near_LE = held_LNE[:, neighbour] | (share_LE > half_L1) | (turn >= min(rings, len(steps)))
            fits_LE = near_LE & ~held_LNE[:, rank] & (count_LE < len(alive))
            akin_LE = 1.0 + np.matmul(together, held_LNE[:, rank, :, None].astype(np.float32))[:, :, 0]
            score_LE = np.where(fits_LE, share_LE * (akin_LE / home_LE) ** 2, -1.0)
            expert_L = score_LE.argmax(axis=1)
            layers = rows[(room_LN[:, rank] > 0) & (score_LE[rows, expert_L] >= 0)]
            held_LNE[layers, rank, expert_L[layers]] = True
            room_LN[layers, rank] -= 1
            count_LE[layers, expert_L[layers]] += 1
