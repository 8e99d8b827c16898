"""`quantization_config` of config.json: every field is honoured or refused by name."""

from __future__ import annotations

import copy
import inspect
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import CompressedTensorsConfig, FineGrainedFP8Config

from moe_runtime.errors import ConfigError
from moe_runtime.models.quantized_fields import (
    ACTIVATION_FIELDS,
    COMPRESSED_FIELDS,
    FP8_FIELDS,
    GROUP_FIELDS,
    WEIGHT_FIELDS,
)
from moe_runtime.models.registry import load_spec
from moe_runtime.models.spec import ModelSpec
from moe_runtime.quantization import FP8_BLOCK, FP8_CHANNEL, FP8_TENSOR, INT8_CHANNEL, QuantScheme
from tests.helpers.fp8_checkpoints import FORMATS
from tests.helpers.int4_checkpoints import INT4_FORMATS
from tests.helpers.int8_checkpoints import INT8_FORMATS
from tests.helpers.tiny_models import tiny_config


def read(folder: Path, quantization: Any, key: str = "quantization_config") -> ModelSpec:
    values = tiny_config("qwen3_moe", 3).to_dict() | {"architectures": ["Qwen3MoeForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(values | {key: quantization}))
    return load_spec(folder)[0]


def changed(name: str, path: str, value: Any) -> dict[str, Any]:
    """A format's configuration with one field changed; `path` has dots."""
    config = copy.deepcopy(CONFIGS[name])
    *parents, last = path.split(".")
    place = config
    for parent in parents:
        place = place[parent]
    place[last] = value
    return config


CONFIGS = {name: form.config for name, form in (FORMATS | INT8_FORMATS | INT4_FORMATS).items()}
SCHEMES = {
    "deepseek": FP8_BLOCK,
    "autofp8": FP8_TENSOR,
    "ct_channel": FP8_CHANNEL,
    "ct_tensor": FP8_TENSOR,
    "ct_block": FP8_BLOCK,
    **dict.fromkeys(INT8_FORMATS, INT8_CHANNEL),
    **{name: form.scheme for name, form in INT4_FORMATS.items()},
}
GROUP = "config_groups.group_0"


@pytest.mark.parametrize(("name", "scheme"), SCHEMES.items())
def test_schemes(name: str, scheme: QuantScheme, tmp_path: Path) -> None:
    spec = read(tmp_path, CONFIGS[name])
    assert spec.stored is not None
    assert (spec.stored.scheme, spec.expert_scheme, spec.stored.experts) == (scheme, scheme, True)
    assert spec.stored.static_activations == (name in ("autofp8", "w8a8_static"))
    assert spec.stored.weights_only == (name in ("ct_block", "w8a16_naive", "w8a16_packed", *INT4_FORMATS))
    assert spec.stored.packed == (name == "w8a16_packed" or name in INT4_FORMATS)
    assert ModelSpec.from_json(spec.to_json()) == spec, "other ranks get the same"


def test_unquantised(tmp_path: Path) -> None:
    for nothing in (None, {}):
        spec = read(tmp_path, nothing)
        assert spec.stored is None
        assert spec.expert_scheme is None


def test_an_older_name_of_the_field(tmp_path: Path) -> None:
    config = FORMATS["ct_channel"].config | {"quant_method": "compressed_tensors"}
    assert read(tmp_path, config, "compression_config").expert_scheme == FP8_CHANNEL


def test_every_field_that_transformers_reads_is_known() -> None:
    for fields, kind in ((FP8_FIELDS, FineGrainedFP8Config), (COMPRESSED_FIELDS, CompressedTensorsConfig)):
        read_there = set(inspect.signature(kind.__init__).parameters) - {"self", "kwargs"}
        assert len(read_there) > 5, "the scan finds nothing"
        assert read_there <= fields.honoured | fields.refused.keys() | fields.irrelevant.keys()
    for fields in (FP8_FIELDS, COMPRESSED_FIELDS, GROUP_FIELDS, WEIGHT_FIELDS, ACTIVATION_FIELDS):
        assert not fields.honoured & (fields.refused.keys() | fields.irrelevant.keys())
        assert not fields.refused.keys() & fields.irrelevant.keys()


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", "mxfp4", "modelopt", "fbgemm_fp8", None])
def test_unsupported_methods(method: str | None, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=rf"quant_method={method!r} is not supported; supported are fp8, compressed"
    ) as error:
        read(tmp_path, {"quant_method": method, "bits": 4, "group_size": 128})
    assert str(tmp_path) in str(error.value)
    assert "\n" not in str(error.value)


def test_modelopt_files_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "hf_quant_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"hf_quant_config\.json: .*ModelOpt"):
        read(tmp_path, None)


@pytest.mark.parametrize(
    ("name", "path", "value", "message"),
    [
        ("deepseek", "weight_block_size", [64, 128], r"weight_block_size=\[64, 128\]: allowed are \[128, 128\]"),
        ("deepseek", "activation_scheme", "none", r"activation_scheme='none': allowed are dynamic, static"),
        ("deepseek", "fmt", "e5m2", r"fmt='e5m2' .*allowed is 'e4m3'"),
        ("deepseek", "scale_fmt", "half", r"scale_fmt='half': allowed are float, ue8m0"),
        ("deepseek", "expert_dtype", "fp4", r"expert_dtype='fp4'"),
        ("deepseek", "modules_to_convert", ["embed_tokens"], r"modules_to_convert=\['embed_tokens'\]"),
        ("deepseek", "rotation", 3, r"quantization_config\.rotation=3 is not known; known are activation_scheme"),
        ("deepseek", "modules_to_not_convert", ["model.layers.0.mlp.experts.1"], r"leaves some experts .*experts\.1\."),
        ("deepseek", "modules_to_not_convert", ["("], r"modules_to_not_convert: .*not a regular expression"),
        ("autofp8", "ignored_layers", ["up_proj"], r"leaves some experts .*up_proj"),
        ("ct_channel", "format", "pack-quantized", r"^.*json: quantization_config\.format='pack-quantized': allowed with weights\.type='float' are float-quantized"),
        ("ct_channel", f"{GROUP}.format", "int-quantized", r"group_0\.format='int-quantized': allowed with weights\.type='float'"),
        ("ct_channel", "format", None, r"format=None: allowed with"),
        ("ct_channel", "kv_cache_scheme", {"num_bits": 8}, r"kv_cache_scheme="),
        ("ct_channel", "transform_config", {"R1": 1}, r"transform_config="),
        ("ct_channel", "sparsity_config", {"format": "sparse-24-bitmask"}, r"sparsity_config\.format="),
        ("ct_channel", "config_groups", {}, r"config_groups is missing or empty"),
        ("ct_channel", "config_groups", {"FP8_DYNAMIC": ["Linear"]}, r"FP8_DYNAMIC: must be an object"),
        ("ct_channel", "ignore", ["re:.*experts.0.*"], r"leaves some experts"),
        ("ct_channel", f"{GROUP}.targets", ["re:.*gate_proj"], r"leaves some experts"),
        ("ct_channel", f"{GROUP}.output_activations", {"num_bits": 8}, r"output_activations="),
        ("ct_channel", f"{GROUP}.weights.num_bits", 4, r"group_0\.weights\.num_bits=4 .*allowed with type='float' is 8$"),
        ("ct_channel", f"{GROUP}.weights.type", "int", r"weights\.type='int'"),
        ("ct_channel", f"{GROUP}.weights.symmetric", False, r"weights\.symmetric=False .*of int4 only"),
        ("ct_channel", f"{GROUP}.weights.strategy", "group", r"weights\.strategy='group': allowed with type='float', num_bits=8 are block, channel"),
        ("ct_channel", f"{GROUP}.weights.group_size", 32, r"weights\.group_size=32"),
        ("ct_channel", f"{GROUP}.weights.block_structure", [128, 128], r"block_structure=\[128, 128\]: must be"),
        ("ct_block", f"{GROUP}.weights.block_structure", [1, 32], r"block_structure=\[1, 32\]: must be \[128, 128\]"),
        ("ct_channel", f"{GROUP}.input_activations.type", "int", r"input_activations\.type='int': .* are float"),
        ("ct_channel", f"{GROUP}.input_activations.sparsity", 2, r"input_activations\.sparsity=2 is not known"),
        ("w8a8", "format", "float-quantized", r"format='float-quantized': allowed with weights\.type='int' are int-quantized"),
        ("w8a8", "format", "mixed-precision", r"format='mixed-precision': allowed with"),
        ("w8a8", f"{GROUP}.weights.type", "float", r"format='int-quantized': allowed with weights\.type='float'"),
        ("w8a8", f"{GROUP}.weights.strategy", "tensor", r"weights\.strategy='tensor': allowed with type='int', num_bits=8 are channel"),
        ("w8a16_packed", f"{GROUP}.weights.strategy", "group", r"weights\.strategy='group': allowed with type='int', num_bits=8 are channel"),
        ("w8a16_packed", f"{GROUP}.weights.group_size", 128, r"weights\.group_size=128 .*-1 with strategy='channel'"),
        ("w8a16_packed", f"{GROUP}.weights.num_bits", 2, r"weights\.num_bits=2 .*allowed with type='int' is 8 or 4$"),
        ("w8a16_packed", f"{GROUP}.weights.num_bits", [4], r"weights\.num_bits=\[4\] is not supported"),
        ("w8a8", f"{GROUP}.weights.num_bits", 4, r"group_0: format='int-quantized': allowed with weights\.num_bits=4 is pack-quantized$"),
        ("group128", f"{GROUP}.weights.group_size", 48, r"weights\.group_size=48: allowed with strategy='group' are 32, 64, 128$"),
        ("group128", f"{GROUP}.weights.group_size", None, r"weights\.group_size=None: allowed with strategy='group'"),
        ("group128", f"{GROUP}.weights.strategy", "channel", r"weights\.group_size=128 .*-1 with strategy='channel'"),
        ("group128", f"{GROUP}.weights.strategy", "tensor", r"weights\.strategy='tensor': allowed with type='int', num_bits=4 are channel, group"),
        ("group128", f"{GROUP}.weights.actorder", "group", r"weights\.actorder='group': allowed are weight, static"),
        ("group128", f"{GROUP}.weights.block_structure", [128, 128], r"block_structure=\[128, 128\]: must be"),
        ("w8a16_packed", f"{GROUP}.weights.symmetric", False, r"weights\.symmetric=False .*zero points"),
        ("w8a16_packed", f"{GROUP}.weights.actorder", "group", r"weights\.actorder='group': allowed are weight, static"),
        ("w8a16_packed", f"{GROUP}.weights.actorder", True, r"weights\.actorder=True: allowed are weight, static"),
        ("w8a16_packed", f"{GROUP}.weights.dynamic", True, r"weights\.dynamic=True"),
        ("w8a8_static", f"{GROUP}.input_activations.symmetric", False, r"input_activations\.symmetric=False .*zero points"),
        ("w8a8", f"{GROUP}.input_activations.num_bits", 4, r"input_activations\.num_bits=4"),
        ("w8a8", f"{GROUP}.input_activations.type", "float", r"input_activations\.type='float': .* are int"),
        ("w8a8", f"{GROUP}.output_activations", {"num_bits": 8}, r"output_activations="),
    ],
)  # fmt: skip
def test_refused_by_name(name: str, path: str, value: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, changed(name, path, value))


@pytest.mark.parametrize("name", ["group128", "group32_zero_points"])
def test_orders_of_calibration(name: str, tmp_path: Path) -> None:
    """As GPTQ and AWQ models have them: columns are where they belong."""
    expected = read(tmp_path, CONFIGS[name]).stored
    for order in ("weight", "static"):
        assert read(tmp_path, changed(name, f"{GROUP}.weights.actorder", order)).stored == expected


@pytest.mark.parametrize("name", ["w8a8", "w8a16_packed"])
def test_other_words_for_the_same(name: str, tmp_path: Path) -> None:
    """What is no more than calibration, defaults, and a group's own format."""
    expected = read(tmp_path, CONFIGS[name]).stored
    for path, value in [
        (f"{GROUP}.weights.actorder", "weight"),
        (f"{GROUP}.weights.actorder", "static"),
        (f"{GROUP}.weights.group_size", -1),
        (f"{GROUP}.weights.observer", "mse"),
    ]:
        assert read(tmp_path, changed(name, path, value)).stored == expected
    short = changed(name, "format", "mixed-precision")
    group = short["config_groups"]["group_0"] | {"format": CONFIGS[name]["format"]}
    short["config_groups"]["group_0"] = group | {"weights": {"strategy": "channel"}}
    assert read(tmp_path, short).stored == expected


def test_groups_must_agree(tmp_path: Path) -> None:
    groups = {
        "attention": FORMATS["ct_tensor"].config["config_groups"]["group_0"]
        | {"targets": ["re:.*self_attn.*"]},
        "experts": FORMATS["ct_channel"].config["config_groups"]["group_0"] | {"targets": ["re:.*experts.*"]},
    }
    config = FORMATS["ct_channel"].config | {"config_groups": groups}
    with pytest.raises(ConfigError, match=r"in one way, not attention: fp8_tensor, experts: fp8_channel"):
        read(tmp_path, config)
    groups["attention"] = groups["experts"] | {"targets": ["re:.*self_attn.*"]}
    assert read(tmp_path, config).expert_scheme == FP8_CHANNEL
    groups["attention"] = CONFIGS["w8a8"]["config_groups"]["group_0"] | {"format": "int-quantized"}
    groups["experts"] = groups["attention"] | {"format": "pack-quantized"}
    with pytest.raises(ConfigError, match=r"not attention: int8_channel, experts: int8_channel packed"):
        read(tmp_path, config)


def test_lists_of_modules_as_the_hub_has_them(tmp_path: Path) -> None:
    """Hundreds of names, none of which is an expert's, though some begin like one."""
    names = ["lm_head", "model.embed_tokens", "gate"]
    for layer in range(48):
        names += [
            f"model.layers.{layer}.{x}" for x in ("input_layernorm", "mlp.gate", "post_attention_layernorm")
        ]
    spec = read(tmp_path, FORMATS["deepseek"].config | {"modules_to_not_convert": names})
    assert spec.expert_scheme == FP8_BLOCK
    everything = FORMATS["deepseek"].config | {"modules_to_not_convert": ["model.layers.*.mlp.experts"]}
    spec = read(tmp_path, everything)
    assert spec.stored is not None
    assert (spec.stored.experts, spec.expert_scheme) == (False, None)
