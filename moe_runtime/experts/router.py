"""From router logits to the experts of each token. Reference semantics, in float32, device-neutral.

How the methods in use are written as a `RoutingMethod` (names as TensorRT-LLM has them):

| method | score | renormalize | eps | further | families |
|---|---|---|---|---|---|
| Default | softmax | no | | | OLMoE, Qwen1.5-MoE, Jamba |
| RenormalizeNaive | softmax | yes | 0 | | Qwen3-MoE, Mixtral |
| Renormalize | softmax_of_chosen | no | | | gpt-oss, Granite |
| DeepSeekV3 | sigmoid | yes | 1e-20 | bias, groups by top2_sum, scale | DeepSeek-V3, GLM-4.5, Kimi K2 |
| DeepSeekV2 | softmax | no | | groups by max, scale | DeepSeek-V2 |
| Llama4 | sigmoid_of_chosen | no | | the layer multiplies the expert's input, not its result | Llama 4 |
| SigmoidRenorm | sigmoid | yes | 0 | | |
| MiniMax2 | sigmoid | yes | 1e-20 | bias | MiniMax-M2 |
| DeepseekV4 | sqrt_softplus | yes | 1e-20 | bias, scale | DeepSeek-V4 |
| zero experts | softmax | no | | bias, scale; logits of E + Z experts | LongCat-Flash |

With zero experts the ids of E and above stand for the identity: the layer, not the router, adds weight times input for them
and turns them into -1 before dispatch.

Legend: T tokens, E experts, K experts per token, G groups, g groups kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from moe_runtime.core import Routing
from moe_runtime.errors import ConfigError

SCORES = ("softmax", "sigmoid", "sqrt_softplus", "softmax_of_chosen", "sigmoid_of_chosen")
GROUP_SCORES = ("max", "top2_sum")


@dataclass(frozen=True)
class RoutingMethod:
    """How K of E experts are chosen and weighted. Raises ConfigError on values that do not fit together."""

    top_k: int
    score: str = "softmax"
    """What an expert's weight is made of. The first three turn all E logits into scores, which choose and weigh. With the
    `_of_chosen` two the logits themselves choose, and what is chosen becomes a softmax over K, or a sigmoid."""
    renormalize: bool = False
    """Whether the K weights are divided by their sum plus `eps`."""
    eps: float = 0.0
    scale: float = 1.0
    """What the weights are multiplied by last."""
    num_groups: int = 1
    """The E experts are this many groups of neighbours, of which only the best `top_groups` take part."""
    top_groups: int = 1
    group_score: str = "max"
    """A group is as good as its best expert, or as the sum of its two best."""

    def __post_init__(self) -> None:
        if self.score not in SCORES:
            raise ConfigError(f"routing score {self.score!r}: allowed are {', '.join(SCORES)}")
        if self.group_score not in GROUP_SCORES:
            raise ConfigError(f"group score {self.group_score!r}: allowed are {', '.join(GROUP_SCORES)}")
        if self.top_k < 1:
            raise ConfigError(f"top_k={self.top_k}: must be at least 1")
        if not 1 <= self.top_groups <= self.num_groups:
            raise ConfigError(f"top_groups={self.top_groups}: must be from 1 to {self.num_groups}")

    @property
    def grouped(self) -> bool:
        """Whether some groups are left out."""
        return self.top_groups < self.num_groups

    def check(self, num_experts: int) -> None:
        """Raises ConfigError if the method cannot choose among so many experts."""
        if self.top_k > num_experts:
            raise ConfigError(f"top_k={self.top_k}: must be from 1 to the number of experts, {num_experts}")
        if not self.grouped:
            return
        size = num_experts // self.num_groups
        if num_experts % self.num_groups:
            raise ConfigError(
                f"num_groups={self.num_groups}: must divide the number of experts, {num_experts}"
            )
        if self.group_score == "top2_sum" and size < 2:
            raise ConfigError(
                f"num_groups={self.num_groups}: groups must have two of the {num_experts} experts"
            )
        if self.top_k > self.top_groups * size:
            raise ConfigError(
                f"top_k={self.top_k}: the {self.top_groups} groups kept have {self.top_groups * size} experts"
            )


class Router(Protocol):
    """What turns logits into routing: `route` here, or a kernel that gives its result."""

    def __call__(
        self,
        logits_TE: torch.Tensor,
        method: RoutingMethod,
        bias_E: torch.Tensor | None = None,
        weights_dtype: torch.dtype = torch.float32,
    ) -> Routing: ...


def route(
    logits_TE: torch.Tensor,
    method: RoutingMethod,
    bias_E: torch.Tensor | None = None,
    weights_dtype: torch.dtype = torch.float32,
) -> Routing:
    """The K best experts of each token, best first; equal ones in the order of their index.

    logits_TE: any float type. bias_E: float32, added to what chooses (groups too), not to the weights.
    weights_dtype: precision the weights are rounded to before they are returned as float32; families whose reference
    keeps them in the model's dtype need it to give the reference's result.
    No host synchronisation. T may be 0. Raises ConfigError if the method does not fit E.
    """
    method.check(logits_TE.shape[1])
    scores_TE = _scores(logits_TE, method.score)
    choosing_TE = scores_TE if bias_E is None else scores_TE + bias_E
    if method.grouped:
        choosing_TE = _best_groups_only(choosing_TE, method)
    # torch.topk promises no order among equal scores; a stable sort does.
    ids_TK = torch.sort(choosing_TE, dim=-1, descending=True, stable=True).indices[:, : method.top_k]
    weights_TK = scores_TE.gather(1, ids_TK)
    if method.score == "softmax_of_chosen":
        weights_TK = torch.softmax(weights_TK, dim=-1)
    elif method.score == "sigmoid_of_chosen":
        weights_TK = torch.sigmoid(weights_TK)
    if method.renormalize:
        weights_TK = weights_TK / (weights_TK.sum(dim=-1, keepdim=True) + method.eps)
    if method.scale != 1.0:
        weights_TK = weights_TK * method.scale
    return Routing(topk_ids_TK=ids_TK.contiguous(), topk_weights_TK=weights_TK.to(weights_dtype).float())


def _scores(logits_TE: torch.Tensor, score: str) -> torch.Tensor:
    if score == "softmax":
        return torch.softmax(logits_TE, dim=-1, dtype=torch.float32)
    if score == "sigmoid":
        return torch.sigmoid(logits_TE.float())
    if score == "sqrt_softplus":
        return torch.nn.functional.softplus(logits_TE.float()).sqrt()
    return logits_TE.float()


def _best_groups_only(choosing_TE: torch.Tensor, method: RoutingMethod) -> torch.Tensor:
    """A copy with minus infinity in all groups but the best; equal groups in the order of their index."""
    T, E = choosing_TE.shape
    grouped = choosing_TE.view(T, method.num_groups, E // method.num_groups)
    if method.group_score == "max":
        group_TG = grouped.amax(dim=-1)
    else:
        group_TG = grouped.topk(2, dim=-1).values.sum(dim=-1)
    kept_Tg = torch.sort(group_TG, dim=-1, descending=True, stable=True).indices[:, : method.top_groups]
    dropped_TG = torch.ones_like(group_TG, dtype=torch.bool).scatter_(1, kept_Tg, False)
    return grouped.masked_fill(dropped_TG.unsqueeze(2), -torch.inf).view(T, E)
