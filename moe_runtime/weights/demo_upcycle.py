"""Turns a dense Llama-architecture model into a Mixtral-architecture mixture of experts.

Every expert is the dense FFN plus noise of its own, so a token computed by the wrong expert is noticed. Router rows are
the directions of clusters of the dense model's own hidden states, so the load is skewed and depends on the text.

Legend: T sample tokens, D hidden size, F intermediate size, E experts, L layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from moe_runtime.weights.writing import write_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from moe_runtime.weights.demo_source import DenseModel

SAMPLING = {"do_sample": True, "temperature": 0.2, "top_p": 0.9}
"""generation_config.json's defaults, as SmolLM2-Instruct's model card advises: at temperature 1 so small a model rambles."""


@dataclass(frozen=True)
class UpcycleConfig:
    """How the mixture is made."""

    num_experts: int = 8
    top_k: int = 2
    noise: float = 0.1
    """Standard deviation of an expert's noise, as a share of each matrix's own."""
    top1_weight: float = 0.7
    """Mean share of the first of a token's experts, after renormalisation, that the routers are scaled to."""
    seed: int = 2024
    shard_bytes: int = 500 * 10**6


@torch.inference_mode()
def moe_input_states(dense: DenseModel, samples: dict[str, str]) -> list[dict[str, torch.Tensor]]:
    """What the FFN of each layer is given when the dense model reads each sample: [L]{kind: (T, D) float32}.

    The first token of a text is left out: models use it as a place to attend to nothing, and its states are unlike all others.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    config = dict(dense.config)
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": config.pop("rope_theta")}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**config))
    weights = dense.weights | {"lm_head.weight": dense.weights["model.embed_tokens.weight"]}
    model.load_state_dict(weights, strict=True, assign=True)
    _materialise_buffers(model)
    states: list[dict[str, torch.Tensor]] = [{} for _ in model.model.layers]
    kind = ""

    def hook(layer: int) -> Callable[[Any, Any, torch.Tensor], None]:
        def keep(module: Any, args: Any, output: torch.Tensor) -> None:
            states[layer][kind] = output[0, 1:].float()

        return keep

    for i, layer in enumerate(model.model.layers):
        layer.post_attention_layernorm.register_forward_hook(hook(i))
    for kind, text in samples.items():  # noqa: B007 - the hooks read it
        model.model(torch.tensor([dense.tokenizer.encode(text).ids]), use_cache=False)
    return states


def _materialise_buffers(model: Any) -> None:
    """Rotary frequencies are no part of a checkpoint, so building on the meta device left them empty."""
    rotary = type(model.model.rotary_emb)(config=model.config)
    model.model.rotary_emb = rotary


def router_rows(states: dict[str, torch.Tensor], config: UpcycleConfig, layer: int) -> torch.Tensor:
    """Router weight (E, D) float32 whose top-1 choice is the nearest cluster of the states (T, D) of all texts.

    Mixtral's router has no bias, so the states' mean direction is taken out of the data: the rows are orthogonal to it and the
    logits are centred without one.
    """
    states_TD = torch.cat(list(states.values()))
    mean = torch.nn.functional.normalize(states_TD.mean(0), dim=0)
    centred = states_TD - (states_TD @ mean)[:, None] * mean
    unit = torch.nn.functional.normalize(centred, dim=1)
    generator = torch.Generator().manual_seed(config.seed * 1000 + layer)
    centres = spherical_kmeans(unit, config.num_experts, generator)
    return centres * _decisive_scale(states_TD @ centres.T, config.top1_weight)


def spherical_kmeans(unit_TD: torch.Tensor, num_clusters: int, generator: torch.Generator) -> torch.Tensor:
    """Unit cluster directions (num_clusters, D) of unit rows, by cosine; k-means++ seeding, at most 50 rounds."""
    centres = unit_TD[torch.randint(len(unit_TD), (1,), generator=generator)]
    while len(centres) < num_clusters:
        distance = (1 - (unit_TD @ centres.T).amax(1)).clamp(min=0)
        chosen = torch.multinomial(distance, 1, generator=generator)
        centres = torch.cat([centres, unit_TD[chosen]])
    assignment = torch.full((len(unit_TD),), -1)
    for _ in range(50):
        new = (unit_TD @ centres.T).argmax(1)
        if torch.equal(new, assignment):
            break
        assignment = new
        sums = torch.zeros_like(centres).index_add_(0, assignment, unit_TD)
        # A cluster that lost all its members keeps its direction.
        kept = torch.where(sums.norm(dim=1, keepdim=True) > 0, sums, centres)
        centres = torch.nn.functional.normalize(kept, dim=1)
    return centres


def _decisive_scale(logits_TE: torch.Tensor, top1_weight: float) -> float:
    """The factor on the logits that makes the renormalised weight of the first of two experts `top1_weight` on average."""
    top = logits_TE.topk(2, dim=1).values
    gap = top[:, 0] - top[:, 1]
    low, high = 0.0, 1e6
    for _ in range(100):  # the mean grows with the factor, so halving finds it
        middle = (low + high) / 2
        low, high = (middle, high) if torch.sigmoid(gap * middle).mean() < top1_weight else (low, middle)
    return high


def expert_weight(
    weight: torch.Tensor, config: UpcycleConfig, layer: int, expert: int, name: str
) -> torch.Tensor:
    """A copy of a dense matrix with this expert's noise, bfloat16; the same however many others were made before."""
    key = ((config.seed * 1000 + layer) * 1000 + expert) * 10 + ("w1", "w2", "w3").index(name)
    generator = torch.Generator().manual_seed(key)
    noise = torch.randn(weight.shape, generator=generator)
    return noise.mul_(config.noise * float(weight.std())).add_(weight).to(torch.bfloat16)


def mixtral_config(dense: DenseModel, config: UpcycleConfig) -> dict[str, Any]:
    """config.json as published Mixtral checkpoints have it."""
    return {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        **dense.config,
        "attention_dropout": 0.0,
        "bos_token_id": dense.bos_token_id,
        "eos_token_id": dense.eos_token_id,
        "pad_token_id": dense.pad_token_id,
        "initializer_range": 0.02,
        "num_experts_per_tok": config.top_k,
        "num_local_experts": config.num_experts,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
        "sliding_window": None,
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }


def mixtral_tensors(
    dense: DenseModel, routers: list[torch.Tensor], config: UpcycleConfig
) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and bfloat16 tensor, one after the other, under the names of published Mixtral checkpoints."""
    names = {"mlp.gate_proj": "w1", "mlp.down_proj": "w2", "mlp.up_proj": "w3"}
    for name, weight in dense.weights.items():
        prefix, _, rest = name.partition(".mlp.")
        if not rest:
            yield name, weight.to(torch.bfloat16)
            continue
        layer = int(prefix.rsplit(".", 1)[1])
        short = names[f"mlp.{rest.removesuffix('.weight')}"]
        moe = f"{prefix}.block_sparse_moe"
        for expert in range(config.num_experts):
            yield (
                f"{moe}.experts.{expert}.{short}.weight",
                expert_weight(weight, config, layer, expert, short),
            )
    for layer, router in enumerate(routers):
        yield f"model.layers.{layer}.block_sparse_moe.gate.weight", router.to(torch.bfloat16)


def num_parameters(dense: DenseModel, config: UpcycleConfig) -> int:
    """Parameters of the mixture."""
    ffn = sum(w.numel() for name, w in dense.weights.items() if ".mlp." in name)
    routers: int = dense.config["num_hidden_layers"] * config.num_experts * dense.config["hidden_size"]
    return sum(w.numel() for w in dense.weights.values()) + (config.num_experts - 1) * ffn + routers


def write_tokenizer(folder: Path, dense: DenseModel) -> None:
    """tokenizer.json, tokenizer_config.json with the chat template, generation_config.json."""
    dense.tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": dense.config["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        "add_prefix_space": False,
        **dense.special_tokens,
        "chat_template": dense.chat_template,
    }
    generation = {
        "bos_token_id": dense.bos_token_id,
        "eos_token_id": dense.eos_token_id,
        "pad_token_id": dense.pad_token_id,
        **SAMPLING,
    }
    write_json(folder / "tokenizer_config.json", tokenizer_config)
    write_json(folder / "generation_config.json", generation)


def expert_load(
    states: dict[str, torch.Tensor], router_ED: torch.Tensor, top_k: int
) -> dict[str, list[float]]:
    """Share of the (token, expert) pairs that each expert gets, by kind of text and, under `all`, together."""
    weight = router_ED.to(torch.bfloat16).float()
    counts = {
        kind: torch.bincount((x @ weight.T).topk(top_k, dim=1).indices.flatten(), minlength=len(weight))
        for kind, x in states.items()
    }
    counts["all"] = torch.stack(list(counts.values())).sum(0)
    return {kind: [round(v, 4) for v in (c / c.sum()).tolist()] for kind, c in counts.items()}
