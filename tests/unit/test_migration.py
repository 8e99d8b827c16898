"""Experts as bytes: whatever a slot holds arrives bit for bit, and every damage shows."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest
import torch

from moe_runtime.experts.base import ExpertWeights
from moe_runtime.experts.migration import PIECE_BYTES, ReadSlot, SlotStore
from moe_runtime.quantization import FP8, int4_scheme

QUANTISED = {"fp8": FP8, "int8": torch.int8, "int4": torch.uint8}
KINDS = ("float32", "bfloat16", "float16", *QUANTISED)


def make_weights(kind: str, num_slots: int, hidden: int, inner: int, seed: int) -> ExpertWeights:
    """Every tensor field filled, with any bits: also those of NaN."""
    generator = torch.Generator().manual_seed(seed)

    def fill(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        size = torch.empty(shape, dtype=dtype).nbytes
        return torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8).view(dtype).view(shape)

    dtype = QUANTISED[kind] if kind in QUANTISED else getattr(torch, kind)
    other = torch.bfloat16 if kind in QUANTISED else dtype
    return ExpertWeights(
        gate_up_pFD=fill(num_slots, 2 * inner, hidden, dtype=dtype),
        down_pDF=fill(num_slots, hidden, inner, dtype=dtype),
        activation="silu",
        gate_up_bias_pF=fill(num_slots, 2 * inner, dtype=other),
        down_bias_pD=fill(num_slots, hidden, dtype=other),
        gate_up_scale=fill(num_slots, 2, 3, 1, dtype=torch.float32) if kind in QUANTISED else None,
        down_scale=fill(num_slots, 1, 3, dtype=torch.float32) if kind in QUANTISED else None,
    )


def test_int4_experts_move_with_scales_and_zero_points(seed: int) -> None:
    """Payload of half as many bytes, scales and zero points of a matrix in one tensor: what the moved expert stands for is the same."""
    source, target = (make_int4(3, 70, 40, seed + i) for i in range(2))

    def read(piece: ReadSlot, memory: memoryview) -> None:
        memory[:] = SlotStore.of([source]).answer(piece)

    SlotStore.of([target]).copy_into(0, 2, read, 1)
    assert not torch.equal(target.dequantize_gate_up(1), source.dequantize_gate_up(1))
    assert torch.equal(target.dequantize_gate_up(2), source.dequantize_gate_up(1))
    assert torch.equal(target.dequantize_down(2), source.dequantize_down(1))
    scheme = int4_scheme(32, zero_points=True)
    bytes_of = sum(rows * math.prod(scheme.payload_shape(1, width)) for rows, width in ((80, 70), (70, 40)))
    scales = sum(rows * 4 * scheme.scale_shape(1, width)[1] for rows, width in ((80, 70), (70, 40)))
    assert SlotStore.of([source]).largest_slot_bytes == bytes_of + scales


def make_int4(num_slots: int, hidden: int, inner: int, seed: int) -> ExpertWeights:
    generator = torch.Generator().manual_seed(seed)
    scheme = int4_scheme(32, zero_points=True)

    def matrix(*lead: int, shape: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
        payload = torch.randint(
            0, 256, (*lead, *scheme.payload_shape(*shape)), generator=generator, dtype=torch.uint8
        )
        return payload, torch.rand((*lead, *scheme.scale_shape(*shape)), generator=generator)

    gate_up, gate_up_scale = matrix(num_slots, 2, shape=(inner, hidden))
    down, down_scale = matrix(num_slots, shape=(hidden, inner))
    return ExpertWeights(
        gate_up.flatten(1, 2), down, "silu", scheme=scheme, gate_up_scale=gate_up_scale, down_scale=down_scale
    )


def tensors(weights: ExpertWeights) -> dict[str, torch.Tensor]:
    found = {f.name: getattr(weights, f.name) for f in dataclasses.fields(weights)}
    return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))


@pytest.mark.parametrize("kind", KINDS)
def test_a_slot_arrives_bit_for_bit_and_nothing_else_changes(kind: str, seed: int) -> None:
    draw = random.Random(seed)
    hidden, inner = draw.randint(1, 40), draw.randint(1, 40)
    source = make_weights(kind, 3, hidden, inner, seed)
    target = make_weights(kind, 5, hidden, inner, seed + 1)
    before = {name: value.clone() for name, value in tensors(target).items()}
    ours, theirs = SlotStore.of([target]), SlotStore.of([source])

    def read(piece: ReadSlot, memory: memoryview) -> None:
        memory[:] = theirs.answer(piece)

    ours.copy_into(0, 4, read, 1)
    assert ours.digest(0, 4) == theirs.digest(0, 1)
    assert ours.digest(0, 4) != theirs.digest(0, 2)
    for name, value in tensors(target).items():
        assert same_bits(value[4], tensors(source)[name][1]), name
        assert same_bits(value[:4], before[name][:4]), name
    assert ours.largest_slot_bytes == sum(value[0].nbytes for value in tensors(source).values())


def test_every_damaged_bit_shows_in_the_digest(seed: int) -> None:
    draw = random.Random(seed)
    weights = make_weights("fp8", 2, 9, 7, seed)
    store = SlotStore.of([weights])
    good = store.digest(0, 1)
    for name, value in tensors(weights).items():
        data = value[1].view(-1).view(torch.uint8)
        place, bit = draw.randrange(len(data)), 1 << draw.randrange(8)
        data[place] ^= bit
        assert store.digest(0, 1) != good, name
        data[place] ^= bit
    assert store.digest(0, 1) == good


def test_large_slots_come_in_pieces(seed: int) -> None:
    hidden, inner = 513, 700
    source, target = (make_weights("float32", 1, hidden, inner, seed + i) for i in range(2))
    pieces = []

    def read(piece: ReadSlot, memory: memoryview) -> None:
        pieces.append(len(memory))
        memory[:] = SlotStore.of([source]).answer(piece)

    SlotStore.of([target]).copy_into(0, 0, read, 0)
    assert max(pieces) == PIECE_BYTES
    assert sum(pieces) == SlotStore.of([source]).largest_slot_bytes
    assert same_bits(source.down_pDF, target.down_pDF)


def test_what_does_not_exist_is_refused() -> None:
    store = SlotStore.of([make_weights("float32", 2, 4, 4, 0)])
    for wrong in (
        ReadSlot(1, 0, 0, 0, 4),
        ReadSlot(0, 2, 0, 0, 4),
        ReadSlot(0, -1, 0, 0, 4),
        ReadSlot(0, 0, 9, 0, 4),
        ReadSlot(0, 0, 0, 0, 4 * 8 * 4 + 1),
        ReadSlot(0, 0, 0, 8, 4),
    ):
        with pytest.raises(IndexError):
            store.answer(wrong)
