"""Mixtral (Mistral AI): every layer sparse, routing weights renormalised, no shared expert."""

from __future__ import annotations

from typing import Any

from moe_runtime.models.base import Refusal, WeightRules, common_spec, extend_fields
from moe_runtime.models.spec import ModelSpec
from moe_runtime.models.weight_rules import decoder_rules


class MixtralAdapter:
    """`intermediate_size` is an expert's; `sliding_window` holds for all layers."""

    architectures = ("MixtralForCausalLM",)
    fields = extend_fields(
        honoured={"sliding_window"},
        refused={"layer_types": Refusal(None, "this family has one kind of attention for all layers")},
        irrelevant={"router_jitter_noise": "training only"},
    )

    def config(self, values: dict[str, Any]) -> Any:
        """transformers\' configuration object of these values."""
        from transformers import MixtralConfig

        return MixtralConfig.from_dict(values)

    def spec(self, config: Any) -> ModelSpec:
        """What the generic decoder has to be for this configuration."""
        num_layers = config.num_hidden_layers
        return ModelSpec(
            architecture=self.architectures[0],
            **common_spec(config),
            sliding_windows=(config.sliding_window,) * num_layers,
            mlp_kinds=("moe",) * num_layers,
            num_experts=config.num_local_experts,
            moe_intermediate_size=config.intermediate_size,
            norm_topk_prob=True,
        )

    def rules(self, spec: ModelSpec) -> WeightRules:
        """Names and shapes of the checkpoint\'s tensors."""
        return decoder_rules(spec, hub_moe="block_sparse_moe", hub_expert=("w1", "w3", "w2"))


ADAPTER = MixtralAdapter()
