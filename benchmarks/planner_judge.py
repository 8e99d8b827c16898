"""How good a placement is for given batches. Imbalance is the sum over layers and batches of the fullest rank's rows / of the mean.

Legend: L layers, N ranks, E experts, p slots per rank, t tokens of a rank, K experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.planner_routing import Trace, count
from moe_runtime.placement import deepseek
from moe_runtime.placement.split import Replicas, most_rows, split_rows

Array = npt.NDArray[Any]


@dataclass
class Imbalance:
    """Sums of the fullest rank's rows and of the mean over ranks."""

    fullest: float = 0.0
    mean: float = 0.0

    def add(self, fullest: float, mean: float) -> None:
        self.fullest += fullest
        self.mean += mean

    @property
    def value(self) -> float:
        return self.fullest / self.mean


def even_loads(slots_LNp: Array, load_LE: Array) -> Array:
    """float64 (L, N): rank loads if every slot of an expert, twice on a rank or not, bears an even share."""
    num_layers = len(slots_LNp)
    held = slots_LNp >= 0
    count_LE = np.zeros(load_LE.shape)
    layer, _, _ = np.nonzero(held)
    np.add.at(count_LE, (layer, slots_LNp[held]), 1.0)
    share_LE = load_LE / np.maximum(count_LE, 1)
    value = np.take_along_axis(share_LE, np.maximum(slots_LNp, 0).reshape(num_layers, -1), axis=1)
    return (value.reshape(slots_LNp.shape) * held).sum(axis=2)


def even_bound(load_LE: Array, num_slots: int, num_ranks: int) -> Array:
    """float64 (L,): no even split has a fullest rank below the mean, nor below the smallest possible largest share."""
    count_LE = np.minimum(deepseek.replicate(load_LE.astype(np.float64), num_slots)[2], num_ranks)
    return np.maximum((load_LE / count_LE).max(axis=1), load_LE.sum(axis=1) / num_ranks)


def without_twins(slots_LNp: Array) -> Array:
    """A second slot of an expert on the same rank becomes empty: it takes nothing off anyone."""
    slots = slots_LNp.copy()
    for p in range(1, slots.shape[2]):
        twin = (slots[:, :, :p] == slots[:, :, p : p + 1]).any(axis=2)
        slots[:, :, p] = np.where(twin, -1, slots[:, :, p])
    return slots


def judge(
    slots_LNp: Array, batches: list[Array], num_experts: int, after: Imbalance, even: Imbalance
) -> None:
    """Add batches (L, E) to the imbalance after the run-time split and with an even one."""
    num_ranks = slots_LNp.shape[1]
    replicas = [Replicas.of(slots_Np, num_experts) for slots_Np in without_twins(slots_LNp)]
    for batch_LE in batches:
        loads_LN = even_loads(slots_LNp, batch_LE)
        even.add(float(loads_LN.max(axis=1).sum()), float(loads_LN.mean(axis=1).sum()))
        for layer, load_E in enumerate(batch_LE):
            after.add(most_rows(load_E, replicas[layer]), float(load_E.sum()) / num_ranks)


def batches_of(
    trace: Trace, rng: np.random.Generator, start: int, stop: int, num_ranks: int, tokens: int, num: int
) -> list[Array]:
    """`num` batches (L, E) of `tokens` tokens a rank."""
    return [
        count(trace.topk_ids_tLK[trace.batch(rng, start, stop, num_ranks, tokens).ravel()], trace.num_experts)
        for _ in range(num)
    ]


def ranks_per_token(
    trace: Trace, slots_LNp: Array, rng: np.random.Generator, start: int, stop: int, tokens: int
) -> tuple[float, float]:
    """Mean number of different ranks a token goes to, tokens taking an expert's replicas in order; and the imbalance, one batch a layer."""
    num_ranks, width = slots_LNp.shape[1:]
    imbalance, visits = Imbalance(), []
    for layer, slots_Np in enumerate(without_twins(slots_LNp)):
        replicas = Replicas.of(slots_Np, trace.num_experts)
        ids_NtK = trace.topk_ids_tLK[trace.batch(rng, start, stop, num_ranks, tokens), layer].astype(np.int64)
        counts_NE = np.stack([np.bincount(ids.ravel(), minlength=trace.num_experts) for ids in ids_NtK])
        rows_NEC = split_rows("waterfill", counts_NE, replicas)
        rank_EC = replicas.slot_EC // width
        load_N = np.zeros(num_ranks)
        for source, ids_tK in enumerate(ids_NtK):
            order = np.argsort(ids_tK.ravel(), kind="stable")
            rank_tK = np.empty(ids_tK.size, dtype=np.int64)
            rank_tK[order] = np.repeat(rank_EC.ravel(), rows_NEC[source].ravel())
            load_N += np.bincount(rank_tK, minlength=num_ranks)
            visited = np.sort(rank_tK.reshape(ids_tK.shape), axis=1)
            visits.append(1 + (np.diff(visited, axis=1) != 0).sum(axis=1))
        imbalance.add(float(load_N.max()), float(load_N.mean()))
    return float(np.concatenate(visits).mean()), imbalance.value
