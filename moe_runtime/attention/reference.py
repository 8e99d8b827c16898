"""Attention as its formula says, one sequence at a time in float32: the oracle for the other backends.

softmax(scale * q k^T) v over the tokens a query may see (itself, those before it, no further back than the
sliding window), scores soft-capped first where the layer says so; query head h uses KV head h // (H / G), as in
grouped-query attention (arXiv 2305.13245). Keys and values are what the cache holds, rounding to FP8 included.

Legend: T tokens, H query heads, G KV heads, d head size, L tokens of one sequence, Q its new tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from moe_runtime.attention.base import heads_problem
from moe_runtime.layers.rope import rotate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moe_runtime.attention.base import AttentionNeed, AttentionSpec
    from moe_runtime.attention.kv_cache import KVCache
    from moe_runtime.core import ForwardBatch
    from moe_runtime.layers.rope import Rotation


@dataclass(frozen=True)
class ReferencePlan:
    """Per sequence: its rows of T, and the slots of all its tokens in order."""

    slot_mapping_T: torch.Tensor
    sequences: tuple[tuple[int, int, torch.Tensor], ...]
    """(first row, new tokens, slots int64 (L,))."""


class ReferenceAttention:
    """See the module. Slow on purpose; any device, any float type, computed in float32."""

    name = "reference"

    def __init__(self, cache: KVCache, specs: Sequence[AttentionSpec]) -> None:
        self.cache = cache
        self.specs = tuple(specs)

    @staticmethod
    def supports(need: AttentionNeed) -> str | None:
        """None if it can serve this model, else why not."""
        if not need.dtype.is_floating_point:
            return f"{need.dtype} is not a floating-point type"
        return heads_problem(need.layers)

    def plan(self, batch: ForwardBatch) -> ReferencePlan:
        """Find every sequence's rows and slots."""
        size = self.cache.block_size
        sequences = []
        first = 0
        for row, (new, total) in enumerate(zip(batch.query_lens, batch.seq_lens, strict=True)):
            position_L = torch.arange(total, device=batch.block_tables_BM.device)
            slots_L = batch.block_tables_BM[row].long()[position_L // size] * size + position_L % size
            sequences.append((first, new, slots_L))
            first += new
        assert first == batch.num_tokens, f"{first} query rows for {batch.num_tokens} tokens"
        return ReferencePlan(batch.slot_mapping_T, tuple(sequences))

    def run(
        self,
        q_THd: torch.Tensor,
        k_TGd: torch.Tensor,
        v_TGd: torch.Tensor,
        rotation: Rotation,
        layer: int,
        plan: ReferencePlan,
    ) -> torch.Tensor:
        """Rotate, write k and v, attend; returns (T, H, d) in q's dtype."""
        spec = self.specs[layer]
        q_THd, k_TGd = rotate(q_THd, *rotation), rotate(k_TGd, *rotation)
        self.cache.write(layer, plan.slot_mapping_T, k_TGd, v_TGd)
        out_THd = torch.empty_like(q_THd)
        for first, new, slots_L in plan.sequences:
            rows = slice(first, first + new)
            k_LGd, v_LGd = self.cache.gather(layer, slots_L, torch.float32)
            out_THd[rows] = _attend(q_THd[rows], k_LGd, v_LGd, spec).to(q_THd.dtype)
        return out_THd


def _attend(
    q_QHd: torch.Tensor, k_LGd: torch.Tensor, v_LGd: torch.Tensor, spec: AttentionSpec
) -> torch.Tensor:
    """Attention of a sequence's last Q tokens over its L tokens, which are float32; float32 (Q, H, d)."""
    num_new, num_all = q_QHd.shape[0], k_LGd.shape[0]
    heads_per_group = spec.num_heads // spec.num_kv_heads
    out_QHd = torch.empty(q_QHd.shape, dtype=torch.float32, device=q_QHd.device)
    for query in range(num_new):
        end = num_all - num_new + query + 1
        start = 0 if spec.sliding_window is None else max(0, end - spec.sliding_window)
        for head in range(spec.num_heads):
            group = head // heads_per_group
            scores = k_LGd[start:end, group] @ q_QHd[query, head].float() * spec.scale
            if spec.logit_soft_cap is not None:
                scores = spec.logit_soft_cap * torch.tanh(scores / spec.logit_soft_cap)
            out_QHd[query, head] = scores.softmax(0) @ v_LGd[start:end, group]
    return out_QHd
