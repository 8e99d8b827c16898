"""How full the fullest rank is after the run-time split, for many layers and windows at once.

To compare placements, thousands of batches would be split (`split.most_rows`) only to see each one's maximum. Here all of them are
levelled in step, a few sweeps of coordinate descent on the sum of squared rank loads, and the maximum is then read off as a bound: at
the optimum the fullest ranks are a group out of which nothing can flow, so the load that lives only inside the group, over its size, is
the maximum (the cut condition of maximum flow). The order of the ranks is right long before their loads are.

Legend: L layers, N ranks, E experts, W windows, R replicas of shared experts and M pairs of them in a layer, X rows (flat).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
SWEEPS = 6
ENOUGH = 1.002
"""Times the mean rank's load: level, as for the run-time split."""


def fullest_rank(held_LNE: Array, loads_WLE: Array) -> Array:
    """float64 (L,): load of the fullest rank after water-filling over that of the mean rank, averaged over windows.

    held_LNE: bool, which rank has a replica of an expert; every expert has one. Ranks that hold nothing in layer 0 do not count.
    A lower bound of what `split.most_rows` says, nearly always within 2 % of it.
    """
    num_windows = len(loads_WLE)
    mean_LW = loads_WLE.sum(axis=2).T / max(int(held_LNE[0].any(axis=1).sum()), 1)
    share_WLE = (loads_WLE / held_LNE.sum(axis=1)).astype(np.float32)
    load_LNW = np.matmul(held_LNE.astype(np.float32), share_WLE.transpose(1, 2, 0))
    load_XW = load_LNW.reshape(-1, num_windows)
    ranks_2ML, shares_2ML, share_XW = _pairs(held_LNE, share_WLE)
    for sweep in range(SWEEPS):
        layers = np.flatnonzero((load_LNW.max(axis=1) > ENOUGH * mean_LW).any(axis=1))
        order = slice(None, None, -1 if sweep % 2 else 1)
        _sweep(load_XW, share_XW, ranks_2ML[:, order, layers], shares_2ML[:, order, layers])
    bound_LW = np.maximum(_bound(held_LNE, loads_WLE, load_LNW), mean_LW)
    ratio_L: Array = (bound_LW / np.where(mean_LW > 0, mean_LW, 1.0)).mean(axis=1)
    return ratio_L


def _pairs(held_LNE: Array, share_WLE: Array) -> tuple[Array, Array, Array]:
    """Pairs of neighbouring replicas of the same expert: their ranks and their shares, as int64 (2, M, L) rows of the flat loads
    (L * N, W) and of the third result, float32 (X, W): even shares, then a row of nothing for layers that have fewer pairs.
    """
    num_layers, num_ranks, _ = held_LNE.shape
    shared_LNE = held_LNE & (held_LNE.sum(axis=1) > 1)[:, None]
    layer, expert, rank = np.nonzero(shared_LNE.swapaxes(1, 2))
    share_XW = np.zeros((len(layer) + 1, len(share_WLE)), dtype=np.float32)
    share_XW[:-1] = share_WLE[:, layer, expert].T
    first = np.flatnonzero((layer[1:] == layer[:-1]) & (expert[1:] == expert[:-1]))
    num_L = np.bincount(layer[first], minlength=num_layers)
    place = np.arange(len(first)) - np.repeat(np.cumsum(num_L) - num_L, num_L)
    shape = (2, int(num_L.max(initial=0)), num_layers)
    ranks_2ML = np.broadcast_to(np.arange(num_layers) * num_ranks, shape).copy()
    shares_2ML = np.full(shape, len(layer))
    for side in (0, 1):
        ranks_2ML[side, place, layer[first]] += rank[first + side]
        shares_2ML[side, place, layer[first]] = first + side
    return ranks_2ML, shares_2ML, share_XW


def _sweep(load_XW: Array, share_XW: Array, ranks_2Ml: Array, shares_2Ml: Array) -> None:
    """Every pair in turn levels its two ranks as far as its shares allow; changes loads and shares."""
    for rank_a, rank_b, share_a, share_b in zip(*ranks_2Ml, *shares_2Ml, strict=True):
        load_a, load_b = load_XW[rank_a], load_XW[rank_b]
        have_a, have_b = share_XW[share_a], share_XW[share_b]
        shift = (load_a - load_b) * np.float32(0.5)
        np.minimum(shift, have_a, out=shift)
        np.maximum(shift, -have_b, out=shift)
        load_XW[rank_a], load_XW[rank_b] = load_a - shift, load_b + shift
        share_XW[share_a], share_XW[share_b] = have_a - shift, have_b + shift


def _bound(held_LNE: Array, loads_WLE: Array, load_LNW: Array) -> Array:
    """float64 (L, W): the most, over groups of the 1, 2, ... fullest ranks, of the load that lives only inside over the group's size."""
    num_layers, num_ranks, num_experts = held_LNE.shape
    num_windows = len(loads_WLE)
    place_LNW = np.argsort(np.argsort(-load_LNW, axis=1, kind="stable"), axis=1, kind="stable")
    layer, expert, rank = np.nonzero(held_LNE.swapaxes(1, 2))
    first = np.flatnonzero(np.diff(layer * num_experts + expert, prepend=-1))
    last_XW = np.maximum.reduceat(place_LNW[layer, rank], first, axis=0)
    row_XW = (layer[first, None] * num_windows + np.arange(num_windows)) * num_ranks + last_XW
    inside = np.bincount(
        row_XW.ravel(),
        weights=loads_WLE.transpose(1, 2, 0).ravel(),
        minlength=num_layers * num_windows * num_ranks,
    )
    inside_LWN = inside.reshape(num_layers, num_windows, num_ranks).cumsum(axis=2)
    bound_LW: Array = (inside_LWN / np.arange(1, num_ranks + 1)).max(axis=2)
    return bound_LW
