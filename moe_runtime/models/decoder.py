"""The generic MoE decoder: one device, no ranks. Its weights come from `weights.loader`.

Pre-norm residual layers of attention and MLP, as in all supported families; what differs is in the ModelSpec.
Precision follows transformers. Nothing here reads a tensor's value on the host.
Legend: T tokens, B rows whose logits are wanted, H query heads, G KV heads, d head size, D hidden, F expert
intermediate, E experts, p slots, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from moe_runtime.experts.base import ExpertWeights
from moe_runtime.experts.router import route
from moe_runtime.layers.embedding import Embedding
from moe_runtime.layers.linear import GatedMlp, Linear, weight
from moe_runtime.layers.norm import RmsNorm
from moe_runtime.layers.rope import RotaryEmbedding
from moe_runtime.moe import MoeInput

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moe_runtime.attention.base import AttentionBackend
    from moe_runtime.core import ForwardBatch, Routing
    from moe_runtime.experts.router import Router
    from moe_runtime.layers.ops import LayerOps
    from moe_runtime.layers.rope import Rotation
    from moe_runtime.models.spec import ModelSpec
    from moe_runtime.moe import MoePass, RoutedExperts


class Attention(nn.Module):
    """Projections and norms around the backend's rotation and attention."""

    def __init__(
        self, spec: ModelSpec, layer: int, dtype: torch.dtype, device: torch.device | str, ops: LayerOps
    ) -> None:
        super().__init__()
        self.layer, self.head_dim, self.clip = layer, spec.head_dim, spec.clip_qkv
        self.q_width, self.kv_width = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        rows = self.q_width + 2 * self.kv_width
        scheme = spec.dense_scheme
        self.qkv = Linear(spec.hidden_size, rows, dtype, device, ops, spec.qkv_bias, scheme)
        self.out = Linear(self.q_width, spec.hidden_size, dtype, device, ops, spec.attention_out_bias, scheme)
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
        rotation: Rotation,
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
        router: Router,
    ) -> None:
        super().__init__()
        hidden, inner, shared = (
            spec.hidden_size,
            spec.moe_intermediate_size,
            spec.shared_expert_intermediate_size,
        )
        self.moe_layer, self.ops = moe_layer, ops
        self.route, self.routing_method = router, spec.routing_method()
        self.weights_dtype = dtype if spec.router_weights_in_model_dtype else torch.float32
        self.activation = spec.activation
        self.router = Linear(hidden, spec.num_experts, dtype, device, ops)
        self.scheme, self.quantize_activations = spec.expert_scheme, spec.quantize_activations
        stored = dtype if self.scheme is None else self.scheme.payload
        shapes = (2 * inner, hidden), (hidden, inner)
        if self.scheme is not None:
            shapes = self.scheme.payload_shape(*shapes[0]), self.scheme.payload_shape(*shapes[1])
        self.gate_up, self.down = (weight(num_slots, *s, dtype=stored, device=device) for s in shapes)
        self.gate_up_scale: nn.Parameter | None = None
        self.down_scale: nn.Parameter | None = None
        if self.scheme is not None:
            gate_up, down = self.scheme.scale_shape(inner, hidden), self.scheme.scale_shape(hidden, inner)
            self.gate_up_scale = weight(num_slots, 2, *gate_up, dtype=self.scheme.scale_dtype, device=device)
            self.down_scale = weight(num_slots, *down, dtype=self.scheme.scale_dtype, device=device)
        self.shared_expert: GatedMlp | None = None
        self.shared_expert_gate: Linear | None = None
        if shared:
            dense = spec.dense_scheme
            self.shared_expert = GatedMlp(hidden, shared, spec.activation, dtype, device, ops, dense)
            self.shared_expert_gate = Linear(hidden, 1, dtype, device, ops)

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

    def forward(
        self, x_TD: torch.Tensor, packed_TB: torch.Tensor | None, moe: RoutedExperts, batch: ForwardBatch
    ) -> MoePass:
        """x_TD: normed hidden states, T may be 0; packed_TB: as of MoeInput. Sends rows to their experts; the output is the pass's."""

        def choose() -> Routing:
            routing = self.route(self.router(x_TD), self.routing_method, None, self.weights_dtype)
            if batch.padding_T is not None:
                routing.topk_ids_TK.masked_fill_(batch.padding_T[:, None], -1)
            return routing

        shared = None if self.shared_expert is None else lambda: self._shared(x_TD)
        weights = self.expert_weights()
        return moe.begin(
            MoeInput(self.moe_layer, x_TD, choose, weights, batch.max_num_tokens, shared, packed_TB)
        )

    def _shared(self, x_TD: torch.Tensor) -> torch.Tensor:
        assert self.shared_expert is not None
        assert self.shared_expert_gate is not None
        gate_T1 = self.ops.elementwise(torch.sigmoid, self.shared_expert_gate(x_TD))
        return gate_T1 * self.shared_expert(x_TD)


@dataclass
class Stream:
    """A batch on its way through the layers."""

    batch: ForwardBatch
    plan: Any
    """The attention backend's."""
    rotation: Rotation
    x_TD: torch.Tensor
    """The residual stream."""
    delta_TD: torch.Tensor | None = None
    """What is still to be added to it."""
    under_way: MoePass | None = None
    """The pass whose output is the next delta."""

    def arrived(self) -> torch.Tensor | None:
        """The delta, once it is there."""
        if self.under_way is not None:
            self.delta_TD, self.under_way = self.under_way.finish(), None
        return self.delta_TD

    def wanted(self) -> tuple[torch.Tensor, torch.Tensor]:
        """After the last layer: the rows of x and delta whose logits are wanted."""
        delta_TD = self.arrived()
        assert delta_TD is not None
        return self.x_TD[self.batch.logit_rows], delta_TD[self.batch.logit_rows]


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

    def forward(self, stream: Stream, backend: AttentionBackend, moe: RoutedExperts) -> None:
        """Takes a stream to where its tokens have left for their experts; a dense layer to its end.

        The addition of what the MLP gives is left to the next norm, which does it in passing.
        """
        delta_TD = stream.arrived()
        if delta_TD is None:
            normed = self.input_norm(stream.x_TD)
        else:
            stream.x_TD, normed = self.input_norm.after_adding(stream.x_TD, delta_TD)
        attended = self.attention(normed, stream.rotation, backend, stream.plan)
        packed = None
        if isinstance(self.mlp, MoeMlp) and moe.takes_packed:
            stream.x_TD, normed, packed = self.mlp_norm.packed_after_adding(stream.x_TD, attended)
        else:
            stream.x_TD, normed = self.mlp_norm.after_adding(stream.x_TD, attended)
        if isinstance(self.mlp, MoeMlp):
            stream.under_way = self.mlp(normed, packed, moe, stream.batch)
        else:
            stream.delta_TD = self.mlp(normed)


class Decoder(nn.Module):
    """A whole model on one device, holding the experts of one rank's slots. Parameters start uninitialised."""

    def __init__(
        self,
        spec: ModelSpec,
        num_slots_per_moe_layer: Sequence[int],
        dtype: torch.dtype,
        device: torch.device | str,
        ops: LayerOps,
        router: Router = route,
    ) -> None:
        """num_slots_per_moe_layer: expert slots held here, for each MoE layer in order (0 is allowed)."""
        super().__init__()
        assert len(num_slots_per_moe_layer) == spec.num_moe_layers
        self.spec, self.dtype, self.ops = spec, dtype, ops
        slots = dict(zip(spec.moe_layers, enumerate(num_slots_per_moe_layer), strict=True))
        self.embedding = Embedding(spec.vocab_size, spec.hidden_size, dtype, device)
        self.rope = RotaryEmbedding(spec.rope, device, ops)
        self.layers = nn.ModuleList()
        for layer in range(spec.num_layers):
            mlp: GatedMlp | MoeMlp
            if layer in slots:
                mlp = MoeMlp(spec, *slots[layer], dtype, device, ops, router)
            else:
                sizes = spec.hidden_size, spec.dense_intermediate_size
                mlp = GatedMlp(*sizes, spec.activation, dtype, device, ops, spec.dense_scheme)
            self.layers.append(DecoderLayer(spec, layer, mlp, dtype, device, ops))
        self.norm = RmsNorm(spec.hidden_size, spec.norm_eps, dtype, device, ops)
        self.head: Linear | None = None
        if not spec.tie_word_embeddings:
            table = spec.hidden_size, spec.vocab_size
            self.head = Linear(*table, dtype, device, ops, scheme=spec.dense_scheme)

    def moe_mlps(self) -> tuple[MoeMlp, ...]:
        """The MoE layers in order, for those who read or replace expert weights between steps."""
        return tuple(layer.mlp for layer in self.layers if isinstance(layer.mlp, MoeMlp))

    def forward(
        self,
        parts: Sequence[tuple[ForwardBatch, Any]],
        attention: AttentionBackend,
        moe: RoutedExperts,
    ) -> torch.Tensor:
        """Compute the batches' tokens and write their KV. Returns float32 logits: each batch's `logit_rows` in turn, (B, V).

        parts: each batch with `attention.plan(batch)`. Of two, one computes in each layer while the other's rows travel; a token of
        the later may attend to tokens of the earlier, whose KV of the same layer is written before. Every MoE layer begins a
        pass for each, whatever T is.
        """
        streams = [
            Stream(batch, plan, self.rope(batch.positions_T, self.dtype), self.embedding(batch.input_ids_T))
            for batch, plan in parts
        ]
        for layer in self.layers:
            for stream in streams:
                layer(stream, attention, moe)
            for stream in streams:
                if stream.under_way is not None:
                    stream.under_way.compute()
        x_BD, delta_BD = (torch.cat(rows) for rows in zip(*(s.wanted() for s in streams), strict=True))
        _, normed = self.norm.after_adding(x_BD, delta_BD)
        logits = self.ops.linear(normed, self.embedding.weight) if self.head is None else self.head(normed)
        return logits.float()
