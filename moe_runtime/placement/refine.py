"""Levelling a placement by exchanging experts, for all layers at once, over several windows of load.

The measure is the sum over windows and ranks of the squared rank load, each replica bearing an even share of its expert. It is lowest where
every window is level, so experts that are busy at different times come together on a rank, and those busy at the same time apart.

Legend: V windows, the last of them the mean; L layers, N ranks, E experts, P pairs of ranks, p slots per rank. `held` is bool (L, N, E).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
ENOUGH = 1.001
"""A layer whose fullest rank has at most this times the mean, in every window, is left alone."""
BARRED = np.float32(1e30)
"""Change of an exchange that may not be."""


def with_mean(loads_WLE: Array) -> Array:
    """float32 (V, L, E): the windows, and their mean with the weight of all of them together."""
    if len(loads_WLE) == 1:
        return loads_WLE.astype(np.float32)
    mean_LE = loads_WLE.mean(axis=0, keepdims=True)
    return np.concatenate([loads_WLE, mean_LE * np.sqrt(len(loads_WLE))]).astype(np.float32)


def level(
    slots_LNp: Array, share_VLE: Array, movable_LNp: Array, *, rounds: int, budget_G: Array | None = None
) -> None:
    """Exchange single replicas between full and less full ranks, in `rounds` rounds at most; changes slots_LNp.

    slots_LNp: int64 experts, -1 where empty; share_VLE: load of one replica; movable_LNp: bool, which may be exchanged. A round
    pairs the fuller half of the ranks with the other half, each time differently, and makes each pair's best exchange; with
    `budget_G`, replicas that may move in each of G equal groups of layers, those that gain most while it lasts.
    """
    half = slots_LNp.shape[1] // 2
    width = int(movable_LNp.sum(axis=2).max())
    if half == 0 or width == 0:
        return
    share_LEV = np.ascontiguousarray(share_VLE.transpose(1, 2, 0))
    layer_L11 = np.arange(len(slots_LNp))[:, None, None]
    value_LNpV = share_LEV[layer_L11, np.maximum(slots_LNp, 0)] * (slots_LNp >= 0)[..., None]
    load_LNV = np.einsum("LNpV->LNV", value_LNpV)
    # From here on only what may be exchanged, as slots m.
    where_LNm = np.argsort(~movable_LNp, axis=2, kind="stable")[:, :, :width]
    movable_LNm = np.take_along_axis(movable_LNp, where_LNm, axis=2)
    slots_LNm = np.take_along_axis(slots_LNp, where_LNm, axis=2)
    value_LNmV = np.take_along_axis(value_LNpV, where_LNm[..., None], axis=2)
    num_used = max(int((slots_LNp[0] >= 0).any(axis=1).sum()), 1)
    left_G = np.array([slots_LNp.size]) if budget_G is None else budget_G // 2
    idle = 0
    for turn in range(rounds):
        uneven = (load_LNV.max(axis=1) * num_used > ENOUGH * load_LNV.sum(axis=1)).any(axis=1)
        layers = np.flatnonzero(uneven)
        if not len(layers) or idle == 3 or not left_G.any():
            break
        order_xN = np.argsort(-load_LNV[layers, :, -1], axis=1, kind="stable")
        low_xP = np.roll(order_xN[:, ::-1][:, :half], turn if turn % 3 else 0, axis=1)
        pairs = (layers[:, None], order_xN[:, :half], low_xP)
        made_G = _exchange(slots_LNm, value_LNmV, movable_LNm, load_LNV, *pairs, left_G)
        idle = 0 if made_G.any() else idle + 1
        if budget_G is not None:
            left_G = left_G - made_G
    np.put_along_axis(slots_LNp, where_LNm, slots_LNm, axis=2)


def _exchange(
    slots_LNm: Array,
    value_LNmV: Array,
    movable_LNm: Array,
    load_LNV: Array,
    layer: Array,
    high: Array,
    low: Array,
    most_G: Array,
) -> Array:
    """Make every pair's best exchange of one replica each if it is better than none, at most `most_G` in each of G equal groups of
    layers; how many were made (G,).

    Moving d from a rank to another that has `gap` less changes the sum of squares by 2 d (d - gap); here d = given - taken.
    """
    width = slots_LNm.shape[2]
    slots_h, slots_l = slots_LNm[layer, high], slots_LNm[layer, low]
    given, taken = value_LNmV[layer, high], value_LNmV[layer, low]
    gap = (load_LNV[layer, high] - load_LNV[layer, low])[:, :, None]
    of_given = np.einsum("xPmV,xPmV->xPm", given, given - gap)
    of_taken = np.einsum("xPmV,xPmV->xPm", taken, taken + gap)
    of_given[~movable_LNm[layer, high] | _has(slots_l, slots_h)] = BARRED
    of_taken[~movable_LNm[layer, low] | _has(slots_h, slots_l)] = BARRED
    # of_given + of_taken - 2 given taken for all pairs of slots, as one product
    one = np.ones((*of_given.shape, 1), dtype=np.float32)
    left = np.concatenate([given, of_given[..., None], one], axis=3)
    right = np.concatenate([-2 * taken, one, of_taken[..., None]], axis=3)
    change = np.matmul(left, right.swapaxes(2, 3)).reshape(*high.shape, width * width)
    best = change.argmin(axis=2)
    least = np.take_along_axis(change, best[..., None], axis=2)[..., 0]
    x, pair = np.nonzero(least < -1e-6)
    group = layer[x, 0] // (len(slots_LNm) // len(most_G))
    made_G = np.bincount(group, minlength=len(most_G))
    if (made_G > most_G).any():
        order = np.lexsort((least[x, pair], group))
        place = np.arange(len(x)) - np.repeat(np.cumsum(made_G) - made_G, made_G)
        chosen = order[place < most_G[group[order]]]
        x, pair, made_G = x[chosen], pair[chosen], np.minimum(made_G, most_G)
    if not len(x):
        return made_G
    a, b = best[x, pair] // width, best[x, pair] % width
    row, rank_h, rank_l = layer[x, 0], high[x, pair], low[x, pair]
    step = taken[x, pair, b] - given[x, pair, a]
    load_LNV[row, rank_h] += step
    load_LNV[row, rank_l] -= step
    for array in (slots_LNm, value_LNmV, movable_LNm):
        array[row, rank_h, a], array[row, rank_l, b] = array[row, rank_l, b], array[row, rank_h, a]
    return made_G


def _has(slots: Array, experts: Array) -> Array:
    """bool like `experts`: whether the pair's other rank holds the expert too."""
    return (experts[..., :, None] == slots[..., None, :]).any(axis=-1)


def relabel(
    held_LNE: Array,
    share_VLE: Array,
    count_LE: Array,
    movable_LE: Array,
    *,
    rounds: int,
) -> None:
    """Let experts with equally many replicas change places as a whole: load levels, the graph of shared experts stays.

    In each round every layer makes the best exchange of an expert of its fullest rank (after a failure of the next fullest, four
    at most). Changes held_LNE.
    """
    load_VLN = np.matmul(share_VLE[:, :, None, :], held_LNE.swapaxes(1, 2).astype(np.float32))[:, :, 0]
    num_used = max(int(held_LNE[0].any(axis=1).sum()), 1)
    # From here on only the experts that may be moved, as columns M.
    columns_LM = np.argsort(~movable_LE, axis=1, kind="stable")[:, : int(movable_LE.sum(axis=1).max())]
    if not columns_LM.shape[1]:
        return
    movable_LM = np.take_along_axis(movable_LE, columns_LM, axis=1)
    count_LM = np.take_along_axis(count_LE, columns_LM, axis=1)
    held_LNM = np.take_along_axis(held_LNE, columns_LM[:, None], axis=2)
    share_VLM = np.take_along_axis(share_VLE, columns_LM[None], axis=2)
    failed_L = np.zeros(len(held_LNE), dtype=np.int64)
    for _ in range(rounds):
        uneven_L = (load_VLN.max(axis=2) * num_used > ENOUGH * load_VLN.sum(axis=2)).any(axis=0)
        layers = np.flatnonzero(uneven_L & (failed_L < min(4, num_used)))
        if not len(layers):
            break
        one, two, gain = _best_relabelling(
            held_LNM, share_VLM, count_LM, movable_LM, load_VLN, layers, failed_L
        )
        better = gain < -1e-6
        failed_L[layers] = np.where(better, 0, failed_L[layers] + 1)
        layers, one, two = layers[better], one[better], two[better]
        ranks_one, ranks_two = held_LNM[layers, :, one], held_LNM[layers, :, two]
        held_LNM[layers, :, one], held_LNM[layers, :, two] = ranks_two, ranks_one
        step_Vx = share_VLM[:, layers, two] - share_VLM[:, layers, one]
        load_VLN[:, layers] += step_Vx[:, :, None] * (ranks_one.astype(np.float32) - ranks_two)
    np.put_along_axis(held_LNE, columns_LM[:, None], held_LNM, axis=2)


def _best_relabelling(
    held_LNE: Array,
    share_VLE: Array,
    count_LE: Array,
    movable_LE: Array,
    load_VLN: Array,
    layers: Array,
    failed_L: Array,
) -> tuple[Array, Array, Array]:
    """For each layer x of `layers`: the two experts, and the change of the sum of squares.

    With d = share_e - share_f, G an expert's rank loads summed, c the count and o the number of ranks both are on, the change is the
    sum over windows of 2 d (G_f - G_e + d (c - o)).
    """
    held, count, movable = held_LNE[layers], count_LE[layers], movable_LE[layers]
    load, share = load_VLN[:, layers].transpose(1, 0, 2), share_VLE[:, layers].transpose(1, 0, 2)
    x = np.arange(len(layers))
    excess = (np.maximum(load - load.mean(axis=2, keepdims=True), 0.0) ** 2).sum(axis=1)
    rank = np.argsort(-excess, axis=1, kind="stable")[x, failed_L[layers]]
    there = held[x, rank] & movable
    width = max(int(there.sum(axis=1).max()), 1)
    e = np.argsort(~there, axis=1, kind="stable")[:, :width]
    x1 = x[:, None]
    held32 = held.astype(np.float32)
    own = np.matmul(load, held32)  # (x, V, E)
    square = np.einsum("xVE,xVE->xE", share, share)
    alone = np.einsum("xVE,xVE->xE", share, own)
    of_f = np.where(movable, -alone, BARRED)
    share_e, own_e, count_e = share.swapaxes(1, 2)[x1, e], own.swapaxes(1, 2)[x1, e], count[x1, e]
    c = count_e.astype(np.float32)[..., None]
    of_e = np.where(there[x1, e], c[..., 0] * square[x1, e] - alone[x1, e], BARRED)
    one = np.ones((*e.shape, 1), dtype=np.float32)
    left = np.concatenate([share_e, own_e - 2 * c * share_e, c, one, of_e[..., None]], axis=2)
    ones = np.ones((len(layers), 1, held.shape[2]), dtype=np.float32)
    right = np.concatenate([own, share, square[:, None], of_f[:, None], ones], axis=1)
    change = np.matmul(left, right)
    if (count_e > 1).any():  # both on one rank: counted twice
        squares = square[x1, e][:, :, None] + square[:, None] - 2 * np.matmul(share_e, share)
        change -= squares * np.matmul(held32.swapaxes(1, 2)[x1, e], held32)
    change *= count[:, None, :] == count_e[..., None]
    change = change.reshape(len(layers), -1)
    best = change.argmin(axis=1)
    num_experts = held.shape[2]
    return e[x, best // num_experts], best % num_experts, 2 * change[x, best]
