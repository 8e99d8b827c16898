"""A plan from scratch that weighs co-activation: as gathered as it can be while it stays level.

The more experts are gathered by co-activation, the less level the ranks, and how fast depends on the loads. So the weight of balance is not
fixed: trial plans, with light to heavy weights and with spare replicas anywhere or along rings, are made without a part of the windows
and judged on it, for each of FOLDS parts (cross-validation). Chosen is what keeps tokens on the fewest ranks while the fullest ranks, after
the run-time split, stay within TOLERANCE of those of a plan that packs by load alone (longest processing time first, as EPLB does).

Legend: W windows, L layers, N ranks, E experts, p slots per rank. `held` is bool (L, N, E).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from moe_runtime.errors import ConfigError
from moe_runtime.placement import affinity
from moe_runtime.placement.packing import pack, pack_level, replica_counts
from moe_runtime.placement.problem import Problem, deal_out
from moe_runtime.placement.refine import with_mean
from moe_runtime.placement.replan import fill_by_room
from moe_runtime.placement.slots import arrange, held_of, of_slots
from moe_runtime.placement.split import Replicas, slot_shares

Array = npt.NDArray[Any]
WEIGHTS = (0.001, 0.002, 0.004, 0.008, 0.016, 0.03, 0.06, 0.12)
"""Of balance beside co-activation, one stage after the other, each from the result of the one before."""
RINGS = (0, 1, affinity.ALL_RINGS)
"""How many spare replicas of each rank come from its neighbours on rings; the others come from anywhere."""
TOLERANCE = 1.02
ROWS_PER_EXPERT = 1000
"""Loads become whole rows in this measure."""
FOLDS = 4
"""Parts of the windows; trial plans from the others are judged on each."""


def gathered(problem: Problem, windows_WLE: Array, together_LEE: Array) -> Array:
    """int64 (L, N, p): first the replicas that must be, gathered by co-activation; then the others. Homes have the lowest slots."""
    together = affinity.scaled(together_LEE)
    parts = np.array_split(np.arange(len(windows_WLE)), min(FOLDS, len(windows_WLE)))
    limit, trials = 0.0, dict[tuple[float, int], Array]()
    try:
        for part in parts:
            rest_WLE = np.delete(windows_WLE, part, axis=0) if len(parts) > 1 else windows_WLE
            rest, unseen_WLE = (
                replace(problem, loads_WLE=rest_WLE),
                windows_WLE[part].mean(axis=0, keepdims=True),
            )
            plain_LNE = pack_level(rest, rest.load_LE, replica_counts(rest, rest.load_LE))
            limit += TOLERANCE * judge(arrange(plain_LNE)[0], unseen_WLE, together, problem)[0]
            for choice, slots_LNp in _candidates(rest, rest_WLE, together):
                judged = np.array(judge(slots_LNp, unseen_WLE, together, problem))
                trials[choice] = trials.get(choice, 0.0) + judged
    except ConfigError:  # limits so uneven that usual replica counts fit nowhere
        return arrange(fill_by_room(problem))[0]
    level = [choice for choice, (fullest, _) in trials.items() if fullest <= limit]
    if level:
        chosen = max(level, key=lambda choice: float(trials[choice][1]))
    else:
        chosen = min(trials, key=lambda choice: float(trials[choice][0]))
    candidates = _candidates(problem, windows_WLE, together)
    return next(slots_LNp for choice, slots_LNp in candidates if choice == chosen)


def _candidates(
    problem: Problem, windows_WLE: Array, together_LEE: Array
) -> Iterator[tuple[tuple[float, int], Array]]:
    """(balance weight, rings) and slots (L, N, p) of each."""
    start_E = np.maximum(problem.min_replicas, problem.pinned_NE.sum(axis=0))
    home_N = deal_out(int(start_E.sum()), problem.room_N, problem.pinned_NE.sum(axis=1))
    count_LE = np.tile(start_E, (problem.num_layers, 1))
    slots_LNp, _ = arrange(pack(replace(problem, room_N=home_N), problem.load_LE, count_LE))
    share_VLE = with_mean(windows_WLE) / count_LE.astype(np.float32)
    movable_LE = np.tile(~problem.pinned_NE.any(axis=0), (problem.num_layers, 1))
    spare_N = problem.room_N - home_N
    for weight in WEIGHTS:
        movable_LNp = of_slots(movable_LE, slots_LNp, False)
        affinity.gather(slots_LNp, share_VLE, movable_LNp, together_LEE, problem.cluster, weight)
        for rings in RINGS if spare_N.any() else (0,):
            held_LNE = held_of(slots_LNp, problem.num_experts)
            room_LN = np.tile(spare_N, (problem.num_layers, 1))
            affinity.add_spares(held_LNE, room_LN, problem.load_LE, together_LEE, rings)
            yield (weight, rings), arrange(held_LNE, slots_LNp)[0]


def judge(slots_LNp: Array, windows_WLE: Array, together_LEE: Array, problem: Problem) -> tuple[float, float]:
    """The fullest rank's load after the run-time split, a share of the mean rank's, and the co-activation kept within ranks (and
    within nodes, with a weight of its own) if tokens choose replicas independently; means over windows and layers.
    """
    num_layers, num_ranks, _ = slots_LNp.shape
    node_N = np.arange(num_ranks) // problem.cluster.ranks_per_node
    fullest, near = 0.0, 0.0
    for layer, slots_Np in enumerate(slots_LNp):
        replicas = Replicas.of(slots_Np, problem.num_experts)
        share_NE = np.zeros((num_ranks, problem.num_experts))
        for load_E in windows_WLE[:, layer]:
            rows_E = np.rint(load_E * ROWS_PER_EXPERT).astype(np.int64)
            part_NE = slot_shares(rows_E, replicas)
            fullest += float((part_NE @ rows_E).max()) / max(int(rows_E.sum()), 1)
            share_NE += part_NE / len(windows_WLE)
        near += float(((share_NE @ together_LEE[layer]) * share_NE).sum())
        if node_N[-1] > 0:
            node_ME = np.add.reduceat(share_NE, np.unique(node_N, return_index=True)[1], axis=0)
            near += affinity.NODE_WEIGHT * float(((node_ME @ together_LEE[layer]) * node_ME).sum())
    num_used = int((problem.room_N > 0).sum())
    return fullest / num_layers / len(windows_WLE) * num_used, near / num_layers / problem.num_experts
