"""The generic MoE decoder: one device, no ranks. Its weights come from `weights.loader`.

Pre-norm residual layers of attention and MLP, as in all supported families; what differs is in the ModelSpec.
Precision follows transformers. Nothing here reads a tensor's value on the host.
Legend: T tokens, H query heads, G KV heads, d head size, D hidden, F expert intermediate, E experts, p slots, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from moe_runtime.experts.base import ExpertWeights
from moe_runtime.experts.router import route
from moe_runtime.layers.embedding import Embedding
from moe_runtime.layers.linear import GatedMlp, Linear, weight
from moe_runtime.layers.norm import RmsNorm
from moe_runtime.layers.rope import RotaryEmbedding
from moe_runtime.quantization import FP8

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from moe_runtime.attention.base import AttentionBackend
    from moe_runtime.core import ForwardBatch, Routing
    from moe_runtime.layers.ops import LayerOps
    from moe_runtime.models.spec import ModelSpec

    RoutedExperts = Callable[
        [int, torch.Tensor, Routing, ExpertWeights, int, Callable[[], torch.Tensor] | None], torch.Tensor
    ]
    """What runs the routed experts of a MoE layer; arguments and result as of `moe.ExpertParallelMoe.__call__`."""


class Attention(nn.Module):
    """Projections and norms around the backend's rotation and attention."""

    def __init__(
        self, spec: ModelSpec, layer: int, dtype: torch.dtype, device: torch.device | str, ops: LayerOps
    ) -> None:
        super().__init__()
        self.layer, self.head_dim, self.clip = layer, spec.head_dim, spec.clip_qkv
        self.q_width, self.kv_width = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        rows = self.q_width + 2 * self.kv_width
        self.qkv = Linear(spec.hidden_size, rows, dtype, device, ops, spec.qkv_bias)
        self.out = Linear(self.q_width, spec.hidden_size, dtype, device, ops, spec.attention_out_bias)
        self.norm_per_head = spec.qk_norm == "head"
        self.q_norm: RmsNorm | None = None
        self.k_norm: RmsNorm | None = None
        if spec.qk_norm != "none":
            q_size, k_size = (
                (self.head_dim, self.head_dim) if self.norm_per_head else (self.q_width, self.kv_width)
            )
            self.q_norm = RmsNorm(q_size, spec.norm_eps, dtype, device, ops)
            self.k_norm = RmsNorm(k_size, spec.norm_eps, dtype, device, ops)

    def forward(
        self,
        x_TD: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        backend: AttentionBackend,
        plan: Any,
    ) -> torch.Tensor:
        """x_TD: normed hidden states; rotation: cos and sin. Returns (T, D)."""
        q, k, v = self.qkv(x_TD).split((self.q_width, self.kv_width, self.kv_width), dim=-1)
        q_THd, k_TGd = self._normed(q, self.q_norm), self._normed(k, self.k_norm)
        v_TGd = self._heads(v)
        if self.clip is not None:
            q_THd, k_TGd, v_TGd = (x.clamp(-self.clip, self.clip) for x in (q_THd, k_TGd, v_TGd))
        attended = backend.run(q_THd, k_TGd, v_TGd, rotation, self.layer, plan)
        return self.out(attended.flatten(1))

    def _normed(self, x: torch.Tensor, norm: RmsNorm | None) -> torch.Tensor:
        if norm is None:
            return self._heads(x)
        return norm(self._heads(x)) if self.norm_per_head else self._heads(norm(x))

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        """(T, heads * d) to (T, heads, d); written out because -1 is ambiguous at T = 0."""
        return x.view(x.shape[0], x.shape[1] // self.head_dim, self.head_dim)


class MoeMlp(nn.Module):
    """Router, the experts in this rank's slots, and the shared expert if there is one."""

    def __init__(
        self,
        spec: ModelSpec,
        moe_layer: int,
        num_slots: int,
        dtype: torch.dtype,
        device: torch.device | str,
        ops: LayerOps,
    ) -> None:
        super().__init__()
        hidden, inner, shared = (
            spec.hidden_size,
            spec.moe_intermediate_size,
            spec.shared_expert_intermediate_size,
        )
        self.moe_layer = moe_layer
        self.top_k, self.renormalize = spec.top_k, spec.norm_topk_prob
        self.weights_dtype = dtype if spec.router_weights_in_model_dtype else torch.float32
        self.activation = spec.activation
        self.router = Linear(hidden, spec.num_experts, dtype, device, ops)
        self.scheme, self.quantize_activations = spec.expert_scheme, spec.quantize_activations
        stored = dtype if self.scheme is None else FP8
        self.gate_up = weight(num_slots, 2 * inner, hidden, dtype=stored, device=device)
        self.down = weight(num_slots, hidden, inner, dtype=stored, device=device)
        self.gate_up_scale: nn.Parameter | None = None
        self.down_scale: nn.Parameter | None = None
        if self.scheme is not None:
            gate_up, down = self.scheme.scale_shape(inner, hidden), self.scheme.scale_shape(hidden, inner)
            self.gate_up_scale = weight(num_slots, 2, *gate_up, dtype=torch.float32, device=device)
            self.down_scale = weight(num_slots, *down, dtype=torch.float32, device=device)
        self.shared_expert = GatedMlp(hidden, shared, spec.activation, dtype, device, ops) if shared else None
        self.shared_expert_gate = Linear(hidden, 1, dtype, device, ops) if shared else None

    def expert_weights(self) -> ExpertWeights:
        """The slots' weights; the tensors themselves, not copies."""
        return ExpertWeights(
            gate_up_pFD=self.gate_up,
            down_pDF=self.down,
            activation=self.activation,
            scheme=self.scheme,
            gate_up_scale=self.gate_up_scale,
            down_scale=self.down_scale,
            quantize_activations=self.quantize_activations,
        )

    def forward(self, x_TD: torch.Tensor, moe: RoutedExperts, max_num_tokens: int) -> torch.Tensor:
        """x_TD: normed hidden states. Calls `moe` once, also with T = 0. Returns (T, D)."""
        routing = route(self.router(x_TD), self.top_k, self.renormalize, self.weights_dtype)
        shared = None if self.shared_expert is None else lambda: self._shared(x_TD)
        return moe(self.moe_layer, x_TD, routing, self.expert_weights(), max_num_tokens, shared)

    def _shared(self, x_TD: torch.Tensor) -> torch.Tensor:
        assert self.shared_expert is not None
        assert self.shared_expert_gate is not None
        return torch.sigmoid(self.shared_expert_gate(x_TD)) * self.shared_expert(x_TD)


class DecoderLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(
        self,
        spec: ModelSpec,
        layer: int,
        mlp: GatedMlp | MoeMlp,
        dtype: torch.dtype,
        device: torch.device | str,
        ops: LayerOps,
    ) -> None:
        super().__init__()
        self.input_norm = RmsNorm(spec.hidden_size, spec.norm_eps, dtype, device, ops)
        self.attention = Attention(spec, layer, dtype, device, ops)
        self.mlp_norm = RmsNorm(spec.hidden_size, spec.norm_eps, dtype, device, ops)
        self.mlp = mlp

    def forward(
        self,
        x_TD: torch.Tensor,
        delta_TD: torch.Tensor | None,
        rotation: tuple[torch.Tensor, torch.Tensor],
        backend: AttentionBackend,
        plan: Any,
        moe: RoutedExperts,
        max_num_tokens: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x_TD: the residual stream, delta_TD: what is still to be added to it; `plan` is the attention backend's.

        Returns the same pair after this layer: an addition is left to the next norm, which does it in passing.
        """
        if delta_TD is None:
            normed = self.input_norm(x_TD)
        else:
            x_TD, normed = self.input_norm.after_adding(x_TD, delta_TD)
        x_TD, normed = self.mlp_norm.after_adding(x_TD, self.attention(normed, rotation, backend, plan))
        if isinstance(self.mlp, MoeMlp):
            return x_TD, self.mlp(normed, moe, max_num_tokens)
        return x_TD, self.mlp(normed)


class Decoder(nn.Module):
    """A whole model on one device, holding the experts of one rank's slots. Parameters start uninitialised."""

    def __init__(
        self,
        spec: ModelSpec,
        num_slots_per_moe_layer: Sequence[int],
        dtype: torch.dtype,
        device: torch.device | str,
        ops: LayerOps,
    ) -> None:
        """num_slots_per_moe_layer: expert slots held here, for each MoE layer in order (0 is allowed)."""
        super().__init__()
        assert len(num_slots_per_moe_layer) == spec.num_moe_layers
        self.spec, self.dtype, self.ops = spec, dtype, ops
        slots = dict(zip(spec.moe_layers, enumerate(num_slots_per_moe_layer), strict=True))
        self.embedding = Embedding(spec.vocab_size, spec.hidden_size, dtype, device)
        self.rope = RotaryEmbedding(spec.rope, device)
        self.layers = nn.ModuleList()
        for layer in range(spec.num_layers):
            mlp: GatedMlp | MoeMlp
            if layer in slots:
                mlp = MoeMlp(spec, *slots[layer], dtype, device, ops)
            else:
                mlp = GatedMlp(
                    spec.hidden_size, spec.dense_intermediate_size, spec.activation, dtype, device, ops
                )
            self.layers.append(DecoderLayer(spec, layer, mlp, dtype, device, ops))
        self.norm = RmsNorm(spec.hidden_size, spec.norm_eps, dtype, device, ops)
        tied = spec.tie_word_embeddings
        self.head = None if tied else Linear(spec.hidden_size, spec.vocab_size, dtype, device, ops)

    def moe_mlps(self) -> tuple[MoeMlp, ...]:
        """The MoE layers in order, for those who read or replace expert weights between steps."""
        return tuple(layer.mlp for layer in self.layers if isinstance(layer.mlp, MoeMlp))

    def forward(
        self, batch: ForwardBatch, attention: AttentionBackend, attention_plan: Any, moe: RoutedExperts
    ) -> torch.Tensor:
        """Compute the batch's tokens and write their KV. Returns float32 logits, (len(batch.logit_rows), V).

        `attention_plan` is `attention.plan(batch)`. Every MoE layer calls `moe` once, whatever T is.
        """
        x_TD = self.embedding(batch.input_ids_T)
        rotation = self.rope(batch.positions_T, self.dtype)
        delta_TD: torch.Tensor | None = None
        for layer in self.layers:
            x_TD, delta_TD = layer(
                x_TD, delta_TD, rotation, attention, attention_plan, moe, batch.max_num_tokens
            )
        assert delta_TD is not None
        rows = batch.logit_rows
        _, normed = self.norm.after_adding(x_TD[rows], delta_TD[rows])
        head = self.embedding.weight if self.head is None else self.head.weight
        return self.ops.linear(normed, head).float()
