"""Random routing methods of every kind, and their definition in float64 for one token."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch

from moe_runtime.experts.router import RoutingMethod


def _plain(
    score: str, biased: bool = False, **fields: object
) -> Callable[[random.Random], tuple[RoutingMethod, int, bool]]:
    def make(draw: random.Random) -> tuple[RoutingMethod, int, bool]:
        num_experts = draw.randint(2, 70)
        top_k = draw.randint(1, min(16, num_experts))
        return RoutingMethod(top_k, score, **fields), num_experts, biased  # type: ignore[arg-type]

    return make


def _grouped(
    score: str, group_score: str, biased: bool, **fields: object
) -> Callable[[random.Random], tuple[RoutingMethod, int, bool]]:
    def make(draw: random.Random) -> tuple[RoutingMethod, int, bool]:
        num_groups, size = draw.randint(2, 9), draw.randint(2, 11)
        top_groups = draw.randint(1, num_groups - 1)
        method = RoutingMethod(
            draw.randint(1, min(16, top_groups * size)),
            score,
            num_groups=num_groups,
            top_groups=top_groups,
            group_score=group_score,
            **fields,  # type: ignore[arg-type]
        )
        return method, num_groups * size, biased

    return make


METHODS: dict[str, Callable[[random.Random], tuple[RoutingMethod, int, bool]]] = {
    "default": _plain("softmax"),
    "renormalize_naive": _plain("softmax", renormalize=True),
    "renormalize": _plain("softmax_of_chosen"),
    "deepseek_v3": _grouped("sigmoid", "top2_sum", True, renormalize=True, eps=1e-20, scale=2.5),
    "deepseek_v2": _grouped("softmax", "max", False, scale=16.0),
    "llama4": _plain("sigmoid_of_chosen"),
    "sigmoid_renorm": _plain("sigmoid", renormalize=True),
    "minimax2": _plain("sigmoid", True, renormalize=True, eps=1e-20),
    "deepseek_v4": _plain("sqrt_softplus", True, renormalize=True, eps=1e-20, scale=1.5),
    "zero_experts": _plain("softmax", True, scale=6.0),
}
"""Name -> draws (method, number of experts, whether there is a bias)."""

DEFINITIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "softmax": lambda x: x.softmax(-1),
    "sigmoid": lambda x: 1 / (1 + (-x).exp()),
    "sqrt_softplus": lambda x: (1 + x.exp()).log().sqrt(),
    "softmax_of_chosen": lambda x: x,
    "sigmoid_of_chosen": lambda x: x,
}


def definition(
    logits_E: torch.Tensor,
    method: RoutingMethod,
    bias_E: torch.Tensor | None,
    ids_K: torch.Tensor,
    weights_K: torch.Tensor,
) -> None:
    """Asserts that a token's choice and weights are right; scores within rounding of one another may change places."""
    scores = DEFINITIONS[method.score](logits_E.double())
    choosing = scores if bias_E is None else scores + bias_E.double()
    if method.grouped:
        grouped = choosing.view(method.num_groups, -1)
        values = grouped.sort(dim=1, descending=True).values
        group_score = values[:, 0] if method.group_score == "max" else values[:, :2].sum(1)
        kept = group_score.sort(descending=True, stable=True).indices[: method.top_groups]
        least = group_score[kept].min()
        # Groups as good as the last one kept, up to float32's rounding, may stand in for it.
        near = (group_score - least).abs() <= 1e-6 * least.abs().clamp(min=1e-6)
        if near.sum() > 1:
            return
        outside = torch.ones(method.num_groups, dtype=torch.bool)
        outside[kept] = False
        choosing = grouped.masked_fill(outside[:, None], -torch.inf).view(-1)
    assert len(set(ids_K.tolist())) == method.top_k
    best = choosing.sort(descending=True).values[: method.top_k]
    torch.testing.assert_close(choosing[ids_K], best, rtol=2e-6, atol=1e-7)
    weights = scores[ids_K]
    if method.score == "softmax_of_chosen":
        weights = weights.softmax(0)
    elif method.score == "sigmoid_of_chosen":
        weights = weights.sigmoid()
    if method.renormalize:
        weights = weights / (weights.sum() + method.eps)
    torch.testing.assert_close(weights_K.double(), weights * method.scale, rtol=1e-5, atol=1e-9)
