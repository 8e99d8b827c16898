"""Qwen3-MoE (Alibaba): RMS norm of each query and key head, dense layers possible, no shared expert."""

from __future__ import annotations

from typing import Any

from moe_runtime.models.base import Refusal, WeightRules, common_spec, extend_fields, sparse_mlp_kinds
from moe_runtime.models.spec import ModelSpec
from moe_runtime.models.weight_rules import decoder_rules


class Qwen3MoeAdapter:
    """`sliding_window` counts only with `use_sliding_window`, and then for all layers."""

    architectures = ("Qwen3MoeForCausalLM",)
    fields = extend_fields(
        honoured={
            "attention_bias",
            "decoder_sparse_step",
            "mlp_only_layers",
            "moe_intermediate_size",
            "sliding_window",
            "use_sliding_window",
        },
        refused={"layer_types": Refusal(None, "this family has one kind of attention for all layers")},
    )

    def config(self, values: dict[str, Any]) -> Any:
        """transformers\' configuration object of these values."""
        from transformers import Qwen3MoeConfig

        return Qwen3MoeConfig.from_dict(values)

    def spec(self, config: Any) -> ModelSpec:
        """What the generic decoder has to be for this configuration."""
        return ModelSpec(
            architecture=self.architectures[0],
            **common_spec(config),
            qk_norm="head",
            qkv_bias=config.attention_bias,
            attention_out_bias=config.attention_bias,
            # transformers' configuration has already set it to None without `use_sliding_window`.
            sliding_windows=(config.sliding_window,) * config.num_hidden_layers,
            mlp_kinds=sparse_mlp_kinds(config),
            dense_intermediate_size=config.intermediate_size,
            num_experts=config.num_experts,
            moe_intermediate_size=config.moe_intermediate_size,
            norm_topk_prob=config.norm_topk_prob,
            router_weights_in_model_dtype=True,
        )

    def rules(self, spec: ModelSpec) -> WeightRules:
        """Names and shapes of the checkpoint\'s tensors."""
        return decoder_rules(spec)


ADAPTER = Qwen3MoeAdapter()
