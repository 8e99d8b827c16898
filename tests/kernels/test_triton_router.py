"""The router kernel against the torch reference and the definition, in Triton's interpreter."""

from __future__ import annotations

import random

import pytest
import torch

from moe_runtime.errors import ConfigError
from moe_runtime.experts.router import RoutingMethod
from moe_runtime.experts.router import route as reference
from moe_runtime.experts.triton_router import route
from tests.helpers.routing_cases import METHODS, definition

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("name", METHODS)
def test_matches_definition(name: str, seed: int) -> None:
    draw = random.Random(seed)
    for dtype in DTYPES:
        method, num_experts, biased = METHODS[name](draw)
        num_tokens = draw.randint(1, 19)
        # A view, so that rows are not adjacent.
        logits = (3 * torch.randn(num_tokens, num_experts + 3)).to(dtype)[:, :num_experts]
        bias = 0.3 * torch.randn(num_experts) if biased else None
        routing = route(logits, method, bias)
        expected = reference(logits, method, bias)
        assert routing.topk_ids_TK.shape == expected.topk_ids_TK.shape
        assert routing.topk_ids_TK.dtype == torch.int64
        for row, ids, weights in zip(logits, routing.topk_ids_TK, routing.topk_weights_TK, strict=True):
            definition(row, method, bias, ids, weights)


@pytest.mark.parametrize("name", METHODS)
def test_equal_scores_choose_lower_experts(name: str, seed: int) -> None:
    """Few distinct logits: equal ones give equal scores, so the order is the reference's, exactly."""
    method, num_experts, _ = METHODS[name](random.Random(seed))
    logits = torch.randint(-1, 2, (13, num_experts)).float()
    logits[0] = 0.0
    logits[1, ::2] = -0.0
    assert torch.equal(route(logits, method).topk_ids_TK, reference(logits, method).topk_ids_TK)


def test_large_sizes(seed: int) -> None:
    """E = 512, K = 16; E = 384 in one padded group; E = 256 in 8 groups, as in DeepSeek-V3."""
    for num_experts, method in (
        (512, RoutingMethod(16, renormalize=True)),
        (384, RoutingMethod(8, "sigmoid", renormalize=True, eps=1e-20, scale=2.8)),
        (256, RoutingMethod(8, "sigmoid", num_groups=8, top_groups=4, group_score="top2_sum")),
    ):
        logits, bias = torch.randn(5, num_experts), 0.1 * torch.randn(num_experts)
        routing = route(logits, method, bias)
        for row, ids, weights in zip(logits, routing.topk_ids_TK, routing.topk_weights_TK, strict=True):
            definition(row, method, bias, ids, weights)


def test_extreme_logits(seed: int) -> None:
    """Far tails keep their precision, infinities and NaN their order: NaN counts as the largest, as in torch's sort."""
    tails = torch.tensor([[-90.0, -30.0, -17.0, -5.0, 0.0, 5.0, 19.0, 30.0, 80.0]])
    method = RoutingMethod(9, "sqrt_softplus")
    got, expected = route(tails, method), reference(tails, method)
    assert torch.equal(got.topk_ids_TK, expected.topk_ids_TK)
    torch.testing.assert_close(got.topk_weights_TK, expected.topk_weights_TK, rtol=1e-6, atol=0)
    method = RoutingMethod(5, "sigmoid_of_chosen")
    odd = torch.tensor([[1.0, torch.nan, torch.inf, -torch.inf, torch.nan], [-torch.inf] * 5])
    assert torch.equal(route(odd, method).topk_ids_TK, reference(odd, method).topk_ids_TK)


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_rounded_to_the_reference_type(dtype: torch.dtype, seed: int) -> None:
    logits, method = torch.randn(6, 9), RoutingMethod(3, renormalize=True)
    exact, rounded = route(logits, method), route(logits, method, None, dtype)
    assert rounded.topk_weights_TK.dtype == torch.float32
    assert torch.equal(rounded.topk_weights_TK, exact.topk_weights_TK.to(dtype).float())


@pytest.mark.parametrize("name", METHODS)
def test_rows_do_not_depend_on_neighbours(name: str, seed: int) -> None:
    """Bit for bit, whatever the batch and the place in it."""
    method, num_experts, biased = METHODS[name](random.Random(seed))
    logits = (3 * torch.randn(9, num_experts)).to(random.choice(DTYPES))
    bias = torch.randn(num_experts) if biased else None
    order = torch.randperm(9)
    together = route(logits[order], method, bias)
    for place, i in enumerate(order.tolist()):
        alone = route(logits[i : i + 1], method, bias)
        assert torch.equal(alone.topk_ids_TK[0], together.topk_ids_TK[place])
        assert torch.equal(alone.topk_weights_TK[0], together.topk_weights_TK[place])


def test_no_tokens() -> None:
    routing = route(torch.empty(0, 6), RoutingMethod(2))
    assert routing.topk_ids_TK.shape == routing.topk_weights_TK.shape == (0, 2)


def test_too_large() -> None:
    with pytest.raises(ConfigError, match="1025 experts, top_k=2: the Triton router takes up to 1024 and 32"):
        route(torch.zeros(1, 1025), RoutingMethod(2))
    with pytest.raises(ConfigError, match="top_k=9: must be from 1"):
        route(torch.zeros(1, 8), RoutingMethod(9))
