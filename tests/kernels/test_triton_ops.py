"""TritonOps in the interpreter against TorchOps and the FP8 oracle."""

from __future__ import annotations

import pytest
import torch

from moe_runtime.errors import ConfigError
from moe_runtime.layers.activation import ACTIVATIONS
from moe_runtime.layers.ops import TORCH_OPS
from moe_runtime.layers.triton_ops import TritonOps, add_rms_norm_fp8
from moe_runtime.quantization import dequantize_rows, quantize_rows

OPS = TritonOps()
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# One step of the last digit: where a float32 sum in another order crosses a rounding boundary.
STEP = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}


def close(ours: torch.Tensor, expected: torch.Tensor) -> None:
    assert ours.dtype == expected.dtype
    torch.testing.assert_close(ours, expected, rtol=STEP[expected.dtype], atol=1e-6)


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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "hidden"), [(0, 16), (2, 40), (9, 128), (3, 300), (2, 2048)])
def test_add_rms_norm_fp8(seed: int, tokens: int, hidden: int, dtype: torch.dtype) -> None:
    """Bit for bit what the oracle makes of the kernel's own norm; a group of zeros has scale 1."""
    x, delta = (3 * torch.randn(2, tokens, hidden)).to(dtype)
    weight = torch.randn(hidden).to(dtype)
    if hidden > 128:
        weight[:128] = 0
    total, payload, scale = add_rms_norm_fp8(x, delta, weight, 1e-6)
    expected_total, normed = OPS.add_rms_norm(x, delta, weight, 1e-6)
    expected_payload, expected_scale = quantize_rows(normed)
    assert torch.equal(total, expected_total)
    assert torch.equal(scale, expected_scale)
    assert torch.equal(payload.float(), expected_payload.float())
    torch.testing.assert_close(dequantize_rows(payload, scale), normed.float(), rtol=2**-4, atol=0.02)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated_activation(seed: int, activation: str, dtype: torch.dtype) -> None:
    for shape in ((0, 10), (1, 2), (5, 70), (2, 3, 34), (2, 2100)):
        gate_up = (4 * torch.randn(shape)).to(dtype)
        ours, expected = (ops.gated_activation(gate_up, activation) for ops in (OPS, TORCH_OPS))
        assert ours.dtype == dtype
        # The activation and the product are each rounded.
        torch.testing.assert_close(ours, expected, rtol=2 * STEP[dtype], atol=4e-6)


def test_extremes() -> None:
    gate_up = torch.tensor([[-1e4, 1e4, 0.0, torch.nan, 1.0, 2.0, 3.0, 4.0]])
    for activation in ACTIVATIONS:
        ours, expected = (ops.gated_activation(gate_up, activation) for ops in (OPS, TORCH_OPS))
        torch.testing.assert_close(ours, expected, equal_nan=True)
    zeros = torch.zeros(2, 16)
    assert torch.equal(OPS.rms_norm(zeros, torch.ones(16), 1e-6), zeros)


def test_nan_survives_quantisation() -> None:
    x = torch.ones(2, 256)
    x[0, 3] = torch.nan
    _, payload, scale = add_rms_norm_fp8(x, torch.zeros(2, 256), torch.ones(256), 1e-6)
    assert dequantize_rows(payload, scale)[0].isnan().any()
    assert not dequantize_rows(payload, scale)[1].isnan().any()


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
