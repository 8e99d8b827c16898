"""Parts of a report that need no cost model: loads, replicas and their reasons, moves, co-activation.

Legend: L MoE layers, N ranks, E experts, p slots per rank, K experts per token, t tokens whose routes were kept.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from moe_runtime.core import ExpertPlacement
from moe_runtime.placement.record import Routes
from moe_runtime.placement.report_data import Cluster, Coactivation, Reason
from moe_runtime.placement.split import Replicas
from moe_runtime.placement.stored import Array

MIN_LIFT = 1.5
MIN_DEVIATIONS = 4.0
MIN_MORE = 5
"""Pairs count as chosen together if they are seen so many times more often than by chance, and more often than chance explains: by
so many standard deviations of a Poisson count, and so many tokens more, since rare pairs have counts far from normal."""
MAX_CLUSTERS = 40
MAX_ROUTES = 4096
"""Tokens looked at for ranks per token: evenly spread over those kept."""


def relative_load(loads_LE: Array) -> Array:
    """float64 (L, E): 1 is the layer's mean; a layer without load counts as balanced."""
    mean_L1 = loads_LE.mean(axis=1, keepdims=True)
    return np.where(mean_L1 > 0, loads_LE / np.where(mean_L1 > 0, mean_L1, 1.0), 1.0)


def replica_counts(placement: ExpertPlacement) -> Array:
    """int64 (L, E)."""
    return np.stack(
        [Replicas.of(np.array(slots), placement.num_experts).count_E for slots in placement.slots]
    )


def holds(placement: ExpertPlacement) -> Array:
    """bool (L, N, E): whether a rank has a replica."""
    slots_LNp = np.array(placement.slots)
    held = np.zeros((*slots_LNp.shape[:2], placement.num_experts), dtype=bool)
    layer, rank, slot = np.nonzero(slots_LNp >= 0)
    held[layer, rank, slots_LNp[layer, rank, slot]] = True
    return held


def reasons(placement: ExpertPlacement, loads_LE: Array) -> list[Reason]:
    """For each expert with several replicas, the heaviest first in each layer."""
    relative_LE, held_LNE = relative_load(loads_LE), holds(placement)
    found = []
    for layer, count_E in enumerate(replica_counts(placement)):
        for expert in sorted(np.flatnonzero(count_E > 1).tolist(), key=lambda e: -relative_LE[layer, e]):
            load, count = float(relative_LE[layer, expert]), int(count_E[expert])
            ranks = np.flatnonzero(held_LNE[layer, :, expert]).tolist()
            found.append(Reason(layer=layer, expert=expert, ranks=ranks, load=load, why=_why(load, count)))
    return found


def _why(load: float, count: int) -> str:
    if load < 1:
        return "not hot: it takes slots that would otherwise be empty, or keeps its replicas near those who use it"
    return f"load {load:.2f} times the mean; {count} replicas make it {load / count:.2f} each"


def moves(
    before: ExpertPlacement, after: ExpertPlacement, same_node_NN: Array, expert_bytes: int
) -> tuple[int, Array]:
    """How many replicas ranks get that they did not have, and int64 (N, N) bytes to copy from rank to rank.

    A replica is copied from a rank of the same node if one has it, else from any; of those from the one that has sent least so far.
    """
    had_LNE, has_LNE = holds(before), holds(after)
    bytes_NN = np.zeros(same_node_NN.shape, dtype=np.int64)
    sent_N = [0] * len(same_node_NN)
    new = np.argwhere(has_LNE & ~had_LNE).tolist()
    for layer, rank, expert in new:
        owners = np.flatnonzero(had_LNE[layer, :, expert]).tolist()
        source = min(owners, key=lambda n: (not same_node_NN[n, rank], sent_N[n], n))
        sent_N[source] += 1
        bytes_NN[source, rank] += expert_bytes
    return len(new), bytes_NN


def coactivation(routes: Routes, before: ExpertPlacement, after: ExpertPlacement) -> Coactivation | None:
    """Clusters of experts, and ranks per token; None without routes."""
    ids_tLK = routes.topk_ids_tLK.astype(np.int64)
    if not len(ids_tLK):
        return None
    held_before, held_after = holds(before), holds(after)
    found: list[Cluster] = []
    for layer in range(ids_tLK.shape[1]):
        for experts, lift, tokens in _clusters(ids_tLK[:, layer], before.num_experts):
            found.append(
                Cluster(
                    layer=layer,
                    experts=experts,
                    lift=lift,
                    tokens=tokens,
                    ranks_before=_fewest_ranks(held_before[layer][:, experts]),
                    ranks_after=_fewest_ranks(held_after[layer][:, experts]),
                )
            )
    found.sort(key=lambda c: (-c.tokens, c.layer, c.experts))
    return Coactivation(
        num_tokens=len(ids_tLK),
        clusters=found[:MAX_CLUSTERS],
        ranks_per_token_before=ranks_per_token(routes, before),
        ranks_per_token_after=ranks_per_token(routes, after),
    )


def _clusters(ids_tK: Array, num_experts: int) -> list[tuple[list[int], float, int]]:
    """Experts, lift and pairs seen of each group of experts that are chosen together above chance."""
    chosen_tE = np.zeros((len(ids_tK), num_experts), dtype=np.float32)
    token, k = np.nonzero(ids_tK >= 0)
    chosen_tE[token, ids_tK[token, k]] = 1
    together_EE = np.rint(chosen_tE.T @ chosen_tE).astype(np.float64)
    count_E = together_EE.diagonal().copy()
    np.fill_diagonal(together_EE, 0)
    pairs = together_EE.sum()
    if not pairs:
        return []
    # Independent choices in proportion to counts, no expert twice, with as many pairs as there are.
    chance_EE = np.outer(count_E, count_E)
    np.fill_diagonal(chance_EE, 0)
    scale = pairs / chance_EE.sum()
    expected_EE = chance_EE * scale
    strong_EE = (together_EE >= MIN_LIFT * expected_EE) & (
        together_EE - expected_EE >= MIN_DEVIATIONS * np.sqrt(expected_EE) + MIN_MORE
    )
    result = []
    for experts in _groups(together_EE, chance_EE, strong_EE, MIN_LIFT * scale):
        inside = np.ix_(experts, experts)
        seen = together_EE[inside].sum()
        result.append((experts, float(seen / (chance_EE[inside].sum() * scale)), int(seen) // 2))
    return result


def _groups(together_EE: Array, chance_EE: Array, strong_EE: Array, least: float) -> list[list[int]]:
    """Disjoint groups, each grown from the strongest pair left by the expert that is tied to it most, while that is enough.

    Strength is pairs seen over chance (whole numbers, so that ties are ties); the lowest numbers win. `least` is the strength that
    ties an expert to a group, of all its pairs with it together, one of which must be strong.
    """
    free_E = np.ones(len(strong_EE), dtype=bool)
    found: list[list[int]] = []
    while True:
        linked_EE = strong_EE & free_E & free_E[:, None]
        strength_EE = np.where(linked_EE, together_EE / np.maximum(chance_EE, 1), 0.0)
        if not linked_EE.any():
            return found
        group = [int(i) for i in np.unravel_index(strength_EE.argmax(), strength_EE.shape)]
        while True:
            tie_E = together_EE[group].sum(axis=0) / np.maximum(chance_EE[group].sum(axis=0), 1)
            allowed_E = linked_EE[group].any(axis=0) & (tie_E >= least)
            allowed_E[group] = False
            if not allowed_E.any():
                break
            group.append(int(np.where(allowed_E, tie_E, 0.0).argmax()))
        free_E[group] = False
        found.append(sorted(group))


def _fewest_ranks(held_Nx: Array) -> int:
    """How many ranks it takes to have all, each step taking the rank that adds most (lowest number on ties)."""
    missing_x = np.ones(held_Nx.shape[1], dtype=bool)
    ranks = 0
    while missing_x.any():
        best = int((held_Nx & missing_x).sum(axis=1).argmax())
        missing_x &= ~held_Nx[best]
        ranks += 1
    return ranks


def ranks_per_token(routes: Routes, placement: ExpertPlacement) -> float:
    """Mean over tokens and layers; a source uses its own replica, else the one chosen by its rank (the static split)."""
    step = -(-len(routes.rank_t) // MAX_ROUTES)
    ids_tLK, rank_t = routes.topk_ids_tLK[::step].astype(np.int64), routes.rank_t[::step]
    num_ranks = len(placement.slots[0])
    total = 0
    for layer, slots in enumerate(placement.slots):
        rank_NE = _static_ranks(np.array(slots), placement.num_experts)
        ids_tK = ids_tLK[:, layer]
        where_tK = np.where(ids_tK >= 0, rank_NE[rank_t[:, None] % num_ranks, np.maximum(ids_tK, 0)], -1)
        reached_tN: Any = (where_tK[:, :, None] == np.arange(num_ranks)).any(axis=1)
        total += int(reached_tN.sum())
    return total / (len(rank_t) * len(placement.slots))


def _static_ranks(slots_Np: Array, num_experts: int) -> Array:
    """int64 (N, E): the rank that source n's tokens for an expert go to."""
    replicas = Replicas.of(slots_Np, num_experts)
    rank_EC = np.where(replicas.slot_EC >= 0, replicas.slot_EC // replicas.slots_per_rank, -1)
    source_N1 = np.arange(replicas.num_ranks)[:, None]
    own_NE = (rank_EC[None] == source_N1[:, :, None]).any(axis=2)
    return np.where(
        own_NE, source_N1, rank_EC[np.arange(num_experts), source_N1 % replicas.count_E].reshape(own_NE.shape)
    )
