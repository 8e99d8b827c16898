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
from moe_runtime.placement.balance import share_out

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
        return Replicas(slot_EC, count_E, num_ranks, width, shared_D, ranks_D, slot_EC[:, 0] // width)


def split_rows(
    method: str, counts_NE: Array, replicas: Replicas, *, ranks_per_node: int | None = None, seed: int = 0
) -> Array:
    """int64 (N, E, C): how many of source rank n's tokens for expert e go to the expert's c-th replica (`replicas.slot_EC`).

    counts_NE is int64, the (token, k) pairs of each source for each expert. Methods (SPLITS):

    * `static`: every source uses its own replica, else the one chosen by its rank, as `layout.layer_placement`;
    * `random`: each token draws its replica; `seed` (say of step and layer) must be the same on all ranks;
    * `waterfill`: the fullest rank gets as few rows as possible (exactly, up to SLACK: `balance.share_out`);
    * `one_replica`: all of an expert's tokens go to one replica, so that the rank with the most experts to read has as few as
      possible, and of those choices one by fewest rows: for decode, where reading weights is what takes time.

    With waterfill, a source's own replica, then those of its node (`ranks_per_node`), are used as far as the balance allows.
    Raises ConfigError for an unknown method.
    """
    counts_NE = np.asarray(counts_NE, dtype=np.int64)
    if method == "waterfill":
        return _by_source(counts_NE, replicas, waterfill(counts_NE.sum(axis=0), replicas), ranks_per_node)
    if method == "one_replica":
        return counts_NE[:, :, None] * (one_replica(counts_NE.sum(axis=0), replicas) > 0)
    if method == "static":
        return _static(counts_NE, replicas)
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


def waterfill(load_E: Array, replicas: Replicas, slack: float = SLACK) -> Array:
    """int64 (E, C): rows of each expert for each replica, so that the fullest rank has as few as whole numbers allow.

    Or at most 1 + slack times the mean, which no split could better by more.
    """
    shares, _ = _share_out(load_E, replicas, slack)
    share_EC: Array = np.zeros(replicas.slot_EC.shape, dtype=np.int64)
    share_EC[:, 0] = load_E
    if len(shares):
        width = share_EC.shape[1]
        share_EC[replicas.shared_D] = [s + [0] * (width - len(s)) for s in shares]
    return share_EC


def most_rows(load_E: Array, replicas: Replicas) -> int:
    """Rows of the fullest rank after `waterfill`."""
    return max(_share_out(load_E, replicas, SLACK)[1])


def _share_out(load_E: Array, replicas: Replicas, slack: float) -> tuple[list[list[int]], list[int]]:
    """Rows per replica of each shared expert, and of each rank."""
    loads_D = load_E[replicas.shared_D]
    base = np.bincount(replicas.first_rank_E, weights=load_E, minlength=replicas.num_ranks)
    base -= np.bincount(
        replicas.first_rank_E[replicas.shared_D], weights=loads_D, minlength=replicas.num_ranks
    )
    return share_out(base.astype(np.int64).tolist(), loads_D.tolist(), replicas.ranks_D, slack)


def one_replica(load_E: Array, replicas: Replicas) -> Array:
    """int64 (E, C): all rows of an expert at one of its replicas; the most experts with rows on any rank is as small as can be."""
    active_EC = waterfill((load_E > 0).astype(np.int64), replicas, slack=0.0)
    return active_EC * load_E[:, None]


def _static(counts_NE: Array, replicas: Replicas) -> Array:
    num_ranks = replicas.num_ranks
    rank_EC = np.where(replicas.slot_EC >= 0, replicas.slot_EC // replicas.slots_per_rank, -1)
    own_NEC = rank_EC[None] == np.arange(num_ranks)[:, None, None]
    by_rank_NE = np.arange(num_ranks)[:, None] % replicas.count_E
    chosen_NE = np.where(own_NEC.any(axis=2), own_NEC.argmax(axis=2), by_rank_NE)
    rows_NEC = np.zeros(own_NEC.shape, dtype=np.int64)
    np.put_along_axis(rows_NEC, chosen_NE[:, :, None], counts_NE[:, :, None], axis=2)
    return rows_NEC


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
