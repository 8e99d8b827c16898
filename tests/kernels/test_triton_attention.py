"""The Triton attention kernels in the interpreter: against full attention in float64, the reference, and themselves.

Most tests cut the work into small tiles, so that short sequences have several of everything.
"""

from __future__ import annotations

import dataclasses
import random
from functools import partial
from typing import Any

import pytest
import torch

from moe_runtime.attention import triton_paged
from moe_runtime.attention.base import AttentionNeed, AttentionSpec
from moe_runtime.attention.kv_cache import KVCache
from moe_runtime.attention.reference import ReferenceAttention
from moe_runtime.attention.triton_paged import AttentionTiles, TritonPagedAttention, choose_tiles
from moe_runtime.layers.rope import RopeSpec, RotaryEmbedding, Rotation
from moe_runtime.quantization import FP8
from tests.helpers.attention_cases import SPANS, Case, check, no_rotation, spec

BF16 = torch.bfloat16
SMALL = AttentionTiles(
    query_rows=16, keys=16, extend_warps=4, extend_stages=2, decode_keys=16, split=32, decode_warps=4, decode_stages=2
)  # fmt: skip
DETERMINISTIC = partial(TritonPagedAttention, deterministic=True)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_paged, "choose_tiles", lambda spec, dtype, arch: SMALL)
    monkeypatch.setattr(triton_paged, "query_rows", lambda spec, dtype, arch: SMALL.query_rows)
    monkeypatch.setattr(triton_paged, "MERGED_AT_ONCE", 2)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("spans", SPANS.values(), ids=SPANS)
def test_matches_full_attention(seed: int, spans: list[tuple[int, int]]) -> None:
    specs = [spec(heads=2, kv_heads=1), spec(heads=2, kv_heads=2, window=4)]
    check(Case(spans, specs, random.choice([1, 3, 16])), TritonPagedAttention)


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_the_tiles_that_are_shipped(seed: int, block_size: int) -> None:
    case = Case([(70, 1), (0, 150), (90, 40), (0, 1)], [spec(heads=2, kv_heads=1, dim=16)], block_size)
    check(case, TritonPagedAttention)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(2, 2, 2), (4, 1, 34), (8, 1, 16), (3, 1, 80), (6, 2, 20)]
)
def test_groups_and_head_sizes(seed: int, heads: int, kv_heads: int, dim: int) -> None:
    check(Case([(40, 1), (5, 21)], [spec(heads, kv_heads, dim)], 3), TritonPagedAttention)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("window", [1, 15, 16, 17, 32, 33, 100])
def test_windows_at_their_edges(seed: int, window: int) -> None:
    spans = [(95, 1), (window, 1), (max(1, window - 1), 1), (30, 20)]
    check(Case(spans, [spec(2, 1, window=window)], 4), TritonPagedAttention)


@pytest.mark.usefixtures("small_tiles")
def test_soft_cap(seed: int) -> None:
    check(Case([(40, 1), (5, 21)], [spec(cap=1.5), spec(cap=0.3, window=9)], 3), TritonPagedAttention)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(
    ("dtype", "cache_dtype"),
    [(BF16, BF16), (torch.float16, torch.float16), (BF16, FP8), (torch.float32, FP8)],
    ids=str,
)
def test_types(seed: int, dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    case = Case([(40, 1), (5, 21)], [spec(dim=16, window=30)], 3, dtype, cache_dtype)
    check(case, TritonPagedAttention, tol=2e-5 if dtype == torch.float32 else 2e-2)


@pytest.mark.usefixtures("small_tiles")
def test_random_batches(seed: int) -> None:
    for _ in range(2):
        spans = [
            (random.choice([0, 1, random.randint(0, 100)]), random.choice([1, 1, random.randint(0, 40)]))
            for _ in range(random.randint(1, 5))
        ]
        group = random.choice([1, 2, 5])
        one = spec(group, 1, random.randint(1, 10), random.choice([None, 3, 20]), random.choice([None, 2.0]))
        # Rotation takes pairs, so heads are even.
        one = dataclasses.replace(one, head_dim=2 * one.head_dim)
        make = random.choice([TritonPagedAttention, DETERMINISTIC])
        check(Case(spans, [one], random.choice([1, 3, 16])), make)


def rotation_of(case: Case, rope: RopeSpec) -> Rotation:
    return RotaryEmbedding(rope, "cpu")(case.batch().positions_T, case.dtype)


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("share", [1.0, 0.5, 0.3])
@pytest.mark.parametrize("cache_dtype", [torch.float32, FP8], ids=str)
def test_rotation_and_what_is_written(
    seed: int, interleaved: bool, share: float, cache_dtype: torch.dtype
) -> None:
    """As the reference, from one fused projection whose heads lie apart; other slots keep their bytes."""
    case = Case([(4, 1), (2, 17)], [spec(heads=2, kv_heads=1, dim=20)], 3, cache_dtype=cache_dtype)
    rotation = rotation_of(case, RopeSpec(20, 50.0, partial_rotary_factor=share, interleaved=interleaved))
    assert rotation.cos.shape[-1] == {1.0: 10, 0.5: 5, 0.3: 3}[share]
    qkv = torch.cat(case.new_rows(0), dim=1).flatten(1)
    q, k, v = (x.unflatten(1, (-1, 20)) for x in qkv.split((40, 20, 20), dim=1))
    outs, caches = [], []
    for backend in (TritonPagedAttention, ReferenceAttention):
        caches.append(case.cache())
        made = backend(caches[-1], case.specs)
        outs.append(made.run(q, k, v, rotation, 0, made.plan(case.batch())))
    torch.testing.assert_close(*outs, rtol=2e-5, atol=2e-5)
    for ours, theirs in zip(*((c.keys[0], c.values[0]) for c in caches), strict=True):
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=1e-5, atol=1e-5, equal_nan=True)
    unwritten = torch.ones(caches[0].num_blocks * 3, dtype=torch.bool)
    for seq, (old, new) in enumerate(case.spans):
        unwritten[case.slots(seq, range(old + new))] = False
    assert caches[0].keys[0].flatten(0, 1).float()[unwritten].isnan().all()


def test_written_keys_and_values_use_the_scales_and_skip_padding(seed: int) -> None:
    case = Case([(0, 4)], [spec(heads=1, kv_heads=1, dim=16)], 4, BF16, FP8)
    cache = dataclasses.replace(case.cache(), key_scales=(0.25,), value_scales=(4.0,))
    batch = case.batch()
    slots = batch.slot_mapping_T.clone()
    backend = TritonPagedAttention(cache, case.specs)
    batch.slot_mapping_T[3] = -1
    q, k, v = case.new_rows(0)
    k[0, 0, 0], v[0, 0, 0] = 1000.0, 5000.0
    backend.run(q, k, v, no_rotation(q), 0, backend.plan(batch))
    keys, values = cache.gather(0, slots, torch.float32)
    assert torch.equal(keys[:3], (k[:3].float() / 0.25).clamp(-448, 448).to(FP8).float() * 0.25)
    assert torch.equal(values[:3], (v[:3].float() / 4).clamp(-448, 448).to(FP8).float() * 4)
    assert (float(keys[0, 0, 0]), float(values[0, 0, 0])) == (112.0, 1792.0)
    assert keys[3].isnan().all()
    assert values[3].isnan().all()


@pytest.mark.usefixtures("small_tiles")
def test_scales_of_an_fp8_cache_are_read(seed: int) -> None:
    case = Case([(40, 1), (5, 21)], [spec(dim=16)], 3, cache_dtype=FP8)
    scaled = [dataclasses.replace(case.cache(), key_scales=(0.5,), value_scales=(2.0,)) for _ in range(2)]
    q, k, v = case.new_rows(0)
    made = [TritonPagedAttention(scaled[0], case.specs), ReferenceAttention(scaled[1], case.specs)]
    ours, expected = (b.run(q, k, v, no_rotation(q), 0, b.plan(case.batch())) for b in made)
    torch.testing.assert_close(ours, expected, rtol=2e-5, atol=2e-5)


def rows_of(case: Case, chosen: list[int], make: type = TritonPagedAttention) -> torch.Tensor:
    """The output of a step with these of the case's sequences only."""
    part = dataclasses.replace(case)
    part.num_blocks, part.tables = case.num_blocks, [case.tables[i] for i in chosen]
    part.spans = [case.spans[i] for i in chosen]
    part.qkv = [[layer[i] for i in chosen] for layer in case.qkv]
    return part.run(make)[0]


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("make", [TritonPagedAttention, DETERMINISTIC], ids=["default", "deterministic"])
@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
def test_a_row_has_the_same_bits_whatever_its_neighbours_are(
    seed: int, dtype: torch.dtype, make: Any
) -> None:
    case = Case([(37, 1), (150, 1), (0, 19), (3, 1)], [spec(heads=2, kv_heads=1, dim=16)], 3, dtype)
    together, alone = rows_of(case, [3, 2, 1, 0], make), [rows_of(case, [i], make) for i in range(4)]
    assert torch.equal(together, torch.cat(alone[::-1]))


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("window", [None, 21])
@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
def test_deterministic_rows_do_not_depend_on_chunks(
    seed: int, dtype: torch.dtype, window: int | None
) -> None:
    """A prompt whole, in chunks over a cached prefix, and its last token alone."""
    case = Case([(0, 53)], [spec(heads=2, kv_heads=1, dim=16, window=window)], 3, dtype)
    whole = rows_of(case, [0], DETERMINISTIC)
    for old in (52, 45, 13, 32):
        case.spans = [(old, 53 - old)]
        assert torch.equal(rows_of(case, [0], DETERMINISTIC), whole[old:])


@pytest.mark.filterwarnings(
    "ignore:All-NaN slice:RuntimeWarning", "ignore:invalid value encountered in subtract:RuntimeWarning"
)
@pytest.mark.usefixtures("small_tiles")
def test_nan_stays_with_its_sequence(seed: int) -> None:
    case = Case([(33, 1), (40, 1), (6, 18)], [spec(heads=2, kv_heads=1, dim=16)], 4)
    for x in case.qkv[0][1]:
        x.fill_(torch.nan)
    backend = TritonPagedAttention(case.cache(), case.specs)
    q, k, v = case.new_rows(0)
    out = backend.run(q, k, v, no_rotation(q), 0, backend.plan(case.batch()))
    assert out[1].isnan().all()
    keep = [0, *range(2, 20)]
    torch.testing.assert_close(out[keep].double(), case.expected(0)[keep], rtol=2e-5, atol=2e-5)


@pytest.mark.usefixtures("small_tiles")
def test_a_decode_plan_with_capacities_follows_the_tensors(seed: int) -> None:
    """As a captured graph does: planned for longer sequences, with places that stay empty, run on what the tensors say."""
    case = Case([(37, 1), (90, 1)], [spec(heads=2, kv_heads=1, dim=16, window=50)], 3)
    batch = case.batch()
    roomy = dataclasses.replace(
        batch,
        query_starts_B1=torch.tensor([0, 1, 2, 2], dtype=torch.int32),
        seq_lens_B=torch.tensor([0, 0, 0], dtype=torch.int32),
        block_tables_BM=torch.cat((batch.block_tables_BM, batch.block_tables_BM[:1])),
        query_lens=[1, 1, 0],
        seq_lens=[400, 400, 400],
    )
    backend = TritonPagedAttention(case.cache(), case.specs)
    plan = backend.plan(roomy)
    roomy.seq_lens_B.copy_(torch.tensor([38, 91, 0]))
    q, k, v = case.new_rows(0)
    out = backend.run(q, k, v, no_rotation(q), 0, plan)
    assert torch.equal(out, rows_of(case, [0, 1]))


def test_long_work_comes_first() -> None:
    tiles = triton_paged._tiles([(0, 5, 5), (2, 3, 50)], 2, torch.device("cpu"))
    assert tiles.tolist() == [[2, 2], [2, 0], [0, 4], [0, 2], [0, 0]]
    assert tiles.dtype == torch.int32


@pytest.mark.parametrize("arch", [80, 90, 100, "gfx942"])
@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
def test_tiles_fit_together(arch: int | str, dtype: torch.dtype) -> None:
    for layer in (spec(1, 1, 2), spec(32, 4, 128), spec(128, 1, 192), spec(16, 8, 256)):
        tiles = choose_tiles(layer, dtype, arch)
        assert tiles.split % tiles.decode_keys == 0
        assert tiles.query_rows == triton_paged.query_rows(layer, dtype, arch)
        assert tiles.query_rows >= layer.num_heads // layer.num_kv_heads
        for side in (tiles.query_rows, tiles.keys, tiles.decode_keys):
            assert side >= 16
            assert side & (side - 1) == 0


def test_supports(monkeypatch: pytest.MonkeyPatch) -> None:
    def why(
        layer: AttentionSpec, device: str = "cpu", dtype: torch.dtype = BF16, stored: object = BF16
    ) -> str:
        return str(TritonPagedAttention.supports(AttentionNeed(device, dtype, (layer,), stored)))  # type: ignore[arg-type]

    good = AttentionSpec(4, 2, 8, 1.0, 5, 2.0)
    assert why(good) == why(good, stored=FP8) == "None"
    assert "5 query heads" in why(AttentionSpec(5, 2, 8, 1.0))
    assert "heads of 512" in why(AttentionSpec(4, 2, 512, 1.0))
    assert "128 query heads" in why(AttentionSpec(256, 1, 8, 1.0))
    assert "int64" in why(good, dtype=torch.int64)
    assert "xpu" in why(good, device="xpu")
    monkeypatch.setattr(triton_paged, "target_arch", lambda device: 80)
    assert "sm_80" in why(good, stored=FP8)
    assert why(good) == "None"
    monkeypatch.setattr(triton_paged, "target_arch", lambda device: 100)
    assert why(good, dtype=torch.float32) == why(good) == why(good, stored=FP8) == "None"


def test_a_cpu_without_the_interpreter_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    need = AttentionNeed("cpu", BF16, (AttentionSpec(4, 2, 8, 1.0),), BF16)
    assert "TRITON_INTERPRET=1" in str(TritonPagedAttention.supports(need))


def test_an_empty_step_launches_nothing() -> None:
    cache = KVCache.allocate([spec()], 2, 4, BF16, "cpu")
    backend = TritonPagedAttention(cache, [spec()])
    q, kv = torch.empty(0, 4, 6, dtype=BF16), torch.empty(0, 2, 6, dtype=BF16)
    plan = backend.plan(Case([], [spec()], 4).batch())
    assert backend.run(q, kv, kv, no_rotation(q), 0, plan).shape == (0, 4, 6)
