"""EPLB's algorithm against its published example and against a plain loop written from its description."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from moe_runtime.errors import ConfigError
from moe_runtime.placement.cost import Cluster
from moe_runtime.placement.deepseek import rebalance_experts
from moe_runtime.placement.planner import plan

Array = npt.NDArray[Any]
EXAMPLE = np.array(
    [
        [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
        [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
    ]
)
"""Of the README of github.com/deepseek-ai/EPLB, with its result for 16 slots, 4 groups, 2 nodes, 8 GPUs."""
RESULT = [
    [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
    [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
]


def test_published_example() -> None:
    arrays = rebalance_experts(EXAMPLE, 16, 4, 2, 8)
    assert arrays.slot_to_expert_LS.tolist() == RESULT
    table = arrays.expert_to_slots()
    for layer in range(2):
        for expert in range(12):
            slots = [s for s in table[layer, expert].tolist() if s >= 0]
            assert len(slots) == arrays.num_replicas_LE[layer, expert]
            assert sorted(slots) == [s for s in range(16) if RESULT[layer][s] == expert]
    result = plan(EXAMPLE, Cluster(2, 4), num_slots=16, algorithm="deepseek", num_groups=4)
    assert [[e for rank in layer for e in rank] for layer in result.placement.slots] == RESULT


def packed(loads: list[float], num_packs: int) -> list[int]:
    """Pack of each item; ties to the lower index."""
    room, weight = [len(loads) // num_packs] * num_packs, [0.0] * num_packs
    pack = [0] * len(loads)
    for item in sorted(range(len(loads)), key=lambda i: -loads[i]) if room[0] > 1 else []:
        pack[item] = min((p for p in range(num_packs) if room[p]), key=lambda p: weight[p])
        room[pack[item]] -= 1
        weight[pack[item]] += loads[item]
    return pack if room[0] != 1 or len(loads) > num_packs else list(range(num_packs))


def plain_global(load: list[float], num_slots: int, num_ranks: int) -> list[list[int]]:
    """Experts on each rank, sorted."""
    count = [1] * len(load)
    for _ in range(num_slots - len(load)):
        best = max(range(len(load)), key=lambda e: (load[e] / count[e], -e))
        count[best] += 1
    experts = [e for e in range(len(load)) for _ in range(count[e])]
    pack = packed([load[e] / count[e] for e in experts], num_ranks)
    return [sorted(e for e, p in zip(experts, pack, strict=True) if p == rank) for rank in range(num_ranks)]


@pytest.mark.parametrize(("num_experts", "num_slots", "num_ranks"), [(12, 16, 4), (24, 30, 5), (9, 27, 3)])
def test_global_form_is_the_plain_loop(seed: int, num_experts: int, num_slots: int, num_ranks: int) -> None:
    # Multiples of 5040 keep most shares whole, so that float32 and Python's float agree.
    load = np.random.default_rng(seed).permutation(np.arange(1, 200))[:num_experts] * 5040.0
    slots = (
        rebalance_experts(load[None], num_slots, 1, 1, num_ranks).slot_to_expert_LS[0].reshape(num_ranks, -1)
    )
    got = [sorted(rank) for rank in slots.tolist()]
    wanted = plain_global(load.tolist(), num_slots, num_ranks)
    share = {e: load[e] / sum(r.count(e) for r in wanted) for e in range(num_experts)}
    assert sorted(e for rank in got for e in rank) == sorted(e for rank in wanted for e in rank)
    assert [sum(share[e] for e in r) for r in got] == pytest.approx(
        [sum(share[e] for e in r) for r in wanted]
    )


def test_twins_become_empty_slots_and_are_told() -> None:
    load = np.array([[100.0, 1, 1, 1]])
    result = plan(load, Cluster.single(2), num_slots=8, algorithm="deepseek")
    assert "twice on one rank" in result.notes[0]
    for rank in result.placement.slots[0]:
        held = [e for e in rank if e >= 0]
        assert len(held) == len(set(held))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((16, 5, 5, 8), "experts .12. to be a multiple of the number of groups .5."),
        ((16, 4, 4, 6), "ranks .6. to be a multiple of the number of nodes .4."),
        ((17, 1, 1, 8), "slots .17. to be a multiple of the number of ranks .8."),
        ((8, 1, 1, 8), "8 slots cannot hold 12 experts; at least 12"),
    ],
)
def test_sizes_that_do_not_divide(sizes: tuple[int, int, int, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rebalance_experts(EXAMPLE, *sizes)
