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
