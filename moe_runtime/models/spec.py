"""What the generic decoder needs to know of a model, in plain values."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from moe_runtime.attention.base import AttentionSpec
from moe_runtime.errors import ConfigError
from moe_runtime.experts.router import RoutingMethod
from moe_runtime.layers.rope import RopeSpec
from moe_runtime.quantization import INT8_CHANNEL, QuantScheme

POSITIVE = (
    "vocab_size",
    "hidden_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "num_experts",
    "moe_intermediate_size",
    "max_position_embeddings",
)
QK_NORMS = ("none", "head", "projection")
MLP_KINDS = ("dense", "moe")


@dataclass(frozen=True, kw_only=True)
class StoredQuantization:
    """How a checkpoint stores its FP8, int8 or int4 matrices: the payload under the matrix's name, its scale under a name beside it."""

    scheme: QuantScheme
    scale_suffixes: tuple[str, ...]
    """What a scale's name has after the matrix's; a checkpoint uses one of them."""
    experts: bool
    """Whether the routed experts are quantised, all of them; other matrices show it by their type."""
    packed: bool = False
    """Whether int8 or int4 values lie several to a word of int32, see `weights.packed`."""
    static_activations: bool = False
    """Whether there are scales for activations, which are not used: activations are kept or quantised as they come."""
    weights_only: bool = False
    """Whether activations are meant to stay as they are."""


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """One MoE decoder. Field names follow config.json where it has one. Raises ConfigError on inconsistent values."""

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope: RopeSpec
    qk_norm: str = "none"
    """RMS norm of queries and keys before rotation: `none`, per `head` (Qwen3), or over the whole `projection` (OLMoE)."""
    qkv_bias: bool = False
    attention_out_bias: bool = False
    clip_qkv: float | None = None
    """Queries, keys and values are clamped to [-clip, clip] after their norm."""
    sliding_windows: tuple[int | None, ...]
    """Per layer: tokens each token sees, itself included; None: all before it."""
    mlp_kinds: tuple[str, ...]
    """Per layer: `dense` or `moe`."""
    dense_intermediate_size: int = 0
    num_experts: int
    top_k: int
    moe_intermediate_size: int
    norm_topk_prob: bool
    """Whether the routing weights of a token are divided by their sum."""
    router_weights_in_model_dtype: bool = False
    """Whether the reference rounds routing weights to the model's dtype (they are float32 otherwise)."""
    shared_expert_intermediate_size: int = 0
    """0: no shared expert. Its output is multiplied by the sigmoid of a learned gate (Qwen2)."""
    activation: str
    tie_word_embeddings: bool
    max_position_embeddings: int
    """Longest context, in tokens."""
    dtype: str
    """The checkpoint's: `float32`, `bfloat16` or `float16`."""
    stored: StoredQuantization | None = None
    """How the checkpoint is quantised, if it is."""
    expert_scheme: QuantScheme | None = None
    """How the routed experts are kept in memory; None: in the model's dtype."""
    dense_scheme: QuantScheme | None = None
    """How attention, shared experts, dense MLPs and an untied head are: None, or int8."""
    quantize_activations: bool = False
    """Whether the experts' activations are rounded to FP8 too; see `experts.base`."""

    def __post_init__(self) -> None:
        for name in POSITIVE:
            if getattr(self, name) < 1:
                raise ConfigError(f"{self.architecture}: {name}={getattr(self, name)}: must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"{self.architecture}: {self.num_heads} attention heads cannot share {self.num_kv_heads} KV heads:"
                " num_attention_heads must be a multiple of num_key_value_heads"
            )
        if not 1 <= self.top_k <= self.num_experts:
            raise ConfigError(
                f"{self.architecture}: num_experts_per_tok={self.top_k}: must be from 1 to {self.num_experts}"
            )
        for window in self.sliding_windows:
            if window is not None and window < 1:
                raise ConfigError(
                    f"{self.architecture}: sliding_window={window}: must be at least 1, or null"
                )
        if "moe" not in self.mlp_kinds:
            raise ConfigError(f"{self.architecture}: no layer of this model has experts")
        if "dense" in self.mlp_kinds and self.dense_intermediate_size < 1:
            raise ConfigError(
                f"{self.architecture}: intermediate_size={self.dense_intermediate_size}: must be at least 1"
            )
        assert len(self.sliding_windows) == len(self.mlp_kinds) == self.num_layers
        assert self.qk_norm in QK_NORMS
        assert self.dense_scheme in (None, INT8_CHANNEL)
        assert set(self.mlp_kinds) <= set(MLP_KINDS)

    def to_json(self) -> str:
        """For another rank's `from_json`; numbers arrive bit for bit."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, text: str) -> ModelSpec:
        """What `to_json` wrote."""
        return msgspec.json.decode(text, type=cls)

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Decoder layers that have experts, in order; the index into it is the `moe_layer` used elsewhere."""
        return tuple(i for i, kind in enumerate(self.mlp_kinds) if kind == "moe")

    @property
    def dense_layers(self) -> tuple[int, ...]:
        """Decoder layers with an ordinary MLP."""
        return tuple(i for i, kind in enumerate(self.mlp_kinds) if kind == "dense")

    @property
    def num_moe_layers(self) -> int:
        """Layers with experts."""
        return len(self.moe_layers)

    def routing_method(self) -> RoutingMethod:
        """How its routers choose experts."""
        return RoutingMethod(top_k=self.top_k, score="softmax", renormalize=self.norm_topk_prob)

    def attention_specs(self) -> tuple[AttentionSpec, ...]:
        """One per decoder layer, for the KV cache and the attention backend."""
        return tuple(
            AttentionSpec(
                num_heads=self.num_heads,
                num_kv_heads=self.num_kv_heads,
                head_dim=self.head_dim,
                scale=self.head_dim**-0.5,
                sliding_window=window,
            )
            for window in self.sliding_windows
        )
