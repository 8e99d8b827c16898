"""The corrected interpreter against torch: bfloat16 and FP8 arithmetic, conversions and reductions."""

from __future__ import annotations

import pytest
import torch
import triton.language as tl

from moe_runtime.triton_support import jit

BF16 = torch.bfloat16


@jit
def _elementwise(x_ptr, y_ptr, out_ptr, OP: tl.constexpr, N: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.arange(0, N)
    x, y = tl.load(x_ptr + i), tl.load(y_ptr + i)
    if OP == "add":
        z = x + y
    elif OP == "sub":
        z = x - y
    elif OP == "mul":
        z = x * y
    elif OP == "div":
        z = (x / y).to(x.dtype)
    elif OP == "max":
        z = tl.maximum(x, y)
    elif OP == "neg":
        z = -x
    elif OP == "abs":
        z = tl.abs(x)
    elif OP == "less":
        z = tl.where(x < y, x, y)
    else:
        z = tl.fma(x, y, x)
    tl.store(out_ptr + i, z)


@pytest.mark.parametrize(
    ("op", "oracle"),
    [
        ("add", lambda x, y: x + y),
        ("sub", lambda x, y: x - y),
        ("mul", lambda x, y: x * y),
        ("div", lambda x, y: x / y),
        ("max", torch.maximum),
        ("neg", lambda x, y: -x),
        ("abs", lambda x, y: x.abs()),
        ("less", torch.minimum),
        ("fma", lambda x, y: (x.float() * y.float() + x.float()).to(BF16)),
    ],
)
def test_bfloat16_elementwise(op: str, oracle, seed: int) -> None:  # type: ignore[no-untyped-def]
    x, y = torch.randn(2, 256).to(BF16)
    out = torch.empty_like(x)
    _elementwise[(1,)](x, y, out, OP=op, N=256)
    assert torch.equal(out, oracle(x, y))


@jit
def _convert(x_ptr, out_ptr, N: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.arange(0, N)
    tl.store(out_ptr + i, tl.load(x_ptr + i).to(out_ptr.dtype.element_ty))


FLOATS = (torch.float32, torch.float16, BF16, torch.float8_e4m3fn, torch.float8_e5m2)


@pytest.mark.parametrize("target", FLOATS)
@pytest.mark.parametrize("source", FLOATS)
def test_conversions_round_as_torch_does(source: torch.dtype, target: torch.dtype, seed: int) -> None:
    limit = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}.get(target, torch.inf)
    x = (torch.randn(4096) * torch.logspace(-6, 4, 4096)).to(source)
    out = torch.empty(4096, dtype=target)
    _convert[(1,)](x, out, N=4096)
    wide = x.float().nan_to_num() if source == torch.float8_e4m3fn else x.float()
    expected = wide.clamp(-limit, limit).to(target)
    both = torch.isfinite(x.float())
    assert torch.equal(out.float()[both], expected.float()[both])


def test_large_values_saturate_in_fp8() -> None:
    x = torch.tensor([500.0, -500.0, 1e9, 448.0] * 4)
    out = torch.empty(16, dtype=torch.float8_e4m3fn)
    _convert[(1,)](x, out, N=16)
    assert out.float().tolist() == [448.0, -448.0, 448.0, 448.0] * 4


@jit
def _dot(a_ptr, b_ptr, out_ptr, N: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.arange(0, N)
    at = i[:, None] * N + i[None, :]
    tl.store(out_ptr + at, tl.dot(tl.load(a_ptr + at), tl.load(b_ptr + at)))


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_dot(dtype: torch.dtype, seed: int) -> None:
    a, b = torch.randn(2, 32, 32).to(dtype)
    out = torch.empty(32, 32)
    _dot[(1,)](a, b, out, N=32)
    torch.testing.assert_close(out, a.float() @ b.float(), rtol=1e-5, atol=1e-5)


@jit
def _reduce(x_ptr, out_ptr, OP: tl.constexpr, N: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.arange(0, N)
    x = tl.load(x_ptr + i[:, None] * N + i[None, :])
    if OP == "max":
        r = tl.max(x, 1)
    elif OP == "min":
        r = tl.min(x, 1)
    else:
        r = tl.sum(x, 1)
    tl.store(out_ptr + i, r)


@pytest.mark.parametrize("op", ["max", "min", "sum"])
def test_bfloat16_reductions(op: str, seed: int) -> None:
    x = torch.randn(32, 32).to(BF16)
    out = torch.empty(32, dtype=BF16)
    _reduce[(1,)](x, out, OP=op, N=32)
    wide = x.float()
    expected = wide.sum(1) if op == "sum" else getattr(wide, f"a{op}")(1)
    torch.testing.assert_close(out.float(), expected.to(BF16).float(), rtol=8e-3, atol=1e-2)


@jit
def _scatter_add(at_ptr, x_ptr, out_ptr, N: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.arange(0, N)
    tl.atomic_add(out_ptr + tl.load(at_ptr + i), tl.load(x_ptr + i), mask=i < N - 3)


def test_bfloat16_atomic_add_counts_every_addend(seed: int) -> None:
    at = torch.randint(0, 4, (64,), dtype=torch.int32)
    x = torch.randint(-8, 8, (64,)).to(BF16)  # sums are exact
    out = torch.ones(4, dtype=BF16)
    _scatter_add[(1,)](at, x, out, N=64)
    expected = torch.ones(4).index_add(0, at[:61].long(), x[:61].float())
    assert torch.equal(out.float(), expected)
