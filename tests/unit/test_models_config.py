"""config.json to ModelSpec: every field that transformers reads is accounted for, and errors name the field."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from transformers import masking_utils, modeling_rope_utils

from moe_runtime.errors import CheckpointError, ConfigError
from moe_runtime.layers.rope import REFUSED_KINDS, REQUIRED_KEYS
from moe_runtime.models.registry import ADAPTER_MODULES, load_adapter, load_spec
from moe_runtime.models.spec import ModelSpec
from tests.helpers.tiny_models import FAMILIES, tiny_config

# Methods and properties of transformers' configuration base class, not fields of config.json.
MACHINERY = {
    "default_rope_type",
    "default_theta",
    "get_text_config",
    "ignore_keys_at_rope_validation",
    "nested_rope_parameter_keys",
    "per_layer_config",
    "standardize_rope_params",
    "validate_rope",
}
ARCHITECTURES = {family: classes[1] for family, classes in FAMILIES.items()}


def is_config(node: ast.AST) -> bool:
    """`config`, `self.config`, `effective_config` and the like."""
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    return name == "config" or name.endswith("_config")


def fields_read(module: ModuleType) -> set[str]:
    """Names X of `config.X`, `getattr(config, "X")` and `hasattr(config, "X")` in a module's source."""
    found = set()
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.Attribute) and is_config(node.value):
            found.add(node.attr)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            dynamic = node.func.id in ("getattr", "hasattr") and is_config(node.args[0])
            if dynamic and isinstance(node.args[1], ast.Constant):
                found.add(node.args[1].value)
    return found


def own_fields(config_class: type) -> set[str]:
    """Fields that the family's own configuration class declares or uses in its methods."""
    tree = ast.parse(inspect.getsource(config_class))
    declared = {
        n.target.id for n in ast.walk(tree) if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
    }
    used = {
        n.attr
        for n in ast.walk(tree)
        if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name) and n.value.id == "self"
    }
    return declared | used


@pytest.mark.parametrize("family", FAMILIES)
def test_every_field_is_accounted_for(family: str) -> None:
    fields = load_adapter(ARCHITECTURES[family]).fields
    package = f"transformers.models.{family}"
    read = fields_read(importlib.import_module(f"{package}.modeling_{family}"))
    assert {"hidden_size", "num_experts_per_tok", "rms_norm_eps"} <= read, "the scan finds nothing"
    read |= fields_read(modeling_rope_utils) | fields_read(masking_utils)
    read |= own_fields(type(tiny_config(family, 0)))
    known = fields.honoured | fields.refused.keys() | fields.irrelevant.keys() | MACHINERY
    assert read - known == set(), "fields that transformers reads and the adapter does not know"
    assert not fields.honoured & (fields.refused.keys() | fields.irrelevant.keys())


def test_rope_types_are_accounted_for() -> None:
    known = REQUIRED_KEYS.keys() | REFUSED_KINDS.keys()
    assert modeling_rope_utils.ROPE_INIT_FUNCTIONS.keys() <= known


def test_rope_parameters_are_accounted_for() -> None:
    """Keys of `rope_parameters` are read by parse_rope, or belong to refused variants."""
    refused = {"short_factor", "long_factor", "mrope_section"}
    source = inspect.getsource(importlib.import_module("moe_runtime.layers.rope"))
    for key in modeling_rope_utils.RopeParameters.__annotations__.keys() - refused:
        assert f'"{key}"' in source, key


def write(folder: Path, family: str, seed: int, **changes: Any) -> Path:
    values = tiny_config(family, seed).to_dict() | {"architectures": [ARCHITECTURES[family]]}
    (folder / "config.json").write_text(json.dumps(values | changes))
    return folder


@pytest.mark.parametrize(
    ("family", "changes", "named"),
    [
        ("olmoe", {"sliding_window": 8}, "sliding_window=8"),
        ("olmoe", {"head_dim": 6}, "head_dim=6"),
        ("mixtral", {"is_causal": False}, "is_causal=False"),
        ("mixtral", {"attention_chunk_size": 8}, "attention_chunk_size=8"),
        ("mixtral", {"sliding_window": 0}, "sliding_window=0"),
        ("mixtral", {"hidden_act": "mish"}, "hidden_act='mish'.*silu"),
        ("mixtral", {"num_experts_per_tok": 99}, "num_experts_per_tok=99"),
        ("mixtral", {"num_attention_heads": 5, "num_key_value_heads": 2}, "num_key_value_heads"),
        ("mixtral", {"dtype": "float64"}, "dtype='float64'.*bfloat16"),
        ("mixtral", {"hidden_size": "wide"}, "hidden_size"),
        ("mixtral", {"per_layer_config": {"0": {"intermediate_size": 4}}}, "per_layer_config"),
        ("mixtral", {"quantization_config": {"quant_method": "gptq"}}, "quant_method='gptq'.*fp8"),
        ("qwen3_moe", {"layer_types": ["full_attention"]}, "layer_types"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step=0"),
        ("qwen3_moe", {"mlp_only_layers": list(range(9))}, "no layer of this model has experts"),
        ("qwen3_moe", {"num_local_experts": 0}, "num_experts"),
        ("qwen3_moe", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ("qwen3_moe", {"partial_rotary_factor": 0.25}, "partial_rotary_factor=0.25"),
        (
            "qwen2_moe",
            {"layer_types": ["sliding_attention"] * 2, "num_hidden_layers": 2},
            "use_sliding_window",
        ),
        ("qwen2_moe", {"layer_types": ["linear_attention"] * 2, "num_hidden_layers": 2}, "layer_types"),
        ("qwen2_moe", {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size=0"),
        ("qwen2_moe", {"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM.*Qwen3MoeForCausalLM"),
        ("qwen2_moe", {"architectures": None}, "supported are MixtralForCausalLM"),
    ],
)
def test_refused_by_name(family: str, changes: dict[str, Any], named: str, tmp_path: Path, seed: int) -> None:
    with pytest.raises(ConfigError, match=named):
        load_spec(write(tmp_path, family, seed, **changes))


@pytest.mark.parametrize("family", FAMILIES)
def test_unknown_fields_are_fine(family: str, tmp_path: Path, seed: int) -> None:
    spec, adapter = load_spec(write(tmp_path, family, seed, something_new=3, auto_map={"AutoModel": "x.Y"}))
    assert ARCHITECTURES[family] in adapter.architectures
    assert len(spec.attention_specs()) == spec.num_layers
    assert spec.num_moe_layers == len(spec.moe_layers) == spec.num_layers


@pytest.mark.parametrize("family", FAMILIES)
def test_other_ranks_get_the_same_shape(family: str, tmp_path: Path, seed: int) -> None:
    yarn = {
        "rope_type": "yarn",
        "factor": 4 / 3,
        "rope_theta": 12345.678,
        "original_max_position_embeddings": 128,
    }
    for changes in ({}, {"rope_parameters": yarn, "rms_norm_eps": 1e-6 / 3}):
        spec, _ = load_spec(write(tmp_path, family, seed, **changes))
        assert ModelSpec.from_json(spec.to_json()) == spec


def test_fields_as_hub_files_have_them(tmp_path: Path) -> None:
    """Fields of Qwen3-30B-A3B's file, with options of files that are older than transformers 5."""
    values = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "head_dim": 128,
        "hidden_size": 2048,
        "max_position_embeddings": 40960,
        "max_window_layers": 48,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 96,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
        "rope_theta": 1000000.0,
        "sliding_window": 4096,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
    }
    (tmp_path / "config.json").write_text(json.dumps(values))
    spec, _ = load_spec(tmp_path)
    assert (spec.num_experts, spec.top_k, spec.norm_topk_prob, spec.dtype) == (96, 8, True, "bfloat16")
    assert (spec.rope.kind, spec.rope.theta, spec.rope.factor) == ("yarn", 1e6, 4.0)
    assert spec.head_dim == 128
    assert set(spec.sliding_windows) == {None}
    assert set(spec.mlp_kinds) == {"moe"}


def test_registry_and_adapters_agree() -> None:
    for architecture in ADAPTER_MODULES:
        assert architecture in load_adapter(architecture).architectures


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no model folder at .*nowhere"):
        load_spec(tmp_path / "nowhere")


def test_missing_config(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        load_spec(tmp_path)


@pytest.mark.parametrize("text", ["{broken", "[]", "\xff"])
def test_broken_config(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load_spec(tmp_path)


HUB_CONFIGS = Path(__file__).parents[1] / "data" / "hub_configs"
# layers, hidden, heads, KV heads, head size, experts, top-k, expert size, renormalised, shared, dense, vocabulary, context
SIZES = {
    "mixtral-8x7b-instruct-v0.1": (32, 4096, 32, 8, 128, 8, 2, 14336, True, 0, 0, 32000, 32768),
    "olmoe-1b-7b-0924": (16, 2048, 16, 16, 128, 64, 8, 1024, False, 0, 0, 50304, 4096),
    "qwen1.5-moe-a2.7b": (24, 2048, 16, 16, 128, 60, 4, 1408, False, 5632, 5632, 151936, 8192),
    "qwen3-30b-a3b": (48, 2048, 32, 4, 128, 128, 8, 768, True, 0, 6144, 151936, 40960),
}
KINDS = {
    "mixtral-8x7b-instruct-v0.1": ("none", False, False, 1e6, 1e-5),
    "olmoe-1b-7b-0924": ("projection", False, True, 1e4, 1e-5),
    "qwen1.5-moe-a2.7b": ("none", True, True, 1e6, 1e-6),
    "qwen3-30b-a3b": ("head", False, True, 1e6, 1e-6),
}


@pytest.mark.parametrize("name", sorted(SIZES))
def test_models_of_the_hub(name: str, tmp_path: Path) -> None:
    """The settings of well-known checkpoints, as their config.json has them."""
    (tmp_path / "config.json").write_text((HUB_CONFIGS / f"{name}.json").read_text())
    spec, adapter = load_spec(tmp_path)
    assert spec.architecture in adapter.architectures
    sizes = (
        *(
            spec.num_layers,
            spec.hidden_size,
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            spec.num_experts,
        ),
        *(spec.top_k, spec.moe_intermediate_size, spec.norm_topk_prob, spec.shared_expert_intermediate_size),
        *(spec.dense_intermediate_size, spec.vocab_size, spec.max_position_embeddings),
    )
    assert sizes == SIZES[name]
    kinds = (
        *(spec.qk_norm, spec.qkv_bias, spec.router_weights_in_model_dtype, spec.rope.theta, spec.norm_eps),
    )
    assert kinds == KINDS[name]
    assert (spec.dtype, spec.activation, spec.clip_qkv, spec.rope.kind) == (
        "bfloat16",
        "silu",
        None,
        "default",
    )
    assert not spec.tie_word_embeddings
    assert not spec.attention_out_bias
    assert set(spec.sliding_windows) == {None}
    assert set(spec.mlp_kinds) == {"moe"}
