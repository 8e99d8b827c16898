"""The run-time split: which replica computes how many of a batch's tokens, from the batch's exact counts.

Every rank computes the split of the whole batch from the counts of all ranks, so all come to the same result without asking.

Legend: N ranks (first axis: source), E experts, p slots per rank, C replicas of the most replicated expert, D replicated experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from moe_runtime.errors import ConfigError
from moe_runtime.placement.balance import even_out, share_out

Array = npt.NDArray[Any]
SLACK = 0.002
SPLITS = ("static", "random", "waterfill", "one_replica")


@dataclass(frozen=True)
class Replicas:
    """Where the replicas of a layer's experts are; made once per placement by `Replicas.of`."""

    slot_EC: Array
    """int64 global slot (rank * p + slot) of each replica by rank, padded with -1."""
    count_E: Array
    """int64 replicas of each expert, at least 1."""
    num_ranks: int
    slots_per_rank: int
    shared_D: Array
    """int64 experts with more than one replica."""
    ranks_D: list[list[int]]
    """Their ranks, ascending."""
    first_rank_E: Array
    """int64 rank of an expert's first replica."""
    home_D: Array
    """int64 which replica of a shared expert is its home: the one in the lowest slot of its rank, of these the first."""

    @staticmethod
    def of(slots_Np: Array, num_experts: int) -> Replicas:
        """From the expert in each slot of each rank, -1 for none. Raises ConfigError if an expert has no slot or a rank has it twice."""
        slots_Np = np.asarray(slots_Np, dtype=np.int64)
        num_ranks, width = slots_Np.shape
        flat = slots_Np.reshape(-1)
        slot = np.flatnonzero(flat >= 0)
        expert = flat[slot]
        if expert.size and int(expert.max()) >= num_experts:
            raise ConfigError(f"a slot holds expert {int(expert.max())}; experts are 0 to {num_experts - 1}")
        count_E = np.bincount(expert, minlength=num_experts)
        if not count_E.all():
            raise ConfigError(f"expert {int(count_E.argmin())} has no slot on any of the {num_ranks} ranks")
        order = np.argsort(expert, kind="stable")
        slot, expert = slot[order], expert[order]
        twice = (expert[1:] == expert[:-1]) & (slot[1:] // width == slot[:-1] // width)
        if twice.any():
            at = int(twice.argmax())
            raise ConfigError(f"rank {int(slot[at]) // width} holds expert {int(expert[at])} twice")
        slot_EC = np.full((num_experts, int(count_E.max())), -1, dtype=np.int64)
        place = np.arange(len(slot)) - np.repeat(np.cumsum(count_E) - count_E, count_E)
        slot_EC[expert, place] = slot
        shared_D = np.flatnonzero(count_E > 1)
        ranks_D = [[int(s) // width for s in slot_EC[e] if s >= 0] for e in shared_D]
        slot_DC = slot_EC[shared_D]
        home_D = np.where(slot_DC >= 0, slot_DC % width, width).argmin(axis=1)
        return Replicas(slot_EC, count_E, num_ranks, width, shared_D, ranks_D, slot_EC[:, 0] // width, home_D)


def split_rows(
    method: str, counts_NE: Array, replicas: Replicas, *, ranks_per_node: int | None = None, seed: int = 0
) -> Array:
    """int64 (N, E, C): how many of source rank n's tokens for expert e go to the expert's c-th replica (`replicas.slot_EC`).

    counts_NE is int64, the (token, k) pairs of each source for each expert. Methods (SPLITS):

    * `static`: every source uses its own replica, else the one chosen by its rank, as `layout.layer_placement`;
    * `random`: each token draws its replica; `seed` (say of step and layer) must be the same on all ranks;
    * `waterfill`: the fullest rank gets as few rows as possible (exactly, up to SLACK: `balance.share_out`);
    * `one_replica`: all of an expert's tokens go to one replica, so that the rank with the most experts to read has as few as
      possible, and then its rows are levelled as far as that allows: for decode, where reading weights is what takes time.

    With waterfill, a source's own replica, else the home of its node (`ranks_per_node`), else the home is used as far as the balance
    allows.
    Raises ConfigError for an unknown method.
    """
    counts_NE = np.asarray(counts_NE, dtype=np.int64)
    if method == "waterfill":
        start_DC = _favourites(counts_NE, replicas, ranks_per_node)
        return _by_source(
            counts_NE, replicas, waterfill(counts_NE.sum(axis=0), replicas, start_DC), ranks_per_node
        )
    if method == "one_replica":
        return counts_NE[:, :, None] * (one_replica(counts_NE.sum(axis=0), replicas) > 0)
    if method == "static":
        return counts_NE[:, :, None] * (static_slots(replicas)[:, :, None] == replicas.slot_EC)
    if method == "random":
        drawn: Any = np.random.default_rng(seed)  # its stubs do not know that counts may have axes
        even_EC = (replicas.slot_EC >= 0) / replicas.count_E[:, None]
        # Turned round, since numpy gives what rounding leaves over to the last: an expert's first replica, never padding.
        return drawn.multinomial(counts_NE, even_EC[:, ::-1])[:, :, ::-1]
    raise ConfigError(f"unknown split {method!r}; choose from {', '.join(SPLITS)}")


def rank_rows(rows_NEC: Array, replicas: Replicas) -> Array:
    """int64 (N,): rows that each rank computes."""
    rank_EC = np.where(replicas.slot_EC >= 0, replicas.slot_EC // replicas.slots_per_rank, 0)
    return np.bincount(
        rank_EC.ravel(), weights=rows_NEC.sum(axis=0).ravel(), minlength=replicas.num_ranks
    ).astype(np.int64)


def waterfill(load_E: Array, replicas: Replicas, start_DC: Array | None = None) -> Array:
    """int64 (E, C): rows of each expert for each replica, so that the fullest rank has as few as whole numbers allow.

    Or at most 1 + SLACK times the mean, which no split could better by more. Rows leave `start_DC`, by default the experts' homes,
    only as that asks.
    """
    shares, _ = _share_out(load_E, replicas, start_DC, SLACK)
    share_EC: Array = np.zeros(replicas.slot_EC.shape, dtype=np.int64)
    share_EC[:, 0] = load_E
    if len(shares):
        width = share_EC.shape[1]
        share_EC[replicas.shared_D] = [s + [0] * (width - len(s)) for s in shares]
    return share_EC


def slot_shares(load_E: Array, replicas: Replicas) -> Array:
    """float64 (N, E): which part of each expert's rows each rank takes after `waterfill`; an expert without rows is at home."""
    share_EC = waterfill(np.maximum(load_E, 1), replicas).astype(np.float64)
    share_EC /= share_EC.sum(axis=1, keepdims=True)
    part_NE = np.zeros((replicas.num_ranks, len(load_E)))
    expert, place = np.nonzero(replicas.slot_EC >= 0)
    part_NE[replicas.slot_EC[expert, place] // replicas.slots_per_rank, expert] = share_EC[expert, place]
    return part_NE


def most_rows(load_E: Array, replicas: Replicas) -> int:
    """Rows of the fullest rank after `waterfill`."""
    # From even shares, not from home: only the maximum is asked for, and they are nearer to it.
    load_D1, count_D1 = load_E[replicas.shared_D, None], replicas.count_E[replicas.shared_D, None]
    place_C = np.arange(replicas.slot_EC.shape[1])
    start_DC = (place_C < count_D1) * (load_D1 // count_D1) + (place_C < load_D1 % count_D1)
    return max(_share_out(load_E, replicas, start_DC, SLACK)[1])


def _share_out(
    load_E: Array, replicas: Replicas, start_DC: Array | None, slack: float
) -> tuple[list[list[int]], list[int]]:
    """Rows per replica of each shared expert, and of each rank."""
    if start_DC is None:
        start_DC = (np.arange(replicas.slot_EC.shape[1]) == replicas.home_D[:, None]) * load_E[
            replicas.shared_D, None
        ]
    starts = [row[: len(ranks)] for row, ranks in zip(start_DC.tolist(), replicas.ranks_D, strict=True)]
    return share_out(_single_rows(load_E, replicas), starts, replicas.ranks_D, slack)


def _single_rows(load_E: Array, replicas: Replicas) -> list[int]:
    """Rows of each rank's experts that have no other replica."""
    single_E = load_E.copy()
    single_E[replicas.shared_D] = 0
    rows_N = np.bincount(replicas.first_rank_E, weights=single_E, minlength=replicas.num_ranks)
    rows: list[int] = rows_N.astype(np.int64).tolist()
    return rows


def _favourites(counts_NE: Array, replicas: Replicas, ranks_per_node: int | None) -> Array:
    """int64 (D, C): rows of shared experts at each replica if every source uses its own, else its node's home, else the home."""
    home_D, num_ranks = replicas.home_D, replicas.num_ranks
    slot_DC = replicas.slot_EC[replicas.shared_D]
    node_size = ranks_per_node or num_ranks
    order_DC = np.where(slot_DC >= 0, slot_DC % replicas.slots_per_rank, replicas.slots_per_rank)
    rank_DC = np.where(slot_DC >= 0, slot_DC // replicas.slots_per_rank, -num_ranks)
    best_ND = np.tile(home_D, (num_ranks, 1))
    if node_size < num_ranks:
        for first in range(0, num_ranks, node_size):
            inside_DC = rank_DC // node_size == first // node_size
            near_D = np.where(inside_DC, order_DC, replicas.slots_per_rank).argmin(axis=1)
            best_ND[first : first + node_size] = np.where(inside_DC.any(axis=1), near_D, home_D)
    d, c = np.nonzero(rank_DC >= 0)
    best_ND[rank_DC[d, c], d] = c
    width = slot_DC.shape[1]
    flat = (np.arange(len(slot_DC)) * width + best_ND).ravel()
    rows = np.bincount(flat, weights=counts_NE[:, replicas.shared_D].ravel(), minlength=slot_DC.size)
    return rows.astype(np.int64).reshape(slot_DC.shape)


def one_replica(load_E: Array, replicas: Replicas) -> Array:
    """int64 (E, C): all rows of an expert at one of its replicas; the most experts with rows on any rank is as small as can be.

    Of the choices with so few, exchanges of up to two experts find one whose fullest rank has few rows.
    """
    active_E = (load_E > 0).astype(np.int64)
    shares, count_N = _share_out(active_E, replicas, None, 0.0)
    choice = [share.index(1) if 1 in share else -1 for share in shares]
    even_out(
        choice, count_N, _single_rows(load_E, replicas), load_E[replicas.shared_D].tolist(), replicas.ranks_D
    )
    rows_EC: Array = np.zeros(replicas.slot_EC.shape, dtype=np.int64)
    rows_EC[:, 0] = load_E
    if len(choice):
        rows_EC[replicas.shared_D, 0] = 0
        rows_EC[replicas.shared_D, np.maximum(choice, 0)] = load_E[replicas.shared_D]
    return rows_EC


def static_slots(replicas: Replicas) -> Array:
    """int64 (N, E): the global slot that the static split sends a source's tokens for an expert to."""
    rank_N1 = np.arange(replicas.num_ranks)[:, None]
    rank_EC = np.where(replicas.slot_EC >= 0, replicas.slot_EC // replicas.slots_per_rank, -1)
    own_NEC = rank_EC[None] == rank_N1[:, :, None]
    chosen_NE = np.where(own_NEC.any(axis=2), own_NEC.argmax(axis=2), rank_N1 % replicas.count_E)
    slots_NE: Array = replicas.slot_EC[np.arange(len(replicas.slot_EC)), chosen_NE]
    return slots_NE


def _by_source(counts_NE: Array, replicas: Replicas, share_EC: Array, ranks_per_node: int | None) -> Array:
    """Which source's tokens make up each replica's share: first its own rank's, then its node's, then the others' in order of rank."""
    rows_NEC = np.zeros((*counts_NE.shape, share_EC.shape[1]), dtype=np.int64)
    rows_NEC[:, :, 0] = counts_NE
    if not len(replicas.shared_D):
        return rows_NEC
    shared_D = replicas.shared_D
    left_ND, free_DC = counts_NE[:, shared_D], share_EC[shared_D]
    slot_DC = replicas.slot_EC[shared_D]
    rank_DC = np.where(slot_DC >= 0, slot_DC // replicas.slots_per_rank, -1)
    rank_N11 = np.arange(replicas.num_ranks)[:, None, None]
    rows_NDC = np.minimum(left_ND[:, :, None], free_DC) * (rank_DC == rank_N11)
    left_ND, free_DC = left_ND - rows_NDC.sum(axis=2), free_DC - rows_NDC.sum(axis=0)
    if ranks_per_node is not None and ranks_per_node < replicas.num_ranks:
        for first in range(0, replicas.num_ranks, ranks_per_node):
            node = slice(first, first + ranks_per_node)
            inside = (rank_DC >= first) & (rank_DC < first + ranks_per_node)
            add = _overlap(left_ND[node], free_DC * inside)
            rows_NDC[node] += add
            left_ND[node] -= add.sum(axis=2)
            free_DC = free_DC - add.sum(axis=0)
    rows_NEC[:, shared_D] = rows_NDC + _overlap(left_ND, free_DC)
    return rows_NEC


def _overlap(left_ND: Array, free_DC: Array) -> Array:
    """Deal out in order of rank: the north-west corner rule of the transportation problem, per expert."""
    end_ND, end_DC = left_ND.cumsum(axis=0), free_DC.cumsum(axis=1)
    upto = np.minimum(end_ND[:, :, None], end_DC)
    after = np.maximum((end_ND - left_ND)[:, :, None], end_DC - free_DC)
    return np.maximum(upto - after, 0)
