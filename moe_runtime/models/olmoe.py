"""OLMoE (Allen Institute for AI): RMS norm over whole query and key projections, optional clipping, all layers sparse."""

from __future__ import annotations

from typing import Any

from moe_runtime.errors import ConfigError
from moe_runtime.models.base import Refusal, WeightRules, common_spec, extend_fields
from moe_runtime.models.spec import ModelSpec
from moe_runtime.models.weight_rules import decoder_rules


class OlmoeAdapter:
    """`intermediate_size` is an expert's."""

    architectures = ("OlmoeForCausalLM",)
    fields = extend_fields(
        honoured={"attention_bias", "clip_qkv"},
        refused={
            "layer_types": Refusal(None, "this family has one kind of attention for all layers"),
            "sliding_window": Refusal(
                None, "transformers applies it with some attention kernels and not with others"
            ),
        },
    )

    def config(self, values: dict[str, Any]) -> Any:
        """transformers\' configuration object of these values."""
        from transformers import OlmoeConfig

        return OlmoeConfig.from_dict(values)

    def spec(self, config: Any) -> ModelSpec:
        """What the generic decoder has to be for this configuration."""
        common, num_layers = common_spec(config), config.num_hidden_layers
        derived = config.hidden_size // config.num_attention_heads
        if common["head_dim"] != derived or config.hidden_size % config.num_attention_heads:
            raise ConfigError(
                f"head_dim={common['head_dim']} in config.json is not supported for {self.architectures[0]}: its query"
                f" norm is as wide as hidden_size={config.hidden_size}, so {config.num_attention_heads} heads must"
                " divide that evenly"
            )
        return ModelSpec(
            architecture=self.architectures[0],
            **common,
            qk_norm="projection",
            qkv_bias=config.attention_bias,
            attention_out_bias=config.attention_bias,
            clip_qkv=config.clip_qkv,
            sliding_windows=(None,) * num_layers,
            mlp_kinds=("moe",) * num_layers,
            num_experts=config.num_experts,
            moe_intermediate_size=config.intermediate_size,
            norm_topk_prob=config.norm_topk_prob,
            router_weights_in_model_dtype=True,
        )

    def rules(self, spec: ModelSpec) -> WeightRules:
        """Names and shapes of the checkpoint\'s tensors."""
        return decoder_rules(spec)


ADAPTER = OlmoeAdapter()
