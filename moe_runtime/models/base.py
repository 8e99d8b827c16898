"""The model seam: what a family's adapter says. Everything else of a model is the generic decoder.

An adapter turns the family's configuration into a ModelSpec and names the tensors of its checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from moe_runtime.errors import ConfigError
from moe_runtime.layers.activation import get_activation
from moe_runtime.layers.rope import parse_rope

if TYPE_CHECKING:
    from collections.abc import Mapping

    from moe_runtime.models.spec import ModelSpec

DTYPES = ("float32", "bfloat16", "float16")
ACTIVATION_SYNONYMS = {"swish": "silu"}


@dataclass(frozen=True)
class Refusal:
    """A configuration field honoured only at `allowed`, its value when absent."""

    allowed: Any
    reason: str


@dataclass(frozen=True)
class ConfigFields:
    """Every field that transformers' code reads for a family, and what becomes of it here.

    A test reads transformers' sources and fails if a field is in none of the three.
    """

    honoured: frozenset[str]
    refused: Mapping[str, Refusal] = field(default_factory=dict)
    irrelevant: Mapping[str, str] = field(default_factory=dict)
    """Field -> why it cannot change an inference result."""


COMMON_FIELDS = ConfigFields(
    honoured=frozenset(
        {
            "dtype",
            "head_dim",
            "hidden_act",
            "hidden_size",
            "intermediate_size",
            "max_position_embeddings",
            "norm_topk_prob",
            "num_attention_heads",
            "num_experts",
            "num_experts_per_tok",
            "num_hidden_layers",
            "num_key_value_heads",
            "num_local_experts",
            "original_max_position_embeddings",
            "partial_rotary_factor",
            "rms_norm_eps",
            "rope_parameters",
            "rope_theta",
            "tie_word_embeddings",
            "vocab_size",
        }
    ),
    refused={
        "is_causal": Refusal(True, "only causal attention is served"),
        "attention_chunk_size": Refusal(None, "this family's attention is not chunked"),
        "is_heterogeneous": Refusal(False, "all layers must have one shape, so no per_layer_config"),
    },
    irrelevant={
        "_attn_implementation": "chooses a kernel, not a result",
        "attention_dropout": "training only",
        "bos_token_id": "used by the tokenizer and generation only",
        "eos_token_id": "used by generation only",
        "initializer_range": "initial weights only",
        "output_router_logits": "adds outputs for the training loss",
        "pad_token_id": "only stops the padding row's gradient",
        "router_aux_loss_coef": "training loss only",
        "use_cache": "there always is a cache",
    },
)


def extend_fields(
    honoured: set[str], refused: Mapping[str, Refusal], irrelevant: Mapping[str, str] | None = None
) -> ConfigFields:
    """The common table with a family's own fields; a family's own entry wins over a common one."""
    own = honoured | set(refused)
    return ConfigFields(
        honoured=(COMMON_FIELDS.honoured - set(refused)) | honoured,
        refused={k: v for k, v in COMMON_FIELDS.refused.items() if k not in own} | dict(refused),
        irrelevant={**COMMON_FIELDS.irrelevant, **(irrelevant or {})},
    )


@dataclass(frozen=True)
class WeightRule:
    """One kind of checkpoint tensor and the place of its rows in the decoder.

    `source` and `target` hold `{layer}`; a `source` with `{expert}` holds one expert's matrix.
    """

    source: str
    target: str
    """Name of the decoder's parameter."""
    shape: tuple[int, ...]
    """The tensor's shape in the checkpoint."""
    layers: tuple[int, ...] = ()
    """Decoder layers it applies to; unused without `{layer}`."""
    first_row: int = 0
    """Where its rows begin in the parameter (in the expert's slot, for experts)."""
    stacked: bool = False
    """Whether its first axis is the expert."""
    parts: int = 1
    """Matrices whose rows follow one another in it: 2 where gate and up are one. Each has scales of its own."""

    @property
    def per_layer(self) -> bool:
        """Whether there is a tensor for each of `layers`."""
        return "{layer}" in self.source

    @property
    def per_expert(self) -> bool:
        """Whether there is a tensor for each expert."""
        return "{expert}" in self.source

    @property
    def num_rows(self) -> int:
        """Rows that a tensor, or each expert of a stacked one, fills."""
        return self.shape[1] if self.stacked else self.shape[0]


@dataclass(frozen=True)
class WeightRules:
    """All rules of a model. Several may fill one place (layouts of different age): a checkpoint uses one of them."""

    rules: tuple[WeightRule, ...]
    ignored: tuple[str, ...] = ()
    """Regular expressions of whole names of tensors that hold nothing to load."""
    copies: tuple[tuple[str, str], ...] = ()
    """(copy, original): if both are there they must be byte-equal, and the copy is not loaded."""


class ModelAdapter(Protocol):
    """One family. Stateless; found by architecture through `models.registry`."""

    architectures: tuple[str, ...]
    fields: ConfigFields

    def config(self, values: dict[str, Any]) -> Any:
        """transformers' configuration object for the contents of config.json, so that defaults are the same."""
        ...

    def spec(self, config: Any) -> ModelSpec:
        """Raises ConfigError naming the field that cannot be honoured."""
        ...

    def rules(self, spec: ModelSpec) -> WeightRules:
        """Where the tensors of a checkpoint of that model belong."""
        ...


def refuse_unsupported(config: Any, fields: ConfigFields, architecture: str) -> None:
    """Raise ConfigError naming the first field with a value that cannot be honoured."""
    for name, refusal in fields.refused.items():
        value = getattr(config, name, refusal.allowed)
        if value != refusal.allowed:
            raise ConfigError(
                f"{name}={value!r} in config.json is not supported for {architecture}: {refusal.reason};"
                f" allowed is {refusal.allowed!r}"
            )


def common_spec(config: Any) -> dict[str, Any]:
    """ModelSpec arguments that every family reads alike."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    act = ACTIVATION_SYNONYMS.get(config.hidden_act, config.hidden_act)
    get_activation(act)
    # A checkpoint that does not say gets the type that loses nothing.
    dtype = str(config.dtype or "float32").removeprefix("torch.")
    if dtype not in DTYPES:
        raise ConfigError(f"dtype={dtype!r} in config.json is not supported; allowed are {', '.join(DTYPES)}")
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_layers": config.num_hidden_layers,
        "num_heads": config.num_attention_heads,
        "num_kv_heads": config.num_key_value_heads,
        "head_dim": head_dim,
        "norm_eps": config.rms_norm_eps,
        "rope": parse_rope(config.rope_parameters, head_dim, config.max_position_embeddings),
        "top_k": config.num_experts_per_tok,
        "activation": act,
        "tie_word_embeddings": config.tie_word_embeddings,
        "max_position_embeddings": config.max_position_embeddings,
        "dtype": dtype,
    }


def sparse_mlp_kinds(config: Any) -> tuple[str, ...]:
    """Qwen's choice of MoE layers, from `mlp_only_layers` and `decoder_sparse_step`."""
    step = config.decoder_sparse_step
    if step < 1:
        raise ConfigError(f"decoder_sparse_step={step} in config.json: must be at least 1")
    dense = set(config.mlp_only_layers)
    return tuple(
        "dense" if layer in dense or (layer + 1) % step else "moe"
        for layer in range(config.num_hidden_layers)
    )
