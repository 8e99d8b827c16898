"""Teacher-forced log-probabilities of the decoder against transformers, for every family and configuration branch."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_runtime.models.registry import load_spec
from moe_runtime.weights.loader import load_weights
from tests.helpers.parity import Reference, check_rows
from tests.helpers.tiny_models import (
    FAMILIES,
    FullAttention,
    LoopExperts,
    decoder_logprobs,
    make_tiny,
    reference_logprobs,
    whole_batch,
)

YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "rope_theta": 1000.0, "factor": 3.0}

CASES: list[tuple[str, dict[str, Any]]] = [
    ("mixtral", {"sliding_window": 5}),
    ("mixtral", {"tie_word_embeddings": True}),
    ("mixtral", {"rope_parameters": YARN, "head_dim": 16}),
    ("mixtral", {"rope_parameters": LINEAR}),
    ("mixtral", {"head_dim": None, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 40}),
    ("mixtral", {"hidden_act": "gelu_pytorch_tanh", "num_experts_per_tok": 1}),
    ("qwen3_moe", {"attention_bias": True, "norm_topk_prob": True}),
    ("qwen3_moe", {"attention_bias": False, "norm_topk_prob": False, "tie_word_embeddings": True}),
    ("qwen3_moe", {"mlp_only_layers": [1], "num_hidden_layers": 3}),
    ("qwen3_moe", {"decoder_sparse_step": 2, "num_hidden_layers": 4}),
    ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 4}),
    ("qwen3_moe", {"use_sliding_window": False, "sliding_window": 4}),
    ("qwen3_moe", {"rope_parameters": LLAMA3 | {"partial_rotary_factor": 1.0}, "head_dim": 16}),
    ("qwen3_moe", {"rope_parameters": YARN | {"truncate": False, "beta_fast": 8}, "head_dim": 16}),
    ("qwen2_moe", {"norm_topk_prob": True, "qkv_bias": False}),
    ("qwen2_moe", {"norm_topk_prob": False, "tie_word_embeddings": True}),
    ("qwen2_moe", {"mlp_only_layers": [0], "decoder_sparse_step": 2, "num_hidden_layers": 4}),
    (
        "qwen2_moe",
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 3, "num_hidden_layers": 4},
    ),
    (
        "qwen2_moe",
        {
            "use_sliding_window": True,
            "sliding_window": 3,
            "num_hidden_layers": 2,
            "layer_types": ["full_attention", "sliding_attention"],
        },
    ),
    ("qwen2_moe", {"rope_parameters": YARN | {"mscale": 0.8, "mscale_all_dim": 0.5}, "hidden_act": "gelu"}),
    ("olmoe", {"clip_qkv": 0.7}),
    ("olmoe", {"attention_bias": True, "norm_topk_prob": True}),
    ("olmoe", {"tie_word_embeddings": True, "hidden_act": "relu"}),
    ("olmoe", {"num_key_value_heads": None, "num_attention_heads": 2, "rope_parameters": LLAMA3}),
]


def compare(family: str, folder: Path, seed: int, fused: bool = False, **overrides: Any) -> None:
    model = make_tiny(family, folder, seed, fused=fused, **overrides)
    spec, adapter = load_spec(folder)
    experts = [list(range(spec.num_experts))] * spec.num_moe_layers
    decoder = load_weights(folder, spec, adapter, experts, torch.float32, "cpu")
    draw = random.Random(seed)
    texts = [[draw.randrange(spec.vocab_size) for _ in range(n)] for n in (23, 1, 9)]
    check_rows(Reference(model), texts, decoder_logprobs(decoder, texts), 1e-4)


@pytest.mark.parametrize("fused", [False, True], ids=["hub", "fused"])
@pytest.mark.parametrize("family", FAMILIES)
def test_family(family: str, fused: bool, tmp_path: Path, seed: int) -> None:
    compare(family, tmp_path, seed, fused)


@pytest.mark.parametrize(("family", "overrides"), CASES, ids=[f"{f}-{'-'.join(o)}"[:60] for f, o in CASES])
def test_configuration(family: str, overrides: dict[str, Any], tmp_path: Path, seed: int) -> None:
    compare(family, tmp_path, seed, **overrides)


@pytest.mark.parametrize("family", FAMILIES)
def test_hub_configuration(family: str, tmp_path: Path, seed: int) -> None:
    """`rope_theta` and `rope_scaling` at the top level, as files on the hub have them."""
    theta, scaling = 700.0, {"type": "linear", "factor": 2.5}
    model = make_tiny(
        family, tmp_path, seed, rope_parameters={"rope_type": "linear", "rope_theta": theta, "factor": 2.5}
    )
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    del values["rope_parameters"]
    values["torch_dtype"] = values.pop("dtype")
    path.write_text(json.dumps(values | {"rope_theta": theta, "rope_scaling": scaling}))
    spec, adapter = load_spec(tmp_path)
    assert (spec.rope.kind, spec.rope.theta, spec.dtype) == ("linear", theta, "float32")
    experts = [list(range(spec.num_experts))] * spec.num_moe_layers
    decoder = load_weights(tmp_path, spec, adapter, experts, torch.float32, "cpu")
    draw = random.Random(seed)
    text = [draw.randrange(spec.vocab_size) for _ in range(17)]
    check_rows(Reference(model), [text], decoder_logprobs(decoder, [text]), 1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16(family: str, tmp_path: Path, seed: int) -> None:
    """Same checkpoint in bfloat16: nearly always the same as transformers in bfloat16, up to rounding."""
    model = make_tiny(family, tmp_path, seed, dtype=torch.bfloat16)
    spec, adapter = load_spec(tmp_path)
    assert spec.dtype == "bfloat16"
    experts = [list(range(spec.num_experts))] * spec.num_moe_layers
    decoder = load_weights(tmp_path, spec, adapter, experts, torch.bfloat16, "cpu")
    draw = random.Random(seed)
    text = [draw.randrange(spec.vocab_size) for _ in range(40)]
    difference = (decoder_logprobs(decoder, [text]) - reference_logprobs(model, text)).abs()
    # A routing choice that rounding flips moves a row a lot, so the bound is on the median row.
    assert difference.amax(-1).median() < 0.2


def test_idle_step_calls_every_moe_layer(tmp_path: Path, seed: int) -> None:
    make_tiny("qwen2_moe", tmp_path, seed, decoder_sparse_step=2, num_hidden_layers=4)
    spec, adapter = load_spec(tmp_path)
    local = [[-1]] * spec.num_moe_layers
    decoder = load_weights(tmp_path, spec, adapter, local, torch.float32, "cpu")
    attention, moe = FullAttention(spec.attention_specs()), LoopExperts.for_local(local)
    batch = whole_batch([])
    logits = decoder([(batch, attention.plan(batch))], attention, moe)
    assert logits.shape == (0, spec.vocab_size)
    assert moe.calls == [(0, 0, 0), (1, 0, 0)]
    assert spec.moe_layers == (1, 3)


def test_logits_of_chosen_rows_only(tmp_path: Path, seed: int) -> None:
    make_tiny("mixtral", tmp_path, seed)
    spec, adapter = load_spec(tmp_path)
    experts = [list(range(spec.num_experts))] * spec.num_moe_layers
    decoder = load_weights(tmp_path, spec, adapter, experts, torch.float32, "cpu")
    attention, moe = FullAttention(spec.attention_specs()), LoopExperts.for_local(experts)
    texts = [[3, 1, 4, 1, 5], [9, 2, 6]]
    every = decoder([(whole_batch(texts), [5, 3])], attention, moe)
    some = decoder([(whole_batch(texts, [7, 4]), [5, 3])], attention, moe)
    assert some.dtype == torch.float32
    torch.testing.assert_close(some, every[[7, 4]], atol=1e-5, rtol=1e-5)
