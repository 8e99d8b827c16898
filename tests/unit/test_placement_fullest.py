"""The fullest rank of many layers and windows at once, beside the run-time split of each batch."""

from __future__ import annotations

import numpy as np
import pytest

from moe_runtime.placement.fullest import fullest_rank
from moe_runtime.placement.slots import arrange
from moe_runtime.placement.split import Replicas, most_rows


def test_it_is_near_the_run_time_split_and_never_above(seed: int) -> None:
    """Random placements, unequal numbers of replicas in the layers, ranks that hold nothing; close to the split whatever the load."""
    rng = np.random.default_rng(seed)
    for _ in range(15):
        num_ranks, num_experts, num_layers = int(rng.integers(2, 13)), int(rng.integers(1, 40)), 3
        held = rng.random((num_layers, num_ranks, num_experts)) < rng.uniform(0.0, 0.3)
        home = rng.integers(num_ranks, size=(num_layers, num_experts))
        np.put_along_axis(held, home[:, None], True, axis=1)
        held[:, np.arange(num_ranks), np.arange(num_ranks) % num_experts] = True
        held = np.pad(held, ((0, 0), (0, int(rng.integers(2))), (0, 0)))  # a rank that holds nothing
        loads = np.rint(1000 * rng.lognormal(0, rng.uniform(0.1, 1.5), (4, num_layers, num_experts)))
        got = fullest_rank(held, loads)
        slots, _ = arrange(held)
        for layer in range(num_layers):
            replicas = Replicas.of(slots[layer], num_experts)
            exact = np.mean(
                [most_rows(w.astype(np.int64), replicas) / (w.sum() / num_ranks) for w in loads[:, layer]]
            )
            # Whole rows, and the split ends at most 0.2 % above what is possible.
            assert got[layer] <= exact * (1 + 1e-5)
            assert got[layer] >= exact * 0.96 - 0.003


def test_by_hand() -> None:
    # Ranks 0 and 1 share expert 0; 2 is alone with expert 2.
    held = np.array([[[1, 1, 0], [1, 0, 0], [0, 0, 1]]], dtype=bool)
    assert fullest_rank(held, np.array([[[6.0, 2.0, 1.0]]])) == pytest.approx([4 / 3])
    assert fullest_rank(held, np.array([[[2.0, 6.0, 1.0]]])) == pytest.approx([6 / 3])
    assert fullest_rank(held, np.array([[[0.0, 0.0, 9.0]]])) == pytest.approx([3.0])
    assert fullest_rank(held, np.zeros((1, 1, 3))) == pytest.approx([0.0])


def test_without_replicas_it_is_the_fullest_rank() -> None:
    held = np.eye(3, dtype=bool)[None]
    assert fullest_rank(held, np.array([[[1.0, 2.0, 6.0]]])) == pytest.approx([2.0])
