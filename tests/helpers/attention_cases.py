"""Batches for paged attention with every sequence's full history, and what attention of them is in float64.

Unused cache positions hold NaN throughout, and blocks are scattered, so that reading a wrong one shows.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch

from moe_runtime.attention.base import AttentionBackend, AttentionSpec
from moe_runtime.attention.kv_cache import KVCache
from moe_runtime.core import ForwardBatch
from moe_runtime.layers.rope import Rotation
from moe_runtime.quantization import FP8

SPANS = {
    "empty step": [],
    "one token": [(0, 1)],
    "prompts": [(0, 7), (0, 1), (0, 16)],
    "decodes": [(1, 1), (40, 1), (16, 1), (15, 1), (2, 1), (39, 1)],
    "chunk after chunk": [(8, 5), (3, 13)],
    "cached prefix, one new": [(17, 1)],
    "mixed": [(5, 1), (0, 9), (20, 1), (4, 6), (0, 1), (31, 2)],
    "nothing new for one": [(3, 0), (2, 2), (4, 1)],
}


def spec(
    heads: int = 4, kv_heads: int = 2, dim: int = 6, window: int | None = None, cap: float | None = None
) -> AttentionSpec:
    return AttentionSpec(heads, kv_heads, dim, random.uniform(0.2, 1.0), window, cap)


def no_rotation(q_THd: torch.Tensor) -> Rotation:
    """Angles of zero: what a backend caches and multiplies is what it was given."""
    shape = q_THd.shape[0], 1, q_THd.shape[2] // 2
    return Rotation(torch.ones(shape, dtype=q_THd.dtype), torch.zeros(shape, dtype=q_THd.dtype))


def stored(x: torch.Tensor, cache_dtype: torch.dtype) -> torch.Tensor:
    """What the cache makes of keys or values."""
    return x.float().clamp(-448, 448).to(FP8).to(x.dtype) if cache_dtype == FP8 else x


@dataclass
class Case:
    """Sequences given as (tokens before this step, new tokens), with their full q, k, v per layer."""

    spans: list[tuple[int, int]]
    specs: list[AttentionSpec]
    block_size: int
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None
    """None: dtype."""

    def __post_init__(self) -> None:
        self.cache_dtype = self.cache_dtype or self.dtype
        size = self.block_size
        needed = [-(-(old + new) // size) for old, new in self.spans]
        self.num_blocks = sum(needed) + 3
        order = random.sample(range(self.num_blocks), sum(needed))
        self.tables = [[order.pop() for _ in range(n)] for n in needed]
        self.qkv = [
            [
                tuple(torch.randn(old + new, h, s.head_dim).to(self.dtype) for h in _heads(s))
                for old, new in self.spans
            ]
            for s in self.specs
        ]

    def slots(self, seq: int, positions: range) -> list[int]:
        return [
            self.tables[seq][p // self.block_size] * self.block_size + p % self.block_size for p in positions
        ]

    def cache(self) -> KVCache:
        """Only what came before this step is there; the rest is NaN."""
        cache = KVCache.allocate(self.specs, self.num_blocks, self.block_size, self.cache_dtype, "cpu")
        for tensor in (*cache.keys, *cache.values):
            tensor.copy_(torch.full(tensor.shape, torch.nan))
        for layer in range(len(self.specs)):
            for seq, (old, _) in enumerate(self.spans):
                slots = torch.tensor(self.slots(seq, range(old)), dtype=torch.int64)
                _, k, v = self.qkv[layer][seq]
                cache.write(layer, slots, k[:old], v[:old])
        return cache

    def batch(self) -> ForwardBatch:
        new = [n for _, n in self.spans]
        total = [old + n for old, n in self.spans]
        width = max((len(t) for t in self.tables), default=0)
        # Padding names a block that is out of range, so that reading it is an error.
        tables = [t + [self.num_blocks] * (width - len(t)) for t in self.tables]
        slots = [s for i, (old, n) in enumerate(self.spans) for s in self.slots(i, range(old, old + n))]
        starts = torch.tensor([0, *new]).cumsum(0)
        return ForwardBatch(
            input_ids_T=torch.zeros(sum(new), dtype=torch.int64),
            positions_T=torch.tensor([p for old, n in self.spans for p in range(old, old + n)]).long(),
            slot_mapping_T=torch.tensor(slots, dtype=torch.int64),
            block_tables_BM=torch.tensor(tables, dtype=torch.int32).view(len(new), width),
            query_starts_B1=starts.int(),
            seq_lens_B=torch.tensor(total, dtype=torch.int32),
            query_lens=new,
            seq_lens=total,
            logit_rows=starts[1:] - 1,
            max_num_tokens=sum(new),
        )

    def new_rows(self, layer: int) -> list[torch.Tensor]:
        """q, k and v of this step's tokens."""
        s = self.specs[layer]
        rows = [[t[old:] for t in qkv] for (old, _), qkv in zip(self.spans, self.qkv[layer], strict=True)]
        empty = [torch.empty(0, h, s.head_dim, dtype=self.dtype) for h in _heads(s)]
        return [torch.cat([empty[i], *(r[i] for r in rows)]) for i in range(3)]

    def run(
        self, make_backend: Callable[[KVCache, list[AttentionSpec]], AttentionBackend]
    ) -> list[torch.Tensor]:
        cache = self.cache()
        backend = make_backend(cache, self.specs)
        plan = backend.plan(self.batch())
        outs = []
        for layer in range(len(self.specs)):
            q, k, v = self.new_rows(layer)
            outs.append(backend.run(q, k, v, no_rotation(q), layer, plan))
            self._check_written(cache, layer)
        return outs

    def _check_written(self, cache: KVCache, layer: int) -> None:
        for seq, (old, new) in enumerate(self.spans):
            slots = torch.tensor(self.slots(seq, range(old + new)), dtype=torch.int64)
            for found, given in zip(
                cache.gather(layer, slots, self.dtype), self.qkv[layer][seq][1:], strict=True
            ):
                assert torch.equal(found, stored(given, self.cache_dtype))

    def expected(self, layer: int) -> torch.Tensor:
        """Full attention of each whole sequence in float64, without pages; rows of this step."""
        s = self.specs[layer]
        outs = [torch.empty(0, s.num_heads, s.head_dim, dtype=torch.float64)]
        for (old, _), qkv in zip(self.spans, self.qkv[layer], strict=True):
            q, k, v = qkv[0], *(stored(t, self.cache_dtype) for t in qkv[1:])
            q, k, v = (t.double().transpose(0, 1) for t in (q, k, v))
            k, v = (t.repeat_interleave(s.num_heads // s.num_kv_heads, 0) for t in (k, v))
            i = torch.arange(q.shape[1])
            distance = i[:, None] - i
            hidden = distance < 0
            if s.sliding_window is not None:
                hidden = hidden | (distance >= s.sliding_window)
            scores = q @ k.transpose(1, 2) * s.scale
            if s.logit_soft_cap is not None:
                scores = s.logit_soft_cap * torch.tanh(scores / s.logit_soft_cap)
            outs.append((scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v).transpose(0, 1)[old:])
        return torch.cat(outs)


def _heads(s: AttentionSpec) -> tuple[int, int, int]:
    return s.num_heads, s.num_kv_heads, s.num_kv_heads


def check(
    case: Case, make_backend: Callable[[KVCache, list[AttentionSpec]], AttentionBackend], tol: float = 2e-5
) -> None:
    """Every layer's output is the expected one, in the model's dtype, and the cache holds the new keys and values."""
    for layer, out in enumerate(case.run(make_backend)):
        assert out.dtype == case.dtype
        torch.testing.assert_close(out.double(), case.expected(layer), rtol=tol, atol=tol)
