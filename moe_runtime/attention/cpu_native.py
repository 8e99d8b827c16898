"""Attention on CPUs in C++ (moe_runtime/native/attention.cpp): rotation, writing to the cache and attention in one call.

Keys and values are read where they lie in the cache; nothing is gathered. Sums and weights are float32.

Legend: T tokens, H query heads, G KV heads, d head size, B sequences.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from moe_runtime.attention.base import heads_problem

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moe_runtime.attention.base import AttentionNeed, AttentionSpec
    from moe_runtime.attention.kv_cache import KVCache
    from moe_runtime.core import ForwardBatch
    from moe_runtime.layers.rope import Rotation
    from moe_runtime.native.build import Native


class _Call(ctypes.Structure):
    """AttentionCall of native/attention.cpp, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in (
            "q", "k", "v", "cos", "sin", "slots", "keys", "values", "tables", "query_starts", "seq_lens", "rotated", "out",
        )),
        *((name, ctypes.c_int64) for name in (
            "q_stride", "k_stride", "v_stride", "num_tokens", "num_seqs", "table_width", "num_blocks", "block_size",
            "heads", "kv_heads", "head_dim", "half", "window",
        )),
        ("scale", ctypes.c_float),
        ("interleaved", ctypes.c_int32),
        ("num_threads", ctypes.c_int32),
    )  # fmt: skip


@dataclass(frozen=True)
class NativePlan:
    """A step's indices, of one batch; contiguous."""

    slots_T: torch.Tensor
    tables_BM: torch.Tensor
    query_starts_B1: torch.Tensor
    seq_lens_B: torch.Tensor


class NativePagedAttention:
    """See the module. bfloat16 in the model and in the cache; as many threads as torch uses, and the same ones."""

    name = "cpu_native"

    def __init__(self, cache: KVCache, specs: Sequence[AttentionSpec], native: Native) -> None:
        self.cache, self.specs, self.native = cache, tuple(specs), native

    @staticmethod
    def supports(need: AttentionNeed, native: Native) -> str | None:
        """None if it can serve this model, else why not."""
        if need.device_type != "cpu":
            return f"runs on cpu, not on {need.device_type}"
        if need.dtype != torch.bfloat16 or need.cache_dtype != torch.bfloat16:
            return f"model and cache must be bfloat16, not {need.dtype} and {need.cache_dtype}"
        for spec in need.layers:
            if spec.logit_soft_cap is not None:
                return "has no soft cap on scores"
        return heads_problem(need.layers) or native.problem

    def plan(self, batch: ForwardBatch) -> NativePlan:
        """The batch's own indices: there is nothing to prepare."""
        return NativePlan(
            batch.slot_mapping_T.contiguous(),
            batch.block_tables_BM.contiguous(),
            batch.query_starts_B1.contiguous(),
            batch.seq_lens_B.contiguous(),
        )

    def run(
        self,
        q_THd: torch.Tensor,
        k_TGd: torch.Tensor,
        v_TGd: torch.Tensor,
        rotation: Rotation,
        layer: int,
        plan: NativePlan,
    ) -> torch.Tensor:
        """Rotate, write k and v, attend; returns (T, H, d) in bfloat16."""
        spec, cache = self.specs[layer], self.cache
        q_THd, k_TGd, v_TGd = _heads_together(q_THd), _heads_together(k_TGd), _heads_together(v_TGd)
        cos, sin = rotation.cos.contiguous(), rotation.sin.contiguous()
        keys, values = cache.keys[layer], cache.values[layer]
        rotated_THd, out_THd = q_THd.new_empty(q_THd.shape), q_THd.new_empty(q_THd.shape)
        call = _Call(
            q_THd.data_ptr(), k_TGd.data_ptr(), v_TGd.data_ptr(), cos.data_ptr(), sin.data_ptr(),
            plan.slots_T.data_ptr(), keys.data_ptr(), values.data_ptr(), plan.tables_BM.data_ptr(),
            plan.query_starts_B1.data_ptr(), plan.seq_lens_B.data_ptr(), rotated_THd.data_ptr(), out_THd.data_ptr(),
            q_THd.stride(0), k_TGd.stride(0), v_TGd.stride(0), q_THd.shape[0], *plan.tables_BM.shape,
            cache.num_blocks, cache.block_size, spec.num_heads, spec.num_kv_heads, spec.head_dim, cos.shape[-1],
            spec.sliding_window or 0, spec.scale, rotation.interleaved, torch.get_num_threads(),
        )  # fmt: skip
        assert self.native.library is not None, self.native.problem
        problem = self.native.library.moe_runtime_attention(ctypes.addressof(call))
        assert not problem, "a slot or a block of the batch is not in the cache"
        return out_THd


def _heads_together(x_TGd: torch.Tensor) -> torch.Tensor:
    """x with each token's heads one after another; a copy only if they are not."""
    together = x_TGd.stride(2) == 1 and (x_TGd.stride(1) == x_TGd.shape[2] or x_TGd.shape[1] == 1)
    return x_TGd if together else x_TGd.contiguous()
