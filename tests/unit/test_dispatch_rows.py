"""The pure bookkeeping of the dispatchers, against loops."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch

from moe_runtime.dispatch.rows import plan_incoming, plan_outgoing, starts, sum_in_k_order


def random_slots(draw: random.Random, T: int, K: int, num_slots: int) -> np.ndarray:
    """(T, K) int64 from -1 to num_slots - 1; a token may name a slot twice."""
    rows = [[draw.randrange(-1, num_slots) for _ in range(K)] for _ in range(T)]
    return np.array(rows, dtype=np.int64).reshape(T, K)


@pytest.mark.parametrize(
    ("T", "K", "N", "p"), [(0, 2, 3, 2), (1, 1, 1, 1), (17, 3, 4, 2), (40, 4, 2, 5), (9, 2, 7, 1)]
)
def test_outgoing(T: int, K: int, N: int, p: int, seed: int) -> None:
    slots = random_slots(random.Random(seed), T, K, N * p)
    outgoing = plan_outgoing(slots, N, p)
    rows, pairs, num_rows, num_pairs = [], {}, [], []
    for rank in range(N):
        before, pairs_before = len(rows), len(pairs)
        for token in range(T):
            local = [s - rank * p if s >= 0 and s // p == rank else -1 for s in slots[token].tolist()]
            if any(s >= 0 for s in local):
                rows.append((token, local))
            for k, s in enumerate(local):
                if s >= 0:
                    pairs[token, k] = len(pairs)
        num_rows.append(len(rows) - before)
        num_pairs.append(len(pairs) - pairs_before)
    assert outgoing.token_M.tolist() == [token for token, _ in rows]
    assert outgoing.slot_MK.tolist() == [local for _, local in rows]
    assert outgoing.slot_MK.dtype == np.int32
    assert outgoing.rows_N == num_rows
    assert outgoing.pairs_N == num_pairs
    assert outgoing.num_pairs == len(pairs)
    expected = [[pairs.get((t, k), -1) for k in range(K)] for t in range(T)]
    assert outgoing.position_TK.tolist() == expected
    assert outgoing.position_TK.shape == (T, K)


@pytest.mark.parametrize(
    ("rows_N", "K", "p"), [([0], 1, 1), ([0, 0, 3], 2, 4), ([5, 0, 8, 1], 3, 2), ([20, 11], 4, 6)]
)
def test_incoming(rows_N: list[int], K: int, p: int, seed: int) -> None:
    R = sum(rows_N)
    slots = random_slots(random.Random(seed), R, K, p).astype(np.int32)
    incoming = plan_incoming(slots, rows_N, p)
    arrival = [(int(slots[r, k]), r, k) for r in range(R) for k in range(K) if slots[r, k] >= 0]
    computed = sorted(arrival)
    assert incoming.row_index_S.tolist() == [r for _, r, _ in computed]
    assert incoming.rows_p.tolist() == [sum(s == slot for s, _, _ in arrival) for slot in range(p)]
    assert [computed[i] for i in incoming.return_S.tolist()] == arrival
    ends = starts(rows_N)
    assert incoming.pairs_N == [
        sum(begin <= r < end for _, r, _ in arrival) for begin, end in itertools.pairwise(ends)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("T", "K", "D"), [(0, 2, 5), (1, 1, 1), (13, 4, 7), (700, 2, 301)])
def test_weighted_sum_is_in_k_order_and_in_float32(
    T: int, K: int, D: int, dtype: torch.dtype, seed: int
) -> None:
    """The last size exceeds one slice of the computation."""
    returned = torch.randn(T * K, D).to(dtype)
    position = torch.randperm(T * K).view(T, K)
    weights = torch.randn(T, K)
    before = returned.clone()
    out = sum_in_k_order(returned, position, weights, all_present=True)
    total = torch.zeros(T, D)
    for k in range(K):
        total = total + weights[:, k : k + 1] * returned[position[:, k]].float()
    assert torch.equal(out, total.to(dtype))
    assert torch.equal(returned, before)
    # The order matters, else this test could not fail.
    if K == 4:
        backwards = sum_in_k_order(returned, position.flip(1), weights.flip(1), all_present=True)
        assert dtype != torch.float32 or not torch.equal(out, backwards)


def test_missing_pairs_add_nothing_even_beside_infinity() -> None:
    returned = torch.tensor([[float("inf"), 1.0], [2.0, 3.0]])
    position = torch.tensor([[-1, 1], [-1, -1], [1, -1]])
    weights = torch.tensor([[float("nan"), 2.0], [float("inf"), 5.0], [0.5, float("nan")]])
    out = sum_in_k_order(returned, position, weights, all_present=False)
    assert out.tolist() == [[4.0, 6.0], [0.0, 0.0], [1.0, 1.5]]


def test_nothing_returned_gives_zeros() -> None:
    out = sum_in_k_order(torch.empty(0, 3), torch.full((4, 2), -1), torch.ones(4, 2), all_present=False)
    assert torch.equal(out, torch.zeros(4, 3))
