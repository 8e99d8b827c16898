"""Attention on CPUs: torch's fused scaled_dot_product_attention over gathered pages.

Sequences with one new token are gathered together, those of similar length in one call; others one by one.
Grouped-query attention costs no copies: KV heads are a batch dimension, and the query heads that share one are
rows (one new token) or a stride-0 expansion (several). What a step gathers is planned in cpu_plan.py.

Legend: T tokens, H query heads, G KV heads, d head size, B sequences of a group, L gathered tokens,
Q query rows of a tile, r query heads per KV head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import scaled_dot_product_attention

from moe_runtime.attention.base import heads_problem
from moe_runtime.attention.cpu_plan import plan_step
from moe_runtime.layers.rope import rotate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moe_runtime.attention.base import AttentionNeed, AttentionSpec
    from moe_runtime.attention.cpu_plan import CpuAttentionPlan, DecodeGroup
    from moe_runtime.attention.kv_cache import KVCache
    from moe_runtime.core import ForwardBatch
    from moe_runtime.layers.rope import Rotation


class CpuPagedAttention:
    """See the module. Computes as torch does: float32 in float32, bfloat16 and float16 with float32 sums.

    Beside the cache it takes memory for one decode group or one sequence's keys and values of one layer.
    """

    name = "cpu"

    def __init__(self, cache: KVCache, specs: Sequence[AttentionSpec]) -> None:
        self.cache = cache
        self.specs = tuple(specs)

    @staticmethod
    def supports(need: AttentionNeed) -> str | None:
        """None if it can serve this model, else why not."""
        if need.device_type != "cpu":
            return f"runs on cpu, not on {need.device_type}"
        if need.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"{need.dtype} is not one of float32, bfloat16, float16"
        for spec in need.layers:
            if spec.logit_soft_cap is not None:
                return "torch's fused attention has no soft cap on scores"
        return heads_problem(need.layers)

    def plan(self, batch: ForwardBatch) -> CpuAttentionPlan:
        """Indices and masks of this step, once for all layers with the same window."""
        return plan_step(batch, self.specs, self.cache)

    def run(
        self,
        q_THd: torch.Tensor,
        k_TGd: torch.Tensor,
        v_TGd: torch.Tensor,
        rotation: Rotation,
        layer: int,
        plan: CpuAttentionPlan,
    ) -> torch.Tensor:
        """Rotate, write k and v, attend; returns (T, H, d) in q's dtype."""
        spec = self.specs[layer]
        q_THd, k_TGd = rotate(q_THd, *rotation), rotate(k_TGd, *rotation)
        self.cache.write(layer, plan.slot_mapping_T, k_TGd, v_TGd)
        work = plan.by_window[spec.sliding_window]
        out_THd = torch.empty(q_THd.shape, dtype=q_THd.dtype, device=q_THd.device)
        for group in work.groups:
            k_SGd, v_SGd = self.cache.gather(layer, group.slots_BL.flatten(), q_THd.dtype)
            out_THd.index_copy_(0, group.rows_B, _attend_group(q_THd, k_SGd, v_SGd, group, spec))
        for chunk in work.chunks:
            if chunk.slots_L is None:
                k_LGd, v_LGd = k_TGd[chunk.rows], v_TGd[chunk.rows]
            else:
                k_LGd, v_LGd = self.cache.gather(layer, chunk.slots_L, q_THd.dtype)
            for tile in chunk.tiles:
                out_THd[chunk.rows][tile.queries] = _attend_tile(
                    q_THd[chunk.rows][tile.queries], k_LGd[tile.keys], v_LGd[tile.keys], tile.mask_QL, spec
                )
        return out_THd


def _attend_group(
    q_THd: torch.Tensor, k_SGd: torch.Tensor, v_SGd: torch.Tensor, group: DecodeGroup, spec: AttentionSpec
) -> torch.Tensor:
    """(B, H, d) of the group's sequences. S: its B * L slots."""
    num_seqs, longest = group.slots_BL.shape
    shape = (num_seqs, longest, spec.num_kv_heads, spec.head_dim)
    k_BGLd = k_SGd.view(shape).transpose(1, 2)
    v_BGLd = v_SGd.view(shape).transpose(1, 2)
    q_BGrd = q_THd.index_select(0, group.rows_B).view(num_seqs, spec.num_kv_heads, -1, spec.head_dim)
    out_BGrd = scaled_dot_product_attention(
        q_BGrd, k_BGLd, v_BGLd, attn_mask=group.mask_B11L, scale=spec.scale
    )
    return out_BGrd.reshape(num_seqs, spec.num_heads, spec.head_dim)


def _attend_tile(
    q_QHd: torch.Tensor,
    k_LGd: torch.Tensor,
    v_LGd: torch.Tensor,
    mask_QL: torch.Tensor | None,
    spec: AttentionSpec,
) -> torch.Tensor:
    """(Q, H, d) of one tile."""
    groups, per_group = spec.num_kv_heads, spec.num_heads // spec.num_kv_heads
    q_GrQd = q_QHd.reshape(-1, groups, per_group, spec.head_dim).permute(1, 2, 0, 3)
    k_GrLd = k_LGd.transpose(0, 1)[:, None].expand(-1, per_group, -1, -1)
    v_GrLd = v_LGd.transpose(0, 1)[:, None].expand(-1, per_group, -1, -1)
    out_GrQd = scaled_dot_product_attention(
        q_GrQd, k_GrLd, v_GrLd, attn_mask=mask_QL, is_causal=mask_QL is None, scale=spec.scale
    )
    return out_GrQd.permute(2, 0, 1, 3).flatten(1, 2)
