"""Qwen1.5/Qwen2-MoE (Alibaba): a shared expert behind a sigmoid gate, biases on q, k and v, dense layers possible."""

from __future__ import annotations

from typing import Any

from moe_runtime.errors import ConfigError
from moe_runtime.models.base import WeightRules, common_spec, extend_fields, sparse_mlp_kinds
from moe_runtime.models.spec import ModelSpec
from moe_runtime.models.weight_rules import decoder_rules


class Qwen2MoeAdapter:
    """Which layers have a sliding window is said by `layer_types`, derived from `max_window_layers` if absent."""

    architectures = ("Qwen2MoeForCausalLM",)
    fields = extend_fields(
        honoured={
            "decoder_sparse_step",
            "layer_types",
            "max_window_layers",
            "mlp_only_layers",
            "moe_intermediate_size",
            "qkv_bias",
            "shared_expert_intermediate_size",
            "sliding_window",
            "use_sliding_window",
        },
        refused={},
    )

    def config(self, values: dict[str, Any]) -> Any:
        """transformers\' configuration object of these values."""
        from transformers import Qwen2MoeConfig

        return Qwen2MoeConfig.from_dict(values)

    def spec(self, config: Any) -> ModelSpec:
        """What the generic decoder has to be for this configuration."""
        if config.shared_expert_intermediate_size < 1:
            raise ConfigError(
                f"shared_expert_intermediate_size={config.shared_expert_intermediate_size} in config.json:"
                " must be at least 1"
            )
        return ModelSpec(
            architecture=self.architectures[0],
            **common_spec(config),
            qkv_bias=config.qkv_bias,
            sliding_windows=_sliding_windows(config),
            mlp_kinds=sparse_mlp_kinds(config),
            dense_intermediate_size=config.intermediate_size,
            num_experts=config.num_experts,
            moe_intermediate_size=config.moe_intermediate_size,
            norm_topk_prob=config.norm_topk_prob,
            router_weights_in_model_dtype=True,
            shared_expert_intermediate_size=config.shared_expert_intermediate_size,
        )

    def rules(self, spec: ModelSpec) -> WeightRules:
        """Names and shapes of the checkpoint\'s tensors."""
        return decoder_rules(spec)


def _sliding_windows(config: Any) -> tuple[int | None, ...]:
    kinds = config.layer_types
    unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if unknown or len(kinds) != config.num_hidden_layers:
        raise ConfigError(
            f"layer_types={kinds!r} in config.json: must name full_attention or sliding_attention for each of"
            f" {config.num_hidden_layers} layers"
        )
    if "sliding_attention" in kinds and not config.sliding_window:
        raise ConfigError(
            f"layer_types in config.json names sliding_attention, but use_sliding_window={config.use_sliding_window}"
            " and sliding_window give no window"
        )
    return tuple(config.sliding_window if kind == "sliding_attention" else None for kind in kinds)


ADAPTER = Qwen2MoeAdapter()
