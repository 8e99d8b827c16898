"""What a placement does with recorded windows, step by step, and where its time goes.

A step's modelled time is the sum of an even part and of losses:

    time = even + packing + drift + noise + padding + incast        (microseconds, summed over layers)

* even: the mean rank's computing without tile padding, traffic as if all pairs of ranks exchanged equally many rows, and telling counts
  if the split asks for them;
* imbalance: fullest rank - mean rank, of computing without tile padding. It is `packing` as far as it is there already for the mean
  load that the plan was made from, `drift` for what the mean load of the judged windows adds, `noise` for what single steps add;
* padding: what whole tiles add to the fullest rank; incast: what uneven traffic adds to the slowest rank.

Each of drift and noise can be negative; the sum is exact.

Legend: W windows, S steps, L MoE layers, N ranks, E experts, p slots per rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from moe_runtime.core import ExpertPlacement
from moe_runtime.placement.cost import Cost
from moe_runtime.placement.router import Router
from moe_runtime.placement.stored import Array
from moe_runtime.placement.traffic import Traffic

LOSSES = ("packing", "drift", "noise", "padding", "incast")


@dataclass(frozen=True)
class Judged:
    """Means over the steps drawn from the judged windows, every window weighing the same."""

    step_us_W: Array
    """float64: mean modelled time of the steps drawn from the window."""
    even_us: float
    losses_us: dict[str, float]
    """By name (LOSSES); with even_us they add up to the mean of step_us_W."""
    bytes_NN: Array
    """float64 per step: rows and their way back, from rank to rank."""
    wait_NN: Array
    """float64 microseconds per step: how long rank n (first axis) waits for rank m because m computes longest in a layer."""
    balancedness: float
    """Sum over steps and layers of the mean rank's rows, over that of the fullest rank's."""


@dataclass(frozen=True)
class _Step:
    """What is looked at in one step."""

    parts_4: Array
    """Even, imbalance, padding, incast."""
    bytes_NN: Array
    wait_NN: Array
    rows_LN: Array


class Judge:
    """Judges one placement under a cost model and a split."""

    def __init__(self, placement: ExpertPlacement, cost: Cost, split: str) -> None:
        self.router = Router.of(placement, split, cost.cluster.ranks_per_node)
        self.cost = cost
        self.untiled = replace(cost, hardware=replace(cost.hardware, tile_rows=1))

    def rows(self, traffic: Traffic, seed: int = 0) -> Array:
        """int64 (L, N, p): rows that each slot computes, of all its windows together."""
        counts_NLE, tokens_N = traffic.counts_WNLE.sum(axis=0), traffic.tokens_WN.sum(axis=0)
        return self.router.route(counts_NLE, tokens_N, seed, num_steps=int(traffic.steps_W.sum()))[0]

    def judge(self, past: Traffic, judged: Traffic, windows: Sequence[int], steps_per_window: int) -> Judged:
        """Draw steps from these of the judged windows (`draw_step`, seed (0, window, step)); `past` is what the plan was made from."""
        steps_of_windows = [
            [self._step(judged, w, i) for i in range(min(int(judged.steps_W[w]), steps_per_window))]
            for w in windows
        ]
        parts_W4 = np.stack([_mean([step.parts_4 for step in steps]) for steps in steps_of_windows])
        even, imbalance, padding, incast = parts_W4.mean(axis=0).tolist()
        packing = self._imbalance_of_mean(past, _pairs_per_step(judged, windows))
        drifted = self._imbalance_of_mean(judged.pick(windows), _pairs_per_step(judged, windows))
        losses = (packing, drifted - packing, imbalance - drifted, padding, incast)
        rows_SLN = np.stack([step.rows_LN for steps in steps_of_windows for step in steps])
        return Judged(
            step_us_W=parts_W4.sum(axis=1),
            even_us=even,
            losses_us=dict(zip(LOSSES, losses, strict=True)),
            bytes_NN=_mean([_mean([step.bytes_NN for step in steps]) for steps in steps_of_windows]),
            wait_NN=_mean([_mean([step.wait_NN for step in steps]) for steps in steps_of_windows]),
            balancedness=float(rows_SLN.mean(axis=2).sum() / max(rows_SLN.max(axis=2).sum(), 1)),
        )

    def _step(self, traffic: Traffic, window: int, i: int) -> _Step:
        counts_NLE, tokens_N, routes = traffic.step(window, i, 0)
        rows_LNp, sent_LNN = self.router.route(counts_NLE, tokens_N, window, routes)
        return _Step(
            parts_4=np.array(self._parts(rows_LNp, sent_LNN, self.router.asking_us(tokens_N, self.cost))),
            bytes_NN=self._bytes(sent_LNN),
            wait_NN=self._waits(rows_LNp),
            rows_LN=rows_LNp.sum(axis=2),
        )

    def _parts(self, rows_LNp: Array, sent_LNN: Array, asking_us: float) -> tuple[float, float, float, float]:
        """Even part, imbalance, padding and incast of a step."""
        tiled_LN, plain_LN = self.cost.compute_us(rows_LNp), self.untiled.compute_us(rows_LNp)
        mean_us = float(plain_LN.mean(axis=1).sum())
        fullest_us = float(plain_LN.max(axis=1).sum())
        padded_us = float(tiled_LN.max(axis=1).sum())
        travel_us, even_travel_us = self._travel(sent_LNN), self._travel(self._even_traffic(sent_LNN))
        return (
            mean_us + even_travel_us + asking_us,
            fullest_us - mean_us,
            padded_us - fullest_us,
            travel_us - even_travel_us,
        )

    def _travel(self, sent_LNN: Array) -> float:
        model = self.cost.model
        there = self.cost.travel_us(sent_LNN, model.row_bytes)
        back = self.cost.travel_us(np.swapaxes(sent_LNN, 1, 2), model.return_bytes)
        return float((there + back).sum())

    def _even_traffic(self, sent_LNN: Array) -> Array:
        """As many rows in the node and between nodes, but equally many from each rank to each."""
        same_NN = self.cost.cluster.same_node_NN
        other_NN = ~np.eye(len(same_NN), dtype=bool)
        even_LNN = np.zeros(sent_LNN.shape)
        for link_NN in (same_NN & other_NN, ~same_NN):
            if link_NN.any():
                even_LNN += (sent_LNN * link_NN).sum(axis=(1, 2), keepdims=True) * link_NN / link_NN.sum()
        return even_LNN

    def _bytes(self, sent_LNN: Array) -> Array:
        sent_NN = sent_LNN.sum(axis=0) * ~np.eye(sent_LNN.shape[1], dtype=bool)
        return sent_NN * self.cost.model.row_bytes + sent_NN.T * self.cost.model.return_bytes

    def _waits(self, rows_LNp: Array) -> Array:
        tiled_LN = self.cost.compute_us(rows_LNp)
        wait_NN = np.zeros((tiled_LN.shape[1],) * 2)
        for us_N in tiled_LN:
            wait_NN[:, us_N.argmax()] += us_N.max() - us_N
        return wait_NN

    def _imbalance_of_mean(self, traffic: Traffic, pairs_L: Array) -> float:
        """Of the traffic's mean load, scaled to so many (token, k) pairs per step in each layer."""
        counts_NLE = traffic.counts_WNLE.sum(axis=0)
        scale_L = pairs_L / np.maximum(counts_NLE.sum(axis=(0, 2)), 1)
        us_LN = self.untiled.compute_us(self.rows(traffic) * scale_L[:, None, None])
        return float((us_LN.max(axis=1) - us_LN.mean(axis=1)).sum())


def _mean(arrays: list[Array]) -> Array:
    mean: Array = np.mean(arrays, axis=0)
    return mean


def evenly_spread(num_windows: int, most: int) -> list[int]:
    """At most so many window numbers below `num_windows`, the first and the last among them."""
    return sorted(set(np.linspace(0, num_windows - 1, min(num_windows, most)).round().astype(int).tolist()))


def _pairs_per_step(traffic: Traffic, windows: Sequence[int]) -> Array:
    """float64 (L,): mean over windows, as steps are judged."""
    index = np.array(windows)
    pairs_WL = traffic.counts_WNLE[index].sum(axis=(1, 3)) / traffic.steps_W[index, None]
    pairs_L: Array = pairs_WL.mean(axis=0)
    return pairs_L
