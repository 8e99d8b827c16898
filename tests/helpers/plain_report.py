"""A report's numbers once more, from a record's own files with plain loops, by the definitions of docs/placement-report.md.

Nothing of moe_runtime.placement is used here but the split, whose every result is checked first: `plain_split`.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.helpers.plain_patterns import Patterns, Slots
from tests.helpers.plain_split import Rows, by_counts, by_static

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moe_runtime.placement.cost import Cluster, Hardware

PHASES = {"prefill": [0], "decode": [1], "all": [0, 1]}


def read_raw(folder: Path) -> Any:
    """A record's arrays by the names of LoadRecord, from json and npz."""
    meta = json.loads((folder / "record.json").read_text())
    parts = [dict(np.load(folder / f"rank{rank}.npz")) for rank in range(meta["num_ranks"])]
    return SimpleNamespace(
        meta=SimpleNamespace(**meta), first_step_W=parts[0]["first_step_W"], num_steps_W=parts[0]["num_steps_W"],
        end_time_W=parts[0]["end_time_W"], placement_W=parts[0]["placement_W"], counts_WPNLE=np.stack([p["counts_WPLE"] for p in parts], axis=2),
        tokens_WPN=np.stack([p["tokens_WP"] for p in parts], axis=2), wait_us_WN=np.stack([p["wait_us_W"] for p in parts], axis=1),
        forward_us_WN=np.stack([p["forward_us_W"] for p in parts], axis=1),
        routes=[
            (rank, int(step), int(phase), ids.tolist())
            for rank, p in enumerate(parts)
            for step, phase, ids in zip(p["routes_step_t"], p["routes_phase_t"], p["routes_topk_ids_tLK"], strict=True)
        ],
    )  # fmt: skip


class Plain(Patterns):
    def __init__(
        self, record: Any, hardware: Hardware, cluster: Cluster, windows: list[int], steps: int, split: str, phase: str
    ) -> None:  # fmt: skip
        """record: of read_raw. windows: those judged; steps: most drawn from each. All windows have tokens of the phase."""
        self.record, self.meta, self.hardware, self.cluster = record, record.meta, hardware, cluster
        self.windows, self.steps, self.split, self.phases = windows, steps, split, PHASES[phase]
        self.half = len(record.num_steps_W) // 2
        self.ranks = range(record.meta.num_ranks)
        self.layers = range(record.meta.num_layers)
        self.methods: set[str] = set()
        """What the split came to somewhere."""
        self._placed: dict[Any, Rows] = {}

    def audit(self, version: int, before: Slots, after: Slots) -> tuple[float, float, float]:
        """Gain and interval on the windows under a placement of the record, numbered anew and all judged."""
        record = self.record
        under = np.flatnonzero(record.placement_W == version).tolist()
        kept = [
            route
            for route in record.routes
            if sum(first <= route[1] for first in record.first_step_W.tolist()) - 1 in under
        ]
        changes = {name: getattr(record, name)[under] for name in vars(record) if "_W" in name}
        part = SimpleNamespace(**{**vars(record), **changes, "routes": kept})
        plain = Plain(
            part, self.hardware, self.cluster, list(range(len(under))), self.steps, self.split, "all"
        )
        plain.half = 0
        return plain.gain_interval(plain.times(before), plain.times(after))

    def count(self, w: int) -> tuple[np.ndarray, np.ndarray]:
        """Pairs [rank][layer][expert] and tokens [rank] of a window, the phases that count together."""
        record = self.record
        return record.counts_WPNLE[w][self.phases].sum(axis=0), record.tokens_WPN[w][self.phases].sum(axis=0)

    def together(self, windows: Sequence[int]) -> tuple[np.ndarray, np.ndarray, int]:
        """Pairs, tokens and steps of several windows."""
        counted = [self.count(w) for w in windows]
        return (
            np.sum([counts for counts, _ in counted], axis=0),
            np.sum([tokens for _, tokens in counted], axis=0),
            sum(int(self.record.num_steps_W[w]) for w in windows),
        )

    def draw(self, w: int, i: int) -> tuple[np.ndarray, np.ndarray]:
        counts, tokens = self.count(w)
        num = int(self.record.num_steps_W[w])
        if num == 1:
            return counts, tokens
        rng = np.random.default_rng((0, w - self.half, i))
        return rng.binomial(counts, 1 / num), rng.binomial(tokens, 1 / num)

    def routes_of(self, w: int) -> list[list[list[list[int]]]]:
        """By source rank: [token][layer] -> experts, of those with at least 32 tokens or all of them; others have none."""
        firsts = self.record.first_step_W.tolist()
        end = firsts[w + 1] if w + 1 < len(firsts) else math.inf
        found: list[list[Any]] = [[] for _ in self.ranks]
        for rank, step, phase, ids in self.record.routes:
            if firsts[w] <= step < end and phase in self.phases:
                found[rank].append(ids)
        tokens = self.count(w)[1].tolist()
        return [f if len(f) >= min(32, t) else [] for f, t in zip(found, tokens, strict=True)]

    def weights(self, w: int, i: int, tokens: np.ndarray) -> list[list[float]]:
        """By source and kept token: how many of the step's tokens it stands for."""
        routes, num = self.routes_of(w), int(self.record.num_steps_W[w])
        if num == 1:
            return [[t / max(len(r), 1)] * len(r) for r, t in zip(routes, tokens.tolist(), strict=True)]
        rng = np.random.default_rng((0, w - self.half, i, 1))
        return [
            rng.multinomial(t, [1 / len(r)] * len(r)).tolist() if r else []
            for r, t in zip(routes, tokens.tolist(), strict=True)
        ]

    def method(self, pairs: np.ndarray, tokens: np.ndarray, num_steps: int) -> str:
        """What the split comes to for a layer's pairs [rank][expert] in a step, the mean one if there are several."""
        if self.split == "auto" and max(tokens.tolist()) / num_steps < 64:
            return "static"
        if self.split not in ("auto", "dynamic"):
            return self.split
        active = sum(sum(row[e] for row in pairs.tolist()) > 0 for e in range(pairs.shape[1]))
        return "one_replica" if pairs.sum() / num_steps < 32 * active else "waterfill"

    def place(
        self, slots: Slots, layer: int, counts: np.ndarray, tokens: np.ndarray, num_steps: int = 1
    ) -> Rows:
        """[source][expert] -> {rank: rows}."""
        ours = counts[:, layer]
        method = self.method(ours, tokens, num_steps)
        self.methods.add(method)
        key = (method, json.dumps(slots[layer]), ours.tobytes())
        if key not in self._placed:
            if method == "static":
                self._placed[key] = by_static(slots[layer], ours)
            else:
                self._placed[key] = by_counts(method, slots[layer], ours, self.cluster.ranks_per_node)
        return self._placed[key]

    def rows(
        self, slots: Slots, counts: np.ndarray, tokens: np.ndarray, num_steps: int = 1
    ) -> list[list[dict[int, float]]]:
        """[layer][rank] -> {expert: rows}."""
        rows: list[list[dict[int, float]]] = [[{} for _ in self.ranks] for _ in self.layers]
        for layer in self.layers:
            for of_source in self.place(slots, layer, counts, tokens, num_steps):
                for expert, of_expert in enumerate(of_source):
                    for rank, pairs in of_expert.items():
                        of_rank = rows[layer][rank]
                        of_rank[expert] = of_rank.get(expert, 0) + pairs
        return rows

    def sent(
        self, slots: Slots, counts: np.ndarray, tokens: np.ndarray, layer: int, w: int, i: int
    ) -> np.ndarray:
        """Token rows from rank to rank, each token once."""
        placed, routes = self.place(slots, layer, counts, tokens), self.routes_of(w)
        weights = self.weights(w, i, tokens)
        sent = np.zeros((len(self.ranks),) * 2)
        for a in self.ranks:
            for b in self.ranks:
                if not routes[a]:
                    missed = 1.0
                    for of_expert in placed[a]:
                        missed *= 1 - min(of_expert.get(b, 0) / max(int(tokens[a]), 1), 1.0)
                    sent[a, b] = (1 - missed) * tokens[a]
                for ids, weight in zip(routes[a], weights[a], strict=True):
                    missed = 1.0
                    for expert in ids[layer]:
                        pairs = int(counts[a][layer][expert])
                        if pairs:
                            missed *= 1 - placed[a][expert].get(b, 0) / pairs
                        else:
                            missed *= self.target(slots, layer, a, expert) != b
                    sent[a, b] += weight * (1 - missed)
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

    def asking_us(self, slots: Slots, layer: int, tokens: np.ndarray) -> float:
        """Of telling counts, 4 bytes for each expert, where an expert has copies and the split asks."""
        held = [e for rank in slots[layer] for e in rank if e >= 0]
        asks = self.split not in ("static", "random", "auto") or (
            self.split == "auto" and max(tokens.tolist()) >= 64
        )
        if not asks or len(held) == len(set(held)):
            return 0.0
        num = len(self.ranks)
        told = np.full((num, num), float(len(set(held))))
        return self.travel_us(told, 4)

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

    def step(self, slots: Slots, w: int, i: int) -> dict[str, Any]:
        counts, tokens = self.draw(w, i)
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
        rows = self.rows(slots, counts, tokens)
        for layer in self.layers:
            tiled = [self.compute_us(rows[layer][n], self.hardware.tile_rows) for n in self.ranks]
            plain = [self.compute_us(rows[layer][n], 1) for n in self.ranks]
            sent = self.sent(slots, counts, tokens, layer, w, i)
            there, back = self.meta.row_bytes, self.meta.return_bytes
            travel = self.travel_us(sent, there) + self.travel_us(sent.T, back)
            level = self.travel_us(self.even(sent), there) + self.travel_us(self.even(sent).T, back)
            asking = self.asking_us(slots, layer, tokens)
            got["even"] += sum(plain) / num + level + asking
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

    def times(self, slots: Slots) -> list[float]:
        """By judged window: mean over its steps."""
        steps = [range(min(int(self.record.num_steps_W[w]), self.steps)) for w in self.windows]
        return [
            sum(self.step(slots, w, i)["total"] for i in drawn) / len(drawn)
            for w, drawn in zip(self.windows, steps, strict=True)
        ]

    def judge(self, slots: Slots) -> dict[str, Any]:
        """Means over steps, then over windows; `times` by window."""
        by_window = [
            [self.step(slots, w, i) for i in range(min(int(self.record.num_steps_W[w]), self.steps))]
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
        counts, _, _ = self.together(windows)
        rows = self.rows(slots, *self.together(windows))
        total = 0.0
        for layer in self.layers:
            wanted = sum(
                self.count(w)[0][:, layer].sum() / self.record.num_steps_W[w] for w in self.windows
            ) / len(self.windows)
            scale = wanted / counts[:, layer].sum()
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
