"""A report's numbers once more, from the raw arrays with plain loops, by the definitions of docs/placement-report.md. Static split only.

Nothing of moe_runtime.placement.report* is used here.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from moe_runtime.placement.cost import Cluster, Hardware
from moe_runtime.placement.record import LoadRecord

Slots = list[list[list[int]]]


class Plain:
    def __init__(
        self, record: LoadRecord, hardware: Hardware, cluster: Cluster, windows: list[int], steps: int
    ) -> None:
        """windows: those judged; steps: most drawn from each."""
        self.record, self.meta, self.hardware, self.cluster = record, record.meta, hardware, cluster
        self.windows, self.steps = windows, steps
        self.half = len(record.num_steps_W) // 2
        self.ranks = range(record.meta.num_ranks)
        self.layers = range(record.meta.num_layers)

    def count(self, w: int) -> tuple[np.ndarray, np.ndarray]:
        """Pairs [rank][layer][expert] and tokens [rank] of a window, phases together."""
        return self.record.counts_WPNLE[w].sum(axis=0), self.record.tokens_WPN[w].sum(axis=0)

    def draw(self, w: int, i: int) -> tuple[np.ndarray, np.ndarray]:
        counts, tokens = self.count(w)
        num = int(self.record.num_steps_W[w])
        if num == 1:
            return counts, tokens
        rng = np.random.default_rng((0, w - self.half, i))
        return rng.binomial(counts, 1 / num), rng.binomial(tokens, 1 / num)

    def target(self, slots: Slots, layer: int, source: int, expert: int) -> int:
        """The rank that a source's tokens for an expert go to."""
        where = [n for n in self.ranks if expert in slots[layer][n]]
        return source if source in where else where[source % len(where)]

    def rows(self, slots: Slots, counts: np.ndarray) -> list[list[dict[int, float]]]:
        """[layer][rank] -> {expert: rows}."""
        rows: list[list[dict[int, float]]] = [[{} for _ in self.ranks] for _ in self.layers]
        for layer in self.layers:
            for source in self.ranks:
                for expert, pairs in enumerate(counts[source][layer].tolist()):
                    of_rank = rows[layer][self.target(slots, layer, source, expert)]
                    of_rank[expert] = of_rank.get(expert, 0) + pairs
        return rows

    def sent(self, slots: Slots, counts: np.ndarray, tokens: np.ndarray, layer: int) -> np.ndarray:
        """Token rows from rank to rank, each token once."""
        sent = np.zeros((len(self.ranks),) * 2)
        for a in self.ranks:
            for b in self.ranks:
                missed = 1.0
                for expert, pairs in enumerate(counts[a][layer].tolist()):
                    if self.target(slots, layer, a, expert) == b:
                        missed *= 1 - min(pairs / max(int(tokens[a]), 1), 1.0)
                sent[a, b] = (1 - missed) * tokens[a]
        return sent

    def compute_us(self, rows: dict[int, float], tile: int) -> float:
        padded = sum(math.ceil(r / tile) * tile for r in rows.values())
        multiply = (
            padded * 6 * self.meta.hidden_size * self.meta.intermediate_size / self.hardware.matmul_flops
        )
        weights = sum(r > 0 for r in rows.values()) * self.meta.expert_bytes
        moved = sum(rows.values()) * (self.meta.row_bytes + self.meta.return_bytes)
        both = multiply, (weights + moved) / self.hardware.memory_bytes_s
        return (max(both) if self.hardware.overlap else sum(both)) * 1e6

    def node(self, rank: int) -> int:
        return rank // self.cluster.ranks_per_node

    def travel_us(self, sent: np.ndarray, size: float) -> float:
        slowest = 0.0
        for near, rate in ((True, self.hardware.link_bytes_s), (False, self.hardware.internode_bytes_s)):
            link = [
                (a, b)
                for a in self.ranks
                for b in self.ranks
                if a != b and (self.node(a) == self.node(b)) == near
            ]
            for rank in self.ranks:
                slowest = max(slowest, sum(sent[p] for p in link if p[0] == rank) / rate)
                slowest = max(slowest, sum(sent[p] for p in link if p[1] == rank) / rate)
        return slowest * size * 1e6 + (self.hardware.latency_us if len(self.ranks) > 1 else 0)

    def even(self, sent: np.ndarray) -> np.ndarray:
        result = np.zeros(sent.shape)
        for near in (True, False):
            link = [
                (a, b)
                for a in self.ranks
                for b in self.ranks
                if a != b and (self.node(a) == self.node(b)) == near
            ]
            for pair in link:
                result[pair] = sum(sent[p] for p in link) / len(link)
        return result

    def step(self, slots: Slots, counts: np.ndarray, tokens: np.ndarray) -> dict[str, Any]:
        num = len(self.ranks)
        got: dict[str, Any] = {
            "even": 0.0,
            "imbalance": 0.0,
            "padding": 0.0,
            "incast": 0.0,
            "mean": 0.0,
            "fullest": 0.0,
        }
        got["bytes"], got["wait"] = np.zeros((num, num)), np.zeros((num, num))
        rows = self.rows(slots, counts)
        for layer in self.layers:
            tiled = [self.compute_us(rows[layer][n], self.hardware.tile_rows) for n in self.ranks]
            plain = [self.compute_us(rows[layer][n], 1) for n in self.ranks]
            sent = self.sent(slots, counts, tokens, layer)
            there, back = self.meta.row_bytes, self.meta.return_bytes
            travel = self.travel_us(sent, there) + self.travel_us(sent.T, back)
            level = self.travel_us(self.even(sent), there) + self.travel_us(self.even(sent).T, back)
            got["even"] += sum(plain) / num + level
            got["imbalance"] += max(plain) - sum(plain) / num
            got["padding"] += max(tiled) - max(plain)
            got["incast"] += travel - level
            slow = tiled.index(max(tiled))
            for a in self.ranks:
                got["wait"][a, slow] += tiled[slow] - tiled[a]
                for b in self.ranks:
                    if a != b:
                        got["bytes"][a, b] += sent[a, b] * there + sent[b, a] * back
            totals = [sum(rows[layer][n].values()) for n in self.ranks]
            got["mean"] += sum(totals) / num
            got["fullest"] += max(totals)
        got["total"] = got["even"] + got["imbalance"] + got["padding"] + got["incast"]
        return got

    def judge(self, slots: Slots) -> dict[str, Any]:
        """Means over steps, then over windows; `times` by window."""
        by_window = [
            [
                self.step(slots, *self.draw(w, i))
                for i in range(min(int(self.record.num_steps_W[w]), self.steps))
            ]
            for w in self.windows
        ]

        def mean(key: str) -> Any:
            return sum(sum(s[key] for s in steps) / len(steps) for steps in by_window) / len(by_window)

        every = [s for steps in by_window for s in steps]
        past = self.mean_imbalance(slots, list(range(self.half)))
        now = self.mean_imbalance(slots, self.windows)
        return {
            "times": [sum(s["total"] for s in steps) / len(steps) for steps in by_window],
            "even_us": mean("even"), "packing": past, "drift": now - past, "noise": mean("imbalance") - now,
            "padding": mean("padding"), "incast": mean("incast"), "total_us": mean("total"), "bytes": mean("bytes"),
            "wait": mean("wait"), "balancedness": sum(s["mean"] for s in every) / sum(s["fullest"] for s in every),
        }  # fmt: skip

    def mean_imbalance(self, slots: Slots, windows: list[int]) -> float:
        """Of the windows' mean load, scaled to the pairs of a judged step."""
        counts = sum(self.count(w)[0] for w in windows)
        rows = self.rows(slots, np.asarray(counts))
        total = 0.0
        for layer in self.layers:
            wanted = sum(
                self.count(w)[0][:, layer].sum() / self.record.num_steps_W[w] for w in self.windows
            ) / len(self.windows)
            scale = wanted / np.asarray(counts)[:, layer].sum()
            times = [
                self.compute_us({e: r * scale for e, r in rows[layer][n].items()}, 1) for n in self.ranks
            ]
            total += max(times) - sum(times) / len(times)
        return total

    def moves(self, before: Slots, after: Slots) -> tuple[int, np.ndarray]:
        """Replicas to copy, and bytes from rank to rank."""
        moved, bytes_, sent = 0, np.zeros((len(self.ranks),) * 2), [0] * len(self.ranks)
        for layer in self.layers:
            for rank in self.ranks:
                for expert in sorted(set(after[layer][rank]) - set(before[layer][rank]) - {-1}):
                    owners = [n for n in self.ranks if expert in before[layer][n]]
                    near = [n for n in owners if self.node(n) == self.node(rank)] or owners
                    source = min(near, key=lambda n: (sent[n], n))
                    sent[source] += 1
                    bytes_[source, rank] += self.meta.expert_bytes
                    moved += 1
        return moved, bytes_

    def gain_interval(self, before: list[float], after: list[float]) -> tuple[float, float, float]:
        """Moving blocks of ceil(cube root of W) windows; 5 and 95 % of 1000 draws."""
        num = len(before)
        length = next(b for b in range(1, num + 1) if b**3 >= num)
        firsts = np.random.default_rng(0).integers(num - length + 1, size=(1000, -(-num // length)))
        gains = []
        for row in firsts.tolist():
            chosen = [first + i for first in row for i in range(length)][:num]
            gains.append(1 - sum(after[c] for c in chosen) / sum(before[c] for c in chosen))
        return 1 - sum(after) / sum(before), _quantile(gains, 0.05), _quantile(gains, 0.95)

    def mean_interval(self, times: list[float]) -> tuple[float, float, float]:
        """Plain bootstrap."""
        chosen = np.random.default_rng(0).integers(len(times), size=(1000, len(times))).tolist()
        means = [sum(times[c] for c in row) / len(row) for row in chosen]
        return sum(times) / len(times), _quantile(means, 0.05), _quantile(means, 0.95)

    def similarity(self) -> list[float]:
        """By lag from 1."""
        deviations = []
        for w in range(len(self.record.num_steps_W)):
            counts = self.count(w)[0].sum(axis=0)
            deviations.append([x / (sum(row) / len(row)) - 1 for row in counts.tolist() for x in row])
        result = []
        for lag in range(1, len(deviations) // 2 + 1):
            pairs = list(zip(deviations, deviations[lag:], strict=False))
            result.append(
                sum(sum(a * b for a, b in zip(x, y, strict=True)) / len(x) for x, y in pairs) / len(pairs)
            )
        return result

    def ranks_per_token(self, slots: Slots) -> float:
        routes, total = self.record.routes, 0
        for t in range(len(routes.rank_t)):
            for layer in self.layers:
                total += len(
                    {
                        self.target(slots, layer, int(routes.rank_t[t]), e)
                        for e in routes.topk_ids_tLK[t, layer].tolist()
                        if e >= 0
                    }
                )
        return total / (len(routes.rank_t) * len(self.layers))


def _quantile(values: list[float], share: float) -> float:
    """Linear between the nearest two."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])
