"""Expert kernels against the formula in float64, with transformers' own activations."""

from __future__ import annotations

import random

import pytest
import torch
from transformers.activations import ACT2FN

from moe_runtime.core import ExpertBatch
from moe_runtime.errors import ConfigError
from moe_runtime.experts import cpu as cpu_module
from moe_runtime.experts.base import ExpertKernel, ExpertNeed, ExpertWeights
from moe_runtime.experts.cpu import CpuExperts
from moe_runtime.experts.reference import ReferenceExperts
from moe_runtime.layers.activation import ACTIVATIONS, get_activation

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
    assert "float64" in str(cpu.supports(ExpertNeed("cpu", torch.float64, "silu")))
    assert "int8" in str(reference.supports(ExpertNeed("cpu", torch.int8, "silu")))
