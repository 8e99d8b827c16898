"""Names of the tensors that all families share, and of experts in each layout met in checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moe_runtime.models.base import WeightRule, WeightRules

if TYPE_CHECKING:
    from moe_runtime.models.spec import ModelSpec

LAYER = "model.layers.{layer}."
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
# Buffers that older checkpoints saved; they follow from the configuration.
ROTARY_BUFFERS = r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"


def decoder_rules(
    spec: ModelSpec,
    hub_moe: str = "mlp",
    hub_expert: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> WeightRules:
    """Rules of a whole model.

    hub_moe: the MoE block's name in a layer, as the hub's files have it; files saved in transformers 5's own layout
    always call it `mlp` and stack the experts. hub_expert: names of an expert's gate, up and down matrices.
    """
    rules = [
        *_outer_rules(spec),
        *_attention_rules(spec),
        *_dense_rules(spec),
        *_shared_expert_rules(spec),
        *_expert_rules(spec, hub_moe, hub_expert),
    ]
    return WeightRules(
        rules=tuple(rules),
        ignored=(ROTARY_BUFFERS,),
        copies=((HEAD, EMBEDDING),) if spec.tie_word_embeddings else (),
    )


def _outer_rules(spec: ModelSpec) -> list[WeightRule]:
    table = (spec.vocab_size, spec.hidden_size)
    return [
        WeightRule(EMBEDDING, "embedding.weight", table),
        # A tied model may have been saved under either name.
        WeightRule(HEAD, "embedding.weight" if spec.tie_word_embeddings else "head.weight", table),
        WeightRule("model.norm.weight", "norm.weight", (spec.hidden_size,)),
    ]


def _attention_rules(spec: ModelSpec) -> list[WeightRule]:
    hidden, layers = spec.hidden_size, tuple(range(spec.num_layers))
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    rules = [
        WeightRule(LAYER + "input_layernorm.weight", "layers.{layer}.input_norm.weight", (hidden,), layers),
        WeightRule(
            LAYER + "post_attention_layernorm.weight", "layers.{layer}.mlp_norm.weight", (hidden,), layers
        ),
        WeightRule(
            LAYER + "self_attn.o_proj.weight", "layers.{layer}.attention.out.weight", (hidden, q), layers
        ),
    ]
    for name, first, rows in (("q", 0, q), ("k", q, kv), ("v", q + kv, kv)):
        source, target = LAYER + f"self_attn.{name}_proj.", "layers.{layer}.attention.qkv."
        rules.append(WeightRule(source + "weight", target + "weight", (rows, hidden), layers, first))
        if spec.qkv_bias:
            rules.append(WeightRule(source + "bias", target + "bias", (rows,), layers, first))
    if spec.attention_out_bias:
        rules.append(
            WeightRule(
                LAYER + "self_attn.o_proj.bias", "layers.{layer}.attention.out.bias", (hidden,), layers
            )
        )
    if spec.qk_norm != "none":
        for name, width in (("q", q), ("k", kv)):
            shape = (spec.head_dim if spec.qk_norm == "head" else width,)
            target = f"layers.{{layer}}.attention.{name}_norm.weight"
            rules.append(WeightRule(LAYER + f"self_attn.{name}_norm.weight", target, shape, layers))
    return rules


def _mlp_rules(
    source: str, target: str, hidden: int, intermediate: int, layers: tuple[int, ...]
) -> list[WeightRule]:
    up = (intermediate, hidden)
    return [
        WeightRule(source + "gate_proj.weight", target + "gate_up.weight", up, layers),
        WeightRule(source + "up_proj.weight", target + "gate_up.weight", up, layers, intermediate),
        WeightRule(source + "down_proj.weight", target + "down.weight", (hidden, intermediate), layers),
    ]


def _dense_rules(spec: ModelSpec) -> list[WeightRule]:
    return _mlp_rules(
        LAYER + "mlp.",
        "layers.{layer}.mlp.",
        spec.hidden_size,
        spec.dense_intermediate_size,
        spec.dense_layers,
    )


def _shared_expert_rules(spec: ModelSpec) -> list[WeightRule]:
    width = spec.shared_expert_intermediate_size
    if not width:
        return []
    source, target = LAYER + "mlp.shared_expert", "layers.{layer}.mlp.shared_expert"
    gate = WeightRule(
        source + "_gate.weight", target + "_gate.weight", (1, spec.hidden_size), spec.moe_layers
    )
    return [*_mlp_rules(source + ".", target + ".", spec.hidden_size, width, spec.moe_layers), gate]


def _expert_rules(spec: ModelSpec, hub_moe: str, hub_expert: tuple[str, str, str]) -> list[WeightRule]:
    num_experts, hidden, inner = spec.num_experts, spec.hidden_size, spec.moe_intermediate_size
    layers, target = spec.moe_layers, "layers.{layer}.mlp."
    rules = [
        WeightRule(LAYER + block + ".gate.weight", target + "router.weight", (num_experts, hidden), layers)
        for block in dict.fromkeys((hub_moe, "mlp"))
    ]
    gate, up, down = (LAYER + hub_moe + ".experts.{expert}." + name + ".weight" for name in hub_expert)
    rules += [
        WeightRule(gate, target + "gate_up", (inner, hidden), layers),
        WeightRule(up, target + "gate_up", (inner, hidden), layers, inner),
        WeightRule(down, target + "down", (hidden, inner), layers),
    ]
    stacked = LAYER + "mlp.experts."
    rules += [
        WeightRule(
            stacked + "gate_up_proj",
            target + "gate_up",
            (num_experts, 2 * inner, hidden),
            layers,
            stacked=True,
            parts=2,
        ),
        WeightRule(
            stacked + "down_proj", target + "down", (num_experts, hidden, inner), layers, stacked=True
        ),
    ]
    return rules
