"""Attention on GPUs: Triton kernels over the paged cache.

A layer is three launches at most. `rotate_and_store` rotates queries and keys and writes keys and values to their slots.
Sequences with one new token go to `decode` and `merge_splits`: the keys are cut into splits of a fixed number of
tokens, which many programs read at once, and their results are merged (Flash-Decoding). All other sequences go to `extend`: tiles
of query rows, each with a running softmax over the keys it sees (FlashAttention-2, arXiv 2307.08691), whether these
were cached before or are new. Both in one step is fine.

Splits and tiles begin at fixed positions and depend on the model and the GPU alone, so a row has the same bits whatever
its batch neighbours are. `deterministic` sends single tokens through `extend` too, and then a row's bits do not depend on chunk
boundaries and cached prefixes either; a long sequence's single token is then computed by one program per KV head.

The host reads nothing back. Decoding is graph-safe: what varies from step to step is read from the batch's tensors, and the grid's
size follows from `ForwardBatch.seq_lens`, the host's copy, which may be larger than the tensor says.

Legend: T tokens, H query heads, G KV heads, d head size, B sequences, M blocks of the longest block table, W tiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from moe_runtime.attention.base import heads_problem
from moe_runtime.quantization import FP8
from moe_runtime.triton_support.availability import has_fp8, target_arch, triton_problem

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moe_runtime.attention.base import AttentionNeed, AttentionSpec
    from moe_runtime.attention.kv_cache import KVCache
    from moe_runtime.core import ForwardBatch
    from moe_runtime.layers.rope import Rotation

MAX_HEAD_DIM = 256
MAX_GROUP = 128
"""Query heads per KV head; they are rows of one tile."""
MERGED_AT_ONCE = 16
ROTATED_TOKENS = 16
"""Tokens per program of rotate_and_store."""


@dataclass(frozen=True)
class AttentionTiles:
    """How the work of a layer is cut. The same for every step, since results depend on it."""

    query_rows: int
    """Rows of an extend tile: query tokens times the query heads that share a KV head."""
    keys: int
    """Keys of an extend tile."""
    extend_warps: int
    extend_stages: int
    decode_keys: int
    """Keys that a decode program takes at once."""
    split: int
    """Keys that a decode program takes in all; a multiple of decode_keys."""
    decode_warps: int
    decode_stages: int


def choose_tiles(spec: AttentionSpec, dtype: torch.dtype, arch: int | str) -> AttentionTiles:
    """Tiles that fit the registers and the shared memory of an architecture (as of `availability.target_arch`)."""
    dim, hip, wide = padded(spec.head_dim), isinstance(arch, str), dtype == torch.float32
    keys = 64 if dim <= 64 or (dim <= 128 and isinstance(arch, int) and arch >= 90) else 32
    return AttentionTiles(
        query_rows=query_rows(spec, dtype, arch),
        keys=16 if wide else 32 if hip else keys,
        extend_warps=4 if hip else 8,
        extend_stages=1 if wide else 2,
        decode_keys=16 if wide else 32 if hip or dim > 128 else 64,
        split=512,
        decode_warps=4,
        decode_stages=2 if wide or hip or dim > 128 else 3,
    )


def query_rows(spec: AttentionSpec, dtype: torch.dtype, arch: int | str) -> int:
    """AttentionTiles.query_rows."""
    long, wide = padded(spec.head_dim) > 128, dtype == torch.float32
    rows = 32 if long and wide else 64 if long or wide or isinstance(arch, str) else 128
    return max(rows, padded(spec.num_heads // spec.num_kv_heads))


def padded(size: int) -> int:
    """The next power of two, at least 16: what a tile's side may be."""
    return max(16, 1 << (size - 1).bit_length())


@dataclass(frozen=True)
class TritonAttentionPlan:
    """What a step's launches need; tensors are on the device."""

    slot_mapping_T: torch.Tensor
    block_tables_BM: torch.Tensor
    query_starts_B1: torch.Tensor
    seq_lens_B: torch.Tensor
    longest_decode: int
    """Tokens of the longest sequence with one new token; 0: there is none."""
    work: dict[int, torch.Tensor]
    """Query tokens per tile -> int32 (W, 2): sequence and its first new token, the longest work first."""


class TritonPagedAttention:
    """See the module. Sums are float32, and products of float32 exact: without NVIDIA's matrix units, but for checking, not for speed."""

    name = "triton"

    def __init__(self, cache: KVCache, specs: Sequence[AttentionSpec], deterministic: bool = False) -> None:
        self.cache = cache
        self.specs = tuple(specs)
        self.deterministic = deterministic
        self.arch = target_arch(cache.keys[0].device)
        # Plans are made before queries are there, and an FP8 cache does not tell their type.
        self.query_dtypes = (torch.bfloat16, torch.float32) if cache.dtype == FP8 else (cache.dtype,)

    @staticmethod
    def supports(need: AttentionNeed) -> str | None:
        """None if it can serve this model, else why not."""
        if need.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"{need.dtype} is not one of float32, bfloat16, float16"
        for spec in need.layers:
            if spec.head_dim > MAX_HEAD_DIM:
                return f"heads of {spec.head_dim} dimensions are larger than {MAX_HEAD_DIM}"
            if spec.num_heads // spec.num_kv_heads > MAX_GROUP:
                return f"more than {MAX_GROUP} query heads share a KV head"
        problem = heads_problem(need.layers) or triton_problem(need.device_type)
        if problem is not None:
            return problem
        arch = target_arch(torch.device(need.device_type))
        if need.cache_dtype == FP8 and not has_fp8(arch):
            return f"Triton has no FP8 (e4m3) on sm_{arch}; it needs sm_89 or later"
        return None

    def plan(self, batch: ForwardBatch) -> TritonAttentionPlan:
        """The tiles of sequences with several new tokens; everything else is in the batch's tensors."""
        assert sum(batch.query_lens) == batch.num_tokens, f"{batch.query_lens} for {batch.num_tokens} tokens"
        spans = list(zip(batch.query_lens, batch.seq_lens, strict=True))
        decodes = [] if self.deterministic else [total for new, total in spans if new == 1]
        extends = [
            (i, new, total) for i, (new, total) in enumerate(spans) if new > 1 or (new and self.deterministic)
        ]
        sizes = {self._tokens_per_tile(spec, d) for spec in self.specs for d in self.query_dtypes if extends}
        return TritonAttentionPlan(
            slot_mapping_T=batch.slot_mapping_T,
            block_tables_BM=batch.block_tables_BM,
            query_starts_B1=batch.query_starts_B1,
            seq_lens_B=batch.seq_lens_B,
            longest_decode=max(decodes, default=0),
            work={size: _tiles(extends, size, batch.seq_lens_B.device) for size in sizes},
        )

    def run(
        self,
        q_THd: torch.Tensor,
        k_TGd: torch.Tensor,
        v_TGd: torch.Tensor,
        rotation: Rotation,
        layer: int,
        plan: TritonAttentionPlan,
    ) -> torch.Tensor:
        """Rotate, write k and v, attend; returns (T, H, d) in q's dtype."""
        out_THd = torch.empty(q_THd.shape, dtype=q_THd.dtype, device=q_THd.device)
        if not q_THd.shape[0]:
            return out_THd
        q_THd = self._rotate_and_store(q_THd, k_TGd, v_TGd, rotation, layer, plan)
        if plan.longest_decode:
            self._decode(q_THd, out_THd, layer, plan)
        if plan.work:
            self._extend(q_THd, out_THd, layer, plan)
        return out_THd

    def _rotate_and_store(
        self,
        q_THd: torch.Tensor,
        k_TGd: torch.Tensor,
        v_TGd: torch.Tensor,
        rotation: Rotation,
        layer: int,
        plan: TritonAttentionPlan,
    ) -> torch.Tensor:
        """Returns the rotated queries, contiguous."""
        from moe_runtime.attention.triton_paged_kernels import rotate_and_store

        tokens, heads, dim = q_THd.shape
        groups, pairs = k_TGd.shape[1], rotation.cos.shape[-1]
        # Within a head, dimensions must be adjacent; heads and tokens may lie anywhere, as in one fused projection.
        q_THd, k_TGd, v_TGd = (x if x.stride(2) == 1 else x.contiguous() for x in (q_THd, k_TGd, v_TGd))
        turned = torch.empty((tokens, heads, dim), dtype=q_THd.dtype, device=q_THd.device)
        rotate_and_store[(-(-tokens // ROTATED_TOKENS), heads + 2 * groups)](
            q_THd, k_TGd, v_TGd, rotation.cos.contiguous(), rotation.sin.contiguous(), plan.slot_mapping_T,
            turned, self.cache.keys[layer], self.cache.values[layer],
            tokens, *q_THd.stride()[:2], *k_TGd.stride()[:2], *v_TGd.stride()[:2],
            self.cache.key_scales[layer], self.cache.value_scales[layer],
            H=heads, G=groups, D=dim, PAIRS=pairs, INTERLEAVED=rotation.interleaved, BT=ROTATED_TOKENS,
            PP=padded(pairs), RESTP=padded(max(1, dim - 2 * pairs)), DP=padded(dim), num_warps=4,
        )  # fmt: skip
        return turned

    def _decode(
        self, q_THd: torch.Tensor, out_THd: torch.Tensor, layer: int, plan: TritonAttentionPlan
    ) -> None:
        from moe_runtime.attention.triton_paged_kernels import decode, merge_splits

        spec, tiles = self.specs[layer], choose_tiles(self.specs[layer], q_THd.dtype, self.arch)
        heads, groups, dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        window, num_seqs = spec.sliding_window or 0, plan.seq_lens_B.shape[0]
        num_splits = -(-plan.longest_decode // tiles.split)
        if window:
            # A window that begins within a split touches one more than its length needs.
            num_splits = min(num_splits, -(-(window - 1) // tiles.split) + 1)
        part = torch.empty((num_seqs, heads, num_splits, dim), dtype=torch.float32, device=q_THd.device)
        stats = torch.empty((num_seqs, heads, num_splits, 2), dtype=torch.float32, device=q_THd.device)
        decode[(num_splits, groups, num_seqs)](
            q_THd, self.cache.keys[layer], self.cache.values[layer], part, stats,
            plan.block_tables_BM, plan.query_starts_B1, plan.seq_lens_B, plan.block_tables_BM.stride(0), num_splits,
            spec.scale * self.cache.key_scales[layer],
            R=heads // groups, G=groups, D=dim, DP=padded(dim), BLOCK_SIZE=self.cache.block_size,
            RP=padded(heads // groups), BN=tiles.decode_keys, SPLIT=tiles.split, WINDOW=window,
            SOFT_CAP=spec.logit_soft_cap or 0.0,
            num_warps=tiles.decode_warps, num_stages=tiles.decode_stages,
        )  # fmt: skip
        merge_splits[(heads, num_seqs)](
            part, stats, out_THd, plan.query_starts_B1, plan.seq_lens_B, num_splits, self.cache.value_scales[layer],
            D=dim, DP=padded(dim), SPLIT=tiles.split, WINDOW=window, BS=MERGED_AT_ONCE, num_warps=4,
        )  # fmt: skip

    def _extend(
        self, q_THd: torch.Tensor, out_THd: torch.Tensor, layer: int, plan: TritonAttentionPlan
    ) -> None:
        from moe_runtime.attention.triton_paged_kernels import extend

        spec, tiles = self.specs[layer], choose_tiles(self.specs[layer], q_THd.dtype, self.arch)
        groups = spec.num_kv_heads
        work_W2 = plan.work[self._tokens_per_tile(spec, q_THd.dtype)]
        extend[(work_W2.shape[0], groups)](
            q_THd, self.cache.keys[layer], self.cache.values[layer], out_THd, work_W2,
            plan.block_tables_BM, plan.query_starts_B1, plan.seq_lens_B, plan.block_tables_BM.stride(0),
            spec.scale * self.cache.key_scales[layer], self.cache.value_scales[layer],
            R=spec.num_heads // groups, G=groups, D=spec.head_dim, DP=padded(spec.head_dim),
            BLOCK_SIZE=self.cache.block_size, BM=tiles.query_rows, BN=tiles.keys,
            WINDOW=spec.sliding_window or 0, SOFT_CAP=spec.logit_soft_cap or 0.0,
            num_warps=tiles.extend_warps, num_stages=tiles.extend_stages,
        )  # fmt: skip

    def _tokens_per_tile(self, spec: AttentionSpec, dtype: torch.dtype) -> int:
        return query_rows(spec, dtype, self.arch) // (spec.num_heads // spec.num_kv_heads)


def _tiles(extends: list[tuple[int, int, int]], size: int, device: torch.device) -> torch.Tensor:
    """Cut new tokens into tiles. extends: (sequence, new tokens, tokens with them). Returns TritonAttentionPlan.work's value."""
    tiles = [
        (min(total - new + first + size, total), i, first)
        for i, new, total in extends
        for first in range(0, new, size)
    ]
    # Programs start in order: with the longest first, none of them is left alone at the end.
    tiles.sort(reverse=True)
    return torch.tensor([tile[1:] for tile in tiles], dtype=torch.int32, device=device)
