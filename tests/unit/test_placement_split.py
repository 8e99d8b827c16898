"""The run-time split against linear programming, and what each method promises. Legend: N ranks, E experts, C replicas of an expert."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from scipy.optimize import linprog

from moe_runtime.errors import ConfigError
from moe_runtime.placement.layout import contiguous, layer_placement
from moe_runtime.placement.split import SLACK, SPLITS, Replicas, rank_rows, split_rows

Array = npt.NDArray[Any]


def random_slots(rng: np.random.Generator, num_ranks: int, num_experts: int, width: int) -> Array:
    """Every expert somewhere, the remaining slots at random, some empty, no expert twice on a rank."""
    slots = np.full((num_ranks, width), -1)
    for expert in range(num_experts):
        free = np.flatnonzero((slots == -1).any(axis=1))
        rank = int(rng.choice(free))
        slots[rank, int(np.flatnonzero(slots[rank] == -1)[0])] = expert
    for rank in range(num_ranks):
        for place in np.flatnonzero(slots[rank] == -1):
            expert = int(rng.integers(num_experts))
            if expert not in slots[rank] and rng.random() < 0.9:
                slots[rank, place] = expert
    return slots


def optimum(load_E: Array, slots: Array) -> float:
    """The least possible load of the fullest rank with fractional shares, by scipy."""
    num_ranks = len(slots)
    pairs = [(int(e), r) for r in range(num_ranks) for e in slots[r] if e >= 0]
    cost = np.zeros(len(pairs) + 1)
    cost[-1] = 1.0
    upper = np.zeros((num_ranks, len(pairs) + 1))
    upper[:, -1] = -1.0
    equal = np.zeros((len(load_E), len(pairs) + 1))
    for i, (expert, rank) in enumerate(pairs):
        upper[rank, i] = 1.0
        equal[expert, i] = 1.0
    solved = linprog(cost, A_ub=upper, b_ub=np.zeros(num_ranks), A_eq=equal, b_eq=load_E)
    assert solved.status == 0
    return float(solved.fun)


@pytest.mark.parametrize(
    ("num_ranks", "num_experts", "width"), [(8, 64, 10), (5, 13, 4), (16, 48, 6), (3, 7, 7), (1, 4, 4)]
)
def test_waterfill_is_as_good_as_linear_programming(
    seed: int, num_ranks: int, num_experts: int, width: int
) -> None:
    rng = np.random.default_rng(seed)
    for scale in (0.5, 20.0, 1000.0):
        slots = random_slots(rng, num_ranks, num_experts, width)
        popular = rng.lognormal(0.0, 1.5, num_experts) * scale
        popular[rng.integers(num_experts)] *= 50
        counts_NE = rng.poisson(popular / num_ranks, (num_ranks, num_experts))
        counts_NE[rng.integers(num_ranks)] = 0
        replicas = Replicas.of(slots, num_experts)
        rows_NEC = split_rows("waterfill", counts_NE, replicas)
        fullest = rank_rows(rows_NEC, replicas).max()
        least = optimum(counts_NE.sum(axis=0), slots)
        # No whole split is better than the next whole number, and none is asked to be closer to the mean than SLACK.
        assert fullest <= max(math.ceil(least - 1e-6), least * (1 + SLACK))
        assert fullest >= least - 1e-6


@pytest.mark.parametrize("method", SPLITS)
def test_every_token_goes_to_one_replica(seed: int, method: str) -> None:
    rng = np.random.default_rng(seed)
    slots = random_slots(rng, 6, 21, 5)
    replicas = Replicas.of(slots, 21)
    counts_NE = rng.integers(0, 9, (6, 21))
    rows_NEC = split_rows(method, counts_NE, replicas, ranks_per_node=3, seed=seed)
    assert (rows_NEC >= 0).all()
    assert (rows_NEC.sum(axis=2) == counts_NE).all()
    assert not rows_NEC[:, replicas.slot_EC < 0].any()
    assert (split_rows(method, counts_NE.copy(), replicas, ranks_per_node=3, seed=seed) == rows_NEC).all()
    flat = slots.ravel()
    for expert in range(21):
        assert [int(flat[s]) for s in replicas.slot_EC[expert] if s >= 0] == [expert] * (flat == expert).sum()
    assert not split_rows(method, np.zeros_like(counts_NE), replicas).any()


def test_static_is_what_the_dispatch_does_today(seed: int) -> None:
    rng = np.random.default_rng(seed)
    placement = contiguous(1, 10, 4, num_redundant=6)
    replicas = Replicas.of(np.array(placement.slots[0]), 10)
    counts_NE = rng.integers(1, 5, (4, 10))
    rows_NEC = split_rows("static", counts_NE, replicas)
    for rank in range(4):
        used = layer_placement(placement, 0, rank).expert_to_slot_E.tolist()
        for expert in range(10):
            (chosen,) = np.flatnonzero(rows_NEC[rank, expert])
            assert replicas.slot_EC[expert, chosen] == used[expert]


def test_one_replica_activates_as_few_experts_on_the_fullest_rank_as_can_be(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(5):
        slots = random_slots(rng, 5, 17, 5)
        replicas = Replicas.of(slots, 17)
        counts_NE = rng.poisson(0.15, (5, 17))
        rows_NEC = split_rows("one_replica", counts_NE, replicas)
        per_replica_EC = rows_NEC.sum(axis=0)
        assert ((per_replica_EC > 0).sum(axis=1) == (counts_NE.sum(axis=0) > 0)).all()
        active_N = rank_rows((per_replica_EC > 0)[None], replicas)
        assert active_N.max() == math.ceil(optimum((counts_NE.sum(axis=0) > 0).astype(float), slots) - 1e-6)


def test_one_replica_also_levels_rows(seed: int) -> None:
    """Beside every choice there is: never more experts on the fullest rank than the least, and rows near the least with so few."""
    rng = np.random.default_rng(seed)
    found, best = 0, 0
    for _ in range(20):
        slots = random_slots(rng, 4, 9, 4)
        replicas = Replicas.of(slots, 9)
        counts_NE = rng.poisson(rng.lognormal(0.0, 1.0, 9), (4, 9))
        load_E = counts_NE.sum(axis=0)
        per_replica_EC = split_rows("one_replica", counts_NE, replicas).sum(axis=0)
        active = int(rank_rows((per_replica_EC > 0)[None], replicas).max())
        rows = int(rank_rows(per_replica_EC[None], replicas).max())
        width = slots.shape[1]
        choices = []
        for choice in product(*([s // width for s in row if s >= 0] for row in replicas.slot_EC)):
            rows_N = np.bincount(choice, weights=load_E, minlength=4)
            active_N = np.bincount(choice, weights=load_E > 0, minlength=4)
            choices.append((int(active_N.max()), int(rows_N.max())))
        least = min(choices)
        assert active == least[0]
        assert rows >= least[1]
        found, best = found + rows, best + least[1]
    assert found <= 1.1 * best


def test_rows_leave_home_only_as_balance_asks() -> None:
    # Experts 0 and 1 live on ranks 0 and 1 (lowest slots), each with a spare on the other rank.
    slots = np.array([[0, 2, 1], [1, 3, 0], [4, 5, -1]])
    replicas = Replicas.of(slots, 6)
    counts_NE = np.zeros((3, 6), dtype=np.int64)
    counts_NE[2] = [40, 20, 0, 0, 30, 0]  # all tokens on rank 2, which has neither
    assert split_rows("waterfill", counts_NE, replicas)[2, :2].tolist() == [[30, 10], [0, 20]]
    counts_NE[2, 1] = 40
    assert split_rows("waterfill", counts_NE, replicas)[2, :2].tolist() == [[40, 0], [0, 40]]


def test_random_draws_near_even_shares_and_depends_on_the_seed_only() -> None:
    replicas = Replicas.of(np.array([[0, 1], [0, 2], [0, -1]]), 3)
    counts_NE = np.array([[3000, 5, 5], [0, 0, 0], [3000, 5, 5]])
    rows_NEC = split_rows("random", counts_NE, replicas, seed=3)
    assert (np.abs(rows_NEC[:, 0].sum(axis=0) - 2000) < 250).all()
    assert (rows_NEC != split_rows("random", counts_NE, replicas, seed=4)).any()


def test_a_source_uses_its_own_replica_then_its_nodes() -> None:
    # Expert 0 on every rank, the other experts carry nothing: each rank can keep its own tokens.
    slots = np.array([[0, 1], [0, 2], [0, 3], [0, 4]])
    replicas = Replicas.of(slots, 5)
    counts_NE = np.zeros((4, 5), dtype=np.int64)
    counts_NE[:, 0] = 10
    assert (split_rows("waterfill", counts_NE, replicas)[:, 0] == 10 * np.eye(4)).all()
    # Rank 0 has all tokens of two experts shared with rank 1 (its node) and rank 2 (another): they split evenly over all holders.
    counts_NE[:, 0] = [20, 0, 20, 0]
    rows = split_rows("waterfill", counts_NE, replicas, ranks_per_node=2)[:, 0]
    assert rows.tolist() == [[10, 10, 0, 0], [0] * 4, [0, 0, 10, 10], [0] * 4]


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ([[0, 1], [1, -1]], "expert 2 has no slot"),
        ([[0, 0], [1, 2]], "rank 0 holds expert 0 twice"),
        ([[0, 3], [1, 2]], "a slot holds expert 3; experts are 0 to 2"),
    ],
)
def test_bad_placements_are_named(slots: list[list[int]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Replicas.of(np.array(slots), 3)


def test_unknown_method() -> None:
    with pytest.raises(ConfigError, match="choose from static, random, waterfill, one_replica"):
        split_rows("best", np.zeros((1, 1), dtype=np.int64), Replicas.of(np.array([[0]]), 1))
