"""The router as one Triton kernel; semantics of `router.route`. Legend: T tokens, E experts, K experts per token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from moe_runtime.core import Routing
from moe_runtime.errors import ConfigError

if TYPE_CHECKING:
    from moe_runtime.experts.router import RoutingMethod

MAX_EXPERTS, MAX_TOP_K = 1024, 32


@dataclass(frozen=True)
class RouterConfig:
    """How the kernel is cut."""

    tokens_per_program: int
    num_warps: int


def router_config(num_columns: int) -> RouterConfig:
    """A token per warp, more warps where a token has more columns than one should hold.

    Not a function of the number of tokens: a token's sums must not depend on its batch.
    """
    return RouterConfig(tokens_per_program=4, num_warps=4 if num_columns <= 512 else 8)


def route(
    logits_TE: torch.Tensor,
    method: RoutingMethod,
    bias_E: torch.Tensor | None = None,
    weights_dtype: torch.dtype = torch.float32,
) -> Routing:
    """See `router.route`; E up to 1024 and K up to 32 (ConfigError beyond), last axis of the logits contiguous.

    Scores that are equal or closer than float32 rounding may be ordered differently than by torch, never ones that are exact.
    """
    import triton

    from moe_runtime.experts import triton_router_kernels as kernels

    T, E = logits_TE.shape
    method.check(E)
    if E > MAX_EXPERTS or method.top_k > MAX_TOP_K:
        raise ConfigError(
            f"{E} experts, top_k={method.top_k}: the Triton router takes up to {MAX_EXPERTS} and {MAX_TOP_K}"
        )
    assert logits_TE.stride(1) == 1
    ids_TK = torch.empty(T, method.top_k, dtype=torch.int64, device=logits_TE.device)
    weights_TK = torch.empty(T, method.top_k, dtype=torch.float32, device=logits_TE.device)
    # Without groups to leave out all experts are one group, whose padding is the least.
    groups = method.num_groups if method.grouped else 1
    columns = triton.next_power_of_2(groups) * triton.next_power_of_2(E // groups)
    config = router_config(columns)
    if T > 0:
        kernels.route_kernel[(triton.cdiv(T, config.tokens_per_program),)](
            logits_TE,
            bias_E,
            ids_TK,
            weights_TK,
            T,
            logits_TE.stride(0),
            method.eps,
            method.scale,
            K=method.top_k,
            K_PADDED=triton.next_power_of_2(method.top_k),
            GROUPS=groups,
            GROUPS_PADDED=triton.next_power_of_2(groups),
            SIZE=E // groups,
            SIZE_PADDED=triton.next_power_of_2(E // groups),
            TOP_GROUPS=method.top_groups if method.grouped else 1,
            TOP2_SUM=method.group_score == "top2_sum",
            SCORE=method.score,
            RENORMALIZE=method.renormalize,
            ROUND_TO=kernels.DTYPES[weights_dtype],
            TOKENS=config.tokens_per_program,
            num_warps=config.num_warps,
            num_stages=1,
        )
    return Routing(topk_ids_TK=ids_TK, topk_weights_TK=weights_TK)
