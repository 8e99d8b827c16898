"""Paged attention: the reference against plain full attention, the CPU path against the reference.

Unused cache positions hold NaN throughout, and blocks are scattered, so that reading a wrong one shows.
"""

from __future__ import annotations

import random

import pytest
import torch

from moe_runtime.attention import cpu_plan
from moe_runtime.attention.base import AttentionNeed, AttentionSpec
from moe_runtime.attention.cpu import CpuPagedAttention
from moe_runtime.attention.deterministic import DeterministicAttention
from moe_runtime.attention.reference import ReferenceAttention
from moe_runtime.quantization import FP8
from tests.helpers.attention_cases import SPANS, Case, check, no_rotation, spec

BACKENDS = {
    "reference": ReferenceAttention,
    "cpu": CpuPagedAttention,
    "deterministic": DeterministicAttention,
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("spans", SPANS.values(), ids=SPANS)
def test_matches_full_attention(
    seed: int, backend: str, block_size: int, spans: list[tuple[int, int]]
) -> None:
    specs = [spec(), spec(window=4), spec(heads=3, kv_heads=3, dim=8), spec(heads=6, kv_heads=1, window=1)]
    check(Case(spans, specs, block_size), BACKENDS[backend])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dim", [2, 6, 16, 34, 80])
def test_head_sizes(seed: int, backend: str, dim: int) -> None:
    check(
        Case(SPANS["mixed"], [spec(dim=dim), spec(heads=7, kv_heads=7, dim=dim, window=5)], 3),
        BACKENDS[backend],
    )


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
    for backend in BACKENDS.values():
        check(Case(spans, [spec(window=window)], 4), backend)


def test_random_batches(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tiles and small gathers, so that every way of splitting the work occurs."""
    monkeypatch.setattr(cpu_plan, "QUERY_TILE", 5)
    monkeypatch.setattr(cpu_plan, "GATHER_BYTES", 2048)
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
        check(Case(spans, specs, random.choice([1, 3, 16])), CpuPagedAttention)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(seed: int, dtype: torch.dtype) -> None:
    case = Case(SPANS["mixed"], [spec(dim=16), spec(dim=16, window=4)], 3, dtype)
    for backend in BACKENDS.values():
        check(case, backend, tol=2e-2)


def test_a_row_does_not_depend_on_its_neighbours_content(seed: int) -> None:
    """NaN in one sequence's own tokens stays with that sequence."""
    case = Case([(9, 1), (7, 1), (8, 1), (6, 3)], [spec()], 4)
    for i in range(3):
        case.qkv[0][1][i].fill_(torch.nan)
    cache_rows = case.cache()
    assert cache_rows.keys[0].isnan().any()
    backend = CpuPagedAttention(cache_rows, case.specs)
    q, k, v = case.new_rows(0)
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
    assert gathered <= cpu_plan.MAX_PADDED_RATIO * sum(old + 1 for old, _ in case.spans)
    assert sorted(r for group in groups for r in group.rows_B.tolist()) == list(range(40))
    assert len(groups) <= 5


def test_decode_groups_stay_below_the_gather_limit(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case([(99, 1)] * 7 + [(399, 1)], [spec(kv_heads=2, dim=6)], 4)
    monkeypatch.setattr(cpu_plan, "GATHER_BYTES", 300 * 2 * 2 * 6 * 4)
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


def test_soft_cap(seed: int) -> None:
    """Of the order of the scores, so that it matters. torch's fused attention has none."""
    check(Case(SPANS["mixed"], [spec(dim=16, cap=1.5), spec(window=4, cap=0.3)], 3), ReferenceAttention)
    assert "soft cap" in str(CpuPagedAttention.supports(need((spec(cap=2.0),))))
    assert ReferenceAttention.supports(need((spec(cap=2.0),))) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_fp8_cache(seed: int, backend: str, dtype: torch.dtype) -> None:
    """Attention over the rounded keys and values, also those of this very step."""
    case = Case(
        SPANS["mixed"] + [(0, 300)], [spec(dim=16), spec(dim=16, window=4)], 3, dtype, cache_dtype=FP8
    )
    check(case, BACKENDS[backend], tol=2e-5 if dtype == torch.float32 else 2e-2)


def need(
    layers: tuple[AttentionSpec, ...], device: str = "cpu", dtype: torch.dtype = torch.float32
) -> AttentionNeed:
    return AttentionNeed(device, dtype, layers, cache_dtype=dtype)


def test_supports() -> None:
    layer = AttentionSpec(4, 2, 8, 1.0)
    odd = AttentionSpec(5, 2, 8, 1.0)
    for backend in BACKENDS.values():
        assert backend.supports(need((layer,), dtype=torch.bfloat16)) is None
        assert "5 query heads" in str(backend.supports(need((layer, odd))))
        assert "int64" in str(backend.supports(need((layer,), dtype=torch.int64)))
    assert ReferenceAttention.supports(need((layer,), "cuda")) is None
    assert "cuda" in str(CpuPagedAttention.supports(need((layer,), "cuda")))


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
