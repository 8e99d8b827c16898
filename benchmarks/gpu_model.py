"""A small Qwen3-like decoder with random weights and what runs it, on any device, for gpu_check."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.gpu_numerics import paged_batch
from moe_runtime.attention.cpu import CpuPagedAttention
from moe_runtime.attention.kv_cache import KVCache
from moe_runtime.attention.triton_paged import TritonPagedAttention
from moe_runtime.dispatch import triton_grouping
from moe_runtime.dispatch.grouping import group_pairs
from moe_runtime.dispatch.local import LocalDispatcher
from moe_runtime.experts import triton_router
from moe_runtime.experts.cpu import CpuExperts
from moe_runtime.experts.router import route
from moe_runtime.experts.triton_grouped import TritonExperts
from moe_runtime.layers.ops import TORCH_OPS
from moe_runtime.layers.rope import RopeSpec
from moe_runtime.layers.triton_ops import TritonOps
from moe_runtime.models.decoder import Decoder
from moe_runtime.models.spec import ModelSpec
from moe_runtime.moe import ExpertParallelMoe
from moe_runtime.placement.layout import contiguous, layer_placement

if TYPE_CHECKING:
    from moe_runtime.core import ForwardBatch

BLOCK_SIZE = 16
NUM_BLOCKS = 4096


@dataclass
class SmallModel:
    """A decoder, its cache and its kernels."""

    decoder: Decoder
    attention: Any
    moe: ExpertParallelMoe
    device: torch.device

    def batch(self, spans: list[tuple[int, int]], device: torch.device) -> ForwardBatch:
        """Sequences of (tokens cached, new tokens). Tokens and blocks are the same on every device."""
        batch, _ = paged_batch(spans, BLOCK_SIZE, device)
        # Blocks in order, so that the next step of the same sequences finds what this one wrote.
        width = NUM_BLOCKS // len(spans)
        first = torch.arange(len(spans), device=device)[:, None] * width
        most = max(old + new for old, new in spans)
        assert most <= width * BLOCK_SIZE, f"{most} tokens of a sequence do not fit {width} blocks"
        sequence_T = torch.repeat_interleave(
            torch.arange(len(spans), device=device), torch.tensor(batch.query_lens, device=device)
        )
        batch.block_tables_BM.copy_(first + torch.arange(batch.block_tables_BM.shape[1], device=device))
        batch.slot_mapping_T.copy_(sequence_T * width * BLOCK_SIZE + batch.positions_T)
        batch.input_ids_T.copy_((batch.positions_T * 31 + sequence_T * 7) % self.decoder.spec.vocab_size)
        return batch

    @torch.inference_mode()
    def step(self, spans: list[tuple[int, int]]) -> torch.Tensor:
        """Logits (sequences, V) float32 after each sequence's last token."""
        batch = self.batch(spans, self.device)
        return self.decoder([(batch, self.attention.plan(batch))], self.attention, self.moe)


def small_model(
    device: torch.device,
    dtype: torch.dtype,
    *,
    triton: bool,
    hidden: int = 64,
    layers: int = 2,
    top_k: int = 2,
    round_to: torch.dtype | None = None,
) -> SmallModel:
    """The same weights everywhere, rounded to round_to first. triton: with all kernels, else with the CPU's."""
    spec = ModelSpec(
        architecture="Qwen3MoeForCausalLM", vocab_size=97, hidden_size=hidden, num_layers=layers,
        num_heads=4, num_kv_heads=2, head_dim=hidden // 4, norm_eps=1e-6, rope=RopeSpec(hidden // 4, 10_000.0), qk_norm="head",
        sliding_windows=(None,) * layers, mlp_kinds=("moe",) * layers, num_experts=8, top_k=top_k,
        moe_intermediate_size=hidden // 2, norm_topk_prob=True, activation="silu", tie_word_embeddings=False,
        max_position_embeddings=65536, dtype=str(dtype).removeprefix("torch."),
    )  # fmt: skip
    ops = TritonOps() if triton else TORCH_OPS
    router = triton_router.route if triton else route
    decoder = Decoder(spec, [spec.num_experts] * layers, dtype, device, ops, router)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            scale = 0.2 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5
            # Clearly different router scores: rounding must not choose other experts.
            noise *= 8 * scale if ".router." in name else scale
            values = noise + (1.0 if "norm" in name else 0.0)
            parameter.copy_(values.to(round_to or dtype))
    cache = KVCache.allocate(spec.attention_specs(), NUM_BLOCKS, BLOCK_SIZE, dtype, device)
    attention = (TritonPagedAttention if triton else CpuPagedAttention)(cache, spec.attention_specs())
    placement = contiguous(layers, spec.num_experts, 1)
    placements = [layer_placement(placement, layer, 0, device) for layer in range(layers)]
    kernel = TritonExperts(device) if triton else CpuExperts()
    dispatcher = LocalDispatcher(triton_grouping.group_pairs if triton else group_pairs)
    return SmallModel(decoder, attention, ExpertParallelMoe(dispatcher, kernel, placements, 0), device)
