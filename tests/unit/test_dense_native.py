"""Dense products and norms in C++ against torch in float32, for every instruction set that this CPU has."""

from __future__ import annotations

import random

import pytest
import torch

from moe_runtime.layers.cpu_native import MAX_ROWS, NativeOps
from moe_runtime.layers.ops import TORCH_OPS
from moe_runtime.native.build import Native

STEP = 2**-7
"""The largest distance of neighbouring bfloat16 values, relative to them."""


@pytest.fixture(scope="module")
def ops(native: Native) -> NativeOps:
    return NativeOps(native)


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).bfloat16()


def random_int8(num_out: int, num_in: int) -> tuple[torch.Tensor, torch.Tensor]:
    """All codes, -128 too, and scales that differ, with which the values are about as large as those of randn."""
    weight = torch.randint(-128, 128, (num_out, num_in), dtype=torch.int8)
    return weight, torch.rand(num_out, 1).add_(0.1).div_(64)


def check_linear(
    ops: NativeOps,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    scale: torch.Tensor | None = None,
) -> None:
    y = ops.linear(x, weight, bias, scale)
    if scale is None:
        want = x.float() @ weight.float().T + (0 if bias is None else bias.float())
    else:
        want = TORCH_OPS.linear(x.float(), weight, None if bias is None else bias.float(), scale)
    assert (y.dtype, y.shape, y.is_contiguous()) == (torch.bfloat16, want.shape, True)
    # One rounding of a sum whose terms are as large as sqrt(in).
    torch.testing.assert_close(y.float(), want, rtol=STEP, atol=1e-5 * x.shape[-1] ** 0.5)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 5, 6, 7, 18, 19, 41, MAX_ROWS, MAX_ROWS + 1])
@pytest.mark.other_sets(threads=[2], bias=[True])
def test_linear(seed: int, ops: NativeOps, threads: int, rows: int, bias: bool) -> None:
    for depth, columns in ((64, 3), (random.randint(1, 300), random.randint(1, 300)), (33, 1000)):
        b = randn(columns) if bias else None
        check_linear(ops, randn(rows, depth), randn(columns, depth), b)
        weight, scale = random_int8(columns, depth)
        check_linear(ops, randn(rows, depth), weight, b, scale)


def test_linear_of_views(seed: int, ops: NativeOps) -> None:
    """Parts of wider rows, more than two axes, one axis, rows that are not contiguous."""
    weight = randn(50, 40)
    wide = randn(7, 100)
    for x in (wide[:, 13:53], randn(2, 3, 40), randn(40), randn(40, 5).T, randn(3, 2, 40).transpose(0, 1)):
        check_linear(ops, x, weight, None)
    check_linear(ops, randn(4, 40), randn(40, 50).T, None)
    weight, scale = random_int8(50, 40)
    check_linear(ops, wide[:, 13:53], weight, None, scale)
    check_linear(ops, randn(2, 3, 40), weight, None, scale)


@pytest.mark.parametrize("tile", [1, 100, 1 << 18])
def test_int8_by_torch(seed: int, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle of the int8 products: whole, and in tiles of a few output channels, in every dtype."""
    monkeypatch.setattr("moe_runtime.layers.ops.INT8_TILE", tile)
    weight, scale = random_int8(37, 29)
    bias = torch.randn(37, dtype=torch.float64)
    for shape in ((0, 29), (29,), (2, 3, 29)):
        x = torch.randn(shape, dtype=torch.float64)
        for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2**-5), (torch.float16, 2**-8)):
            given, shift = x.to(dtype), bias.to(dtype)
            want = given.double() @ (weight.double() * scale.double()).T
            for b, expected in ((None, want), (shift, want + shift.double())):
                found = TORCH_OPS.linear(given, weight, b, scale)
                assert found.dtype == dtype
                torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=4 * tolerance)


@pytest.mark.other_sets(threads=[2])
def test_linear_rows_do_not_depend_on_each_other(seed: int, ops: NativeOps, threads: int) -> None:
    """Nor on whether there are so many that int8 weights are widened first."""
    for weight, scale in ((randn(70, 200), None), random_int8(70, 200)):
        x = randn(29, 200)
        whole = ops.linear(x, weight, None, scale)
        for first, end in ((0, 1), (3, 5), (10, 29)):
            assert torch.equal(ops.linear(x[first:end], weight, None, scale), whole[first:end])
        x[4] = torch.nan
        again = ops.linear(x, weight, None, scale)
        assert again[4].isnan().all()
        keep = [i for i in range(29) if i != 4]
        assert torch.equal(again[keep], whole[keep])


def check_norm(found: torch.Tensor, want: torch.Tensor) -> None:
    """Two roundings, each to either neighbour."""
    assert (found.dtype, found.shape, found.is_contiguous()) == (torch.bfloat16, want.shape, True)
    torch.testing.assert_close(found.float(), want.float(), rtol=2 * STEP, atol=1e-30)


@pytest.mark.parametrize("size", [1, 6, 16, 17, 64, 200, 2048])
@pytest.mark.other_sets(threads=[2])
def test_rms_norm(seed: int, ops: NativeOps, threads: int, size: int) -> None:
    weight = randn(size)
    fused = randn(5, 3 * size + 7)
    for x in (
        randn(0, size),
        randn(1, size) * 1e-3,
        randn(37, size) * 100,
        randn(4, 3, size),
        fused[:, 7:].unflatten(1, (3, size)),
        fused[:, :size],
        randn(2, 2, 2, size),
        randn(size, 5).T,
    ):
        check_norm(ops.rms_norm(x, weight, 1e-6), TORCH_OPS.rms_norm(x, weight, 1e-6))


@pytest.mark.parametrize("size", [1, 17, 64, 2048])
@pytest.mark.other_sets(threads=[2])
def test_add_rms_norm(seed: int, ops: NativeOps, threads: int, size: int) -> None:
    weight = randn(size)
    wide = randn(9, 2 * size)
    for x, delta in (
        (randn(0, size), randn(0, size)),
        (randn(23, size), randn(23, size)),
        (wide[:, size:], wide[:, :size]),
    ):
        before = x.clone()
        total, normed = ops.add_rms_norm(x, delta, weight, 1e-5)
        assert torch.equal(total, x + delta)
        assert torch.equal(x, before)
        check_norm(normed, TORCH_OPS.rms_norm(total, weight, 1e-5))


def test_norm_of_extremes(seed: int, ops: NativeOps) -> None:
    """Zeros give zeros; NaN stays with its row; the largest values overflow as torch's do."""
    x = randn(4, 32)
    x[0], x[1, 3], x[2] = 0.0, torch.nan, 3e38
    weight = randn(32)
    found, want = ops.rms_norm(x, weight, 1e-6), TORCH_OPS.rms_norm(x, weight, 1e-6)
    assert found[1].isnan().all()
    assert not found[[0, 3]].isnan().any()
    torch.testing.assert_close(found, want, rtol=2 * STEP, atol=1e-30, equal_nan=True)


def test_supports(ops: NativeOps) -> None:
    assert NativeOps.supports("cpu", torch.bfloat16, ops.native) is None
    assert "not on cuda" in str(NativeOps.supports("cuda", torch.bfloat16, ops.native))
    assert "float32" in str(NativeOps.supports("cpu", torch.float32, ops.native))
    assert "no compiler" in str(NativeOps.supports("cpu", torch.bfloat16, Native(None, "", "no compiler")))
