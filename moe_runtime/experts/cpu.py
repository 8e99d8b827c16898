"""Experts on CPUs: for every local slot that has rows, gather them and multiply twice.

FP8, int8 and int4 weights are brought back to the model's dtype a tile at a time, in a buffer that is used again and again, and multiplied as
other weights are (W8A16).

Legend: S expert rows, n rows of one tile, D hidden, F expert intermediate size, O out and I in of one matrix, p slots.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moe_runtime.experts.base import wide_tokens
from moe_runtime.int4 import BLOCK, LARGEST_CODE, MIDDLE
from moe_runtime.layers.activation import expert_activation, expert_activation_problem
from moe_runtime.quantization import GROUP

if TYPE_CHECKING:
    from collections.abc import Iterator

    from moe_runtime.core import ExpertBatch
    from moe_runtime.experts.base import ExpertNeed, ExpertWeights
    from moe_runtime.quantization import QuantScheme

ROW_TILE = 1024
"""Most rows multiplied at once: enough to be bound by arithmetic, and it bounds the memory a hot slot takes."""
DEQUANT_TILE = 1 << 20
"""Values of a matrix brought back from FP8, int8 or int4 at once, about: few enough to stay in a cache until they are multiplied."""


class CpuExperts:
    """See the module. Matrix products in the model's dtype, as torch's CPU library does them."""

    name = "cpu"

    def supports(self, need: ExpertNeed) -> str | None:
        """None if it can, else why not."""
        if need.device_type != "cpu":
            return f"runs on cpu, not on {need.device_type}"
        if need.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"{need.dtype} is not one of float32, bfloat16, float16"
        return expert_activation_problem(need.activation)

    def __call__(self, batch: ExpertBatch, weights: ExpertWeights) -> torch.Tensor:
        """Returns y_SD in batch.dtype. Raises ConfigError on an unknown activation."""
        activation = expert_activation(weights.activation, weights.activation_limit)
        tokens_RD, row_index_S = wide_tokens(batch, batch.dtype), batch.row_index_S
        y_SD = tokens_RD.new_empty(row_index_S.shape[0], tokens_RD.shape[1])
        end = 0
        for slot, num_rows in enumerate(batch.num_rows_p.tolist()):
            if not num_rows:
                continue
            start, end = end, end + num_rows
            gate_up = _Matrix(
                weights,
                weights.gate_up_pFD[slot],
                _at(weights.gate_up_bias_pF, slot),
                _at(weights.gate_up_scale, slot),
            )
            down = _Matrix(
                weights,
                weights.down_pDF[slot],
                _at(weights.down_bias_pD, slot),
                _at(weights.down_scale, slot),
            )
            for first in range(start, end, ROW_TILE):
                tile = slice(first, min(first + ROW_TILE, end))
                x_nD = tokens_RD.index_select(0, row_index_S[tile])
                h_nF = activation(gate_up.multiply(x_nD, x_nD.new_empty(x_nD.shape[0], gate_up.num_out)))
                down.multiply(h_nF, y_SD[tile])
        assert end == y_SD.shape[0], f"slots have {end} rows, the batch {y_SD.shape[0]}"
        return y_SD


def _at(tensor: torch.Tensor | None, slot: int) -> torch.Tensor | None:
    return None if tensor is None else tensor[slot]


class _Matrix:
    """One expert's [O, I] matrix, whatever it is stored as; int4 rows are bytes."""

    def __init__(
        self,
        weights: ExpertWeights,
        stored_OI: torch.Tensor,
        bias_O: torch.Tensor | None,
        scale: torch.Tensor | None,
    ) -> None:
        """scale: of the matrix, or [parts, ...] of the parts that its rows are made of."""
        self.stored_OI, self.bias_O, self.scheme = stored_OI, bias_O, weights.scheme
        self.scales = None if scale is None else scale.view(-1, *scale.shape[-2:])
        self.num_out = stored_OI.shape[0]
        self.quantize_activations = weights.quantize_activations

    def multiply(self, x_nI: torch.Tensor, out_nO: torch.Tensor) -> torch.Tensor:
        """out = x W^T + bias; returns out."""
        if self.scheme is not None and self.quantize_activations:
            x_nI = self.scheme.round_rows(x_nI)
        for rows, tile_OI in self._tiles(x_nI.dtype, x_nI.shape[1]):
            if self.bias_O is None:
                torch.mm(x_nI, tile_OI.t(), out=out_nO[:, rows])
            else:
                torch.addmm(self.bias_O[rows], x_nI, tile_OI.t(), out=out_nO[:, rows])
        return out_nO

    def _tiles(self, dtype: torch.dtype, num_in: int) -> Iterator[tuple[slice, torch.Tensor]]:
        """Rows of the matrix and their values, which are valid until the next tile."""
        if self.scheme is None:
            yield slice(0, self.num_out), self.stored_OI
            return
        assert self.scales is not None
        step = self.scheme.row_step
        width = 2 * self.stored_OI.shape[1] if self.scheme.payload == torch.uint8 else num_in
        height = max(step, DEQUANT_TILE // width // step * step)
        scratch = torch.empty(height * width, dtype=torch.int32)
        part_rows = self.num_out // self.scales.shape[0]
        for part, scale in enumerate(self.scales):
            for first in range(0, part_rows, height):
                stop = min(first + height, part_rows)
                rows = slice(part * part_rows + first, part * part_rows + stop)
                payload = self.stored_OI[rows]
                buffer = scratch[: width * (stop - first)].view(stop - first, width)
                values = _dequantize(payload, self.scheme, self.scheme.scale_rows(scale, first, stop), buffer)
                yield rows, values[:, :num_in].to(dtype)


def _dequantize(
    payload_OI: torch.Tensor, scheme: QuantScheme, scale: torch.Tensor, buffer_OI: torch.Tensor
) -> torch.Tensor:
    """`scheme.dequantize` bit for bit, some twenty times as fast, in the memory of `buffer_OI` (int32).

    The bits of e4m3, moved to the same places of a float32 (its lowest exponent bits and highest of the mantissa), are the value
    times 2^(7 - 127), as the exponents' biases are 7 and 127; subnormal values too. NaN, which is not kept, is refused on loading.
    int4 needs a buffer of whole blocks, and leaves values behind the ends of the rows.
    """
    if scheme.payload == torch.uint8:
        return _dequantize_int4(payload_OI, scheme, scale, buffer_OI.view(torch.float32))
    if scheme.payload == torch.int8:
        return buffer_OI.view(torch.float32).copy_(payload_OI).mul_(scale)
    buffer_OI.copy_(payload_OI.view(torch.int8)).bitwise_left_shift_(20).bitwise_and_(SIGN_AND_VALUE)
    values_OI = buffer_OI.view(torch.float32).mul_(2.0**120)
    if scheme.name != "fp8_block":
        return values_OI.mul_(scale)
    wide = scale.repeat_interleave(GROUP, 1)[:, : payload_OI.shape[1]]
    whole = payload_OI.shape[0] // GROUP
    values_OI[: whole * GROUP].view(whole, GROUP, payload_OI.shape[1]).mul_(wide[:whole, None])
    if whole < wide.shape[0]:
        values_OI[whole * GROUP :].mul_(wide[whole])
    return values_OI


def _dequantize_int4(
    payload: torch.Tensor, scheme: QuantScheme, scale: torch.Tensor, values_OI: torch.Tensor
) -> torch.Tensor:
    """Fills values_OI: float32, of whole blocks."""
    scale = scale.float()
    num_rows, width = values_OI.shape
    halves = values_OI.view(num_rows, width // BLOCK, 2, BLOCK // 2)
    pairs = payload.view(num_rows, width // BLOCK, BLOCK // 2)
    halves[:, :, 0].copy_(pairs & LARGEST_CODE)
    halves[:, :, 1].copy_(pairs >> 4)
    if scheme.zero_points:
        scale, zero = scale.chunk(2, dim=1)
    else:
        zero = scale.new_full((1,), MIDDLE).expand_as(scale)
    # The last group of a row may be shorter, and behind it may be less or more than a group of surplus codes.
    group = scheme.group or width
    whole = min(width // group, scale.shape[1])
    parts = [(values_OI[:, : whole * group].view(num_rows, whole, group), slice(0, whole))]
    if whole < scale.shape[1]:
        parts.append((values_OI[:, whole * group :].unsqueeze(1), slice(whole, None)))
    for values, groups in parts:
        values.sub_(zero[:, groups, None]).mul_(scale[:, groups, None])
    return values_OI


SIGN_AND_VALUE = -0x78100000
"""int32 mask of the bits that come from an int8 shifted by 20: 31, its sign, and 20 to 26; bits 27 to 30 repeat the sign."""
