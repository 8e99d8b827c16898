"""Paged attention: the reference against plain full attention, the CPU path against the reference.

Unused cache positions hold NaN throughout, and blocks are scattered, so that reading a wrong one shows.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch

from moe_runtime.attention import cpu as cpu_module
from moe_runtime.attention.base import AttentionBackend, AttentionNeed, AttentionSpec, Rotation
from moe_runtime.attention.cpu import CpuPagedAttention
from moe_runtime.attention.deterministic import DeterministicAttention
from moe_runtime.attention.kv_cache import KVCache
from moe_runtime.attention.reference import ReferenceAttention
from moe_runtime.core import ForwardBatch

BACKENDS = {
    "reference": ReferenceAttention,
    "cpu": CpuPagedAttention,
    "deterministic": DeterministicAttention,
}


def spec(heads: int = 4, kv_heads: int = 2, dim: int = 6, window: int | None = None) -> AttentionSpec:
    return AttentionSpec(heads, kv_heads, dim, scale=random.uniform(0.2, 1.0), sliding_window=window)


def no_rotation(q_THd: torch.Tensor) -> Rotation:
    """Angles of zero: what a backend caches and multiplies is what it was given."""
    shape = q_THd.shape[0], 1, q_THd.shape[2] // 2
    return torch.ones(shape, dtype=q_THd.dtype), torch.zeros(shape, dtype=q_THd.dtype)


@dataclass
class Case:
    """Sequences given as (tokens before this step, new tokens), with their full q, k, v per layer."""

    spans: list[tuple[int, int]]
    specs: list[AttentionSpec]
    block_size: int
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
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
        cache = KVCache.allocate(self.specs, self.num_blocks, self.block_size, self.dtype, "cpu")
        for tensor in (*cache.keys, *cache.values):
            tensor.fill_(torch.nan)
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

    def run(self, backend_class: type) -> list[torch.Tensor]:
        cache = self.cache()
        backend: AttentionBackend = backend_class(cache, self.specs)
        plan = backend.plan(self.batch())
        outs = []
        for layer, s in enumerate(self.specs):
            rows = [[t[old:] for t in qkv] for (old, _), qkv in zip(self.spans, self.qkv[layer], strict=True)]
            q, k, v = (
                torch.cat([r[i] for r in rows]) if rows else torch.empty(0, h, s.head_dim, dtype=self.dtype)
                for i, h in enumerate(_heads(s))
            )
            outs.append(backend.run(q, k, v, no_rotation(q), layer, plan))
            self._check_written(cache, layer)
        return outs

    def _check_written(self, cache: KVCache, layer: int) -> None:
        for seq, (old, new) in enumerate(self.spans):
            slots = self.slots(seq, range(old + new))
            _, k, v = self.qkv[layer][seq]
            assert torch.equal(cache.keys[layer].flatten(0, 1)[slots], k)
            assert torch.equal(cache.values[layer].flatten(0, 1)[slots], v)

    def expected(self, layer: int) -> torch.Tensor:
        """Full attention of each whole sequence in float64, without pages; rows of this step."""
        s = self.specs[layer]
        outs = [torch.empty(0, s.num_heads, s.head_dim, dtype=torch.float64)]
        for (old, _), qkv in zip(self.spans, self.qkv[layer], strict=True):
            q, k, v = (t.double().transpose(0, 1) for t in qkv)
            k, v = (t.repeat_interleave(s.num_heads // s.num_kv_heads, 0) for t in (k, v))
            i = torch.arange(q.shape[1])
            distance = i[:, None] - i
            hidden = distance < 0
            if s.sliding_window is not None:
                hidden = hidden | (distance >= s.sliding_window)
            scores = (q @ k.transpose(1, 2) * s.scale).masked_fill(hidden, -torch.inf)
            outs.append((scores.softmax(-1) @ v).transpose(0, 1)[old:])
        return torch.cat(outs)


def _heads(s: AttentionSpec) -> tuple[int, int, int]:
    return s.num_heads, s.num_kv_heads, s.num_kv_heads


def check(case: Case, backend: str, tol: float = 2e-5) -> None:
    for layer, out in enumerate(case.run(BACKENDS[backend])):
        assert out.dtype == case.dtype
        torch.testing.assert_close(out.double(), case.expected(layer), rtol=tol, atol=tol)


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


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("spans", SPANS.values(), ids=SPANS)
def test_matches_full_attention(
    seed: int, backend: str, block_size: int, spans: list[tuple[int, int]]
) -> None:
    specs = [spec(), spec(window=4), spec(heads=3, kv_heads=3, dim=8), spec(heads=6, kv_heads=1, window=1)]
    check(Case(spans, specs, block_size), backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dim", [2, 6, 16, 34, 80])
def test_head_sizes(seed: int, backend: str, dim: int) -> None:
    check(Case(SPANS["mixed"], [spec(dim=dim), spec(heads=7, kv_heads=7, dim=dim, window=5)], 3), backend)


@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 9, 30, 31, 32, 100])
def test_windows_at_their_edges(seed: int, window: int) -> None:
    spans = [
        (0, 31),
        (31, 1),
        (29, 3),
        (window, 1),
        (window - 1, 1),
        (window - 1, 4),
        (0, window),
        (0, window + 1),
    ]
    for backend in BACKENDS:
        check(Case(spans, [spec(window=window)], 4), backend)


def test_random_batches(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tiles and small gathers, so that every way of splitting the work occurs."""
    monkeypatch.setattr(cpu_module, "QUERY_TILE", 5)
    monkeypatch.setattr(cpu_module, "GATHER_BYTES", 2048)
    for _ in range(25):
        spans = [
            (
                random.choice([0, 0, 1, random.randint(0, 60)]),
                random.choice([1, 1, 1, 2, random.randint(0, 30)]),
            )
            for _ in range(random.randint(1, 9))
        ]
        groups = random.choice([1, 2, 3])
        specs = [
            spec(
                groups * random.choice([1, 2, 5]),
                groups,
                2 * random.randint(1, 10),
                random.choice([None, 1, 3, 7, 20]),
            )
            for _ in range(2)
        ]
        check(Case(spans, specs, random.choice([1, 3, 16])), "cpu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(seed: int, dtype: torch.dtype) -> None:
    case = Case(SPANS["mixed"], [spec(dim=16), spec(dim=16, window=4)], 3, dtype)
    for backend in BACKENDS:
        check(case, backend, tol=2e-2)


def test_a_row_does_not_depend_on_its_neighbours_content(seed: int) -> None:
    """NaN in one sequence's own tokens stays with that sequence."""
    case = Case([(9, 1), (7, 1), (8, 1), (6, 3)], [spec()], 4)
    for i in range(3):
        case.qkv[0][1][i].fill_(torch.nan)
    cache_rows = case.cache()
    assert cache_rows.keys[0].isnan().any()
    backend = CpuPagedAttention(cache_rows, case.specs)
    rows = [[t[old:] for t in qkv] for (old, _), qkv in zip(case.spans, case.qkv[0], strict=True)]
    q, k, v = (torch.cat([r[i] for r in rows]) for i in range(3))
    out = backend.run(q, k, v, no_rotation(q), 0, backend.plan(case.batch()))
    assert out[1].isnan().all()
    want = case.expected(0)
    keep = [0, 2, 3, 4, 5]
    torch.testing.assert_close(out[keep].double(), want[keep], rtol=2e-5, atol=2e-5)


def test_decode_groups_bound_padding_and_memory(seed: int) -> None:
    case = Case([(random.choice([1, 3, 50, 300, 317]), 1) for _ in range(40)], [spec(window=None)], 4)
    plan = CpuPagedAttention(case.cache(), case.specs).plan(case.batch())
    groups = plan.by_window[None].groups
    gathered = sum(group.slots_BL.numel() for group in groups)
    assert gathered <= cpu_module.MAX_PADDED_RATIO * sum(old + 1 for old, _ in case.spans)
    assert sorted(r for group in groups for r in group.rows_B.tolist()) == list(range(40))
    assert len(groups) <= 5


def test_decode_groups_stay_below_the_gather_limit(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case([(99, 1)] * 7 + [(399, 1)], [spec(kv_heads=2, dim=6)], 4)
    monkeypatch.setattr(cpu_module, "GATHER_BYTES", 300 * 2 * 2 * 6 * 4)
    groups = CpuPagedAttention(case.cache(), case.specs).plan(case.batch()).by_window[None].groups
    assert [tuple(group.slots_BL.shape) for group in groups] == [(1, 400), (3, 100), (3, 100), (1, 100)]


def test_gathers_no_more_than_the_window(seed: int) -> None:
    case = Case([(300, 1), (200, 20)], [spec(window=8)], 16)
    work = CpuPagedAttention(case.cache(), case.specs).plan(case.batch()).by_window[8]
    assert [group.slots_BL.shape[1] for group in work.groups] == [8]
    assert [c.slots_L.numel() for c in work.chunks if c.slots_L is not None] == [27]


def test_first_chunks_gather_nothing_and_need_no_mask(seed: int) -> None:
    case = Case([(0, 700), (0, 4)], [spec(), spec(window=9)], 16)
    plan = CpuPagedAttention(case.cache(), case.specs).plan(case.batch())
    assert all(chunk.slots_L is None for work in plan.by_window.values() for chunk in work.chunks)
    assert [len(chunk.tiles) for chunk in plan.by_window[None].chunks] == [1, 1]
    assert all(tile.mask_QL is None for chunk in plan.by_window[None].chunks for tile in chunk.tiles)


def test_supports() -> None:
    layer = AttentionSpec(4, 2, 8, 1.0)
    odd = AttentionSpec(5, 2, 8, 1.0)
    for backend in BACKENDS.values():
        assert backend.supports(AttentionNeed("cpu", torch.bfloat16, (layer,))) is None
        assert "5 query heads" in str(backend.supports(AttentionNeed("cpu", torch.float32, (layer, odd))))
        assert "int64" in str(backend.supports(AttentionNeed("cpu", torch.int64, (layer,))))
    assert ReferenceAttention.supports(AttentionNeed("cuda", torch.float32, (layer,))) is None
    assert "cuda" in str(CpuPagedAttention.supports(AttentionNeed("cuda", torch.float32, (layer,))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_deterministic_bits_depend_on_the_sequence_alone(seed: int, dtype: torch.dtype) -> None:
    """One sequence's last tokens as one chunk, as several, alone, beside others, in other blocks, on two threads."""
    layers = [spec(6, 2, 16), spec(6, 2, 16, window=random.randint(1, 90))]
    total = random.randint(70, 200)
    full = Case([(0, total)], layers, 16, dtype)
    want = [out[-9:] for out in full.run(DeterministicAttention)]
    for new, size, threads in ((9, 3, 2), (4, 16, 1), (1, 5, 2)):
        neighbours = [(random.randint(0, 90), random.randint(0, 20)) for _ in range(3)]
        case = Case([*neighbours, (total - new, new), (5, 1)], layers, size, dtype)
        for layer in range(2):
            case.qkv[layer][3] = full.qkv[layer][0]
        first = sum(n for _, n in neighbours)
        torch.set_num_threads(threads)
        outs = case.run(DeterministicAttention)
        torch.set_num_threads(1)
        for layer in range(2):
            assert torch.equal(outs[layer][first : first + new], want[layer][-new:])
            assert not outs[layer].isnan().any()
