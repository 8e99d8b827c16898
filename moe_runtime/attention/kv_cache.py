"""The paged KV cache of one rank.

Keys and values are kept in the model's dtype, or rounded to FP8 (e4m3): half the memory, and half of what decoding reads.
An FP8 byte stands for payload * scale; there is one scale per layer for keys and one for values. Scales are 1 here, so
that values beyond +-448 are cut; checkpoints with calibrated scales are not read yet.

Legend: T tokens, L tokens of a sequence, G KV heads, d head size. A *slot* is one token's place: block * block_size + offset in block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from moe_runtime.quantization import FP8, FP8_MAX

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moe_runtime.attention.base import AttentionSpec


def cache_dtype(setting: str, dtype: torch.dtype) -> torch.dtype:
    """Type of the cache of a model that computes in `dtype`. `setting`: kv_cache_dtype; all but `auto` mean FP8."""
    return dtype if setting == "auto" else FP8


@dataclass(frozen=True)
class KVCache:
    """Keys and values of all layers, one tensor each per layer: [num_blocks, block_size, G, d]."""

    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]
    num_blocks: int
    block_size: int
    key_scales: tuple[float, ...]
    """Per layer; 1 unless the cache is FP8."""
    value_scales: tuple[float, ...]

    @property
    def dtype(self) -> torch.dtype:
        """Of what is stored."""
        return self.keys[0].dtype

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
            key_scales=(1.0,) * len(specs),
            value_scales=(1.0,) * len(specs),
        )

    @staticmethod
    def bytes_per_block(specs: Sequence[AttentionSpec], block_size: int, dtype: torch.dtype) -> int:
        """Bytes that one block takes over all layers, keys and values together."""
        return sum(2 * block_size * s.num_kv_heads * s.head_dim for s in specs) * dtype.itemsize

    def write(
        self, layer: int, slot_mapping_T: torch.Tensor, k_TGd: torch.Tensor, v_TGd: torch.Tensor
    ) -> None:
        """Store each token's key and value at its slot. slot_mapping_T: int64, no slot twice."""
        stored = (
            (self.keys[layer], self.key_scales[layer], k_TGd),
            (self.values[layer], self.value_scales[layer], v_TGd),
        )
        for tensor, scale, new_TGd in stored:
            if self.dtype == FP8:
                new_TGd = (new_TGd.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8)
            _slots(tensor).index_copy_(0, slot_mapping_T, _bytes(new_TGd))

    def gather(
        self, layer: int, slots_L: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values at these slots, (L, G, d) each, in `dtype`. slots_L: int64."""
        return (
            self._read(self.keys[layer], self.key_scales[layer], slots_L, dtype),
            self._read(self.values[layer], self.value_scales[layer], slots_L, dtype),
        )

    def _read(
        self, tensor: torch.Tensor, scale: float, slots_L: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        read = _slots(tensor).index_select(0, slots_L).view(tensor.dtype)
        return (read.float() * scale).to(dtype) if tensor.dtype == FP8 else read.to(dtype)

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
            stored = _bytes(tensor)
            stored.index_copy_(0, destination, stored.index_select(0, source))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """FP8 as bytes, which torch can index on every device; other types as they are."""
    return tensor.view(torch.uint8) if tensor.dtype == FP8 else tensor


def _slots(tensor: torch.Tensor) -> torch.Tensor:
    """(slots, G, d) of a layer's keys or values, without a copy."""
    return _bytes(tensor).flatten(0, 1)
