"""Live load as rebalancing sees it, and a cost model that only rows matter to. Legend: W windows, L layers, E experts, P kinds."""

from __future__ import annotations

import numpy as np

from moe_runtime.placement.balancer import StepModel
from moe_runtime.placement.cost import Cluster, Cost, Hardware, ModelCost
from moe_runtime.placement.live_loads import LiveTraffic
from moe_runtime.placement.stored import Array

MODEL = ModelCost(hidden=1, intermediate=1, expert_bytes=1000, row_bytes=1, return_bytes=1, top_k=1)
ROWS = Hardware("rows", 6e6, 1e30, 1e30, 1e30, 0.0, 1)
"""6 D F = 6 operations: a row takes a microsecond, and nothing else takes any time."""


def rows_model(num_ranks: int, hardware: Hardware = ROWS, split: str = "static") -> StepModel:
    """Ranks on one node."""
    return StepModel(Cost(MODEL, hardware, Cluster.single(num_ranks)), split)


def decoded(loads_WLE: Array, num_ranks: int = 2) -> LiveTraffic:
    """Windows of one step of decoding each, all of it on rank 0: what is modelled are these very counts."""
    counts_WNLPE = np.zeros((len(loads_WLE), num_ranks, loads_WLE.shape[1], 2, loads_WLE.shape[2]), np.int64)
    counts_WNLPE[:, 0, :, 1] = loads_WLE
    return LiveTraffic(counts_WNLPE, np.array([[0, 1]] * len(loads_WLE)))
