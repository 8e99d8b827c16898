"""The paged KV cache of one rank.

Legend: T tokens, G KV heads, d head size. A *slot* is one token's place: block * block_size + offset in block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moe_runtime.attention.base import AttentionSpec


@dataclass(frozen=True)
class KVCache:
    """Keys and values of all layers, one tensor each per layer: [num_blocks, block_size, G, d]."""

    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]
    num_blocks: int
    block_size: int

    @classmethod
    def allocate(
        cls,
        specs: Sequence[AttentionSpec],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> KVCache:
        """Reserve the cache for layers of these shapes.

        The contents are undefined: readers touch only slots that were written. So on a CPU the memory is
        reserved but not touched, and becomes resident block by block as sequences use it.
        """

        def one(spec: AttentionSpec) -> torch.Tensor:
            shape = (num_blocks, block_size, spec.num_kv_heads, spec.head_dim)
            return torch.empty(shape, dtype=dtype, device=device)

        return cls(
            keys=tuple(one(spec) for spec in specs),
            values=tuple(one(spec) for spec in specs),
            num_blocks=num_blocks,
            block_size=block_size,
        )

    @staticmethod
    def bytes_per_block(specs: Sequence[AttentionSpec], block_size: int, dtype: torch.dtype) -> int:
        """Bytes that one block takes over all layers, keys and values together."""
        return sum(2 * block_size * s.num_kv_heads * s.head_dim for s in specs) * dtype.itemsize

    def write(
        self, layer: int, slot_mapping_T: torch.Tensor, k_TGd: torch.Tensor, v_TGd: torch.Tensor
    ) -> None:
        """Store each token's key and value at its slot. slot_mapping_T: int64, no slot twice."""
        for tensor, new_TGd in ((self.keys[layer], k_TGd), (self.values[layer], v_TGd)):
            tensor.view(-1, *tensor.shape[2:]).index_copy_(0, slot_mapping_T, new_TGd)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, (source, destination), in every layer.

        All sources are read before any destination is written, so a block may be the destination of one pair
        and the source of another (which then passes on its old contents). A destination occurs once.
        """
        if not pairs:
            return
        assert len({destination for _, destination in pairs}) == len(pairs), f"destination twice in {pairs}"
        source, destination = torch.tensor(pairs, dtype=torch.int64, device=self.keys[0].device).unbind(1)
        for tensor in (*self.keys, *self.values):
            tensor.index_copy_(0, destination, tensor.index_select(0, source))
