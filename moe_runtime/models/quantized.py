"""`quantization_config` of config.json: which FP8 checkpoints can be read, and how their weights are stored.

Two methods are read: `fp8`, as DeepSeek, Qwen and AutoFP8 write it and transformers' FineGrainedFP8Config reads it, and
`compressed-tensors` with FP8 weights, as LLM Compressor writes it. Every field is honoured, or refused by name.
"""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, Any

from moe_runtime.errors import ConfigError
from moe_runtime.models.base import ConfigFields, Refusal
from moe_runtime.models.spec import StoredQuantization
from moe_runtime.quantization import FP8, FP8_BLOCK, FP8_CHANNEL, FP8_TENSOR, GROUP, INT8_CHANNEL

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from moe_runtime.models.base import WeightRules
    from moe_runtime.models.spec import ModelSpec
    from moe_runtime.quantization import QuantScheme

METHODS = ("fp8", "compressed-tensors")
BLOCK = [GROUP, GROUP]
FORMATS = ("float-quantized", "naive-quantized")
STRATEGIES = {"block": FP8_BLOCK, "channel": FP8_CHANNEL, "tensor": FP8_TENSOR}
ASKED = {"fp8": FP8_BLOCK, "fp8_channel": FP8_CHANNEL, "fp8_tensor": FP8_TENSOR, "int8": INT8_CHANNEL}
"""Scheme that each value of the `quantization` setting makes of unquantised experts."""

FP8_FIELDS = ConfigFields(
    honoured=frozenset(
        {
            "quant_method",
            "activation_scheme",
            "weight_block_size",
            "modules_to_not_convert",
            "ignored_layers",
            "scale_fmt",
        }
    ),
    refused={
        "fmt": Refusal("e4m3", "no other FP8 type is read"),
        "modules_to_convert": Refusal(None, "embeddings must not be quantised"),
        "expert_dtype": Refusal("fp8", "experts in another type than the rest are not read"),
    },
    irrelevant={
        "dequantize": "says how transformers keeps the weights; here the `quantization` setting does"
    },
)
COMPRESSED_FIELDS = ConfigFields(
    honoured=frozenset({"quant_method", "config_groups", "format", "ignore", "sparsity_config"}),
    refused={
        "kv_cache_scheme": Refusal(None, "the KV cache is not quantised"),
        "transform_config": Refusal(None, "transformed weights are not read"),
    },
    irrelevant={
        "dequantize": "says how transformers keeps the weights; here the `quantization` setting does",
        "global_compression_ratio": "information only",
        "quantization_status": "the types of the stored tensors show it",
        "run_compressed": "an older name of `dequantize`",
        "use_optimized_inference": "chooses a kernel, not a result",
        "version": "information only",
    },
)
GROUP_FIELDS = ConfigFields(
    honoured=frozenset({"targets", "weights", "input_activations", "format"}),
    refused={"output_activations": Refusal(None, "results of layers are not quantised")},
)
_NUMBER = {
    "num_bits": Refusal(8, "only FP8 is read"),
    "type": Refusal("float", "only FP8 is read"),
    "symmetric": Refusal(True, "FP8 has no zero point"),
    "actorder": Refusal(None, "columns are not reordered"),
}
_CALIBRATION = {
    "observer": "calibration only",
    "observer_kwargs": "calibration only",
    "scale_dtype": "the types of the stored tensors show it",
    "zp_dtype": "FP8 has no zero point",
}
WEIGHT_FIELDS = ConfigFields(
    honoured=frozenset({"strategy", "block_structure"}),
    refused=_NUMBER
    | {
        "dynamic": Refusal(False, "weights are quantised in the file"),
        "group_size": Refusal(None, "scales of groups within a row are not read"),
    },
    irrelevant=_CALIBRATION,
)
ACTIVATION_FIELDS = ConfigFields(
    honoured=frozenset({"dynamic"}),
    refused=_NUMBER,
    irrelevant=_CALIBRATION
    | {
        "strategy": "activations are kept, or quantised as the weights' scheme says",
        "group_size": "activations are kept, or quantised as the weights' scheme says",
        "block_structure": "activations are kept, or quantised as the weights' scheme says",
    },
)


def stored_quantization(values: Mapping[str, Any], rules: WeightRules, spec: ModelSpec) -> StoredQuantization:
    """How the checkpoint with this `quantization_config` stores its weights.

    Raises ConfigError naming the first field that cannot be honoured.
    """
    if not isinstance(values, dict):
        raise ConfigError(f"quantization_config={values!r}: must be an object")
    method = str(values.get("quant_method")).replace("_", "-")
    experts = _expert_modules(rules, spec)
    if method == "fp8":
        return _fp8(values, experts)
    if method == "compressed-tensors":
        return _compressed_tensors(values, experts)
    raise ConfigError(
        f"quantization_config.quant_method={values.get('quant_method')!r} is not supported; supported are"
        f" {', '.join(METHODS)} (both with FP8 weights), and checkpoints that are not quantised"
    )


def with_expert_scheme(spec: ModelSpec, asked: str, device_type: str = "cpu") -> ModelSpec:
    """The spec with the scheme that the experts have in memory, for a value of the `quantization` setting.

    On GPUs, which multiply FP8 by FP8, activations are quantised too, unless the checkpoint is of weights only. Raises ConfigError
    if the checkpoint's experts are already quantised in another way than asked.
    """
    stored = spec.stored.scheme if spec.stored is not None and spec.stored.experts else None
    if asked == "auto":
        scheme = stored
    elif asked == "none":
        scheme = None
    elif stored is not None and asked != stored.name and not stored.name.startswith(f"{asked}_"):
        raise ConfigError(
            f"quantization={asked!r}: the experts of this checkpoint are stored as {stored.name}; use auto to keep them so,"
            " or none to compute with the model's dtype"
        )
    else:
        scheme = stored or ASKED[asked]
    weights_only = spec.stored is not None and spec.stored.weights_only
    both = scheme is not None and scheme.payload == FP8 and device_type != "cpu" and not weights_only
    return dataclasses.replace(spec, expert_scheme=scheme, quantize_activations=both)


def _fp8(values: Mapping[str, Any], experts: Sequence[str]) -> StoredQuantization:
    where = "quantization_config"
    _check_fields(values, FP8_FIELDS, where)
    activations = _one_of(values, "activation_scheme", ("dynamic", "static"), "dynamic", where)
    _one_of(values, "scale_fmt", ("float", "ue8m0"), "float", where)
    block = values.get("weight_block_size")
    if block is not None and block != BLOCK:
        raise ConfigError(f"{where}.weight_block_size={block!r}: allowed are {BLOCK} and null (per tensor)")
    # A list under both names would be the same one; transformers and vLLM differ in which they ask for first.
    skipped = [*(values.get("modules_to_not_convert") or []), *(values.get("ignored_layers") or [])]
    return StoredQuantization(
        scheme=FP8_TENSOR if block is None else FP8_BLOCK,
        scale_suffixes=("_scale_inv", "_scale"),
        experts=_all_or_none(experts, _not_matching(skipped, f"{where}.modules_to_not_convert"), where),
        static_activations=activations == "static",
    )


def _compressed_tensors(values: Mapping[str, Any], experts: Sequence[str]) -> StoredQuantization:
    where = "quantization_config"
    _check_fields(values, COMPRESSED_FIELDS, where)
    _one_of(values, "format", FORMATS, None, where)
    sparsity = values.get("sparsity_config") or {}
    if sparsity.get("format", "dense") != "dense":
        raise ConfigError(f"{where}.sparsity_config.format={sparsity['format']!r}: allowed is dense")
    groups = values.get("config_groups") or {}
    if not groups:
        raise ConfigError(f"{where}.config_groups is missing or empty")
    read = {name: _group(group, f"{where}.config_groups.{name}") for name, group in groups.items()}
    schemes = {scheme for scheme, _ in read.values()}
    if len(schemes) > 1:
        named = ", ".join(f"{name}: {scheme.name}" for name, (scheme, _) in read.items())
        raise ConfigError(f"{where}.config_groups: all must quantise weights in one way, not {named}")
    targeted = _named_by([t for group in groups.values() for t in group["targets"]], where)
    ignored = _named_by(values.get("ignore") or [], where)
    return StoredQuantization(
        scheme=schemes.pop(),
        scale_suffixes=("_scale",),
        experts=_all_or_none(experts, lambda name: targeted(name) and not ignored(name), where),
        static_activations=any(inputs is not None and not inputs["dynamic"] for _, inputs in read.values()),
        weights_only=all(inputs is None for _, inputs in read.values()),
    )


def _group(group: Any, where: str) -> tuple[QuantScheme, Mapping[str, Any] | None]:
    """A group's scheme of weights, and what it says of its inputs: None if they are not quantised."""
    if not isinstance(group, dict) or not isinstance(group.get("weights"), dict) or not group.get("targets"):
        raise ConfigError(f"{where}: must be an object with targets and weights")
    _check_fields(group, GROUP_FIELDS, where)
    _one_of(group, "format", FORMATS, FORMATS[0], where)
    weights, inputs = group["weights"], group.get("input_activations")
    _check_fields({"num_bits": 8, "type": "int", **weights}, WEIGHT_FIELDS, f"{where}.weights")
    strategy = _one_of(weights, "strategy", tuple(STRATEGIES), None, f"{where}.weights")
    block = weights.get("block_structure")
    if block != (BLOCK if strategy == "block" else None):
        raise ConfigError(
            f"{where}.weights.block_structure={block!r}: must be {BLOCK} with strategy='block', else null"
        )
    if inputs is not None:
        inputs = {"num_bits": 8, "type": "int", "dynamic": False, **inputs}
        _check_fields(inputs, ACTIVATION_FIELDS, f"{where}.input_activations")
    return STRATEGIES[strategy], inputs


def _check_fields(values: Mapping[str, Any], fields: ConfigFields, where: str) -> None:
    """Raise ConfigError on a field with a value that cannot be honoured, and on one that is not known."""
    for name, value in values.items():
        # What writers leave for "not set".
        if name in fields.honoured or name in fields.irrelevant or value is None or value in ({}, []):
            continue
        refusal = fields.refused.get(name)
        if refusal is None:
            known = sorted({*fields.honoured, *fields.refused, *fields.irrelevant})
            raise ConfigError(f"{where}.{name}={value!r} is not known; known are {', '.join(known)}")
        if value != refusal.allowed:
            raise ConfigError(
                f"{where}.{name}={value!r} is not supported: {refusal.reason}; allowed is {refusal.allowed!r}"
            )


def _one_of(
    values: Mapping[str, Any], name: str, allowed: Sequence[str], default: str | None, where: str
) -> str:
    value = values.get(name)
    if value is None and default is not None:
        return default
    if value not in allowed:
        raise ConfigError(f"{where}.{name}={value!r}: allowed are {', '.join(allowed)}")
    return str(value)


def _expert_modules(rules: WeightRules, spec: ModelSpec) -> list[str]:
    """Names of all experts' matrices as modules, as the hub's files have them."""
    return [
        rule.source.format(layer=layer, expert=expert).removesuffix(".weight")
        for rule in rules.rules
        if rule.per_expert
        for layer in rule.layers
        for expert in range(spec.num_experts)
    ]


def _all_or_none(experts: Iterable[str], quantised: Callable[[str], bool], where: str) -> bool:
    """Whether the experts are quantised. Raises ConfigError if only some are."""
    answers = {name: quantised(name) for name in experts}
    if len(set(answers.values())) > 1:
        example = next(name for name, answer in answers.items() if not answer)
        raise ConfigError(
            f"{where} leaves some experts unquantised ({example}, say) and not others; all or none must be"
        )
    return all(answers.values())


def _not_matching(patterns: Sequence[str], where: str) -> Callable[[str], bool]:
    """transformers' rule: a pattern is a regular expression of the name up to a dot or its end, or the name's end."""
    if not patterns:
        return lambda name: True
    matches = _compiled("|".join(f"(?:{p})" for p in patterns), where)
    bounded = _compiled(rf"(?:{matches.pattern})(?:(?<=\.)|(?=\.|$))", where)
    return lambda name: bounded.match(name) is None and not name.endswith(tuple(patterns))


def _named_by(targets: Sequence[str], where: str) -> Callable[[str], bool]:
    """compressed-tensors' rule: a name, `re:` and a regular expression of its beginning, or the class `Linear`."""
    exact = frozenset(targets)
    patterns = [f"(?:{t.removeprefix('re:')})" for t in targets if t.startswith("re:")]
    if "Linear" in exact:
        return lambda name: True
    if not patterns:
        return lambda name: name in exact
    matches = _compiled("|".join(patterns), where)
    return lambda name: name in exact or matches.match(name) is not None


def _compiled(pattern: str, where: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"{where}: {pattern!r} is not a regular expression: {error}") from None
