"""The paged KV cache: sizes, writes, block copies, and memory that stays untouched until used."""

from __future__ import annotations

import random
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from moe_runtime.attention.base import AttentionSpec
from moe_runtime.attention.kv_cache import KVCache
from moe_runtime.quantization import FP8

SPECS = (
    AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=5, scale=1.0),
    AttentionSpec(num_heads=3, num_kv_heads=3, head_dim=7, scale=1.0, sliding_window=4),
)


def random_cache(num_blocks: int, block_size: int, dtype: torch.dtype = torch.float32) -> KVCache:
    cache = KVCache.allocate(SPECS, num_blocks, block_size, dtype, "cpu")
    for tensor in (*cache.keys, *cache.values):
        tensor.copy_(torch.randn(tensor.shape))
    return cache


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP8], ids=str)
def test_bytes_per_block_is_what_allocate_takes(dtype: torch.dtype) -> None:
    cache = KVCache.allocate(SPECS, 6, 3, dtype, torch.device("cpu"))
    taken = sum(t.numel() * t.element_size() for t in (*cache.keys, *cache.values))
    assert 6 * KVCache.bytes_per_block(SPECS, 3, dtype) == taken
    assert [tuple(k.shape) for k in cache.keys] == [(6, 3, 2, 5), (6, 3, 3, 7)]
    assert [tuple(v.shape) for v in cache.values] == [(6, 3, 2, 5), (6, 3, 3, 7)]
    assert all(t.dtype == dtype for t in (*cache.keys, *cache.values))


def test_write_reaches_the_named_slots_and_no_other(seed: int) -> None:
    cache = random_cache(5, 3)
    keys_before, values_before = cache.keys[1].clone(), cache.values[1].clone()
    other_layer = cache.keys[0].clone()
    slots = torch.randperm(15)[:4]
    k, v = torch.randn(4, 3, 7), torch.randn(4, 3, 7)
    cache.write(1, slots, k, v)
    for row, slot in enumerate(slots.tolist()):
        keys_before[slot // 3, slot % 3] = k[row]
        values_before[slot // 3, slot % 3] = v[row]
    assert torch.equal(cache.keys[1], keys_before)
    assert torch.equal(cache.values[1], values_before)
    assert torch.equal(cache.keys[0], other_layer)


def test_write_takes_no_tokens_and_strided_tokens(seed: int) -> None:
    cache = random_cache(2, 3)
    before = cache.keys[0].clone()
    cache.write(0, torch.empty(0, dtype=torch.int64), torch.empty(0, 2, 5), torch.empty(0, 2, 5))
    assert torch.equal(cache.keys[0], before)
    fused = torch.randn(2, 4, 5)
    cache.write(0, torch.tensor([5, 0]), fused[:, :2], fused[:, 2:])
    assert torch.equal(cache.keys[0].view(6, 2, 5)[[5, 0]], fused[:, :2])
    assert torch.equal(cache.values[0].view(6, 2, 5)[[5, 0]], fused[:, 2:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fp8_rounds_what_is_written_and_widens_what_is_read(seed: int, dtype: torch.dtype) -> None:
    cache = replace(random_cache(4, 3, FP8), key_scales=(0.5, 0.25), value_scales=(1.0, 2.0))
    slots = torch.tensor([5, 0, 11])
    k, v = (3 * torch.randn(2, 3, 3, 7)).to(dtype)
    k[1, 1, 1], v[2, 0, 3], v[0, 0, 0] = 1e4, -1e4, torch.nan
    cache.write(1, slots, k, v)
    keys, values = cache.gather(1, slots, dtype)
    assert keys.dtype == values.dtype == dtype
    for found, given, scale in ((keys, k, 0.25), (values, v, 2.0)):
        limited = (given.float() / scale).clamp(-448, 448)
        expected = (limited.to(FP8).float() * scale).to(dtype)
        assert torch.equal(found.isnan(), given.isnan())
        assert torch.equal(found.nan_to_num(), expected.nan_to_num())
    assert (float(keys[1, 1, 1]), float(values[2, 0, 3])) == (112.0, -896.0)


@pytest.mark.parametrize("dtype", [torch.float32, FP8], ids=str)
def test_copies_read_every_source_before_writing(seed: int, dtype: torch.dtype) -> None:
    cache = random_cache(7, 3, dtype)
    before = [t.clone() for t in (*cache.keys, *cache.values)]
    pairs = [(0, 1), (1, 2), (2, 0), (3, 4), (3, 5)]
    random.shuffle(pairs)
    cache.copy_blocks(pairs)
    for old, new in zip(before, (*cache.keys, *cache.values), strict=True):
        want = old.clone()
        for source, destination in pairs:
            want[destination] = old[source]
        assert torch.equal(new.float(), want.float())


def test_copying_nothing_and_to_one_block_twice() -> None:
    cache = random_cache(3, 2)
    before = cache.values[1].clone()
    cache.copy_blocks([])
    assert torch.equal(cache.values[1], before)
    with pytest.raises(AssertionError, match="destination twice"):
        cache.copy_blocks([(0, 2), (1, 2)])


MEASURE = """
import os
from pathlib import Path
import torch
from moe_runtime.attention.base import AttentionSpec
from moe_runtime.attention.kv_cache import KVCache

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

spec = AttentionSpec(num_heads=4, num_kv_heads=4, head_dim=64, scale=1.0)
start = resident()
cache = KVCache.allocate([spec], 4096, 16, torch.float32, "cpu")
allocated = resident()
cache.keys[0].zero_()
print(4096 * KVCache.bytes_per_block([spec], 16, torch.float32), allocated - start, resident() - allocated)
"""


def test_allocation_does_not_touch_memory() -> None:
    # In a process of its own: what other tests free meanwhile would blur the measurement.
    ran = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True, check=True)
    size, by_allocating, by_zeroing_keys = map(int, ran.stdout.split())
    assert size == 128 * 2**20
    assert by_allocating < size // 16
    assert by_zeroing_keys > size // 3, "the measurement does not see touched memory"
