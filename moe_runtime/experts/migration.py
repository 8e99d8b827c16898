"""Experts' weights as bytes, whatever their format: read on one rank, written on another, and compared.

A slot's bytes are those of its rows of every tensor of ExpertWeights, in the order of the fields: FP8 payload, scales and
biases travel like anything else, and a tensor added to ExpertWeights travels without further work.

Legend: p slots on this rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import msgspec
import torch

from moe_runtime.errors import MoeRuntimeError
from moe_runtime.experts.base import ExpertWeights

DIGEST_BYTES = 16
PIECE_BYTES = 1 << 18
"""Most bytes asked for at once: few enough that a step's share is met closely, enough that a question costs little."""


class CorruptCopyError(MoeRuntimeError):
    """A copy differs from its source."""


class ReadSlot(msgspec.Struct, tag="read_slot"):
    """Ask for some bytes of a slot."""

    layer: int
    """MoE layer."""
    slot: int
    part: int
    """Which tensor."""
    start: int
    stop: int


class DigestSlot(msgspec.Struct, tag="digest_slot"):
    """Ask for the digest of a whole slot."""

    layer: int
    slot: int


Question = ReadSlot | DigestSlot


@dataclass(frozen=True)
class SlotStore:
    """The slots of this rank's MoE layers."""

    parts: tuple[tuple[torch.Tensor, ...], ...]
    """[layer]: tensors [p, ...], contiguous."""

    @staticmethod
    def of(layers: Sequence[ExpertWeights]) -> SlotStore:
        """The tensors themselves, not copies."""
        return SlotStore(tuple(tuple(_tensors(weights)) for weights in layers))

    @property
    def largest_slot_bytes(self) -> int:
        """Of one expert, in the layer where they are largest."""
        sizes = [sum(p[0].numel() * p.element_size() for p in parts) for parts in self.parts]
        return max(sizes, default=0)

    def answer(self, question: Question) -> bytes | memoryview:
        """What another rank asks for. Raises IndexError on what does not exist."""
        if isinstance(question, DigestSlot):
            return self.digest(question.layer, question.slot)
        part = self._bytes_of(question.layer, question.slot)[question.part]
        if not 0 <= question.start <= question.stop <= part.numel():
            raise IndexError(f"bytes {question.start} to {question.stop} of {part.numel()}")
        return _memory(part[question.start : question.stop].cpu())

    def digest(self, layer: int, slot: int) -> bytes:
        """BLAKE2b of the slot's bytes."""
        digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
        for part in self._bytes_of(layer, slot):
            digest.update(_memory(part.cpu()))
        return digest.digest()

    def copy_into(
        self, layer: int, slot: int, read: Callable[[ReadSlot, memoryview], None], source_slot: int
    ) -> None:
        """Fill a slot piece by piece; `read` brings a piece of the source into memory."""
        for index, part in enumerate(self._bytes_of(layer, slot)):
            for start in range(0, part.numel(), PIECE_BYTES):
                stop = min(start + PIECE_BYTES, part.numel())
                target = part[start:stop]
                landing = (
                    target if target.device.type == "cpu" else torch.empty(stop - start, dtype=torch.uint8)
                )
                read(ReadSlot(layer, source_slot, index, start, stop), _memory(landing))
                if landing is not target:
                    target.copy_(landing)

    def _bytes_of(self, layer: int, slot: int) -> list[torch.Tensor]:
        """uint8, one-dimensional; they share the slot's memory."""
        if slot < 0:
            raise IndexError(f"slot {slot}")
        return [part[slot].reshape(-1).view(torch.uint8) for part in self.parts[layer]]


def _tensors(weights: ExpertWeights) -> Iterator[torch.Tensor]:
    for field in fields(weights):
        value = getattr(weights, field.name)
        if isinstance(value, torch.Tensor):
            assert value.is_contiguous(), f"{field.name} is not contiguous"
            yield value.detach()


def _memory(data: torch.Tensor) -> memoryview:
    """The bytes of a uint8 tensor on the CPU, not a copy."""
    array: Any = data.numpy()
    return memoryview(array)
