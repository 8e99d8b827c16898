"""`quantization_config` of config.json: which FP8, int8 and int4 checkpoints can be read, and how their weights are stored.

Two methods are read: `fp8`, as DeepSeek, Qwen and AutoFP8 write it and transformers' FineGrainedFP8Config reads it, and
`compressed-tensors` with FP8, int8 or int4 weights, as LLM Compressor writes it. Every field is honoured, or refused by name.
"""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, Any, NamedTuple

from moe_runtime.errors import ConfigError
from moe_runtime.models.quantized_fields import (
    ACTIVATION_FIELDS,
    COMPRESSED_FIELDS,
    FP8_FIELDS,
    GROUP_FIELDS,
    WEIGHT_FIELDS,
    check_fields,
    one_of,
)
from moe_runtime.models.spec import StoredQuantization
from moe_runtime.quantization import (
    FP8,
    FP8_BLOCK,
    FP8_CHANNEL,
    FP8_TENSOR,
    GROUP,
    INT4_GROUPS,
    INT4_MADE,
    INT8_CHANNEL,
    int4_scheme,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from moe_runtime.models.base import WeightRules
    from moe_runtime.models.spec import ModelSpec
    from moe_runtime.quantization import QuantScheme

METHODS = ("fp8", "compressed-tensors")
BLOCK = [GROUP, GROUP]
PACKED_FORMAT = "pack-quantized"
FORMATS = {
    "float": ("float-quantized", "naive-quantized"),
    "int": ("int-quantized", "naive-quantized", PACKED_FORMAT),
}
STRATEGIES = {
    ("float", 8): {"block": FP8_BLOCK, "channel": FP8_CHANNEL, "tensor": FP8_TENSOR},
    ("int", 8): {"channel": INT8_CHANNEL},
    ("int", 4): {"channel": int4_scheme(0), "group": int4_scheme(INT4_GROUPS[-1])},
}
"""For each type of weights and number of bits, what shares a scale; the group's size is in the file."""
INT4 = ("int", 4)
CALIBRATION_ORDERS = ("weight", "static")
"""Values of `actorder` that say in which order columns were calibrated; in the file they are where they belong."""
ASKED = {
    "fp8": FP8_BLOCK,
    "fp8_channel": FP8_CHANNEL,
    "fp8_tensor": FP8_TENSOR,
    "int8": INT8_CHANNEL,
    "int4": INT4_MADE,
}
"""Scheme that each value of the `quantization` setting makes of unquantised experts."""


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
        f" {', '.join(METHODS)} (with FP8 weights; the latter with int8 and int4 too), and checkpoints that are not quantised"
    )


def with_weight_schemes(spec: ModelSpec, asked: str, device_type: str = "cpu") -> ModelSpec:
    """The spec with the schemes that experts and dense layers have in memory, for a value of the `quantization` setting.

    Dense layers become int8 where int8 or int4 is asked for, if the file has them in int8 or unquantised.
    On GPUs, which multiply FP8 by FP8, activations are quantised too, unless the checkpoint is of weights only. Raises ConfigError
    if the checkpoint's experts are already quantised in another way than asked, or would be integers on a GPU.
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
    if scheme is not None and scheme.payload != FP8 and device_type != "cpu":
        ways = "none dequantises them" if stored else "use auto, none or fp8"
        raise ConfigError(
            f"quantization={asked!r}: {scheme.payload_name} experts are computed on CPUs only; {ways}"
        )
    weights_only = spec.stored is not None and spec.stored.weights_only
    from_int8 = spec.stored is None or spec.stored.scheme == INT8_CHANNEL
    dense = INT8_CHANNEL if asked in ("int8", "int4") and from_int8 else None
    both = scheme is not None and scheme.payload == FP8 and device_type != "cpu" and not weights_only
    return dataclasses.replace(spec, expert_scheme=scheme, dense_scheme=dense, quantize_activations=both)


def _fp8(values: Mapping[str, Any], experts: Sequence[str]) -> StoredQuantization:
    where = "quantization_config"
    check_fields(values, FP8_FIELDS, where)
    activations = one_of(values, "activation_scheme", ("dynamic", "static"), "dynamic", where)
    one_of(values, "scale_fmt", ("float", "ue8m0"), "float", where)
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
    check_fields(values, COMPRESSED_FIELDS, where)
    sparsity = values.get("sparsity_config") or {}
    if sparsity.get("format", "dense") != "dense":
        raise ConfigError(f"{where}.sparsity_config.format={sparsity['format']!r}: allowed is dense")
    groups = values.get("config_groups") or {}
    if not groups:
        raise ConfigError(f"{where}.config_groups is missing or empty")
    read = {
        name: _group(group, values.get("format"), f"{where}.config_groups.{name}")
        for name, group in groups.items()
    }
    ways = {(group.scheme, group.packed) for group in read.values()}
    if len(ways) > 1:
        named = ", ".join(
            f"{name}: {group.scheme.name}{' packed' if group.packed else ''}" for name, group in read.items()
        )
        raise ConfigError(f"{where}.config_groups: all must quantise weights in one way, not {named}")
    targeted = _named_by([t for group in groups.values() for t in group["targets"]], where)
    ignored = _named_by(values.get("ignore") or [], where)
    ((scheme, packed),) = ways
    inputs = [group.inputs for group in read.values()]
    return StoredQuantization(
        scheme=scheme,
        scale_suffixes=("_scale",),
        experts=_all_or_none(experts, lambda name: targeted(name) and not ignored(name), where),
        packed=packed,
        static_activations=any(i is not None and not i["dynamic"] for i in inputs),
        weights_only=all(i is None for i in inputs),
    )


class _Group(NamedTuple):
    """What a group of `config_groups` says."""

    scheme: QuantScheme
    packed: bool
    """Whether int8 or int4 values lie several to a word of int32."""
    inputs: Mapping[str, Any] | None
    """How activations are quantised; None if they are not."""


def _group(group: Any, file_format: Any, where: str) -> _Group:
    """file_format: of the whole file, for a group that names none."""
    if not isinstance(group, dict) or not isinstance(group.get("weights"), dict) or not group.get("targets"):
        raise ConfigError(f"{where}: must be an object with targets and weights")
    check_fields(group, GROUP_FIELDS, where)
    weights, inputs = {"num_bits": 8, "type": "int", **group["weights"]}, group.get("input_activations")
    check_fields(weights, WEIGHT_FIELDS, f"{where}.weights")
    kind = one_of(weights, "type", tuple(FORMATS), None, f"{where}.weights")
    own = group.get("format")
    stored_as = {"format": file_format if own is None else own}
    when = f" with weights.type={kind!r}"
    written = one_of(
        stored_as, "format", FORMATS[kind], None, "quantization_config" if own is None else where, when
    )
    if inputs is not None:
        inputs = {"num_bits": 8, "type": "int", "dynamic": False, **inputs}
        check_fields(inputs, ACTIVATION_FIELDS, f"{where}.input_activations")
        one_of(inputs, "type", (kind,), None, f"{where}.input_activations", when)
    scheme = _scheme(weights, kind, f"{where}.weights")
    if scheme.payload_name == "int4" and written != PACKED_FORMAT:
        raise ConfigError(f"{where}: format={written!r}: allowed with weights.num_bits=4 is {PACKED_FORMAT}")
    return _Group(scheme, written == PACKED_FORMAT, inputs)


def _scheme(weights: Mapping[str, Any], kind: str, where: str) -> QuantScheme:
    number = kind, weights["num_bits"]
    if number not in list(STRATEGIES):
        bits = " or ".join(str(bits) for name, bits in STRATEGIES if name == kind)
        raise ConfigError(
            f"{where}.num_bits={number[1]!r} is not supported; allowed with type={kind!r} is {bits}"
        )
    when = f" with type={kind!r}, num_bits={number[1]}"
    strategy = one_of(weights, "strategy", tuple(STRATEGIES[number]), None, where, when)
    block, group_size = weights.get("block_structure"), weights.get("group_size")
    symmetric = weights.get("symmetric")
    if symmetric not in (None, True) and number != INT4:
        raise ConfigError(
            f"{where}.symmetric={symmetric!r} is not supported{when}: zero points are read of int4 only"
        )
    if block != (BLOCK if strategy == "block" else None):
        raise ConfigError(
            f"{where}.block_structure={block!r}: must be {BLOCK} with strategy='block', else null"
        )
    one_of(weights, "actorder", CALIBRATION_ORDERS, CALIBRATION_ORDERS[0], where)
    if strategy == "group":
        if group_size not in INT4_GROUPS:
            sizes = ", ".join(map(str, INT4_GROUPS))
            raise ConfigError(f"{where}.group_size={group_size!r}: allowed with strategy='group' are {sizes}")
        return int4_scheme(group_size, symmetric is False)
    # -1 is another word for a whole row.
    if group_size is not None and (group_size, strategy) != (-1, "channel"):
        raise ConfigError(
            f"{where}.group_size={group_size!r} is not supported with strategy={strategy!r};"
            " allowed is null, or -1 with strategy='channel'"
        )
    return int4_scheme(0, symmetric is False) if number == INT4 else STRATEGIES[number][strategy]


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
