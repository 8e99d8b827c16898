"""What a placement is expected to take: load windows through the run-time split and the cost model.

Legend: W windows, L layers, N ranks, E experts, p slots per rank.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from moe_runtime.placement.cost import Cost, sent_rows, slot_rows
from moe_runtime.placement.split import Replicas, split_rows

Array = npt.NDArray[Any]


def predicted_us(
    slots_LNp: Array,
    loads_WLE: Array,
    cost: Cost,
    *,
    tokens_per_rank: int,
    split: str = "waterfill",
    counts_of: int = 0,
) -> Array:
    """float64 (W,): modelled microseconds of a step whose tokens choose experts as in each window, every rank with equally many.

    loads_WLE in any unit. Only counts are known here, so rows sent are expected ones (`cost.sent_rows`); the simulator replays routes.
    """
    num_windows, num_layers, num_experts = loads_WLE.shape
    num_ranks, width = slots_LNp.shape[1:]
    replicas = [Replicas.of(slots_Np, num_experts) for slots_Np in slots_LNp]
    alive_N = np.any(slots_LNp >= 0, axis=(0, 2)).astype(np.int64)
    tokens_N = alive_N * tokens_per_rank
    times = np.zeros(num_windows)
    for window, loads_LE in enumerate(loads_WLE):
        rows_LNp = np.zeros((num_layers, num_ranks, width))
        sent_LNN = np.zeros((num_layers, num_ranks, num_ranks))
        for layer, load_E in enumerate(loads_LE):
            counts_NE = whole_counts(load_E, tokens_per_rank * cost.model.top_k) * alive_N[:, None]
            rows_NEC = split_rows(
                split, counts_NE, replicas[layer], ranks_per_node=cost.cluster.ranks_per_node, seed=layer
            )
            rows_LNp[layer] = slot_rows(rows_NEC, replicas[layer].slot_EC, num_ranks, width)
            sent_LNN[layer] = sent_rows(rows_NEC, replicas[layer].slot_EC, width, tokens_N)
        times[window] = cost.step(rows_LNp, sent_LNN, counts_of=counts_of).total_us
    return times


def whole_counts(load_E: Array, total: int) -> Array:
    """int64 (E,): `total` dealt out in proportion to the load, by largest remainders."""
    exact_E = load_E / load_E.sum() * total if load_E.sum() > 0 else np.full(len(load_E), total / len(load_E))
    count_E = np.floor(exact_E).astype(np.int64)
    short = total - int(count_E.sum())
    count_E[np.argsort(count_E - exact_E, kind="stable")[:short]] += 1
    return count_E


def moved_bytes(before_LNE: Array, after_LNE: Array, cost: Cost) -> Array:
    """float64 (N, N): bytes of experts copied from rank to rank for a new `held`: from a rank of the same node if one has it."""
    same_NN = cost.cluster.same_node_NN
    moved_NN = np.zeros(same_NN.shape)
    for layer, rank, expert in zip(*np.nonzero(after_LNE & ~before_LNE), strict=True):
        have_N = before_LNE[layer, :, expert]
        if have_N.any():  # else it is read from the checkpoint
            near_N = have_N & same_NN[rank] if (have_N & same_NN[rank]).any() else have_N
            moved_NN[int(np.where(near_N, moved_NN.sum(axis=1), np.inf).argmin()), rank] += (
                cost.model.expert_bytes
            )
    return moved_NN
