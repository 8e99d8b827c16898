"""Routing semantics against the definition, in float64, and against transformers' routers."""

from __future__ import annotations

import random

import pytest
import torch

from moe_runtime.experts.router import route


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_matches_definition(renormalize: bool, dtype: torch.dtype, seed: int) -> None:
    draw = random.Random(seed)
    num_tokens, num_experts = draw.randint(1, 40), draw.randint(2, 70)
    top_k = draw.randint(1, num_experts)
    logits = (3 * torch.randn(num_tokens, num_experts)).to(dtype)
    routing = route(logits, top_k, renormalize)
    assert routing.topk_ids_TK.shape == routing.topk_weights_TK.shape == (num_tokens, top_k)
    assert routing.topk_ids_TK.dtype == torch.int64
    assert routing.topk_weights_TK.dtype == torch.float32
    for row, ids, weights in zip(
        logits.double(), routing.topk_ids_TK, routing.topk_weights_TK.double(), strict=True
    ):
        scores = row.softmax(0)
        order = sorted(range(num_experts), key=lambda e: (-row[e].item(), e))
        chosen = scores[ids]
        # float32 scores may tie where the logits differ in the last bit, so compare values, not the order itself.
        torch.testing.assert_close(chosen, scores[order[:top_k]], rtol=1e-6, atol=1e-12)
        expected = chosen / chosen.sum() if renormalize else chosen
        torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-9)
        assert len(set(ids.tolist())) == top_k


def test_equal_scores_choose_lower_experts(seed: int) -> None:
    """Few distinct values among many experts: every choice is a tie somewhere."""
    logits = torch.randint(0, 3, (50, 64)).float()
    ids = route(logits, 11, True).topk_ids_TK
    for row, chosen in zip(logits.tolist(), ids.tolist(), strict=True):
        assert chosen == sorted(range(64), key=lambda e: (-row[e], e))[:11]


def test_rows_do_not_depend_on_neighbours(seed: int) -> None:
    logits = torch.randn(33, 17)
    together = route(logits, 5, True)
    for i in range(33):
        alone = route(logits[i : i + 1], 5, True)
        assert torch.equal(alone.topk_ids_TK[0], together.topk_ids_TK[i])


def test_weights_rounded_to_the_reference_type(seed: int) -> None:
    logits = torch.randn(20, 9)
    exact, rounded = route(logits, 3, True), route(logits, 3, True, torch.bfloat16)
    assert rounded.topk_weights_TK.dtype == torch.float32
    assert torch.equal(rounded.topk_weights_TK, exact.topk_weights_TK.bfloat16().float())
    assert not torch.equal(rounded.topk_weights_TK, exact.topk_weights_TK)


def test_no_tokens() -> None:
    routing = route(torch.empty(0, 6), 2, True)
    assert routing.topk_ids_TK.shape == routing.topk_weights_TK.shape == (0, 2)
