"""f(X)[i] is f(X[i:i+1])[0], bit for bit: any batch, any place, one thread or two; and f is what it should be."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest
import torch

from moe_runtime.core import ExpertBatch
from moe_runtime.dispatch.rows import sum_in_k_order
from moe_runtime.experts import router
from moe_runtime.experts.base import ExpertWeights
from moe_runtime.experts.deterministic import DeterministicExperts, route
from moe_runtime.experts.reference import ReferenceExperts
from moe_runtime.layers.deterministic_ops import DeterministicOps
from moe_runtime.layers.invariant import Workers, row_dependence, row_tiles
from moe_runtime.layers.ops import TORCH_OPS
from moe_runtime.layers.rope import RopeSpec, RotaryEmbedding
from moe_runtime.sampling.logits import token_logprobs
from tests.helpers.routing_cases import METHODS

DTYPES = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
OPS = {n: DeterministicOps(Workers(n)) for n in (1, 2)}
Function = Callable[[torch.Tensor, DeterministicOps], torch.Tensor]
T = TypeVar("T")


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=[False, pytest.param(True, marks=pytest.mark.slow)], ids=["few", "many"])
def many(request: pytest.FixtureRequest) -> bool:
    """Whether a test tries all its cases, or some drawn at random."""
    return bool(request.param)


def some(cases: list[T], many: bool, few: int = 1) -> list[T]:
    return cases if many else random.sample(cases, few)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """NaN never passes."""
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    equal = torch.equal(a.contiguous().view(integers), b.contiguous().view(integers))
    return a.dtype == b.dtype and equal and not bool(a.isnan().any())


def check_rows(f: Function, x: torch.Tensor) -> torch.Tensor:
    """Compare rows of x alone with them in random batches, at random places and with one or two threads."""
    torch.set_num_threads(1)
    alone = [f(x[i : i + 1].clone(), OPS[1])[0] for i in range(4)]
    for num_threads in random.sample([1, 2, 1, 2], 3):
        torch.set_num_threads(num_threads)
        chosen = [i for i in range(4) for _ in range(2)]
        others = random.sample(range(4, x.shape[0]), random.randint(0, x.shape[0] - 8))
        order = random.sample(chosen + others, len(chosen) + len(others))
        y = f(x[order].clone(), OPS[num_threads])
        for place, row in enumerate(order):
            if row < 4:
                assert same_bits(y[place], alone[row]), f"row {row} at {place} of {len(order)}"
    assert f(x[:0], OPS[1]).shape[0] == 0
    return f(x, OPS[1])


def test_linear(seed: int, many: bool) -> None:
    sizes = [(i, o) for i in (1, 5, 37, 64, 129, 300) for o in (1, 2, 8, 9, 61, 1030)]
    for num_in, num_out in some(sizes, many, few=4):
        dtype, biased = random.choice(list(DTYPES)), random.random() < 0.5
        weight = (torch.randn(num_out, num_in) / num_in**0.5).to(dtype)
        bias = torch.randn(num_out).to(dtype) if biased else None
        x = torch.randn(70, num_in).to(dtype)
        y = check_rows(lambda x, ops, weight=weight, bias=bias: ops.linear(x, weight, bias), x)
        want = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
        tol = DTYPES[dtype]
        torch.testing.assert_close(y.double(), want, rtol=tol, atol=tol)


def test_a_weight_s_address_changes_nothing(seed: int) -> None:
    """An expert stands in another slot, so at another address, on another number of ranks."""
    for num_out in (2, 8, 61):
        weight, x = torch.randn(num_out, 37), torch.randn(13, 37)
        want = OPS[1].linear(x, weight)
        for offset in (1, 3, 8):
            room = torch.zeros(offset + weight.numel())
            moved = room[offset:].view_as(weight).copy_(weight)
            assert same_bits(OPS[1].linear(x, moved), want)


ACTIVATIONS = ["silu", "gelu", "gelu_pytorch_tanh", "relu", "swiglu_oai", "relu2"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms_and_activations(seed: int, dtype: torch.dtype, many: bool) -> None:
    tol = DTYPES[dtype]
    for width in some([2, 34, 1000], many):
        x = torch.randn(70, width).to(dtype)
        weight, delta = torch.randn(width).to(dtype), torch.randn(width).to(dtype)
        y = check_rows(lambda x, ops, weight=weight: ops.rms_norm(x, weight, 1e-5), x)
        torch.testing.assert_close(y, TORCH_OPS.rms_norm(x, weight, 1e-5), rtol=tol, atol=tol)
        check_rows(lambda x, ops, w=weight, d=delta: ops.add_rms_norm(x, d.expand_as(x), w, 1e-5)[1], x)
        for name in some(ACTIVATIONS, many, few=2):
            y = check_rows(lambda x, ops, name=name: ops.gated_activation(x, name), x)
            torch.testing.assert_close(y, TORCH_OPS.gated_activation(x, name), rtol=tol, atol=tol)
        check_rows(lambda x, ops: ops.elementwise(torch.sigmoid, x), x)


def test_rope(seed: int) -> None:
    positions = torch.randint(0, 100_000, (70, 1))
    for dim in (2, 6, 64):
        spec = RopeSpec(dim, 10_000.0)
        for part in (0, 1):
            check_rows(
                lambda p, ops, spec=spec, part=part: RotaryEmbedding(spec, "cpu", ops)(
                    p[:, 0], torch.float32
                )[part],
                positions,
            )


@pytest.mark.parametrize("name", METHODS)
def test_router(seed: int, name: str, many: bool) -> None:
    """Weights and ids, side by side as integers; both those of the plain router, up to rounding."""
    for dtype in some(list(DTYPES), many):
        method, num_experts, biased = METHODS[name](random.Random(random.random()))
        bias = torch.randn(num_experts) if biased else None

        def routed(
            x: torch.Tensor,
            _: DeterministicOps,
            method: router.RoutingMethod = method,
            bias: torch.Tensor | None = bias,
        ) -> torch.Tensor:
            routing = route(x, method, bias)
            assert not bool(routing.topk_weights_TK.isnan().any())
            return torch.cat((routing.topk_ids_TK, routing.topk_weights_TK.view(torch.int32).long()), 1)

        logits = (3 * torch.randn(70, num_experts)).to(dtype)
        together = check_rows(routed, logits)
        plain = router.route(logits, method, bias)
        ids, bits = together.chunk(2, dim=1)
        torch.testing.assert_close(
            bits.int().view(torch.float32), plain.topk_weights_TK, rtol=1e-5, atol=1e-6
        )
        assert torch.equal(ids, plain.topk_ids_TK)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_combine(seed: int, dtype: torch.dtype) -> None:
    num_experts, width = 3, random.randint(1, 90)
    scales = torch.rand(num_experts)

    def combine(x: torch.Tensor, _: DeterministicOps) -> torch.Tensor:
        T = x.shape[0]
        position = torch.arange(T * num_experts).view(T, num_experts)
        rows = x.repeat_interleave(num_experts, 0)
        return sum_in_k_order(rows, position, scales.expand(T, -1), all_present=True)

    check_rows(combine, torch.randn(70, width).to(dtype))


def test_logprobs(seed: int, many: bool) -> None:
    for vocab in some([61, 1000, 4099], many):
        top = min(5, vocab)

        def logprobs(x: torch.Tensor, _: DeterministicOps, top: int = top) -> torch.Tensor:
            if not len(x):
                return x
            found = token_logprobs(x, [3] * len(x), [top] * len(x))
            return torch.tensor([[f.logprob, *(p for _, p in f.top)] for f in found], dtype=torch.float64)

        check_rows(logprobs, torch.randn(70, vocab) * 4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_experts(seed: int, dtype: torch.dtype) -> None:
    hidden, inner = random.randint(5, 40), random.randint(5, 40)
    weights = ExpertWeights(
        (torch.randn(3, 2 * inner, hidden) / hidden**0.5).to(dtype),
        (torch.randn(3, hidden, inner) / inner**0.5).to(dtype),
        "silu",
    )

    def batch_of(x: torch.Tensor) -> ExpertBatch:
        """Every row goes to the hot slot 1, the first also to slot 2; slot 0 is empty."""
        rows = torch.arange(len(x))
        return ExpertBatch(x, torch.cat((rows, rows[:1])), torch.tensor([0, len(x), min(1, len(x))]))

    x = torch.randn(70, hidden).to(dtype)
    y = check_rows(lambda x, ops: DeterministicExperts(ops)(batch_of(x), weights)[: len(x)], x)
    want = ReferenceExperts()(batch_of(x), weights)[: len(x)]
    torch.testing.assert_close(y, want, rtol=DTYPES[dtype], atol=4 * DTYPES[dtype])


def test_tiles_cover_all_rows_once() -> None:
    for num_rows in range(200):
        tiles = row_tiles(num_rows)
        assert [i for rows, _ in tiles for i in range(rows.start, rows.stop)] == list(range(num_rows))
        assert all(rows.stop - rows.start <= size for rows, size in tiles)


def test_the_library_passes_the_check_at_start(seed: int) -> None:
    for dtype in DTYPES:
        for shape in ((1, 64), (8, 37), (1030, 129)):
            assert row_dependence(OPS[2].linear, torch.randn(shape).to(dtype)) is None


def test_the_check_at_start_can_fail(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    product = torch.mm
    monkeypatch.setattr(torch, "mm", lambda a, b: product(a, b) + a.shape[0])
    assert "depend on more than the row" in str(row_dependence(OPS[1].linear, torch.randn(20, 5)))
