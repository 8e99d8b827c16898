"""Splits of a layer's counts over replicas, with plain loops: computed, or checked where several would be right.

Legend: N source ranks, E experts, C replicas of an expert.
"""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np

from moe_runtime.placement.split import Replicas, split_rows

Rows = list[list[dict[int, int]]]
"""[source][expert] -> {rank: rows}"""


def by_static(slots: list[list[int]], counts_NE: np.ndarray) -> Rows:
    """Every source uses its own replica, else the one chosen by its rank."""
    result: Rows = []
    for source, row in enumerate(counts_NE.tolist()):
        result.append([])
        for expert, pairs in enumerate(row):
            where = [n for n, held in enumerate(slots) if expert in held]
            result[-1].append({source if source in where else where[source % len(where)]: pairs})
    return result


def by_counts(method: str, slots: list[list[int]], counts_NE: np.ndarray, ranks_per_node: int) -> Rows:
    """The project's waterfill or one_replica, after asserting that it is one."""
    num_experts = counts_NE.shape[1]
    replicas = Replicas.of(np.array(slots), num_experts)
    rows_NEC = split_rows(method, counts_NE, replicas, ranks_per_node=ranks_per_node)
    result: Rows = [[{} for _ in range(num_experts)] for _ in slots]
    for (source, expert, c), rows in np.ndenumerate(rows_NEC):
        slot = int(replicas.slot_EC[expert, c])
        assert slot >= 0 or rows == 0
        assert rows >= 0
        if slot >= 0:
            rank = slot // len(slots[0])
            assert expert in slots[rank]
            result[source][expert][rank] = int(rows)
    counts = counts_NE.tolist()
    for of_source, wanted in zip(result, counts, strict=True):
        assert [sum(of_expert.values()) for of_expert in of_source] == wanted
    if method == "waterfill":
        check_waterfill(slots, counts, result, ranks_per_node)
    else:
        check_one_replica(slots, counts, result)
    return result


def check_one_replica(slots: list[list[int]], counts: list[list[int]], rows: Rows) -> None:
    """All of an expert's pairs go to one rank, and no choice has fewer experts to read on the fullest rank."""
    ranks, experts = range(len(slots)), range(len(counts[0]))
    where = [[n for n in ranks if e in slots[n]] for e in experts]
    reads = [0] * len(slots)
    for e in experts:
        used = {n for of_source in rows for n, pairs in of_source[e].items() if pairs}
        assert len(used) == any(row[e] for row in counts)
        for n in used:
            reads[n] += 1
    assert max(reads) == fewest_rows([int(any(row[e] for row in counts)) for e in experts], where, len(slots))


def check_waterfill(slots: list[list[int]], counts: list[list[int]], rows: Rows, ranks_per_node: int) -> None:
    """The fullest rank is as level as can be, and sources use their own replica, then those of their node, as far as that allows."""
    ranks, experts = range(len(slots)), range(len(counts[0]))
    where = [[n for n in ranks if e in slots[n]] for e in experts]
    for e in experts:
        taken = {n: sum(rows[source][e][n] for source in ranks) for n in where[e]}
        for n in where[e]:
            assert rows[n][e][n] == min(counts[n][e], taken[n])
        for first in range(0, len(slots), ranks_per_node):
            node = range(first, first + ranks_per_node)
            inside = sum(rows[source][e].get(n, 0) for source in node for n in node)
            assert inside == min(sum(counts[s][e] for s in node), sum(taken.get(n, 0) for n in node))
    total = [
        sum(sum(row) for row in column)
        for column in ([[r.get(n, 0) for r in s] for s in rows] for n in ranks)
    ]
    fewest = fewest_rows([sum(row[e] for row in counts) for e in experts], where, len(slots))
    assert max(total) <= max(fewest, math.ceil(1.002 * sum(total) / len(total)))


def fewest_rows(load: list[int], where: list[list[int]], num_ranks: int) -> int:
    """Rows of the fullest rank in the best split: some set of ranks must compute all that only they hold (minimum cut)."""
    return max(
        math.ceil(sum(x for x, ranks in zip(load, where, strict=True) if set(ranks) <= set(some)) / size)
        for size in range(1, num_ranks + 1)
        for some in combinations(range(num_ranks), size)
    )
