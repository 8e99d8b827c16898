"""From router logits to the experts of each token. Reference semantics, in float32, device-neutral.

Legend: T tokens, E experts, K experts per token.
"""

from __future__ import annotations

import torch

from moe_runtime.core import Routing


def route(
    logits_TE: torch.Tensor,
    top_k: int,
    renormalize: bool,
    weights_dtype: torch.dtype = torch.float32,
) -> Routing:
    """Softmax over all experts in float32, then the K largest; equal scores choose the lower expert index.

    `renormalize` divides the K weights by their sum (Mixtral, Qwen3); otherwise they stay as they are (OLMoE).
    `weights_dtype`: precision the weights are rounded to before they are returned as float32; families whose reference
    keeps them in the model's dtype need it to give the reference's result.
    No host synchronisation. T may be 0.
    """
    scores_TE = torch.softmax(logits_TE, dim=-1, dtype=torch.float32)
    # torch.topk promises no order among equal scores; a stable sort does.
    sorted_TE, ids_TE = torch.sort(scores_TE, dim=-1, descending=True, stable=True)
    weights_TK = sorted_TE[:, :top_k]
    if renormalize:
        weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
    return Routing(
        topk_ids_TK=ids_TE[:, :top_k].contiguous(),
        topk_weights_TK=weights_TK.to(weights_dtype).float().contiguous(),
    )
