"""What becomes of every field of `quantization_config`: honoured, refused by name, or of no effect here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moe_runtime.errors import ConfigError
from moe_runtime.models.base import ConfigFields, Refusal

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

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
_CALIBRATION = {
    "observer": "calibration only",
    "observer_kwargs": "calibration only",
    "scale_dtype": "the types of the stored tensors show it",
    "zp_dtype": "the types of the stored tensors show it",
}
WEIGHT_FIELDS = ConfigFields(
    honoured=frozenset(
        {"type", "num_bits", "symmetric", "strategy", "block_structure", "group_size", "actorder"}
    ),
    refused={"dynamic": Refusal(False, "weights are quantised in the file")},
    irrelevant=_CALIBRATION,
)
ACTIVATION_FIELDS = ConfigFields(
    honoured=frozenset({"type", "dynamic"}),
    refused={
        "num_bits": Refusal(8, "activations are kept, or quantised to 8 bits"),
        "symmetric": Refusal(True, "zero points of activations are not read"),
        "actorder": Refusal(None, "columns are not reordered"),
    },
    irrelevant=_CALIBRATION
    | {
        "strategy": "activations are kept, or quantised as the weights' scheme says",
        "group_size": "activations are kept, or quantised as the weights' scheme says",
        "block_structure": "activations are kept, or quantised as the weights' scheme says",
    },
)


def check_fields(values: Mapping[str, Any], fields: ConfigFields, where: str) -> None:
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


def one_of(
    values: Mapping[str, Any],
    name: str,
    allowed: Sequence[str],
    default: str | None,
    where: str,
    when: str = "",
) -> str:
    """The field's value, or the default for null. Raises ConfigError; `when` says what else the allowed ones depend on."""
    value = values.get(name)
    if value is None and default is not None:
        return default
    if value not in allowed:
        raise ConfigError(f"{where}.{name}={value!r}: allowed{when} are {', '.join(allowed)}")
    return str(value)
