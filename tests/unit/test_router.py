"""Routing semantics against the definition, in float64, and against transformers' routers."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_runtime.errors import ConfigError
from moe_runtime.experts.router import SCORES, RoutingMethod, route
from tests.helpers.routing_cases import DEFINITIONS, METHODS, definition


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", METHODS)
def test_matches_definition(name: str, dtype: torch.dtype, seed: int) -> None:
    draw = random.Random(seed)
    method, num_experts, biased = METHODS[name](draw)
    num_tokens = draw.randint(1, 30)
    logits = (3 * torch.randn(num_tokens, num_experts)).to(dtype)
    bias = 0.3 * torch.randn(num_experts) if biased else None
    routing = route(logits, method, bias)
    assert routing.topk_ids_TK.shape == routing.topk_weights_TK.shape == (num_tokens, method.top_k)
    assert routing.topk_ids_TK.dtype == torch.int64
    assert routing.topk_weights_TK.dtype == torch.float32
    assert routing.topk_ids_TK.is_contiguous()
    for row, ids, weights in zip(logits, routing.topk_ids_TK, routing.topk_weights_TK, strict=True):
        definition(row, method, bias, ids, weights)


def test_every_score_is_covered() -> None:
    assert set(DEFINITIONS) == set(SCORES)


@pytest.mark.parametrize("name", METHODS)
def test_equal_scores_choose_lower_experts(name: str, seed: int) -> None:
    """Few distinct values among many experts: every choice is a tie somewhere."""
    method, num_experts, _ = METHODS[name](random.Random(seed))
    logits = torch.randint(0, 3, (30, num_experts)).float()
    chosen = route(logits, method).topk_ids_TK.tolist()
    for row, ids in zip(logits.tolist(), chosen, strict=True):
        allowed = set(range(num_experts))
        if method.grouped:
            size = num_experts // method.num_groups
            members = [range(g * size, (g + 1) * size) for g in range(method.num_groups)]
            # The scores rise with the logits, so pairs of logits order groups as sums of two scores or one maximum do.
            best_two = [sorted((row[e] for e in group), reverse=True)[:2] for group in members]
            by = best_two if method.group_score == "top2_sum" else [two[:1] for two in best_two]
            totals = [sum(torch.tensor(two).sigmoid().tolist()) for two in by]
            order = sorted(range(method.num_groups), key=lambda g: (-totals[g], g))
            allowed = {e for g in order[: method.top_groups] for e in members[g]}
        assert ids == sorted(allowed, key=lambda e: (-row[e], e))[: method.top_k]


def test_rows_do_not_depend_on_neighbours(seed: int) -> None:
    logits, method = torch.randn(33, 17), RoutingMethod(top_k=5, renormalize=True)
    together = route(logits, method)
    for i in range(33):
        alone = route(logits[i : i + 1], method)
        assert torch.equal(alone.topk_ids_TK[0], together.topk_ids_TK[i])


def test_weights_rounded_to_the_reference_type(seed: int) -> None:
    logits, method = torch.randn(20, 9), RoutingMethod(top_k=3, renormalize=True)
    exact, rounded = route(logits, method), route(logits, method, None, torch.bfloat16)
    assert rounded.topk_weights_TK.dtype == torch.float32
    assert torch.equal(rounded.topk_weights_TK, exact.topk_weights_TK.bfloat16().float())
    assert not torch.equal(rounded.topk_weights_TK, exact.topk_weights_TK)


@pytest.mark.parametrize("name", METHODS)
def test_no_tokens(name: str) -> None:
    method, num_experts, _ = METHODS[name](random.Random(1))
    routing = route(torch.empty(0, num_experts), method)
    assert routing.topk_ids_TK.shape == routing.topk_weights_TK.shape == (0, method.top_k)


@pytest.mark.parametrize(
    ("fields", "num_experts", "message"),
    [
        ({"score": "sigmoids"}, 8, "score 'sigmoids'.*allowed are softmax, sigmoid"),
        ({"group_score": "sum"}, 8, "group score 'sum'.*allowed are max, top2_sum"),
        ({"top_k": 0}, 8, "top_k=0: must be at least 1"),
        ({"top_groups": 3, "num_groups": 2}, 8, "top_groups=3: must be from 1 to 2"),
        ({"top_k": 9}, 8, "top_k=9: must be from 1 to the number of experts, 8"),
        ({"num_groups": 3, "top_groups": 2}, 8, "num_groups=3: must divide the number of experts, 8"),
        ({"num_groups": 8, "top_groups": 4, "group_score": "top2_sum"}, 8, "groups must have two"),
        ({"num_groups": 4, "top_groups": 1, "top_k": 3}, 8, "the 1 groups kept have 2 experts"),
    ],
)
def test_bad_methods(fields: dict[str, Any], num_experts: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        route(torch.zeros(1, num_experts), RoutingMethod(**{"top_k": 2, **fields}))


T, D, E, K = 50, 12, 24, 4
GROUPS = {"n_group": 6, "topk_group": 3}
TRANSFORMERS: dict[str, tuple[str, dict[str, Any], RoutingMethod]] = {
    "olmoe.OlmoeTopKRouter": ("", {"norm_topk_prob": False}, RoutingMethod(K)),
    "qwen3_moe.Qwen3MoeTopKRouter": ("", {"norm_topk_prob": True}, RoutingMethod(K, renormalize=True)),
    "mixtral.MixtralTopKRouter": ("", {}, RoutingMethod(K, renormalize=True)),
    "gpt_oss.GptOssTopKRouter": ("", {}, RoutingMethod(K, "softmax_of_chosen")),
    "granitemoe.GraniteMoeTopKRouter": ("", {}, RoutingMethod(K, "softmax_of_chosen")),
    "deepseek_v3.DeepseekV3TopkRouter": (
        "e_score_correction_bias",
        {**GROUPS, "norm_topk_prob": True, "routed_scaling_factor": 2.5},
        RoutingMethod(
            K,
            "sigmoid",
            renormalize=True,
            eps=1e-20,
            scale=2.5,
            num_groups=6,
            top_groups=3,
            group_score="top2_sum",
        ),
    ),
    "deepseek_v2.DeepseekV2TopkRouter": (
        "",
        {**GROUPS, "topk_method": "group_limited_greedy", "routed_scaling_factor": 16.0},
        RoutingMethod(K, scale=16.0, num_groups=6, top_groups=3),
    ),
    "llama4.Llama4Router": ("", {}, RoutingMethod(K, "sigmoid_of_chosen")),
    "minimax_m2.MiniMaxM2TopKRouter": (
        "argument",
        {},
        RoutingMethod(K, "sigmoid", renormalize=True, eps=1e-20),
    ),
    "deepseek_v4.DeepseekV4TopKRouter": (
        "e_score_correction_bias",
        {"scoring_func": "sqrtsoftplus", "routed_scaling_factor": 1.5},
        RoutingMethod(K, "sqrt_softplus", renormalize=True, eps=1e-20, scale=1.5),
    ),
    "longcat_flash.LongcatFlashTopkRouter": (
        "e_score_correction_bias",
        {"n_routed_experts": 16, "zero_expert_num": 8, "routed_scaling_factor": 6.0},
        RoutingMethod(K, scale=6.0),
    ),
    "lfm2_moe.Lfm2MoeTopKRouter": (
        "",
        {"use_expert_bias": False, "norm_topk_prob": True, "routed_scaling_factor": 1.0},
        RoutingMethod(K, "sigmoid", renormalize=True, eps=1e-6),
    ),
}
"""transformers' class -> (where it has its bias, configuration, the method here)."""


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_matches_transformers(name: str, seed: int) -> None:
    import importlib

    bias_at, values, method = TRANSFORMERS[name]
    family, class_name = name.split(".")
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    sizes = {"hidden_size": D, "num_experts": E, "num_local_experts": E, "num_experts_per_tok": K}
    router = getattr(module, class_name)(SimpleNamespace(**sizes, **values))
    for parameter in router.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    bias = 0.2 * torch.randn(E) if bias_at else None
    if bias is not None and bias_at != "argument":
        getattr(router, bias_at).copy_(bias)
    x = torch.randn(T, D)
    with torch.no_grad():
        out = router(x, bias) if bias_at == "argument" else router(x)
    routing = route(out[1] if class_name == "Llama4Router" else out[0], method, bias)
    expected = torch.zeros(T, E)
    if class_name == "Llama4Router":
        expected = out[0]
    else:
        expected.scatter_(1, out[2], out[1].float())
    got = torch.zeros(T, E).scatter_(1, routing.topk_ids_TK, routing.topk_weights_TK)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-7)
