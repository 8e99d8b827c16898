"""FP8, int8 and int4 schemes: shapes, error bounds, exact round trips, edge values."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from moe_runtime import int4
from moe_runtime.quantization import (
    FP8,
    FP8_BLOCK,
    FP8_CHANNEL,
    FP8_TENSOR,
    INT4_GROUPS,
    INT4_MADE,
    INT8_CHANNEL,
    QuantScheme,
    dequantize_rows,
    fp8_to_float,
    int4_scheme,
    quantize_rows,
)

FP8_SCHEMES = (FP8_BLOCK, FP8_CHANNEL, FP8_TENSOR)
SCHEMES = (*FP8_SCHEMES, INT8_CHANNEL, INT4_MADE)


@pytest.mark.parametrize("shape", [(3, 300, 200), (128, 256), (1, 1), (2, 5, 129)])
@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: s.name)
def test_weights_come_back_within_half_a_step(scheme: QuantScheme, shape: tuple[int, ...], seed: int) -> None:
    weight = torch.randn(shape) * torch.logspace(-3, 3, shape[-1])
    payload, scale = scheme.quantize_weight(weight)
    assert payload.shape == (*shape[:-2], *scheme.payload_shape(*shape[-2:]))
    assert payload.dtype == scheme.payload
    assert (scale.shape, scale.dtype) == (
        (*shape[:-2], *scheme.scale_shape(*shape[-2:])),
        scheme.scale_dtype,
    )
    error = (scheme.dequantize(payload, scale, shape[-1]) - weight).abs()
    if scheme is INT4_MADE:
        check_int4_error(weight, error)
        return
    if scheme.payload == torch.int8:
        assert (error <= scale / 2 * 1.001).all()
        return
    # e4m3 has 3 bits of mantissa: half a step is 1/16 of the value, or of the smallest normal number.
    step = scheme.dequantize(torch.full(shape, 2.0**-6).to(FP8), scale)
    assert (error <= torch.maximum(weight.abs(), step) / 16 * 1.001).all()


def check_int4_error(weight: torch.Tensor, error: torch.Tensor) -> None:
    """For each group: at most the error of codes spread evenly over its range, but for the rounding of scales to bfloat16."""
    for values, found in zip(weight.split(32, dim=-1), error.split(32, dim=-1), strict=True):
        low, high = values.aminmax(dim=-1, keepdim=True)
        step = (high - low).clamp_min(1e-30) / 15
        even = ((values - low) / step).round() * step + low
        bound = (even - values).abs() + values.abs().amax(-1, keepdim=True) * 2**-7
        assert (found.norm(dim=-1) <= bound.norm(dim=-1)).all()


@pytest.mark.parametrize("num_in", [1, 32, 63, 64, 100, 129])
@pytest.mark.parametrize("zero_points", [False, True])
@pytest.mark.parametrize("group", [0, *INT4_GROUPS])
def test_int4_by_hand(group: int, zero_points: bool, num_in: int, seed: int) -> None:
    """(code - zero point) * scale, value by value, with the codes where the layout says they are."""
    scheme = int4_scheme(group, zero_points)
    size = group or num_in
    codes = torch.randint(0, 16, (3, num_in), dtype=torch.uint8)
    payload = int4.pack(codes)
    assert payload.shape == scheme.payload_shape(3, num_in)
    groups = -(-num_in // size)
    scale = torch.randn(3, groups)
    zeros = torch.randint(0, 16, (3, groups)) if zero_points else torch.full((3, groups), 8)
    stored = torch.cat((scale, zeros.float()), dim=1) if zero_points else scale
    assert stored.shape == scheme.scale_shape(3, num_in)
    values = scheme.dequantize(payload, stored, num_in)
    for row in range(3):
        for column in range(num_in):
            block, place = divmod(column, 64)
            byte = int(payload[row, 32 * block + place % 32])
            code = byte >> 4 if place >= 32 else byte & 15
            assert code == int(codes[row, column])
            expected = (code - zeros[row, column // size]) * scale[row, column // size]
            assert values[row, column] == expected
    assert torch.equal(int4.unpack(payload, num_in), codes)
    assert torch.equal(scheme.encode(values, stored), payload), "every value is nearest to itself"


def test_int4_keeps_what_it_can_hold() -> None:
    """Groups of one value, also zero, of two, and of sixteen at even distances."""
    weight = torch.zeros(4, 80)
    weight[1] = -3.5
    weight[2, ::3] = 7.5
    weight[3] = torch.arange(80) % 16 * 0.5 - 2
    assert torch.equal(INT4_MADE.dequantize(*INT4_MADE.quantize_weight(weight), 80), weight)


def test_a_block_has_the_scale_of_its_own_largest_value() -> None:
    weight = torch.zeros(300, 200)
    weight[290, 140] = -896.0
    payload, scale = FP8_BLOCK.quantize_weight(weight)
    assert scale.tolist() == [[1.0, 1.0], [1.0, 1.0], [1.0, 2.0]]
    assert torch.equal(FP8_BLOCK.dequantize(payload, scale), weight)


@pytest.mark.parametrize("scheme", FP8_SCHEMES, ids=lambda s: s.name)
def test_fp8_scales_are_powers_of_two(scheme: QuantScheme, seed: int) -> None:
    """The least that keep the largest in range, so that bfloat16 holds what comes back."""
    weight = torch.randn(300, 200).bfloat16()
    weight[:128] = 0.0
    weight[200] *= 1e-6
    payload, scale = scheme.quantize_weight(weight)
    assert (scale.frexp().mantissa == 0.5).all()
    largest = scheme.largest(weight)
    assert ((largest / scale > 224) & (largest / scale <= 448) | (largest == 0) & (scale == 1)).all()
    values = scheme.dequantize(payload, scale)
    assert torch.equal(values.bfloat16().float(), values)
    # At the border itself, and where the scale would be too small for a float.
    border = torch.tensor([448.0, 448.00003, 896.0, 1e-44, 3.4e38])
    exact = [1.0, 2.0, 2.0, 1.0, 2.0**120]
    assert FP8_CHANNEL.scale_of(border[:, None]).flatten().tolist() == exact


def test_int8_codes() -> None:
    """By hand: the largest of a row is 127, ties go to even codes, zeros have scale 1."""
    weight = torch.tensor([[254.0, -254.0, 1.0, 3.0, -2.0], [0.0, 0.0, 0.0, 0.0, 0.0]])
    payload, scale = INT8_CHANNEL.quantize_weight(weight)
    assert payload.tolist() == [[127, -127, 0, 2, -1], [0] * 5]
    assert scale.tolist() == [[2.0], [1.0]]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: s.name)
def test_what_is_no_number_stays_visible(scheme: QuantScheme, bad: float) -> None:
    weight = torch.ones(3, 5)
    weight[1, 2] = bad
    payload, scale = scheme.quantize_weight(weight)
    assert scheme.dequantize(payload, scale, 5).isnan().any()


@pytest.mark.parametrize("rows", [0, 1, 7])
def test_rows_have_a_scale_per_group(rows: int, seed: int) -> None:
    x = torch.randn(rows, 200).bfloat16()
    payload, scale = quantize_rows(x)
    assert scale.shape == (rows, 2)
    error = (dequantize_rows(payload, scale) - x.float()).abs()
    assert (
        error
        <= torch.maximum(x.float().abs() / 16, scale.repeat_interleave(128, 1)[:, :200] * 2**-10) * 1.001
    ).all()


def test_nan_stays_visible() -> None:
    payload, scale = quantize_rows(torch.tensor([[1.0, float("nan")]]))
    assert torch.isnan(dequantize_rows(payload, scale)).any()


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: s.name)
def test_rows_of_a_matrix_are_a_matrix(scheme: QuantScheme, seed: int) -> None:
    """Between multiples of row_step: as the loader and the CPU kernel cut matrices."""
    weight = torch.randn(300, 200)
    payload, scale = scheme.quantize_weight(weight)
    whole = scheme.dequantize(payload, scale, 200)
    cuts = [0, scheme.row_step, 2 * scheme.row_step, 300]
    for first, stop in pairwise(cuts):
        part = scheme.dequantize(payload[first:stop], scheme.scale_rows(scale, first, stop), 200)
        assert torch.equal(part, whole[first:stop])


@pytest.mark.parametrize("scheme", FP8_SCHEMES, ids=lambda s: s.name)
def test_rounding_activations_keeps_what_fp8_can_hold(scheme: QuantScheme, seed: int) -> None:
    x = torch.randn(5, 200).bfloat16()
    rounded = scheme.round_rows(x)
    assert rounded.dtype == x.dtype
    assert not torch.equal(rounded, x)
    assert (rounded - x).abs().max() <= x.abs().max() / 16
    exact = torch.randint(-8, 9, (5, 200)).float()
    exact[:, ::128] = 448.0
    exact[:, 1] = -448.0
    assert torch.equal(scheme.round_rows(exact), exact)


def test_every_code_becomes_the_float_that_torch_gives() -> None:
    """Often enough that it is not left to torch, and with gaps between the rows."""
    codes = torch.arange(256).to(torch.uint8).repeat(64, 2).view(FP8)[:, :300]
    got, wanted = fp8_to_float(codes), codes.float()
    assert torch.equal(got.isnan(), wanted.isnan())
    assert torch.equal(got.signbit(), wanted.signbit())
    assert torch.equal(got.nan_to_num(), wanted.nan_to_num())
