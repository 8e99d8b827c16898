"""The symmetric heap: one segment of memory per rank, all of one size, which the other ranks can write."""

from __future__ import annotations

from typing import Protocol

import torch


class SymmetricHeap(Protocol):
    """What the one-sided kernels need of a heap. Segments are zero at first and aligned to 64 bytes."""

    rank: int
    num_ranks: int
    segment: torch.Tensor
    """uint8, this rank's segment on its device. Its length is the size of every rank's."""
    addresses_N: torch.Tensor
    """int64 on the device: where each rank's segment begins, as this rank addresses it; 0 if it can only be reached
    over a network."""

    def close(self) -> None:
        """Give the memory back. Idempotent."""
        ...


class HeapPart:
    """`num_bytes` of every segment of a heap, from `first_byte` on (both multiples of 64). A SymmetricHeap; the memory stays the heap's."""

    def __init__(self, heap: SymmetricHeap, first_byte: int, num_bytes: int) -> None:
        self.rank, self.num_ranks = heap.rank, heap.num_ranks
        # Tensors made inside inference mode could not be written outside it.
        with torch.inference_mode(False):
            self.segment = heap.segment[first_byte : first_byte + num_bytes]
            addresses_N = heap.addresses_N
            self.addresses_N = torch.where(addresses_N == 0, addresses_N, addresses_N + first_byte)

    def close(self) -> None:
        """Forget the memory. Idempotent."""
        self.segment = torch.empty(0, dtype=torch.uint8)
