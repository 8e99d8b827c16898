"""Sharing integer loads out over the ranks that may take them, so that the fullest rank has as little as possible: exact.

The problem is a maximum flow (loads -> ranks) under the smallest capacity that lets all of it through. It is solved in two parts:
passes that level each load over its ranks (coordinate descent on the sum of squared rank loads, whose minimum also has the smallest
maximum: Fujishige, Mathematics of Operations Research 5(2), 1980), then augmenting paths from the fullest rank until there is none,
which proves the optimum (Ford and Fulkerson). Plain lists: for the few dozen replicated experts of a layer, numpy's calls cost more.
"""

from __future__ import annotations

import math

PASSES = 6


def share_out(
    base: list[int], starts: list[list[int]], ranks: list[list[int]], slack: float = 0.0
) -> tuple[list[list[int]], list[int]]:
    """How much of each load each of its ranks takes, and what every rank has in the end.

    `base` is what a rank has anyway; `starts[i]` is where load i would best be among `ranks[i]`, each rank listed once. Load leaves
    its place only as balance asks for it. The largest result is the least possible in whole numbers, that is ceil of the linear
    optimum, or at most 1 + `slack` times the mean, which ends the search early. The result depends on the arguments only.
    """
    shares = [list(start) for start in starts]
    total = list(base)
    for share, where in zip(shares, ranks, strict=True):
        for rank, part in zip(where, share, strict=True):
            total[rank] += part
    mean = sum(total) / len(total)
    goal = max(math.ceil(mean), int(mean * (1 + slack)))
    for step in (_relieve_all, _level_all):
        for _ in range(PASSES):
            if max(total) <= goal or not step(total, shares, ranks, goal):
                break
    if max(total) > goal:
        _augment(total, shares, ranks, goal)
    return shares, total


def _relieve_all(total: list[int], shares: list[list[int]], ranks: list[list[int]], goal: int) -> bool:
    """Every rank above `goal` gives what it has too much to emptier ranks, load by load; whether anything moved."""
    moved = False
    for share, where in zip(shares, ranks, strict=True):
        for i, rank in enumerate(where):
            while total[rank] > goal and share[i]:
                emptiest = where[1 - i] if len(where) == 2 else min(where, key=total.__getitem__)
                room = goal - total[emptiest]
                if room <= 0:
                    break
                amount = min(share[i], total[rank] - goal, room)
                share[i] -= amount
                share[where.index(emptiest)] += amount
                total[rank] -= amount
                total[emptiest] += amount
                moved = True
    return moved


def _level_one(total: list[int], load: int, where: list[int]) -> list[int]:
    """Pour `load` over ranks `where`, onto the lowest first; adds to `total`."""
    if len(where) == 2:
        a, b = where
        first = (load + total[b] - total[a] + 1) >> 1
        first = 0 if first < 0 else load if first > load else first
        total[a] += first
        total[b] += load - first
        return [first, load - first]
    order = sorted(range(len(where)), key=lambda i: total[where[i]])
    share = [0] * len(where)
    level, used = total[where[order[0]]], 1
    left = load
    while used < len(order):
        step = total[where[order[used]]] - level
        if step * used >= left:
            break
        left -= step * used
        level += step
        used += 1
    each, more = divmod(left, used)
    for place, i in enumerate(order[:used]):
        target = level + each + (place < more)
        share[i] = target - total[where[i]]
        total[where[i]] = target
    return share


def _level_all(total: list[int], shares: list[list[int]], ranks: list[list[int]], goal: int) -> bool:
    """One pass of coordinate descent; whether anything moved."""
    moved = False
    for i, where in enumerate(ranks):
        share = shares[i]
        if len(where) == 2:
            a, b = where
            gap = total[a] - total[b]
            if -2 < gap < 2:
                continue
            shift = gap >> 1 if gap > 0 else -(-gap >> 1)
            if shift > share[0]:
                shift = share[0]
            elif shift < -share[1]:
                shift = -share[1]
            if shift:
                share[0] -= shift
                share[1] += shift
                total[a] -= shift
                total[b] += shift
                moved = True
        else:
            load = sum(share)
            for rank, part in zip(where, share, strict=True):
                total[rank] -= part
            shares[i] = _level_one(total, load, where)
            moved = moved or shares[i] != share
    return moved


def _augment(total: list[int], shares: list[list[int]], ranks: list[list[int]], goal: int) -> None:
    """Move load from the fullest rank along paths of shared experts until no path makes the maximum smaller."""
    loads_of: list[list[int]] = [[] for _ in total]  # replicated loads of each rank
    for i, where in enumerate(ranks):
        for rank in where:
            loads_of[rank].append(i)
    while True:
        top = max(total)
        if top <= goal:
            return
        start = total.index(top)
        path = _path(start, top, total, shares, ranks, loads_of)
        if path is None:
            return
        amount = (top - total[path[-1][2]]) >> 1
        for i, a, _ in path:
            amount = min(amount, shares[i][ranks[i].index(a)])
        for i, a, b in path:
            shares[i][ranks[i].index(a)] -= amount
            shares[i][ranks[i].index(b)] += amount
            total[a] -= amount
            total[b] += amount


def _path(
    start: int,
    top: int,
    total: list[int],
    shares: list[list[int]],
    ranks: list[list[int]],
    loads_of: list[list[int]],
) -> list[tuple[int, int, int]] | None:
    """Shortest way (load, from rank, to rank) from `start` to a rank at least two below `top`, by breadth-first search."""
    came: dict[int, tuple[int, int]] = {start: (-1, -1)}
    queue = [start]
    for rank in queue:
        for i in loads_of[rank]:
            where = ranks[i]
            if shares[i][where.index(rank)] == 0:
                continue
            for other in where:
                if other in came:
                    continue
                came[other] = (i, rank)
                if total[other] <= top - 2:
                    path = []
                    while other != start:
                        i, before = came[other]
                        path.append((i, before, other))
                        other = before
                    return path[::-1]
                queue.append(other)
    return None


def even_out(
    choice: list[int], counts: list[int], base: list[int], loads: list[int], ranks: list[list[int]]
) -> None:
    """Level the rows of whole loads without giving any rank more loads than the one that has most: changes `choice` and `counts`.

    Load i is on `ranks[i][choice[i]]`, or nowhere (-1) if it is 0; `counts` and `base` are the loads and the other rows of each
    rank. Each step makes the best move off the fullest rank of one load, or of two, the second making way for the first.
    """
    most = max(counts)
    rows = list(base)
    on: list[list[int]] = [[] for _ in base]
    for i, place in enumerate(choice):
        if place >= 0:
            rows[ranks[i][place]] += loads[i]
            on[ranks[i][place]].append(i)
    for _ in choice:
        top = rows.index(max(rows))
        best = _best_moves(top, most, counts, rows, on, loads, ranks)
        if best is None:
            return
        for i, start, end in best:
            on[start].remove(i)
            on[end].append(i)
            choice[i] = ranks[i].index(end)
            for amounts, amount in ((counts, 1), (rows, loads[i])):
                amounts[start] -= amount
                amounts[end] += amount


def _best_moves(
    top: int,
    most: int,
    counts: list[int],
    rows: list[int],
    on: list[list[int]],
    loads: list[int],
    ranks: list[list[int]],
) -> list[tuple[int, int, int]] | None:
    """One or two (load, from rank, to rank) after which the largest of the ranks concerned is lowest, and below that of `top`."""
    best, peak = None, rows[top]
    for i in on[top]:
        left = rows[top] - loads[i]
        for b in ranks[i]:
            if b == top:
                continue
            if counts[b] < most:
                height = max(left, rows[b] + loads[i])
                if height < peak:
                    best, peak = [(i, top, b)], height
            for j in on[b]:
                at_b = rows[b] + loads[i] - loads[j]
                if at_b >= peak:
                    continue
                for c in ranks[j]:
                    if c == b or (c != top and counts[c] >= most):
                        continue
                    at_c = (left if c == top else rows[c]) + loads[j]
                    height = max(at_b, at_c, left)
                    if height < peak:
                        best, peak = [(j, b, c), (i, top, b)], height
    return best
