"""What a record says without a cost model, with plain loops: intervals, how long its load lasts, which experts go together."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from scipy import stats

from moe_runtime.placement.intervals import student_t

Slots = list[list[list[int]]]


class Patterns:
    """Of a record as plain_report.read_raw gives it; base of Plain, which counts and places."""

    record: Any
    ranks: range
    layers: range

    def count(self, w: int) -> tuple[np.ndarray, np.ndarray]:
        """Pairs [rank][layer][expert] and tokens [rank] of a window."""
        raise NotImplementedError

    def target(self, slots: Slots, layer: int, source: int, expert: int) -> int:
        """The rank that a source's tokens for an expert go to, by the static split."""
        where = [n for n in self.ranks if expert in slots[layer][n]]
        return source if source in where else where[source % len(where)]

    def gain_interval(self, before: list[float], after: list[float]) -> tuple[float, float, float]:
        """Moving blocks of ceil(cube root of W) windows, 1000 draws; 90 %."""
        gains = [1 - sum(after[c] for c in row) / sum(before[c] for c in row) for row in _blocks(len(before))]
        return 1 - sum(after) / sum(before), *_bounds(gains, len(before) / _block_length(len(before)), 0.9)

    def mean_interval(self, times: list[float]) -> tuple[float, float, float]:
        """Plain bootstrap."""
        chosen = np.random.default_rng(0).integers(len(times), size=(1000, len(times))).tolist()
        means = [sum(times[c] for c in row) / len(row) for row in chosen]
        return sum(times) / len(times), *_bounds(means, len(times), 0.9)

    def deviations(self) -> list[list[float]]:
        """Loads relative to the mean, less 1, of groups of equally many neighbouring windows: at most 256 groups."""
        size = math.ceil(len(self.record.num_steps_W) / 256)
        result = []
        for first in range(0, len(self.record.num_steps_W) - size + 1, size):
            counts = sum(self.count(w)[0].sum(axis=0) for w in range(first, first + size))
            rows = np.asarray(counts).tolist()
            result.append([x / (sum(row) / len(row)) - 1 for row in rows for x in row])
        return result

    def similarity(self) -> list[float]:
        """By lag from 1."""
        deviations = self.deviations()
        return [_mean(self._products(deviations, lag)) for lag in range(1, len(deviations) // 2 + 1)]

    def _products(self, deviations: list[list[float]], lag: int) -> list[float]:
        return [
            sum(a * b for a, b in zip(x, y, strict=True)) / len(x)
            for x, y in zip(deviations, deviations[lag:], strict=False)
        ]

    def lasting(self) -> bool:
        """Whether the mean product of neighbours is above 0 by a 99 % interval of Student's t over blocks."""
        products = self._products(self.deviations(), 1)
        means = [_mean([products[c] for c in row]) for row in _blocks(len(products))]
        blocks = len(products) / _block_length(len(products))
        spread = math.sqrt(_mean([(m - _mean(means)) ** 2 for m in means]))
        return _mean(products) > math.sqrt(blocks / (blocks - 1)) * student_t(0.995, blocks - 1) * spread

    def half_life(self) -> float | None:
        """In groups of windows: where the line through the similarities first meets half of the first one."""
        if not self.lasting():
            return None
        similarity = self.similarity()
        for lag in range(1, len(similarity)):
            high, low = similarity[lag - 1], similarity[lag]
            if low <= similarity[0] / 2:
                return lag + (high - similarity[0] / 2) / (high - low)
        return None

    def clusters(self) -> list[tuple[int, list[int], float, int]]:
        """Layer, experts, lift and pairs of each group chosen together above chance."""
        found = []
        for layer in self.layers:
            together: dict[tuple[int, int], int] = {}
            chosen: dict[int, int] = {}
            for _, _, _, ids in self.record.routes:
                experts = {e for e in ids[layer] if e >= 0}
                for a in experts:
                    chosen[a] = chosen.get(a, 0) + 1
                    for b in experts - {a}:
                        together[a, b] = together.get((a, b), 0) + 1
            scale = sum(together.values()) / sum(
                chosen[a] * chosen[b] for a in chosen for b in chosen if a != b
            )
            strong = set()
            for (a, b), seen in together.items():
                chance = chosen[a] * chosen[b] * scale
                if seen >= 1.5 * chance and seen - chance >= 4 * math.sqrt(chance) + 5:
                    strong.add((a, b))
            while strong:
                # The strongest pair, and then again and again the expert with most in common with all of the group.
                _, a, b = min((-together[a, b] / (chosen[a] * chosen[b]), a, b) for a, b in strong)
                group = [a, b]
                while True:
                    ties = []
                    for e in sorted({e for e, other in strong if other in group} - set(group)):
                        seen = sum(together.get((e, g), 0) for g in group)
                        ties.append((-seen / sum(chosen[e] * chosen[g] for g in group), e))
                    if not ties or -min(ties)[0] < 1.5 * scale:
                        break
                    group.append(min(ties)[1])
                strong = {(a, b) for a, b in strong if a not in group and b not in group}
                seen = sum(together.get((a, b), 0) for a in group for b in group)
                chance = sum(chosen[a] * chosen[b] * scale for a in group for b in group if a != b)
                found.append((layer, sorted(group), seen / chance, seen // 2))
        return found

    def ranks_per_token(self, slots: Slots) -> float:
        """Of at most 4096 tokens, evenly spread."""
        routes = self.record.routes[:: math.ceil(len(self.record.routes) / 4096)]
        total = 0
        for rank, _, _, ids in routes:
            for layer in self.layers:
                total += len({self.target(slots, layer, rank, e) for e in ids[layer] if e >= 0})
        return total / (len(routes) * len(self.layers))


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _blocks(num: int) -> list[list[int]]:
    """1000 draws of moving blocks of ceil(cube root of the number) neighbours."""
    length = _block_length(num)
    firsts = np.random.default_rng(0).integers(num - length + 1, size=(1000, -(-num // length)))
    return [[first + i for first in row for i in range(length)][:num] for row in firsts.tolist()]


def _block_length(num: int) -> int:
    return next(b for b in range(1, num + 1) if b**3 >= num)


def _bounds(draws: list[float], units: float, confidence: float) -> tuple[float, float]:
    """Quantiles of draws where a normal distribution is as wide as Student's t of so many units, its variance by n - 1.

    `student_t` has a test of its own.
    """
    wide = math.sqrt(units / (units - 1)) * student_t((1 + confidence) / 2, units - 1)
    share = float(stats.norm.cdf(-wide))
    return _quantile(draws, share), _quantile(draws, 1 - share)


def _quantile(values: list[float], share: float) -> float:
    """Linear between the nearest two."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])
