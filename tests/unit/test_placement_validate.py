"""What is wrong with a placement is told by layer and slot."""

from __future__ import annotations

import random

import pytest

from moe_runtime.errors import ConfigError
from moe_runtime.placement.layout import layer_placement
from moe_runtime.placement.stored import Model, StoredPlacement
from moe_runtime.placement.validate import check_slots, to_placement
from tests.helpers.placements import random_placement

Slots = list[list[list[int]]]
MODEL = Model(num_experts=4, num_ranks=2, moe_layers=(0, 2), num_layers=3, checkpoint="a" * 64)
GOOD: Slots = [[[0, 1, 2], [3, 0, 1]], [[1, 0, -1], [2, 3, 1]]]


def frozen(slots: Slots) -> tuple[tuple[tuple[int, ...], ...], ...]:
    return tuple(tuple(tuple(rank) for rank in layer) for layer in slots)


def message(slots: Slots) -> str:
    with pytest.raises(ConfigError) as caught:
        check_slots(slots, MODEL, "FILE")
    return str(caught.value)


def test_good_ones_pass(seed: int) -> None:
    draw = random.Random(seed)
    check_slots(GOOD, MODEL, "FILE")
    for _ in range(20):
        num_experts, num_ranks = draw.randint(1, 9), draw.randint(1, 5)
        width = -(-num_experts // num_ranks) + draw.randint(0, 2)
        placement = random_placement(draw, 2, num_experts, num_ranks, width, empty=0.5)
        check_slots(placement.slots, Model.of_moe_layers(2, num_experts, num_ranks), "FILE")
        layer_placement(placement, 1, draw.randrange(num_ranks))


@pytest.mark.parametrize(
    ("layer", "ranks", "expected"),
    [
        (1, [[1, 0, 4], [2, 3, 1]], "MoE layer 1 (decoder layer 2), rank 0, slot 2: expert 4 is out of range; allowed are 0 to 3"),
        (0, [[0, 1, -2], [3, 0, 2]], "MoE layer 0, rank 0, slot 2: expert -2 is out of range"),
        (0, [[0, 1, 0], [3, 0, 1]], "MoE layer 0: expert 2 has no slot"),
        (0, [[0, 1, 2], [3, 0, 3]], "MoE layer 0, rank 1, slot 2: holds expert 3 again, which slot 0 has"),
        (1, [[1, 0, 2], [2, 3]], "MoE layer 1 (decoder layer 2), rank 1 has 2 slots but rank 0 has 3"),
        (1, [[1, 0], [2, 3]], "MoE layer 1 (decoder layer 2) has 2 slots per rank but MoE layer 0 has 3"),
        (1, [[1, 0, 2], [2, 3, 0], [0, 1, 2]], "MoE layer 1 (decoder layer 2) has 3 ranks; wanted 2"),
    ],
)  # fmt: skip
def test_problems_are_named(layer: int, ranks: list[list[int]], expected: str) -> None:
    slots = [ranks if i == layer else good for i, good in enumerate(GOOD)]
    text = message(slots)
    assert text.startswith("FILE: ")
    assert expected in text


def test_many_problems_are_cut_off() -> None:
    text = message([[[9] * 3] * 2] * 2)
    assert text.count("out of range") == 5
    assert text.endswith("; and more")


def test_every_single_change_of_an_expert_is_seen_or_harmless(seed: int) -> None:
    """Against the rules themselves, written down another way."""
    draw = random.Random(seed)
    model = Model.of_moe_layers(2, 4, 3)
    for _ in range(300):
        placement = random_placement(draw, 2, 4, 3, 2)
        slots = [[list(rank) for rank in layer] for layer in placement.slots]
        slots[draw.randrange(2)][draw.randrange(3)][draw.randrange(2)] = draw.randint(-2, 5)
        valid = all(
            {e for rank in layer for e in rank} - {-1} == set(range(4))
            and all(len({e for e in rank if e >= 0}) == sum(e >= 0 for e in rank) for rank in layer)
            for layer in slots
        )
        if valid:
            check_slots(slots, model, "FILE")
        else:
            with pytest.raises(ConfigError, match=r"MoE layer \d"):
                check_slots(slots, model, "FILE")


def test_what_the_file_was_made_for() -> None:
    stored = StoredPlacement(
        "moe_runtime", frozen(GOOD), ranks_known=True, num_experts=4, checkpoint="a" * 64
    )
    assert to_placement(stored, MODEL, "FILE").slots == frozen(GOOD)
    for changes, expected in [
        ({"checkpoint": "b" * 64}, "made for another checkpoint (bbbbbbbbbbbb...) than this one (aaaaaaaaaaaa...)"),
        ({"num_experts": 5}, "is for 5 experts, but the model has 4"),
        ({"slots": frozen(GOOD)[:1]}, "has 1 layers; wanted 2 (MoE layers) or all 3 decoder layers"),
        ({"layer_ids": (1, 2)}, "has layers 1-2; wanted 0, 2 (decoder layers with experts) or 0-1 (counting only those)"),
    ]:  # fmt: skip
        values = {"num_experts": 4, "checkpoint": "", "slots": frozen(GOOD)} | changes
        with pytest.raises(ConfigError) as caught:
            to_placement(StoredPlacement(format="moe_runtime", ranks_known=True, **values), MODEL, "FILE")  # type: ignore[arg-type]
        assert expected in str(caught.value)


def test_slots_that_cannot_be_shared() -> None:
    flat = tuple(((*range(4), 0),) for _ in range(2))
    with pytest.raises(
        ConfigError, match="MoE layer 0 has 5 slots, of which 2 ranks cannot have equally many"
    ):
        to_placement(StoredPlacement("vllm", flat, ranks_known=False), MODEL, "FILE")
