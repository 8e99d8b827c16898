"""Tiny random checkpoints of each family, made with transformers' own classes, and plain oracles to run them with."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch.nn import functional as F

from moe_runtime.core import ForwardBatch
from moe_runtime.layers.rope import rotate

if TYPE_CHECKING:
    from moe_runtime.attention.base import AttentionSpec
    from moe_runtime.layers.rope import Rotation
    from moe_runtime.models.decoder import Decoder
    from moe_runtime.moe import MoeInput

FAMILIES = {
    "mixtral": ("MixtralConfig", "MixtralForCausalLM"),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM"),
    "qwen2_moe": ("Qwen2MoeConfig", "Qwen2MoeForCausalLM"),
    "olmoe": ("OlmoeConfig", "OlmoeForCausalLM"),
}


def tiny_config(family: str, seed: int, **overrides: Any) -> Any:
    """A transformers configuration with sizes drawn from the seed; `overrides` win."""
    draw = random.Random(f"{family} {seed}")
    kv_heads = draw.choice([1, 2, 3])
    heads, head_dim = kv_heads * draw.choice([1, 2]), draw.choice([4, 8, 16])
    num_experts = draw.randint(4, 9)
    values: dict[str, Any] = {
        "vocab_size": draw.randrange(61, 140, 2),
        # OLMoE's norms tie the hidden size to the heads; the others may have any.
        "hidden_size": heads * head_dim if family == "olmoe" else draw.randrange(32, 96, 2),
        "num_hidden_layers": draw.randint(2, 4),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": draw.randrange(12, 50),
        "num_experts_per_tok": draw.randint(1, 4),
        "max_position_embeddings": 512,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "rms_norm_eps": draw.choice([1e-5, 1e-6]),
        "rope_parameters": {"rope_type": "default", "rope_theta": draw.choice([100.0, 10_000.0, 1e6])},
        "num_local_experts" if family == "mixtral" else "num_experts": num_experts,
    }
    if family != "olmoe":
        values["head_dim"] = head_dim
    if family.startswith("qwen"):
        values["moe_intermediate_size"] = draw.randrange(9, 40)
    if family == "qwen2_moe":
        values["shared_expert_intermediate_size"] = draw.randrange(9, 40)
    if family != "mixtral":
        values["norm_topk_prob"] = draw.random() < 0.5
    return getattr(transformers, FAMILIES[family][0])(**(values | overrides))


def make_tiny(
    family: str,
    path: Path,
    seed: int,
    fused: bool = False,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "5GB",
    **overrides: Any,
) -> Any:
    """Write a random checkpoint to `path` and return transformers' model, ready to compare with.

    fused: transformers 5's own layout (stacked experts) instead of the hub's.
    Weights are spread so widely that logits differ clearly and every norm weight and bias matters.
    """
    config = tiny_config(family, seed, **overrides)
    config.dtype = dtype
    model = getattr(transformers, FAMILIES[family][1])(config).eval()
    # The default expert kernel takes rows that are multiples of 16 bytes only.
    model.set_experts_implementation("eager")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            center = 1.0 if "norm" in name else 0.0
            # Matrices keep the size of activations; the router is wide so that its choices are clear.
            scale = 0.2 if parameter.dim() == 1 else 1.2 / parameter.shape[-1] ** 0.5
            parameter.copy_(center + noise * (3 * scale if ".gate.weight" in name else scale))
    model = model.to(dtype)
    model.save_pretrained(path, save_original_format=not fused, max_shard_size=max_shard_size)
    return model


def reference_logprobs(model: Any, ids: list[int]) -> torch.Tensor:
    """(len(ids), V) float32: transformers' log-probabilities after each token."""
    with torch.no_grad():
        logits = model(torch.tensor([ids]), use_cache=False).logits[0]
    return F.log_softmax(logits.float(), dim=-1)


@dataclass
class FullAttention:
    """Oracle AttentionBackend: whole sequences only, no cache. The plan is the list of query lengths."""

    layers: tuple[AttentionSpec, ...]
    name: str = "oracle"

    def plan(self, batch: ForwardBatch) -> list[int]:
        return batch.query_lens

    def run(
        self,
        q_THd: torch.Tensor,
        k_TGd: torch.Tensor,
        v_TGd: torch.Tensor,
        rotation: Rotation,
        layer: int,
        plan: Any,
    ) -> torch.Tensor:
        spec = self.layers[layer]
        q_THd, k_TGd = rotate(q_THd, *rotation), rotate(k_TGd, *rotation)
        shared = spec.num_heads // spec.num_kv_heads
        out = torch.empty_like(q_THd)
        first = 0
        for length in plan:
            rows = slice(first, first + length)
            q, k, v = q_THd[rows], k_TGd[rows], v_TGd[rows]
            k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
            scores = torch.einsum("qhd,khd->hqk", q.float(), k.float()) * spec.scale
            distance = torch.arange(length)[:, None] - torch.arange(length)
            hidden = (distance < 0) | (distance >= (spec.sliding_window or length))
            weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
            out[rows] = torch.einsum("hqk,khd->qhd", weights, v.float()).to(q.dtype)
            first += length
        return out


@dataclass
class LoopExperts:
    """Oracle for `moe`: every (token, k) pair alone. Experts are looked up in `slots`: layer -> expert -> slot.

    Experts that are not in `slots` give zero, as if another rank computed them and was never asked.
    """

    slots: list[dict[int, int]]
    calls: list[tuple[int, int, int]]
    """(moe_layer, tokens, max_num_tokens) of each call."""
    takes_packed: bool = False

    @staticmethod
    def for_local(local_experts: list[list[int]]) -> LoopExperts:
        return LoopExperts([{e: s for s, e in enumerate(row) if e >= 0} for row in local_experts], [])

    def begin(self, work: MoeInput) -> LoopPass:
        """The last stage but one does all."""
        return LoopPass(self, work)

    def compute(self, work: MoeInput) -> torch.Tensor:
        x_TD, weights = work.x_TD, work.weights
        self.calls.append((work.moe_layer, len(x_TD), work.max_num_tokens))
        act = transformers.activations.ACT2FN[weights.activation]
        out = torch.zeros(x_TD.shape)
        routing = work.route()
        ids_TK, scales_TK = routing.topk_ids_TK, routing.topk_weights_TK
        for token, (ids, scales) in enumerate(zip(ids_TK.tolist(), scales_TK.tolist(), strict=True)):
            for expert, scale in zip(ids, scales, strict=True):
                slot = self.slots[work.moe_layer].get(expert)
                if slot is not None:
                    gate, up = F.linear(x_TD[token], weights.gate_up_pFD[slot]).chunk(2)
                    out[token] += scale * F.linear(act(gate) * up, weights.down_pDF[slot]).float()
        out = out.to(x_TD.dtype)
        return out if work.meanwhile is None else out + work.meanwhile()


@dataclass
class LoopPass:
    moe: LoopExperts
    work: MoeInput
    out: torch.Tensor | None = None

    def compute(self) -> None:
        self.out = self.moe.compute(self.work)

    def finish(self) -> torch.Tensor:
        assert self.out is not None
        return self.out


def whole_batch(sequences: list[list[int]], logit_rows: list[int] | None = None) -> ForwardBatch:
    """A step that computes whole sequences from position 0; logits of all rows unless given."""
    lens = [len(s) for s in sequences]
    total = sum(lens)
    rows = list(range(total)) if logit_rows is None else logit_rows
    starts = [sum(lens[:i]) for i in range(len(lens) + 1)]
    return ForwardBatch(
        input_ids_T=torch.tensor([t for s in sequences for t in s], dtype=torch.int64),
        positions_T=torch.tensor([i for n in lens for i in range(n)], dtype=torch.int64),
        slot_mapping_T=torch.arange(total),
        block_tables_BM=torch.zeros(len(lens), 1, dtype=torch.int32),
        query_starts_B1=torch.tensor(starts, dtype=torch.int32),
        seq_lens_B=torch.tensor(lens, dtype=torch.int32),
        query_lens=lens,
        seq_lens=lens,
        logit_rows=torch.tensor(rows, dtype=torch.int64),
        max_num_tokens=total,
    )


def decoder_logprobs(
    decoder: Decoder, sequences: list[list[int]], local_experts: list[list[int]] | None = None
) -> torch.Tensor:
    """(total tokens, V): the decoder's log-probabilities with the oracles around it; all experts local by default."""
    spec = decoder.spec
    held = local_experts or [list(range(spec.num_experts))] * spec.num_moe_layers
    batch = whole_batch(sequences)
    attention = FullAttention(spec.attention_specs())
    logits = decoder([(batch, attention.plan(batch))], attention, LoopExperts.for_local(held))
    return F.log_softmax(logits, dim=-1)
