"""Scales and zero points of FP8, int8 and int4 matrices in a checkpoint: which tensor holds those of which matrix, and where in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moe_runtime.errors import CheckpointError
from moe_runtime.quantization import FP8
from moe_runtime.weights.packed import PACKED, zero_point_shape
from moe_runtime.weights.safetensors_file import FP8_PAYLOAD, INT8_PAYLOAD

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from moe_runtime.models.spec import StoredQuantization
    from moe_runtime.quantization import QuantScheme
    from moe_runtime.weights.safetensors_file import StoredTensor

DTYPES = ("F32", "BF16", "F16", "F8_E8M0")
ZERO_POINT = "_zero_point"
"""What the name of a matrix's zero points has behind the matrix's."""
ACTIVATION_SCALES = r".*\.(input_scale|(\w+_)?activation_scale)"
"""Scales of static activation quantisation, as vLLM's and transformers' files name them."""


@dataclass(frozen=True)
class StoredScale:
    """Bytes of a checkpoint file with the scales of one matrix."""

    tensor: StoredTensor
    offset: int
    num_bytes: int


def payload_dtype(quantization: StoredQuantization) -> str:
    """Type of the tensors that have scales."""
    if quantization.scheme.payload == FP8:
        return FP8_PAYLOAD
    return PACKED[quantization.scheme.payload] if quantization.packed else INT8_PAYLOAD


def scale_names(matrices: Iterable[str], quantization: StoredQuantization | None) -> set[str]:
    """Every name that scales and zero points of these tensors may have."""
    if quantization is None:
        return set()
    zeros = (ZERO_POINT,) if quantization.scheme.zero_points else ()
    return {name + suffix for name in matrices for suffix in (*quantization.scale_suffixes, *zeros)}


def find_scales(
    stored: Mapping[str, StoredTensor],
    matrices: Mapping[str, tuple[tuple[int, ...], int]],
    quantization: StoredQuantization | None,
) -> dict[str, StoredTensor]:
    """The scales of every quantised tensor among `matrices`, by its name.

    matrices: shape, and number of matrices whose rows follow one another in it. Raises CheckpointError naming scales that are
    missing, there twice, of another shape or type than the scheme's, or of a tensor that is not quantised.
    """
    found: dict[str, StoredTensor] = {}
    missing: list[str] = []
    if quantization is None:
        return found
    payload = payload_dtype(quantization)
    for name, (shape, parts) in matrices.items():
        names = [name + suffix for suffix in quantization.scale_suffixes if name + suffix in stored]
        if stored[name].dtype != payload:
            if names:
                raise CheckpointError(
                    f"{names[0]} has scales of {name}, which is of type {stored[name].dtype}, not {payload}"
                )
            continue
        if len(names) > 1:
            raise CheckpointError(f"the checkpoint holds the scales of {name} twice: {', '.join(names)}")
        if not names:
            missing.append(name + quantization.scale_suffixes[0])
            continue
        found[name] = stored[names[0]]
        _check(found[name], quantization.scheme, shape, parts)
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        kind = quantization.scheme.payload_name
        raise CheckpointError(f"the checkpoint lacks scales of {kind} tensors: {min(missing)}{more}")
    return found


def find_zero_points(
    stored: Mapping[str, StoredTensor],
    scales: Mapping[str, StoredTensor],
    shapes: Mapping[str, tuple[int, ...]],
    quantization: StoredQuantization | None,
) -> dict[str, StoredTensor]:
    """The zero points of every tensor that has scales, by its name, if the scheme has any. scales: as of find_scales.

    Raises CheckpointError naming zero points that are missing, alone, or of another shape or type than the scheme's.
    """
    found: dict[str, StoredTensor] = {}
    if quantization is None or not quantization.scheme.zero_points:
        return found
    alone = [name for name in shapes if name not in scales and name + ZERO_POINT in stored]
    if alone:
        raise CheckpointError(
            f"{alone[0]}{ZERO_POINT} has zero points of {alone[0]}, which is not {quantization.scheme.payload_name}"
        )
    for name in scales:
        zero = stored.get(name + ZERO_POINT)
        if zero is None:
            raise CheckpointError(f"the checkpoint lacks {name}{ZERO_POINT}, the zero points of {name}")
        num_out, num_in = shapes[name]
        expected = zero_point_shape(num_out, quantization.scheme.scale_shape(num_out, num_in)[1] // 2)
        if zero.dtype != "I32" or zero.shape != expected:
            raise CheckpointError(
                f"{zero.name} in {zero.path} has type {zero.dtype} and shape {list(zero.shape)}, but"
                f" {quantization.scheme.name} of a matrix of {[num_out, num_in]} has {list(expected)} words of type I32"
            )
        found[name] = zero
    return found


def _check(scale: StoredTensor, scheme: QuantScheme, shape: tuple[int, ...], parts: int) -> None:
    *stack, num_out, num_in = shape
    rows, columns = scheme.scale_shape(num_out // parts, num_in)
    if scheme.zero_points:
        columns //= 2
    expected = (*stack, parts * rows, columns)
    if scale.dtype not in DTYPES:
        raise CheckpointError(
            f"{scale.name} in {scale.path} is of type {scale.dtype}; scales may be {', '.join(DTYPES)}"
        )
    # A single scale is written as [], [1] or [1, 1], one per channel as [out] or [out, 1].
    if [n for n in scale.shape if n != 1] != [n for n in expected if n != 1]:
        raise CheckpointError(
            f"{scale.name} in {scale.path} has shape {list(scale.shape)}, but {scheme.name} scales of a matrix of"
            f" {list(shape)} have {list(expected)}; see quantization_config in config.json"
        )


def scale_of_part(scale: StoredTensor, index: int, count: int) -> StoredScale:
    """The scales of the index-th of `count` matrices."""
    num_bytes = scale.num_bytes // count
    return StoredScale(scale, scale.offset + index * num_bytes, num_bytes)
