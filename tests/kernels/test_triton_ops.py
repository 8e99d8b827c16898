"""TritonOps in the interpreter against TorchOps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from moe_runtime.errors import ConfigError
from moe_runtime.layers import triton_ops
from moe_runtime.layers.activation import ACTIVATIONS
from moe_runtime.layers.deterministic_ops import DeterministicOps
from moe_runtime.layers.invariant import Workers, row_dependence
from moe_runtime.layers.ops import TORCH_OPS
from moe_runtime.layers.triton_dense import dense_tiles
from moe_runtime.layers.triton_ops import TritonOps
from moe_runtime.quantization import dequantize_rows, pack_rows, unpack_rows

OPS = TritonOps()
DETERMINISTIC = TritonOps(deterministic=True)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# One step of the last digit: where a float32 sum in another order crosses a rounding boundary.
STEP = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
far_below_zero = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
"""The interpreter's sigmoid is 1 / (1 + exp(-x)): right, with an infinity on the way, where x is far below zero."""


def close(ours: torch.Tensor, expected: torch.Tensor) -> None:
    """A norm rounds twice, before and after its weight: a step in the first and a half in the second come to two steps at most."""
    assert ours.dtype == expected.dtype
    torch.testing.assert_close(ours, expected, rtol=2 * STEP[expected.dtype], atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(0, 48), (1, 1), (7, 48), (3, 130), (2, 5000), (5, 3, 20)], ids=str)
def test_rms_norm(seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
    close(OPS.rms_norm(x, weight, 1e-5), TORCH_OPS.rms_norm(x, weight, 1e-5))


def test_rms_norm_of_views(seed: int) -> None:
    """Heads of one fused projection, columns that lie apart, and four dimensions."""
    fused, weight = torch.randn(9, 10, 16), torch.randn(16)
    for x in (fused[:, 2:5], fused.transpose(0, 1), torch.randn(16, 6).T, torch.randn(2, 3, 4, 16)):
        close(OPS.rms_norm(x, weight, 1e-6), TORCH_OPS.rms_norm(x, weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "hidden"), [(0, 16), (1, 40), (9, 130), (3, 2100)])
def test_add_rms_norm(seed: int, tokens: int, hidden: int, dtype: torch.dtype) -> None:
    x, delta = torch.randn(2, tokens, hidden).to(dtype)
    wide = torch.randn(tokens, hidden + 3).to(dtype)[:, :hidden]
    weight = torch.randn(hidden).to(dtype)
    for added in (delta, wide):
        total, normed = OPS.add_rms_norm(x, added, weight, 1e-6)
        expected_total, expected = TORCH_OPS.add_rms_norm(x, added, weight, 1e-6)
        assert torch.equal(total, expected_total)
        close(normed, expected)


def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not written shows: fresh memory is NaN, or 0xAB where it is bytes."""
    empty = torch.empty

    def poisoned(*size: Any, **options: Any) -> torch.Tensor:
        made = empty(*size, **options)
        return made.fill_(0xAB if made.dtype == torch.uint8 else torch.nan)

    monkeypatch.setattr(torch, "empty", poisoned)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("tokens", "hidden"), [(0, 16), (1, 1), (5, 40), (9, 128), (11, 129), (3, 1031), (2, 5000)]
)
def test_add_rms_norm_with_fp8_rows(
    seed: int, tokens: int, hidden: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One kernel gives the bits of two: the norm, and the oracle's rounding of it; also of rows of zeros, tiny and huge values."""
    x, delta = (torch.randn(tokens, hidden) * torch.logspace(-6, 3, tokens)[:, None] for _ in range(2))
    x[1:2] = delta[1:2] = 0
    x, weight = x.to(dtype), torch.randn(hidden).to(dtype)
    weight[: hidden // 3] *= 2**-12
    wide = torch.zeros(tokens, hidden + 3, dtype=dtype)[:, :hidden].copy_(delta)
    for added in (delta.to(dtype), wide):
        alone = OPS.add_rms_norm(x, added, weight, 1e-6)
        with monkeypatch.context() as patched:
            poison(patched)
            *together, packed = OPS.add_rms_norm_packed(x, added, weight, 1e-6)
        assert all(map(torch.equal, together, alone))
        assert torch.equal(packed, pack_rows(alone[1]))
        values, scale = unpack_rows(packed, hidden)
        assert not values.float().isnan().any()
        assert (scale > 0).all()


def test_plain_operations_pack_the_norm_too(seed: int) -> None:
    """The two-step form, which ranks on CPUs use."""
    x, delta = torch.randn(2, 7, 150)
    for ops in (TORCH_OPS, DeterministicOps(Workers(1))):
        *results, packed = ops.add_rms_norm_packed(x, delta, torch.ones(150), 1e-6)
        assert all(map(torch.equal, results, ops.add_rms_norm(x, delta, torch.ones(150), 1e-6)))
        back = dequantize_rows(*unpack_rows(packed, 150))
        torch.testing.assert_close(back, results[1], rtol=2**-4, atol=0.01)


@pytest.mark.filterwarnings(
    "ignore:invalid value encountered:RuntimeWarning", "ignore:All-NaN slice:RuntimeWarning"
)
@pytest.mark.parametrize("hidden", [64, 200])
def test_fp8_rows_keep_nan_in_its_row(seed: int, hidden: int) -> None:
    x = torch.randn(4, hidden)
    x[1, 3], x[2, 5] = torch.nan, torch.inf
    _, normed, packed = OPS.add_rms_norm_packed(x, torch.zeros_like(x), torch.ones(hidden), 1e-6)
    values, scale = unpack_rows(packed, hidden)
    assert values[1].float().isnan().all()
    assert torch.equal(values.float().isnan(), normed.isnan())
    assert normed[2, 5].isnan(), "infinity over infinity"
    assert not scale.isnan().any()
    assert torch.equal(packed[[0, 3]], pack_rows(normed[[0, 3]]))


def test_gpus_without_fp8_round_in_two_steps(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_ops, "target_arch", lambda device: 80)
    x, delta = torch.randn(2, 5, 200)
    total, normed, packed = OPS.add_rms_norm_packed(x, delta, torch.ones(200), 1e-6)
    assert torch.equal(total, x + delta)
    assert torch.equal(packed, pack_rows(normed))


@far_below_zero
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated_activation(seed: int, activation: str, dtype: torch.dtype) -> None:
    for shape in ((0, 10), (1, 2), (5, 70), (2, 3, 34), (2, 2100)):
        gate_up = (4 * torch.randn(shape)).to(dtype)
        ours, expected = (ops.gated_activation(gate_up, activation) for ops in (OPS, TORCH_OPS))
        assert ours.dtype == dtype
        # The activation and the product are each rounded.
        torch.testing.assert_close(ours, expected, rtol=2 * STEP[dtype], atol=4e-6)


@far_below_zero
def test_extremes() -> None:
    gate_up = torch.tensor([[-1e4, 1e4, 0.0, torch.nan, 1.0, 2.0, 3.0, 4.0]])
    for activation in ACTIVATIONS:
        ours, expected = (ops.gated_activation(gate_up, activation) for ops in (OPS, TORCH_OPS))
        torch.testing.assert_close(ours, expected, equal_nan=True)
    zeros = torch.zeros(2, 16)
    assert torch.equal(OPS.rms_norm(zeros, torch.ones(16), 1e-6), zeros)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_does_not_depend_on_the_others(seed: int, dtype: torch.dtype) -> None:
    x, delta = torch.randn(2, 13, 70).to(dtype)
    weight = torch.randn(70).to(dtype)
    together = (
        *OPS.add_rms_norm(x, delta, weight, 1e-6),
        OPS.rms_norm(x, weight, 1e-6),
        OPS.gated_activation(x, "silu"),
    )
    for row in (0, 5, 12):
        a, b = x[row : row + 1], delta[row : row + 1]
        alone = (
            *OPS.add_rms_norm(a, b, weight, 1e-6),
            OPS.rms_norm(a, weight, 1e-6),
            OPS.gated_activation(a, "silu"),
        )
        for one, many in zip(alone, together, strict=True):
            assert torch.equal(one[0], many[row])


def test_supports_and_refusals() -> None:
    assert TritonOps.supports("cpu", torch.bfloat16, "silu") is None
    assert "int64" in str(TritonOps.supports("cpu", torch.int64, "silu"))
    assert "softsign" in str(TritonOps.supports("cpu", torch.float32, "softsign"))
    assert "xpu" in str(TritonOps.supports("xpu", torch.float32, "silu"))
    with pytest.raises(ConfigError, match="softsign"):
        OPS.gated_activation(torch.zeros(1, 4), "softsign")


def dense_case(shape: tuple[int, ...], num_out: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    x = torch.randn(shape).to(dtype)
    weight = (torch.randn(num_out, shape[-1]) / shape[-1] ** 0.5).to(dtype)
    return x, weight, torch.randn(num_out).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("shape", "num_out"),
    [((0, 48), 5), ((1, 1), 1), ((7, 130), 1), ((65, 33), 70), ((130, 64), 200), ((3, 2, 20), 17)],
    ids=str,
)
def test_deterministic_linear(seed: int, shape: tuple[int, ...], num_out: int, dtype: torch.dtype) -> None:
    x, weight, bias = dense_case(shape, num_out, dtype)
    apart = torch.zeros(*shape[:-1], shape[-1] + 3, dtype=dtype)[..., : shape[-1]].copy_(x)
    for rows, b in ((x, None), (x, bias), (apart, bias)):
        ours = DETERMINISTIC.linear(rows, weight, b)
        exact = x.double() @ weight.double().t() + (0 if b is None else b.double())
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.double(), exact, rtol=STEP[dtype], atol=4 * STEP[dtype])


def test_deterministic_linear_keeps_nan_in_its_row(seed: int) -> None:
    x, weight, bias = dense_case((5, 40), 9, torch.float32)
    x[2, 7] = torch.nan
    y = DETERMINISTIC.linear(x, weight, bias)
    assert y[2].isnan().all()
    assert not y[[0, 1, 3, 4]].isnan().any()


@pytest.mark.parametrize("arch", [80, 90, 100, "gfx942"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dense_tiles_are_powers_of_two(arch: int | str, dtype: torch.dtype) -> None:
    for num_out in (1, 64, 8191, 8192, 151_936):
        tiles = dense_tiles(num_out, dtype, arch)
        for side in (tiles.rows, tiles.outputs, tiles.inputs):
            assert side >= 16
            assert side & (side - 1) == 0


def same_rows(f: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> None:
    """f(X)[i] is f(X[i:i+1])[0], bit for bit, wherever in X the row is."""
    order = torch.randperm(x.shape[0])
    together = f(x[order].clone())
    for place in torch.randperm(x.shape[0])[:6].tolist():
        i = order[place]
        alone = f(x[i : i + 1].clone())
        assert torch.equal(alone[0], together[place]), f"row {i} at {place}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_deterministic_operations_take_rows_one_by_one(seed: int, dtype: torch.dtype) -> None:
    """Also at the ends of arrays, where torch's own loops use other code."""
    for num_in, num_out in ((37, 1), (130, 70)):
        x, weight, bias = dense_case((131, num_in), num_out, dtype)
        same_rows(lambda x, w=weight, b=bias: DETERMINISTIC.linear(x, w, b), x)
        assert row_dependence(DETERMINISTIC.linear, weight) is None
    for function in (torch.sigmoid, torch.cos, torch.sin):
        same_rows(lambda x, f=function: DETERMINISTIC.elementwise(f, x), x[:, :7])
        torch.testing.assert_close(DETERMINISTIC.elementwise(function, x), function(x))
    norm, delta = torch.randn(130).to(dtype), torch.randn(130).to(dtype)
    for ops in (OPS, DETERMINISTIC):
        same_rows(lambda x, ops=ops: ops.rms_norm(x, norm, 1e-6), x)
        same_rows(lambda x, ops=ops: torch.cat(ops.add_rms_norm(x, delta.expand_as(x), norm, 1e-6), 1), x)
        same_rows(lambda x, ops=ops: ops.add_rms_norm_packed(x, delta.expand_as(x), norm, 1e-6)[2], x)
        for activation in ACTIVATIONS:
            same_rows(lambda x, ops=ops, a=activation: ops.gated_activation(x, a), x)
