"""Tiles of the grouped GEMM: a pure choice by shape and architecture, or from a tuned table in vLLM's file format.

The tables are files of `profiles/kernels/`, named as vLLM names those of its fused MoE kernel, which load too.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_runtime.errors import ConfigError
from moe_runtime.triton_support.availability import has_fp8

if TYPE_CHECKING:
    from collections.abc import Mapping

logger = logging.getLogger(__name__)

PROFILES = Path(__file__).resolve().parents[2] / "profiles" / "kernels"
GROUP = 128
"""Values that share an FP8 scale; a tile may not lie across two of them."""
GATHERING_SUMS = 64
"""Most sums per thread of tiles whose rows descriptors fetch by index."""
DETERMINISTIC_ROWS = 64
"""Rows of a tile, whatever the batch, where a row's result may not depend on its neighbours."""


@dataclass(frozen=True)
class GroupedGemmConfig:
    """How one product is cut into tiles. Sizes are powers of two of at least 16."""

    block_m: int
    """Expert rows of a tile."""
    block_n: int
    """Weight rows of a tile, gate and up together."""
    block_k: int
    group_m: int = 8
    """Row tiles of a slot that run side by side, so that they share its weight tiles in the L2 cache."""
    num_warps: int = 4
    num_stages: int = 3
    swap_ab: bool = False
    """Weights on the M side of the dot: for few rows per slot, where a GPU has 64 or 128 rows there."""
    split_k: int = 1
    """Parts of K computed by different programs and added by a second kernel."""
    use_tma: bool = False
    """Operands through tensor descriptors, where their strides allow: neighbouring rows (sm_90, sm_100), rows by index (sm_100)."""

    def __post_init__(self) -> None:
        for name in ("block_m", "block_n", "block_k", "num_warps", "group_m", "split_k", "num_stages"):
            value, low = getattr(self, name), 16 if name.startswith("block") else 1
            if not isinstance(value, int) or isinstance(value, bool) or value < low:
                raise ConfigError(f"{name}={value!r}: must be a whole number of at least {low}")
            if (name.startswith("block") or name == "num_warps") and value & (value - 1):
                raise ConfigError(f"{name}={value}: must be a power of two")


@dataclass(frozen=True)
class GemmShape:
    """What decides the tiles of one product: [rows, num_in] times the slots' [parts * num_out, num_in]."""

    num_tokens: int
    """Distinct token rows; the key of tuned tables."""
    num_rows: int
    """Expert rows over all slots, as a capacity."""
    num_slots: int
    num_out: int
    num_in: int
    parts: int
    """2: gate and up."""
    x_bytes: int
    """Of one value as it enters the dot."""
    w_bytes: int
    scheme: str | None = None


@dataclass(frozen=True)
class Gpu:
    """What decides tiles on the side of the hardware; fields as of triton_support.availability."""

    arch: int | str
    num_sms: int
    shared_bytes: int

    @property
    def has_fp8(self) -> bool:
        """Whether Triton converts and multiplies e4m3 there; else it is decoded from bytes and multiplied wider."""
        return has_fp8(self.arch)

    @property
    def wide_m(self) -> bool:
        """Whether the tensor cores take 64 or more rows of their first operand at once, and TMA exists."""
        return isinstance(self.arch, int) and 90 <= self.arch < 120

    def gathers(self, config: GroupedGemmConfig) -> bool:
        """Whether tensor descriptors fetch rows by index for these tiles. sm_90's only fetch neighbours; and the indices take
        registers, which the sums of larger tiles do not leave."""
        able = isinstance(self.arch, int) and 100 <= self.arch < 120
        return able and config.block_m * config.block_n <= GATHERING_SUMS * 32 * config.num_warps


@dataclass(frozen=True)
class TunedTable:
    """Configurations by number of tokens, of the gate/up and of the down product."""

    gate_up: Mapping[int, GroupedGemmConfig]
    down: Mapping[int, GroupedGemmConfig]


def choose_config(
    shape: GemmShape,
    gpu: Gpu,
    deterministic: bool = False,
    tuned: Mapping[int, GroupedGemmConfig] | None = None,
) -> GroupedGemmConfig:
    """The tuned entry nearest in tokens, else a built-in one; made to fit the scheme and the GPU's shared memory.

    deterministic: the same for any number of rows, and K unsplit, so that a row's result does not depend on the others.
    """
    if deterministic:
        shape = replace(shape, num_tokens=0, num_rows=DETERMINISTIC_ROWS * shape.num_slots)
        return fit(_built_in(shape, gpu), shape, gpu)
    if tuned:
        return fit(tuned[min(tuned, key=lambda n: (abs(n - shape.num_tokens), n))], shape, gpu)
    config = fit(_built_in(shape, gpu), shape, gpu)
    return replace(config, split_k=_split(config, shape, gpu))


def fit(config: GroupedGemmConfig, shape: GemmShape, gpu: Gpu) -> GroupedGemmConfig:
    """The config with what `shape` and `gpu` do not allow cut down to what they do."""
    block_n = max(config.block_n, 16 * shape.parts)
    block_k = max(config.block_k, 32) if min(shape.x_bytes, shape.w_bytes) == 1 else config.block_k
    if shape.scheme == "fp8_block":
        block_n, block_k = min(block_n, GROUP * shape.parts), min(block_k, GROUP)
    config = replace(
        config, block_n=block_n, block_k=block_k, use_tma=config.use_tma and gpu.wide_m,
        swap_ab=config.swap_ab and gpu.wide_m,
        num_stages=config.num_stages if isinstance(gpu.arch, int) else min(config.num_stages, 2),
    )  # fmt: skip
    while config.num_stages > 1 and shared_bytes(config, shape) > gpu.shared_bytes:
        config = replace(config, num_stages=config.num_stages - 1)
    while config.block_k > 32 and shared_bytes(config, shape) > gpu.shared_bytes:
        config = replace(config, block_k=config.block_k // 2)
    return config


def shared_bytes(config: GroupedGemmConfig, shape: GemmShape) -> int:
    """Shared memory that the tiles in flight take, as an estimate from above for one part of num_stages each."""
    stage = config.block_k * (config.block_m * shape.x_bytes + config.block_n * shape.w_bytes)
    return stage * config.num_stages


def programs_per_sm(config: GroupedGemmConfig, shape: GemmShape, gpu: Gpu) -> int:
    """Programs of a persistent grid that an SM runs at once: an estimate from shared memory and registers, at most 4."""
    by_shared = gpu.shared_bytes // shared_bytes(config, shape)
    threads = 32 * config.num_warps
    registers = min(255, config.block_m * config.block_n // threads + 80)
    return max(1, min(4, by_shared, 65536 // (threads * registers)))


def _split(config: GroupedGemmConfig, shape: GemmShape, gpu: Gpu) -> int:
    """Enough parts of K to give each SM a tile, but at least four steps to each."""
    columns = config.block_n // shape.parts
    tiles = max(1, min(shape.num_slots, shape.num_rows)) * -(-shape.num_out // columns)
    steps = -(-shape.num_in // config.block_k)
    split = 1
    while split < 8 and tiles * split * 2 <= gpu.num_sms and steps >= 8 * split:
        split *= 2
    return split


def _built_in(shape: GemmShape, gpu: Gpu) -> GroupedGemmConfig:
    rows = -(-shape.num_rows // max(1, min(shape.num_slots, shape.num_rows)))
    if shape.x_bytes == 4:
        # float32 without tensor cores: small tiles, whose operands stay in registers.
        return GroupedGemmConfig(64 if rows > 32 else 32, 64, 32, num_stages=2)
    if isinstance(gpu.arch, str):
        return _for_amd(rows, shape)
    if not gpu.wide_m:
        return _for_mma_sync(rows, shape)
    return _for_wide_m(rows, shape)


def _for_amd(rows: int, shape: GemmShape) -> GroupedGemmConfig:
    if rows <= 32:
        warps = 8 if rows > 16 and shape.scheme else 4
        return GroupedGemmConfig(32 if rows > 16 else 16, 128, 64, num_warps=warps, num_stages=2)
    return GroupedGemmConfig(64 if rows <= 64 else 128, 128, 64, num_warps=8, num_stages=2)


def _for_mma_sync(rows: int, shape: GemmShape) -> GroupedGemmConfig:
    """sm_80 and others whose tensor cores read registers, 16 rows at a time. Decoded FP8 needs more of those."""
    if rows <= 32:
        warps = 8 if rows > 16 and shape.scheme else 4
        return GroupedGemmConfig(32 if rows > 16 else 16, 128, 64, num_warps=warps, num_stages=4)
    return GroupedGemmConfig(64 if rows <= 64 or shape.scheme else 128, 128, 64, num_warps=8, num_stages=3)


def _for_wide_m(rows: int, shape: GemmShape) -> GroupedGemmConfig:
    """sm_90 and sm_100, whose tensor cores read shared memory, 64 or 128 rows on the M side."""
    few = 16 if rows <= 16 else 32 if rows <= 32 else 64
    if shape.x_bytes != shape.w_bytes:
        # Weights that are converted first come from registers, which only the M side may.
        return GroupedGemmConfig(few, 128, 64, num_stages=4, swap_ab=True)
    if shape.scheme == "fp8_block":
        # One scale group of every part to a tile, so that the epilogue can round h to FP8.
        block_n, warps = GROUP * shape.parts, 4 * shape.parts
        if rows <= 32:
            return GroupedGemmConfig(few, block_n, 128, num_warps=warps, num_stages=4, swap_ab=True)
        block_m = 64 if rows <= 64 or shape.parts == 2 else 128
        return GroupedGemmConfig(block_m, block_n, 128, num_warps=8, num_stages=4, use_tma=True)
    block_k = 128 // shape.x_bytes
    if rows <= 32:
        return GroupedGemmConfig(few, 128, block_k, num_stages=4, swap_ab=True)
    if rows <= 64:
        return GroupedGemmConfig(64, 128, block_k, num_stages=4, use_tma=True)
    # FP8 sums leave the tensor core every 128 values and so need twice the registers.
    block_n = 128 if shape.x_bytes == 1 and shape.parts == 1 else 256
    return GroupedGemmConfig(128, block_n, block_k, num_warps=8, num_stages=4, use_tma=True)


def profile_name(num_slots: int, num_inner: int, device: str, dtype: str | None, block: bool) -> str:
    """vLLM's name of a table: experts here, their intermediate size, the GPU, and the weights' type unless 16-bit."""
    parts = [f"E={num_slots}", f"N={num_inner}", f"device_name={device.replace(' ', '_')}"]
    parts += [f"dtype={dtype}"] if dtype else []
    return ",".join(parts + ([f"block_shape=[{GROUP},{GROUP}]"] if block else [])) + ".json"


@cache
def find_table(folder: Path, name: str, flags: str, log: bool = True) -> TunedTable | None:
    """The table of that name, read once. None where there is none, with the command that makes it in the log. Raises ConfigError.

    log: whether this is the process that speaks for all; others say it at level debug.
    """
    path = folder / name
    if path.is_file():
        return read_table(path)
    text = "no tuned tiles in %s, using built-in ones; to tune: python -m moe_runtime.tools.tune %s"
    logger.log(logging.INFO if log else logging.DEBUG, text, path, flags)
    return None


_KEYS = {
    "BLOCK_SIZE_M": "block_m", "BLOCK_SIZE_N": "block_n", "BLOCK_SIZE_K": "block_k", "GROUP_SIZE_M": "group_m",
    "num_warps": "num_warps", "num_stages": "num_stages", "SPLIT_K": "split_k", "SWAP_AB": "swap_ab", "USE_TMA": "use_tma",
}  # fmt: skip


def read_table(path: Path) -> TunedTable:
    """{tokens: {BLOCK_SIZE_M: .., ..}}, optionally with "down": {..} for the second product. Raises ConfigError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        entries = {int(n): entry for n, entry in content.items() if n != "triton_version"}
        if not entries:
            raise ValueError("no entries")
        gate_up = {n: _from_json(entry) for n, entry in entries.items()}
        down = {n: _from_json(entry.get("down", entry)) for n, entry in entries.items()}
    except (ValueError, KeyError, AttributeError, TypeError, ConfigError) as e:
        raise ConfigError(f"{path}: not a table of tiles: {type(e).__name__}: {e}") from e
    return TunedTable(gate_up, down)


def _from_json(entry: Mapping[str, Any]) -> GroupedGemmConfig:
    """One entry; keys of other kernels are let pass. Without SWAP_AB, as in vLLM's files, few rows go to the N side."""
    config = GroupedGemmConfig(**{ours: entry[key] for key, ours in _KEYS.items() if key in entry})
    few = config.block_m < 64 <= config.block_n
    return config if "SWAP_AB" in entry else replace(config, swap_ab=few)


def to_json(config: GroupedGemmConfig) -> dict[str, int | bool]:
    """The entry that `read_table` reads back."""
    return {key: getattr(config, ours) for key, ours in _KEYS.items()}
