"""The experts in C++ against the plain formula, for every instruction set that this CPU has."""

from __future__ import annotations

import dataclasses
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from moe_runtime.core import ExpertBatch, RowScales
from moe_runtime.experts.base import ExpertNeed, ExpertWeights
from moe_runtime.experts.cpu import CpuExperts
from moe_runtime.experts.cpu_native import ACTIVATION_CODES, NativeExperts
from moe_runtime.experts.reference import ReferenceExperts
from moe_runtime.native.build import Native, load_native
from moe_runtime.quantization import (
    FP8_BLOCK,
    FP8_CHANNEL,
    FP8_TENSOR,
    INT4_MADE,
    INT8_CHANNEL,
    QuantScheme,
    int4_scheme,
)

ROOT = Path(__file__).parents[2]
TOLERANCE = 1.5e-2
"""Of the largest result: bfloat16 has 8 bits, and the rows between the two products are rounded to it."""


@pytest.fixture(scope="module")
def kernel(native: Native) -> NativeExperts:
    return NativeExperts(native, max_rows=10**6)


def make_weights(slots: int, hidden: int, inner: int, activation: str, **rest: object) -> ExpertWeights:
    weights = ExpertWeights(
        gate_up_pFD=(torch.randn(slots, 2 * inner, hidden) / hidden**0.5).bfloat16(),
        down_pDF=(torch.randn(slots, hidden, inner) / inner**0.5).bfloat16(),
        activation=activation,
    )
    return dataclasses.replace(weights, **rest)  # type: ignore[arg-type]


def make_batch(counts: list[int], num_tokens: int, hidden: int) -> ExpertBatch:
    return ExpertBatch(
        tokens_RD=torch.randn(num_tokens, hidden).bfloat16(),
        row_index_S=torch.randint(max(1, num_tokens), (sum(counts),)),
        num_rows_p=torch.tensor(counts, dtype=torch.int64),
    )


def check(kernel: NativeExperts, batch: ExpertBatch, weights: ExpertWeights) -> torch.Tensor:
    """Against the reference computed in float32 from the same values."""
    y = kernel(batch, weights)
    assert (y.dtype, y.shape) == (torch.bfloat16, (batch.row_index_S.shape[0], batch.tokens_RD.shape[1]))
    exact = dataclasses.replace(
        weights,
        **{
            f.name: value.float()
            for f in dataclasses.fields(weights)
            if isinstance(value := getattr(weights, f.name), torch.Tensor) and value.dtype == torch.bfloat16
        },
    )
    wide = dataclasses.replace(batch, tokens_RD=batch.tokens_RD.float()) if batch.scales is None else batch
    want = ReferenceExperts()(wide, exact).float()
    tolerance = TOLERANCE * max(1.0, float(want.abs().max())) if want.numel() else 0.0
    torch.testing.assert_close(y.float(), want, rtol=0.0, atol=tolerance)
    return y


@pytest.mark.parametrize("limit", [None, 0.5])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("activation", ACTIVATION_CODES)
@pytest.mark.other_sets(biased=[True], limit=[0.5])
def test_activations_biases_and_limits(
    seed: int, kernel: NativeExperts, activation: str, biased: bool, limit: float | None
) -> None:
    hidden, inner = random.randint(1, 90), random.randint(1, 90)
    counts = [random.choice([0, 1, 2, 7]) for _ in range(random.randint(1, 6))]
    weights = make_weights(len(counts), hidden, inner, activation, activation_limit=limit)
    if biased:
        weights = dataclasses.replace(
            weights,
            gate_up_bias_pF=torch.randn(len(counts), 2 * inner).bfloat16(),
            down_bias_pD=torch.randn(len(counts), hidden).bfloat16(),
        )
    check(kernel, make_batch(counts, 9, hidden), weights)


@pytest.mark.parametrize(("hidden", "inner"), [(1, 1), (33, 3), (64, 32), (96, 130), (257, 71), (640, 320)])
@pytest.mark.other_sets(threads=[2])
def test_shapes_and_numbers_of_rows(
    seed: int, kernel: NativeExperts, threads: int, hidden: int, inner: int
) -> None:
    counts = [1, 3, 0, 17, 64, 2, 5]
    check(kernel, make_batch(counts, 40, hidden), make_weights(len(counts), hidden, inner, "silu"))


@pytest.mark.parametrize(
    ("counts", "num_tokens"),
    [([0, 0, 0], 4), ([0, 0], 0), ([0, 133, 0, 0], 5), ([1, 0, 1], 1), ([], 3)],
    ids=["no rows", "no tokens", "one hot slot", "one token twice", "no slots"],
)
def test_uneven_slots(seed: int, kernel: NativeExperts, counts: list[int], num_tokens: int) -> None:
    check(kernel, make_batch(counts, num_tokens, 50), make_weights(len(counts), 50, 21, "silu"))


def test_large_and_small_gates(seed: int, kernel: NativeExperts) -> None:
    """The exponential at its ends: gates of hundreds either way, and zero."""
    for activation in ACTIVATION_CODES:
        weights = make_weights(2, 8, 6, activation)
        weights = dataclasses.replace(weights, gate_up_pFD=weights.gate_up_pFD * 200)
        batch = make_batch([5, 4], 6, 8)
        batch.tokens_RD[0] = 0
        check(kernel, batch, weights)


@pytest.mark.other_sets(threads=[2])
def test_a_row_does_not_depend_on_its_neighbours(seed: int, kernel: NativeExperts, threads: int) -> None:
    hidden, inner = random.choice([40, 96, 131]), random.choice([24, 64, 77])
    weights = make_weights(2, hidden, inner, "silu")
    batch = make_batch([0, 23], 23, hidden)
    together = kernel(batch, weights)
    for row in range(23):
        alone = ExpertBatch(batch.tokens_RD, batch.row_index_S[row : row + 1], torch.tensor([0, 1]))
        assert torch.equal(kernel(alone, weights)[0], together[row])


def test_slots_above_the_limit_go_to_torch(seed: int, kernel: NativeExperts) -> None:
    weights, batch = make_weights(5, 48, 40, "silu"), make_batch([3, 9, 0, 8, 20], 12, 48)
    mixed = check(NativeExperts(kernel.native, max_rows=8), batch, weights)
    own = kernel(batch, weights)
    small = torch.tensor([True] * 3 + [False] * 9 + [True] * 8 + [False] * 20)
    assert torch.equal(mixed[small], own[small])


INT4_FILE_SCHEMES = (int4_scheme(0), int4_scheme(64), int4_scheme(128, True), int4_scheme(32, True))
SCHEMES = (FP8_BLOCK, FP8_CHANNEL, FP8_TENSOR, INT8_CHANNEL, INT4_MADE, *INT4_FILE_SCHEMES)


def quantized(weights: ExpertWeights, scheme: QuantScheme) -> ExpertWeights:
    """Gate, up and down apart, with scales that differ much."""
    slots, _, hidden = weights.gate_up_pFD.shape
    gate_up = weights.gate_up_pFD.float().view(slots, 2, -1, hidden)
    gate_up = gate_up * (torch.rand(slots, 2, gate_up.shape[2], 1) + 0.1)
    (gate_up, gate_up_scale), (down, down_scale) = (
        int4_of_file(scheme, matrix) if scheme in INT4_FILE_SCHEMES else scheme.quantize_weight(matrix)
        for matrix in (gate_up, weights.down_pDF.float())
    )
    return dataclasses.replace(
        weights,
        gate_up_pFD=gate_up.flatten(1, 2),
        down_pDF=down,
        scheme=scheme,
        gate_up_scale=gate_up_scale,
        down_scale=down_scale,
    )


def int4_of_file(scheme: QuantScheme, matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of the matrix under scales and zero points that are too large or too small, so that every code occurs."""
    shape = (*matrix.shape[:-2], *scheme.scale_shape(*matrix.shape[-2:]))
    scale = torch.rand(shape).add_(0.3) * float(matrix.abs().max()) / 8
    if scheme.zero_points:
        scale.chunk(2, dim=-1)[1].copy_(torch.randint(0, 16, (*shape[:-1], shape[-1] // 2)))
    return scheme.encode(matrix, scale), scale


@pytest.mark.parametrize(
    ("hidden", "inner"), [(1, 1), (33, 3), (128, 256), (257, 131), (200, 300), (136, 120)]
)
@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: s.name)
@pytest.mark.other_sets(threads=[2], hidden=[1, 33, 128, 257])
def test_quantised_weights(
    seed: int, kernel: NativeExperts, threads: int, scheme: QuantScheme, hidden: int, inner: int
) -> None:
    counts = [1, 3, 0, 17, 64, 2, 5]
    weights = make_weights(len(counts), hidden, inner, "silu")
    if random.random() < 0.5:
        biases = (torch.randn(len(counts), n).bfloat16() for n in (2 * inner, hidden))
        weights = dataclasses.replace(weights, gate_up_bias_pF=next(biases), down_bias_pD=next(biases))
    weights = quantized(weights, scheme)
    assert kernel.supports(ExpertNeed("cpu", torch.bfloat16, "silu", scheme)) is None
    check(kernel, make_batch(counts, 40, hidden), weights)


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: s.name)
def test_a_quantised_row_does_not_depend_on_its_neighbours(
    seed: int, kernel: NativeExperts, scheme: QuantScheme
) -> None:
    rows = (
        2 if scheme is FP8_BLOCK else 43
    )  # More rows of block weights have the scales applied to them first.
    weights, batch = quantized(make_weights(1, 200, 140, "silu"), scheme), make_batch([rows], 23, 200)
    together = kernel(batch, weights)
    for row in range(rows):
        alone = ExpertBatch(batch.tokens_RD, batch.row_index_S[row : row + 1], torch.tensor([1]))
        assert torch.equal(kernel(alone, weights)[0], together[row])


@pytest.mark.parametrize("scheme", [FP8_TENSOR, INT8_CHANNEL], ids=lambda s: s.name)
@pytest.mark.parametrize("rows", [1, 3, 41])
def test_every_value(kernel: NativeExperts, scheme: QuantScheme, rows: int) -> None:
    """Exactly: the down projection of a one is a value, alone or beside others; subnormals and -128 too."""
    codes = [b for b in range(256) if scheme.payload == torch.int8 or b & 0x7F != 0x7F]
    payload = torch.tensor(codes, dtype=torch.uint8).view(scheme.payload)
    for width in (1, 64):
        down = torch.zeros(1, len(payload), width).to(scheme.payload)
        down[0, :, -1] = payload
        weights = ExpertWeights(
            gate_up_pFD=torch.eye(1, len(payload)).repeat(1, 2 * width, 1).to(scheme.payload),
            down_pDF=down,
            activation="relu",
            scheme=scheme,
            gate_up_scale=torch.ones(1, 2, *scheme.scale_shape(width, len(payload))),
            down_scale=torch.ones(1, *scheme.scale_shape(len(payload), width)),
        )
        tokens = torch.zeros(1, len(payload), dtype=torch.bfloat16)
        tokens[0, 0] = 1
        y = kernel(ExpertBatch(tokens, torch.zeros(rows, dtype=torch.int64), torch.tensor([rows])), weights)
        assert all(torch.equal(row.float(), payload.float()) for row in y)


def test_fp8_activations_go_to_torch(seed: int, kernel: NativeExperts) -> None:
    weights = quantized(make_weights(2, 40, 24, "silu"), FP8_CHANNEL)
    weights = dataclasses.replace(weights, quantize_activations=True)
    batch = make_batch([2, 5], 6, 40)
    assert torch.equal(kernel(batch, weights), CpuExperts()(batch, weights))


def test_rows_that_lie_apart_and_fp8_rows(seed: int, kernel: NativeExperts) -> None:
    weights, batch = make_weights(3, 40, 24, "silu"), make_batch([2, 0, 5], 6, 40)
    wide = torch.full((6, 64), torch.nan, dtype=torch.bfloat16)
    wide[:, :40] = batch.tokens_RD
    assert torch.equal(
        kernel(dataclasses.replace(batch, tokens_RD=wide[:, :40]), weights), kernel(batch, weights)
    )
    payload, scale_RG = FP8_BLOCK.quantize_rows(batch.tokens_RD.float())
    scales = RowScales(scale_RG, torch.bfloat16)
    check(kernel, dataclasses.replace(batch, tokens_RD=payload, scales=scales), weights)


def test_inputs_are_not_changed(seed: int, kernel: NativeExperts) -> None:
    batch, weights = make_batch([3, 2], 4, 8), make_weights(2, 8, 3, "gelu")
    inputs = (batch.tokens_RD, weights.gate_up_pFD, weights.down_pDF)
    before = [t.clone() for t in inputs]
    kernel(batch, weights)
    assert all(torch.equal(a, b) for a, b in zip(before, inputs, strict=True))


def test_memory_outside_the_batch_is_never_read(seed: int, kernel: NativeExperts) -> None:
    weights, batch = make_weights(2, 8, 3, "silu"), make_batch([3, 2], 4, 8)
    for index in (-1, 4):
        wrong = batch.row_index_S.clone()
        wrong[2] = index
        with pytest.raises(AssertionError, match="a row's token is not in the batch"):
            kernel(dataclasses.replace(batch, row_index_S=wrong), weights)
    for counts in ([3, 3], [3, 1], [-1, 6]):
        with pytest.raises(AssertionError, match="the slots' rows are not the batch's"):
            kernel(dataclasses.replace(batch, num_rows_p=torch.tensor(counts)), weights)
    turned = weights.down_pDF.transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(AssertionError, match="down_pDF"):
        kernel(batch, dataclasses.replace(weights, down_pDF=turned))


def test_supports(kernel: NativeExperts) -> None:
    need = ExpertNeed("cpu", torch.bfloat16, "silu")
    assert kernel.supports(need) is None
    for change, word in [
        ({"device_type": "cuda"}, "cuda"),
        ({"dtype": torch.float32}, "float32"),
        ({"activation": "relu2"}, "relu2"),
    ]:
        assert word in str(kernel.supports(dataclasses.replace(need, **change)))  # type: ignore[arg-type]
    assert NativeExperts(load_native("off")).supports(need) == "cpu_kernels is off"


def test_threads_are_those_of_torch() -> None:
    """One OpenMP library in the process: a second one would have threads of its own, which wait for work by spinning."""
    native = load_native()
    if native.library is None:
        pytest.skip(str(native.problem))
    code = (
        "import torch; from moe_runtime.native.build import load_native;"
        "assert load_native().library; torch.ones(1 << 20).sum();"
        "lines = open('/proc/self/maps').read().split();"
        "print(*{w for w in lines if 'gomp' in w or 'iomp' in w or 'libomp' in w})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert len(done.stdout.split()) == 1, done.stdout
