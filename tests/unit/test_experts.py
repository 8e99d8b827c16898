"""Expert kernels against the formula in float64, with transformers' own activations."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
from transformers.activations import ACT2FN

from moe_runtime.core import ExpertBatch
from moe_runtime.errors import ConfigError
from moe_runtime.experts import cpu as cpu_module
from moe_runtime.experts.base import ExpertKernel, ExpertNeed, ExpertWeights
from moe_runtime.experts.cpu import CpuExperts, _dequantize
from moe_runtime.experts.reference import ReferenceExperts
from moe_runtime.layers.activation import ACTIVATIONS, SWIGLU_OAI, UNGATED, get_activation, is_gated
from moe_runtime.quantization import (
    FP8,
    FP8_BLOCK,
    FP8_CHANNEL,
    FP8_TENSOR,
    INT4_GROUPS,
    INT4_MADE,
    INT8_CHANNEL,
    QuantScheme,
    int4_scheme,
)

KERNELS: list[ExpertKernel] = [ReferenceExperts(), CpuExperts()]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def make_weights(slots: int, hidden: int, inner: int, activation: str, dtype: torch.dtype) -> ExpertWeights:
    gate_up = torch.randn(slots, 2 * inner, hidden) / hidden**0.5
    down = torch.randn(slots, hidden, inner) / inner**0.5
    return ExpertWeights(gate_up.to(dtype), down.to(dtype), activation)


def make_batch(counts: list[int], num_tokens: int, hidden: int, dtype: torch.dtype) -> ExpertBatch:
    return ExpertBatch(
        tokens_RD=torch.randn(num_tokens, hidden).to(dtype),
        row_index_S=torch.randint(num_tokens, (sum(counts),)) if num_tokens else torch.empty(0).long(),
        num_rows_p=torch.tensor(counts, dtype=torch.int64),
    )


def expected(batch: ExpertBatch, weights: ExpertWeights) -> torch.Tensor:
    """Every row through its slot in float64."""
    slot_S = torch.arange(len(batch.num_rows_p)).repeat_interleave(batch.num_rows_p)
    x = batch.tokens_RD.double()[batch.row_index_S]
    h = torch.einsum("sfd,sd->sf", weights.gate_up_pFD.double()[slot_S], x)
    gate, up = h.chunk(2, dim=1)
    act = ACT2FN[weights.activation]
    return torch.einsum("sdf,sf->sd", weights.down_pDF.double()[slot_S], act(gate) * up)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_matches_the_formula(seed: int, kernel: ExpertKernel, activation: str, dtype: torch.dtype) -> None:
    hidden, inner = random.randint(1, 40), random.randint(1, 40)
    counts = [random.choice([0, 1, 2, 7]) for _ in range(random.randint(1, 6))]
    weights = make_weights(len(counts), hidden, inner, activation, dtype)
    batch = make_batch(counts, 9, hidden, dtype)
    y = kernel(batch, weights)
    assert y.dtype == dtype
    want = expected(batch, weights)
    # Rounded inputs to the activation err in proportion to the row's size, not to the single element.
    tolerance = TOLERANCE[dtype] * max(1.0, float(want.abs().max()) if want.numel() else 0.0)
    torch.testing.assert_close(y.double(), want, rtol=0.0, atol=tolerance)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.name)
@pytest.mark.parametrize(
    ("counts", "num_tokens"),
    [([0, 0, 0], 4), ([0, 0], 0), ([0, 33, 0, 0], 5), ([1, 0, 1], 1), ([], 3)],
    ids=["no rows", "no tokens", "one hot slot", "one token twice", "no slots"],
)
def test_uneven_slots(seed: int, kernel: ExpertKernel, counts: list[int], num_tokens: int) -> None:
    weights = make_weights(len(counts), 11, 5, "silu", torch.float32)
    batch = make_batch(counts, num_tokens, 11, torch.float32)
    y = kernel(batch, weights)
    assert y.shape == (sum(counts), 11)
    torch.testing.assert_close(y.double(), expected(batch, weights), rtol=1e-5, atol=1e-5)


def test_a_hot_slot_is_tiled(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_module, "ROW_TILE", 4)
    batch = make_batch([9, 0, 4, 5], 7, 8, torch.float32)
    weights = make_weights(4, 8, 3, "silu", torch.float32)
    y = CpuExperts()(batch, weights)
    torch.testing.assert_close(y.double(), expected(batch, weights), rtol=1e-5, atol=1e-5)


def test_inputs_are_not_changed(seed: int) -> None:
    batch, weights = make_batch([3, 2], 4, 8, torch.float32), make_weights(2, 8, 3, "relu", torch.float32)
    inputs = (batch.tokens_RD, weights.gate_up_pFD, weights.down_pDF)
    before = [t.clone() for t in inputs]
    for kernel in KERNELS:
        kernel(batch, weights)
    assert all(torch.equal(a, b) for a, b in zip(before, inputs, strict=True))


def test_unknown_activation_is_refused(seed: int) -> None:
    with pytest.raises(ConfigError, match=r"'swish9' is not supported; allowed are silu, gelu"):
        get_activation("swish9")
    batch = make_batch([1], 1, 4, torch.float32)
    for kernel in KERNELS:
        assert "swish9" in str(kernel.supports(ExpertNeed("cpu", torch.float32, "swish9")))
        with pytest.raises(ConfigError, match="swish9"):
            kernel(batch, make_weights(1, 4, 4, "swish9", torch.float32))


def test_supports() -> None:
    reference, cpu = KERNELS
    for activation in ACTIVATIONS:
        for kernel in KERNELS:
            assert kernel.supports(ExpertNeed("cpu", torch.bfloat16, activation)) is None
    assert reference.supports(ExpertNeed("cuda", torch.float32, "silu")) is None
    assert "cuda" in str(cpu.supports(ExpertNeed("cuda", torch.float32, "silu")))
    for scheme in SCHEMES:
        for activation in (SWIGLU_OAI, *UNGATED):
            assert cpu.supports(ExpertNeed("cpu", torch.bfloat16, activation, scheme)) is None
    assert "float64" in str(cpu.supports(ExpertNeed("cpu", torch.float64, "silu")))
    assert "int8" in str(reference.supports(ExpertNeed("cpu", torch.int8, "silu")))


FP8_SCHEMES = (FP8_BLOCK, FP8_CHANNEL, FP8_TENSOR)
SCHEMES = (*FP8_SCHEMES, INT8_CHANNEL, INT4_MADE)
INT4_SCHEMES = (INT4_MADE, *(int4_scheme(g, zeros) for g in (0, *INT4_GROUPS) for zeros in (False, True)))


def full_weights(
    slots: int,
    hidden: int,
    inner: int,
    activation: str,
    dtype: torch.dtype,
    scheme: QuantScheme | None,
    **rest: object,
) -> ExpertWeights:
    """With biases; quantised part by part if there is a scheme."""
    parts = 2 if is_gated(activation) else 1
    gate_up = torch.randn(slots, parts, inner, hidden) / hidden**0.5
    down = torch.randn(slots, hidden, inner) / inner**0.5
    gate_up_scale = down_scale = None
    if scheme is None:
        gate_up, down = gate_up.to(dtype), down.to(dtype)
    else:
        (gate_up, gate_up_scale), (down, down_scale) = map(scheme.quantize_weight, (gate_up, down))
    weights = ExpertWeights(
        gate_up_pFD=gate_up.flatten(1, 2),
        down_pDF=down,
        activation=activation,
        gate_up_bias_pF=torch.randn(slots, parts * inner).to(dtype),
        down_bias_pD=torch.randn(slots, hidden).to(dtype),
        scheme=scheme,
        gate_up_scale=gate_up_scale,
        down_scale=down_scale,
    )
    return dataclasses.replace(weights, **rest)  # type: ignore[arg-type]


def check_cpu_against_reference(batch: ExpertBatch, weights: ExpertWeights) -> None:
    y, want = CpuExperts()(batch, weights), ReferenceExperts()(batch, weights)
    dtype = batch.tokens_RD.dtype
    assert y.dtype == dtype
    tolerance = TOLERANCE[dtype] * max(1.0, float(want.abs().max()))
    torch.testing.assert_close(y.float(), want.float(), rtol=0.0, atol=tolerance)


@pytest.mark.parametrize("limit", [None, 0.5])
@pytest.mark.parametrize("activation", [*sorted(ACTIVATIONS), SWIGLU_OAI, *UNGATED])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_cpu_biases_limits_and_activations(
    seed: int, dtype: torch.dtype, activation: str, limit: float | None
) -> None:
    weights = full_weights(3, 24, 13, activation, dtype, None, activation_limit=limit)
    check_cpu_against_reference(make_batch([2, 0, 5], 4, 24, dtype), weights)


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: s.name)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_cpu_quantised_weights(
    seed: int, dtype: torch.dtype, scheme: QuantScheme, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Matrices of several tiles, the last one not whole."""
    monkeypatch.setattr(cpu_module, "DEQUANT_TILE", 130 * 200)
    weights = full_weights(4, 200, 300, "silu", dtype, scheme)
    check_cpu_against_reference(make_batch([3, 0, 9, 1], 7, 200, dtype), weights)


@pytest.mark.parametrize("scheme", FP8_SCHEMES, ids=lambda s: s.name)
def test_cpu_fp8_activations_if_asked(seed: int, scheme: QuantScheme) -> None:
    weights = full_weights(4, 200, 300, "silu", torch.float32, scheme, quantize_activations=True)
    batch = make_batch([3, 0, 9, 1], 7, 200, torch.float32)
    y, want = CpuExperts()(batch, weights), ReferenceExperts()(batch, weights)
    kept = CpuExperts()(batch, dataclasses.replace(weights, quantize_activations=False))
    # A value between two steps of FP8 may be rounded either way, so single results may differ.
    assert (y - want).norm() < 0.02 * want.norm()
    assert (kept - want).norm() > 3 * (y - want).norm(), "activations were not rounded"


@pytest.mark.parametrize("shape", [(1, 1), (3, 300), (128, 128), (129, 200), (256, 130), (30, 70), (300, 7)])
@pytest.mark.parametrize("scheme", [*SCHEMES, *INT4_SCHEMES[1:]], ids=lambda s: s.name)
def test_cpu_dequantises_bit_for_bit(seed: int, scheme: QuantScheme, shape: tuple[int, int]) -> None:
    payload = torch.randint(0, 256, scheme.payload_shape(*shape), dtype=torch.uint8)
    if scheme.payload == FP8:
        payload[(payload & 0x7F) == 0x7F] = 0x80
    scale = torch.rand(scheme.scale_shape(*shape)) * 10.0 ** random.randint(-6, 6)
    scale = scale.to(scheme.scale_dtype)
    width = 2 * payload.shape[1] if scheme.payload == torch.uint8 else shape[1]
    buffer = torch.empty(shape[0], width, dtype=torch.int32)
    found = _dequantize(payload.view(scheme.payload), scheme, scale, buffer)[:, : shape[1]]
    expected = scheme.dequantize(payload.view(scheme.payload), scale, shape[1])
    assert torch.equal(found.contiguous().view(torch.int32), expected.view(torch.int32))


def test_fp8_weights_are_never_dequantised_as_a_whole(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_module, "DEQUANT_TILE", 128 * 64)
    sizes: list[int] = []

    def noted(*args: torch.Tensor) -> torch.Tensor:
        sizes.append(args[0].numel())
        return _dequantize(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(cpu_module, "_dequantize", noted)
    weights = full_weights(2, 64, 700, "silu", torch.bfloat16, FP8_BLOCK)
    CpuExperts()(make_batch([0, 3], 3, 64, torch.bfloat16), weights)
    assert sum(sizes) == 3 * 64 * 700, "the slot without rows costs nothing"
    assert max(sizes) <= 128 * 700
