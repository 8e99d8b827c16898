"""The paged attention in C++ against full attention in float64, for every instruction set that this CPU has.

Cases as in test_attention.py: unused cache positions hold NaN, blocks are scattered.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
import torch

from moe_runtime.attention.base import AttentionNeed, AttentionSpec
from moe_runtime.attention.cpu import CpuPagedAttention
from moe_runtime.attention.cpu_native import NativePagedAttention
from moe_runtime.layers.rope import Rotation
from moe_runtime.native.build import Native
from tests.helpers.attention_cases import SPANS, Case, check, no_rotation, spec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moe_runtime.attention.kv_cache import KVCache

TOLERANCE = 2e-2
"""As for the other backends in bfloat16."""


def compare(
    native: Native, spans: list[tuple[int, int]], specs: list[AttentionSpec], block_size: int
) -> None:
    check(Case(spans, specs, block_size, torch.bfloat16), make(native), tol=TOLERANCE)


def make(native: Native):  # type: ignore[no-untyped-def]
    def backend(cache: KVCache, specs: Sequence[AttentionSpec]) -> NativePagedAttention:
        return NativePagedAttention(cache, specs, native)

    return backend


@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("spans", SPANS.values(), ids=SPANS)
@pytest.mark.other_sets(threads=[2], block_size=[3])
def test_matches_full_attention(
    seed: int, native: Native, threads: int, block_size: int, spans: list[tuple[int, int]]
) -> None:
    specs = [spec(), spec(window=4), spec(heads=3, kv_heads=3, dim=8), spec(heads=6, kv_heads=1, window=1)]
    compare(native, spans, specs, block_size)


@pytest.mark.parametrize("dim", [2, 6, 16, 34, 64, 80, 128])
def test_head_sizes(seed: int, native: Native, dim: int) -> None:
    compare(native, SPANS["mixed"], [spec(dim=dim), spec(heads=7, kv_heads=7, dim=dim, window=5)], 3)


@pytest.mark.parametrize("window", [1, 2, 5, 31, 63, 64, 65, 100, 130])
@pytest.mark.other_sets(window=[1, 5, 64, 65, 130])
def test_windows_at_their_edges(seed: int, native: Native, window: int) -> None:
    spans = [
        (0, 131),
        (131, 1),
        (129, 3),
        (window, 1),
        (window - 1, 4),
        (0, window),
        (0, window + 1),
        (63, 70),
    ]
    compare(native, spans, [spec(window=window)], 4)


@pytest.mark.other_sets(threads=[2])
def test_random_batches(seed: int, native: Native, threads: int) -> None:
    for _ in range(15):
        spans = [
            (
                random.choice([0, 0, 1, 63, 64, random.randint(0, 200)]),
                random.choice([1, 1, 1, 2, 64, random.randint(0, 90)]),
            )
            for _ in range(random.randint(1, 6))
        ]
        groups = random.choice([1, 2, 3])
        layer = spec(
            groups * random.choice([1, 2, 5, 13]),
            groups,
            2 * random.randint(1, 40),
            random.choice([None, 1, 3, 7, 20, 64, 100]),
        )
        compare(native, spans, [layer], random.choice([1, 3, 16]))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("turned", [4, 10, 16])
def test_rotates_as_torch_does(seed: int, native: Native, interleaved: bool, turned: int) -> None:
    """The cache holds the same bits, whole heads or parts of them turned; q is rotated alike."""
    case = Case(SPANS["mixed"], [spec(6, 2, 16), spec(6, 2, 16, window=7)], 3, torch.bfloat16)
    caches = case.cache(), case.cache()
    backends = CpuPagedAttention(caches[0], case.specs), NativePagedAttention(caches[1], case.specs, native)
    for layer in range(2):
        q, k, v = case.new_rows(layer)
        angle = torch.rand(q.shape[0], 1, turned // 2) * 7
        rotation = Rotation(angle.cos().bfloat16(), angle.sin().bfloat16(), interleaved)
        want, found = (
            backend.run(q, k, v, rotation, layer, backend.plan(case.batch()))  # type: ignore[attr-defined]
            for backend in backends
        )
        for name in ("keys", "values"):
            torch.testing.assert_close(
                getattr(caches[1], name)[layer],
                getattr(caches[0], name)[layer],
                rtol=0,
                atol=0,
                equal_nan=True,
            )
        assert not found.isnan().any()
        torch.testing.assert_close(found.float(), want.float(), rtol=TOLERANCE, atol=TOLERANCE)


def test_parts_of_a_fused_projection_need_no_copy(seed: int, native: Native) -> None:
    """q, k and v as views into one row of a fused product."""
    case = Case(SPANS["mixed"], [spec(4, 2, 16)], 4, torch.bfloat16)
    q, k, v = case.new_rows(0)
    rows = torch.cat([x.flatten(1) for x in (q, k, v)], dim=1)
    parts = rows.split([64, 32, 32], dim=1)
    views = [part.unflatten(1, (-1, 16)) for part in parts]
    backend = NativePagedAttention(case.cache(), case.specs, native)
    out = backend.run(*views, no_rotation(q), 0, backend.plan(case.batch()))
    torch.testing.assert_close(out.double(), case.expected(0), rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.other_sets(threads=[2])
def test_a_row_does_not_depend_on_its_neighbours(seed: int, native: Native, threads: int) -> None:
    """Neither on NaN in another sequence, nor, bit for bit, on whether others are there."""
    case = Case([(9, 1), (70, 1), (8, 1), (6, 3)], [spec(dim=16)], 4, torch.bfloat16)
    q, k, v = case.new_rows(0)

    def run() -> torch.Tensor:
        backend = NativePagedAttention(case.cache(), case.specs, native)
        return backend.run(q, k, v, no_rotation(q), 0, backend.plan(case.batch()))

    clean = run()
    for i in range(3):
        case.qkv[0][1][i].fill_(torch.nan)
    q, k, v = case.new_rows(0)
    out = run()
    assert out[1].isnan().all()
    keep = [0, 2, 3, 4, 5]
    assert torch.equal(out[keep], clean[keep])


def test_supports(native: Native) -> None:
    def need(layer: AttentionSpec, dtype: torch.dtype = torch.bfloat16, **rest: object) -> AttentionNeed:
        given = {"device_type": "cpu", "cache_dtype": dtype} | rest
        return AttentionNeed(dtype=dtype, layers=(layer,), **given)  # type: ignore[arg-type]

    layer = AttentionSpec(4, 2, 8, 1.0)
    assert NativePagedAttention.supports(need(layer), native) is None
    none = Native(None, "", "no compiler")
    for wrong, library, why in (
        (need(layer, device_type="cuda"), native, "not on cuda"),
        (need(layer, torch.float32), native, "must be bfloat16"),
        (need(layer, cache_dtype=torch.float8_e4m3fn), native, "float8_e4m3fn"),
        (need(AttentionSpec(4, 2, 8, 1.0, logit_soft_cap=3.0)), native, "soft cap"),
        (need(AttentionSpec(5, 2, 8, 1.0)), native, "5 query heads"),
        (need(layer), none, "no compiler"),
    ):
        assert why in str(NativePagedAttention.supports(wrong, library))
