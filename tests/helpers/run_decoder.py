"""A decoder of one rank with the real experts, and the whole-sequence attention oracle around it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional as F

from moe_runtime.dispatch.local import LocalDispatcher
from moe_runtime.experts.cpu import CpuExperts
from moe_runtime.moe import ExpertParallelMoe
from moe_runtime.placement.layout import contiguous, layer_placement
from tests.helpers.tiny_models import FullAttention, whole_batch

if TYPE_CHECKING:
    from moe_runtime.models.decoder import Decoder


def logprobs_with_cpu_experts(decoder: Decoder, ids: list[int]) -> torch.Tensor:
    """(len(ids), V) float32: log-probabilities after each token. Expert e must be in slot e of every MoE layer."""
    spec = decoder.spec
    placement = contiguous(spec.num_moe_layers, spec.num_experts, 1)
    layers = [layer_placement(placement, layer, 0) for layer in range(spec.num_moe_layers)]
    moe = ExpertParallelMoe(LocalDispatcher(), CpuExperts(), layers, 0)
    batch, attention = whole_batch([ids]), FullAttention(spec.attention_specs())
    with torch.inference_mode():
        return F.log_softmax(decoder([(batch, attention.plan(batch))], attention, moe), dim=-1)
