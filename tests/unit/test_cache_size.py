"""How large the KV cache becomes: from memory or as asked, limited by control groups, alike on all ranks."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_runtime.attention.kv_cache import KVCache
from moe_runtime.config import EngineConfig
from moe_runtime.engine import model_runner
from moe_runtime.engine.model_runner import allocate_cache, step_bytes
from moe_runtime.errors import CapacityError
from moe_runtime.layers.rope import RopeSpec
from moe_runtime.models.spec import ModelSpec
from moe_runtime.topology import free_under_limits, own_cgroups

MIB, GIB = 2**20, 2**30
DTYPE = torch.bfloat16


@dataclass
class Ranks:
    """Stands in for a Topology whose ranks have these amounts of free memory; this is the first of them."""

    free: list[int]
    device: torch.device = field(default_factory=lambda: torch.device("meta"))

    @property
    def world_size(self) -> int:
        return len(self.free)

    def all_gather_text(self, text: str) -> list[str]:
        return [text, *(str(n) for n in self.free[1:])]


@pytest.fixture(autouse=True)
def _given_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_runner, "free_memory_bytes", lambda ranks: ranks.free[0])


@pytest.fixture
def spec(seed: int) -> ModelSpec:
    draw = random.Random(seed)
    num_layers, heads = draw.randint(2, 5), draw.choice([2, 4])
    return ModelSpec(
        architecture="MixtralForCausalLM",
        vocab_size=draw.randint(500, 2000),
        hidden_size=draw.randint(32, 100),
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=draw.choice([1, 2]),
        head_dim=draw.choice([8, 16, 24]),
        norm_eps=1e-5,
        rope=RopeSpec(head_dim=8, theta=1e4),
        sliding_windows=(None,) * num_layers,
        mlp_kinds=("moe",) * num_layers,
        num_experts=8,
        top_k=2,
        moe_intermediate_size=48,
        norm_topk_prob=True,
        activation="silu",
        tie_word_embeddings=False,
        max_position_embeddings=100_000,
        dtype="bfloat16",
    )


def cache_for(spec: ModelSpec, free: list[int], max_model_len: int, **flags: Any) -> KVCache:
    return allocate_cache(EngineConfig(**flags), spec, DTYPE, max_model_len, Ranks(free))  # type: ignore[arg-type]


def block_bytes(spec: ModelSpec, block_size: int) -> int:
    return 2 * spec.num_layers * block_size * spec.num_kv_heads * spec.head_dim * DTYPE.itemsize


@pytest.mark.parametrize("utilization", [0.3, 0.8, 1.0])
@pytest.mark.parametrize("block_size", [1, 7, 16])
def test_fills_the_share_of_memory_it_is_given(spec: ModelSpec, utilization: float, block_size: int) -> None:
    free = 2 * GIB
    flags: dict[str, Any] = {"memory_utilization": utilization, "block_size": block_size}
    # So many long sequences that memory is what limits.
    flags |= {"max_num_batched_tokens": 64, "max_num_seqs": 400}
    cache = cache_for(spec, [free], 100_000, **flags)
    step = step_bytes(EngineConfig(**flags), spec, DTYPE, 1)  # type: ignore[arg-type]
    taken = sum(t.numel() * t.element_size() for t in (*cache.keys, *cache.values))
    assert taken == cache.num_blocks * block_bytes(spec, block_size)
    left = free * utilization - step - taken
    assert -1 < left < block_bytes(spec, block_size), "not one block more would fit, and none too many"


@pytest.mark.parametrize("name", ["fp8", "fp8_e4m3"])
def test_an_fp8_cache_takes_half_the_memory(spec: ModelSpec, name: str) -> None:
    flags: dict[str, Any] = {"max_num_batched_tokens": 64, "max_num_seqs": 1000, "memory_utilization": 1.0}
    plain, small = (
        cache_for(spec, [2 * GIB], 100_000, kv_cache_dtype=kind, **flags) for kind in ("auto", name)
    )
    assert (plain.dtype, small.dtype) == (DTYPE, torch.float8_e4m3fn)
    assert small.num_blocks in (2 * plain.num_blocks, 2 * plain.num_blocks + 1)


def test_no_more_than_all_sequences_can_use(spec: ModelSpec) -> None:
    cache = cache_for(spec, [50 * GIB], 1000, max_num_seqs=3, block_size=16)
    assert cache.num_blocks == 3 * 63


def test_the_rank_with_the_least_memory_decides(spec: ModelSpec) -> None:
    flags = {"max_num_seqs": 2000, "max_num_batched_tokens": 64, "memory_utilization": 1.0}
    sizes = {
        cache_for(spec, free, 20_000, **flags).num_blocks
        for free in ([GIB, 2 * GIB, 3 * GIB], [3 * GIB, GIB, 2 * GIB], [2 * GIB, 3 * GIB, GIB])
    }
    assert len(sizes) == 1
    (size,) = sizes
    assert size * block_bytes(spec, 16) <= GIB


def test_too_small_says_how_much_there_is(spec: ModelSpec) -> None:
    flags = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "memory_utilization": 0.5}
    step = step_bytes(EngineConfig(**flags), spec, DTYPE, 2)  # type: ignore[arg-type]
    needed = 63 * block_bytes(spec, 16)
    enough = 2 * (step + needed)
    assert cache_for(spec, [enough, GIB], 1000, **flags).num_blocks >= 63
    for free in ([enough - 2 * block_bytes(spec, 16), GIB], [GIB, enough - 2 * block_bytes(spec, 16)]):
        with pytest.raises(CapacityError, match=r"room for 992 tokens .*max_model_len=1000") as error:
            cache_for(spec, free, 1000, **flags)
        for number in (
            f"{min(free) / MIB:.1f} MiB free",
            "memory_utilization=0.5",
            f"{step / MIB:.1f} MiB kept",
        ):
            assert number in str(error.value)


def test_no_memory_at_all(spec: ModelSpec) -> None:
    with pytest.raises(CapacityError, match="room for 0 tokens"):
        cache_for(spec, [0], 16)


def test_a_number_of_blocks_is_taken_as_given(spec: ModelSpec) -> None:
    # Fewer than a sequence of max_model_len needs, too: such requests are then refused one by one.
    assert cache_for(spec, [GIB], 10_000, num_kv_blocks=5).num_blocks == 5
    # Neither the share nor the room for a step counts.
    blocks = GIB // block_bytes(spec, 16)
    assert cache_for(spec, [GIB], 16, num_kv_blocks=blocks, memory_utilization=0.01).num_blocks == blocks
    for free in ([GIB, 9 * GIB], [9 * GIB, GIB]):
        with pytest.raises(
            CapacityError,
            match=rf"num_kv_blocks={blocks + 1} needs 1\.00 GiB per rank, but 1\.00 GiB is free",
        ):
            cache_for(spec, free, 16, num_kv_blocks=blocks + 1)


def make_cgroup(folder: Path, limit: str, used: int = 0, cached: int = 0) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(limit + "\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon {used - cached}\nfile {cached}\ninactive_file {cached}\n")
    return folder


def test_the_tightest_control_group_counts(tmp_path: Path) -> None:
    outer = make_cgroup(tmp_path / "a", str(8 * GIB), used=6 * GIB, cached=GIB)
    inner = make_cgroup(tmp_path / "a" / "b", str(9 * GIB), used=5 * GIB)
    unlimited = make_cgroup(tmp_path / "c", "max", used=50 * GIB)
    assert free_under_limits(20 * GIB, [unlimited]) == 20 * GIB
    assert free_under_limits(20 * GIB, [outer]) == 3 * GIB, "cached file pages can be given back"
    assert free_under_limits(20 * GIB, [inner, unlimited]) == 4 * GIB
    assert free_under_limits(20 * GIB, [inner, outer, tmp_path]) == 3 * GIB, "a folder without limits is none"
    assert free_under_limits(GIB, [inner, outer]) == GIB, "the host itself may be shorter"
    overdrawn = make_cgroup(tmp_path / "d", str(GIB), used=2 * GIB)
    assert free_under_limits(GIB, [overdrawn]) == 0


def test_own_control_groups_include_those_around(tmp_path: Path) -> None:
    membership = tmp_path / "cgroup"
    mount = tmp_path / "mount"
    membership.write_text("5:cpu:/other\n0::/slice/pod/container\n")
    expected = {mount / "slice/pod/container", mount / "slice/pod", mount / "slice", mount}
    assert set(own_cgroups(mount, membership)) == expected
    membership.write_text("0::/\n")
    assert own_cgroups(mount, membership) == [mount]
    assert own_cgroups(mount, tmp_path / "absent") == [mount]
