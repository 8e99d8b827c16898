"""Experts on GPUs in two grouped products: gate and up with the activation behind them, then down.

Nothing waits for the host: rows per slot are read on the device, S is a capacity, and so the launches can be captured in
a graph. Kernels: triton_grouped_kernels. Tiles: triton_config.

Legend: R token rows, S expert rows, D hidden, F expert intermediate size, p slots, K and N input and output width of a
product, C capacity in row tiles, G groups with an FP8 scale each.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from moe_runtime.errors import ConfigError
from moe_runtime.experts.base import wide_tokens
from moe_runtime.experts.triton_config import (
    GROUP,
    PROFILES,
    GemmShape,
    Gpu,
    GroupedGemmConfig,
    TunedTable,
    choose_config,
    find_table,
    fit,
    profile_name,
    programs_per_sm,
)
from moe_runtime.layers.activation import expert_activation_problem
from moe_runtime.quantization import FP8
from moe_runtime.triton_support import availability
from moe_runtime.triton_support.fp8_rows import quantize_rows

if TYPE_CHECKING:
    from moe_runtime.core import ExpertBatch
    from moe_runtime.experts.base import ExpertNeed, ExpertWeights

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class TritonExperts:
    """See the module. One for each device; deterministic: a row's result is the same bits whatever else is in the batch.

    profiles: folder of the tuned tables. log: whether this rank says where one is missing.
    """

    name = "triton"

    def __init__(
        self, device: torch.device, deterministic: bool = False, profiles: Path = PROFILES, log: bool = True
    ) -> None:
        self.device = device
        self.deterministic = deterministic
        self.profiles, self.log = profiles, log

    def supports(self, need: ExpertNeed) -> str | None:
        """None if it can, else why not."""
        if need.dtype not in DTYPES:
            return f"{need.dtype} is not one of float32, bfloat16, float16"
        if need.scheme is not None and need.scheme.payload != FP8:
            return f"{need.scheme.name} weights are computed on CPUs only, by cpu_native and cpu"
        return expert_activation_problem(need.activation) or availability.triton_problem(need.device_type)

    def __call__(self, batch: ExpertBatch, weights: ExpertWeights) -> torch.Tensor:
        """Returns y_SD in batch.dtype. Raises ConfigError on an unknown activation."""
        gate_up, down = gemm_shapes(batch, weights, self.gpu)
        tuned = self._tuned(weights, batch.dtype)
        configs = (
            choose_config(gate_up, self.gpu, self.deterministic, tuned.gate_up if tuned else None),
            choose_config(down, self.gpu, self.deterministic, tuned.down if tuned else None),
        )
        return compute_experts(batch, weights, configs, self.gpu)

    @cached_property
    def gpu(self) -> Gpu:
        """What the tiles depend on."""
        return gpu_of(self.device)

    def _tuned(self, weights: ExpertWeights, dtype: torch.dtype) -> TunedTable | None:
        """The table for these weights, of the device's own name."""
        device = availability.device_name(self.device)
        if device is None or self.deterministic:
            return None
        num_slots, hidden, inner = weights.down_pDF.shape
        kind = table_dtype(weights, dtype)
        block = _scheme(weights) == "fp8_block"
        name = profile_name(num_slots, inner, device, kind, block)
        flags = f"--num-experts {num_slots} --hidden-size {hidden} --intermediate-size {inner}"
        flags += (f" --dtype {kind}" if kind else "") + (" --block" if block else "")
        return find_table(self.profiles, name, flags, self.log)


def gpu_of(device: torch.device) -> Gpu:
    """The device as Triton's driver describes it."""
    return Gpu(
        availability.target_arch(device),
        availability.num_sms(device),
        availability.shared_memory_bytes(device),
    )


def table_dtype(weights: ExpertWeights, dtype: torch.dtype) -> str | None:
    """The `dtype=` of a tuned table's name; None for 16-bit weights."""
    if weights.scheme is not None:
        return "fp8_w8a8" if weights.quantize_activations else "fp8_w8a16"
    return "float32" if dtype == torch.float32 else None


def gemm_shapes(batch: ExpertBatch, weights: ExpertWeights, gpu: Gpu) -> tuple[GemmShape, GemmShape]:
    """Of the gate/up and the down product."""
    num_slots, hidden, inner = weights.down_pDF.shape
    x_bytes = _payload(batch.dtype, weights, gpu).itemsize
    common = (batch.tokens_RD.shape[0], batch.row_index_S.shape[0], num_slots)
    types = (x_bytes, weights.down_pDF.dtype.itemsize, _scheme(weights))
    return (
        GemmShape(*common, inner, hidden, weights.gate_up_pFD.shape[1] // inner if inner else 1, *types),
        GemmShape(*common, hidden, inner, 1, *types),
    )


def compute_experts(
    batch: ExpertBatch, weights: ExpertWeights, configs: tuple[GroupedGemmConfig, GroupedGemmConfig], gpu: Gpu
) -> torch.Tensor:
    """y_SD in batch.dtype, with these tiles for gate/up and down (cut to what fits). A tuner times this."""
    problem = expert_activation_problem(weights.activation)
    if problem is not None:
        raise ConfigError(problem)
    num_rows, dtype = batch.row_index_S.shape[0], batch.dtype
    num_slots, hidden, inner = weights.down_pDF.shape
    y_SD = batch.tokens_RD.new_empty(num_rows, hidden, dtype=dtype)
    if 0 in (num_rows, num_slots, hidden, inner):
        return y_SD.zero_()
    shapes = gemm_shapes(batch, weights, gpu)
    first, second = (fit(c, s, gpu) for c, s in zip(configs, shapes, strict=True))
    payload = _payload(dtype, weights, gpu)
    rounds = weights.scheme is not None and weights.quantize_activations
    x = _tokens(batch, weights, payload)
    # The epilogue can round h itself where a tile holds just one scale group of a row.
    fused = rounds and _scheme(weights) == "fp8_block" and first.block_n // shapes[0].parts == GROUP
    h = _Rows(
        y_SD.new_empty(num_rows, inner, dtype=payload if fused else dtype),
        y_SD.new_empty(num_rows, -(-inner // GROUP), dtype=torch.float32) if fused else None,
    )
    block_map = _block_map(batch.num_rows_p, num_rows, first)
    gate_up = _Product(
        weights.gate_up_pFD, weights.gate_up_scale, weights.gate_up_bias_pF, weights.activation, weights.activation_limit
    )  # fmt: skip
    _multiply(
        _Rows(x.values, x.scale, batch.row_index_S), gate_up, shapes[0], block_map, h, fused, first, gpu
    )
    if rounds and not fused:
        h = _rounded(h.values, weights, payload)
    if (first.block_m, first.group_m) != (second.block_m, second.group_m):
        block_map = _block_map(batch.num_rows_p, num_rows, second)
    down = _Product(weights.down_pDF, weights.down_scale, weights.down_bias_pD, "none", None)
    _multiply(h, down, shapes[1], block_map, _Rows(y_SD), False, second, gpu)
    return y_SD


@dataclass(frozen=True)
class _Rows:
    """One side of a product: values [rows, K], FP8 scales [rows, G] if rounded, and which rows to take (None: as they lie)."""

    values: torch.Tensor
    scale: torch.Tensor | None = None
    index_S: torch.Tensor | None = None

    @property
    def scale_stride(self) -> int | None:
        """From a row's scales to the next one's; None where there are none."""
        return None if self.scale is None else self.scale.stride(0)


@dataclass(frozen=True)
class _Product:
    """The other side: weights [p, parts * N, K], their scales and biases, and what follows."""

    weights: torch.Tensor
    scale: torch.Tensor | None
    bias: torch.Tensor | None
    activation: str
    limit: float | None


@dataclass(frozen=True)
class _BlockMap:
    """Row tiles in the order of the slots; see the kernels' MAP_*."""

    tiles_5C: torch.Tensor
    num_tiles_1: torch.Tensor
    capacity: int


def _block_map(num_rows_p: torch.Tensor, num_rows: int, config: GroupedGemmConfig) -> _BlockMap:
    """The row tiles of `config`: each slot with rows has at most one that is not full."""
    from moe_runtime.experts.triton_grouped_kernels import build_block_map

    num_slots = num_rows_p.shape[0]
    capacity = num_rows // config.block_m + min(num_slots, num_rows)
    tiles_5C = num_rows_p.new_empty(5, capacity, dtype=torch.int32)
    num_tiles_1 = num_rows_p.new_empty(1, dtype=torch.int32)
    tiles = 64
    build_block_map[(-(-capacity // tiles),)](
        num_rows_p, tiles_5C, num_tiles_1, num_slots, capacity,
        BM=config.block_m, GROUP_M=config.group_m, SLOTS=1 << max(4, (num_slots - 1).bit_length()), TILES=tiles,
    )  # fmt: skip
    return _BlockMap(tiles_5C, num_tiles_1, capacity)


def _tokens(batch: ExpertBatch, weights: ExpertWeights, payload: torch.dtype) -> _Rows:
    """The token rows as they enter the first product."""
    if weights.scheme is None or not weights.quantize_activations:
        return _Rows(wide_tokens(batch, batch.dtype))
    if batch.scales is not None and weights.scheme.name == "fp8_block":
        return _Rows(batch.tokens_RD.to(payload), batch.scales.scale_RG)
    return _rounded(wide_tokens(batch, batch.dtype), weights, payload)


def _rounded(x: torch.Tensor, weights: ExpertWeights, payload: torch.dtype) -> _Rows:
    """Rows through FP8: per group of 128 for block scales, else per row. Values are FP8, or e4m3 values in `payload`."""
    rows, width = x.shape
    group = GROUP if _scheme(weights) == "fp8_block" else width
    values = x.new_empty(rows, width, dtype=payload)
    scale = x.new_empty(rows, -(-width // group), dtype=torch.float32)
    quantize_rows(x, values, scale, group)
    return _Rows(values, scale)


def _multiply(
    x: _Rows,
    product: _Product,
    shape: GemmShape,
    block_map: _BlockMap,
    out: _Rows,
    quantize: bool,
    config: GroupedGemmConfig,
    gpu: Gpu,
) -> None:
    """One product into out.values (and out.scale if `quantize`)."""
    from moe_runtime.experts.triton_grouped_kernels import grouped_gemm, reduce_splits

    assert x.values.stride(1) == 1, "rows of values must be contiguous"
    assert product.weights.is_contiguous()
    columns, parts = config.block_n // shape.parts, shape.parts
    tiles_n = -(-shape.num_out // columns)
    matrix = product.weights.view(-1, shape.num_in)
    if shape.scheme is not None and not gpu.has_fp8:
        matrix = matrix.view(torch.uint8)
    w_tma = config.use_tma and _descriptor_fits(matrix)
    x_tma = config.use_tma and (x.index_S is None or gpu.gathers(config)) and _descriptor_fits(x.values)
    x_gather = x_tma and x.index_S is not None
    epilogue: dict[str, Any] = {
        "SCHEME": shape.scheme or "none", "ACT": product.activation, "LIMIT": product.limit, "PARTS": parts,
        "QUANTIZE": quantize,
    }  # fmt: skip
    target = (
        out.values
        if config.split_k == 1
        else matrix.new_empty(config.split_k * parts, shape.num_rows, shape.num_out, dtype=torch.float32)
    )
    capacity = block_map.capacity * tiles_n * config.split_k
    grouped_gemm[(min(capacity, gpu.num_sms * programs_per_sm(config, shape, gpu)),)](
        _descriptor(x.values, 1 if x_gather else config.block_m, config.block_k) if x_tma else x.values,
        x.scale,
        _descriptor(matrix, columns, config.block_k) if w_tma else matrix,
        product.scale, product.bias, target, out.scale, x.index_S, block_map.tiles_5C, block_map.num_tiles_1,
        shape.num_out, shape.num_in, x.values.stride(0), x.scale_stride, block_map.capacity, shape.num_rows,
        **epilogue, BM=config.block_m, BN=columns, BK=config.block_k, SWAP_AB=config.swap_ab, SPLIT_K=config.split_k,
        X_TMA=x_tma, X_GATHER=x_gather, W_TMA=w_tma, EVEN_K=shape.num_in % config.block_k == 0,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    if config.split_k > 1:
        reduce_splits[(block_map.capacity, tiles_n)](
            target, x.scale, product.scale, product.bias, out.values, out.scale, x.index_S, block_map.tiles_5C,
            block_map.num_tiles_1, shape.num_out, x.scale_stride, block_map.capacity, shape.num_rows,
            **epilogue, BM=config.block_m, BN=columns, SPLIT_K=config.split_k, num_warps=config.num_warps,
        )  # fmt: skip


def _descriptor_fits(matrix: torch.Tensor) -> bool:
    """Whether hardware descriptors can address it: rows and start on 16 bytes."""
    return (matrix.stride(0) * matrix.itemsize) % 16 == 0 and matrix.data_ptr() % 16 == 0


def _descriptor(matrix: torch.Tensor, rows: int, columns: int) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor.from_tensor(matrix, [rows, columns])


def _scheme(weights: ExpertWeights) -> str | None:
    return None if weights.scheme is None else weights.scheme.name


def _payload(dtype: torch.dtype, weights: ExpertWeights, gpu: Gpu) -> torch.dtype:
    """The type in which activations enter the dot."""
    rounds = weights.scheme is not None and weights.quantize_activations
    return FP8 if rounds and gpu.has_fp8 else dtype
