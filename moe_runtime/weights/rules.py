"""From weight rules and the tensors that are there to the list of copies one rank makes.

The check of coverage covers all experts, not only the rank's, so that every rank comes to the same verdict.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moe_runtime.errors import CheckpointError
from moe_runtime.weights.safetensors_file import DTYPES, FP8_PAYLOAD, INT8_PAYLOAD, StoredTensor
from moe_runtime.weights.scales import (
    ACTIVATION_SCALES,
    StoredScale,
    find_scales,
    find_zero_points,
    payload_dtype,
    scale_names,
    scale_of_part,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from moe_runtime.models.base import WeightRule, WeightRules
    from moe_runtime.models.spec import ModelSpec, StoredQuantization

MAX_NAMES = 5


@dataclass(frozen=True)
class Place:
    """A parameter of the whole model: for experts, one expert's matrix in it."""

    target: str
    expert: int | None = None
    moe_layer: int | None = None


@dataclass(frozen=True)
class Piece:
    """Rows of a place, and where a checkpoint tensor holds them."""

    source: str
    place: Place
    first_row: int
    num_rows: int
    shape: tuple[int, ...]
    """Of the whole checkpoint tensor."""
    index: int | None = None
    """Index on the tensor's first axis, for stacked experts."""
    parts: int = 1
    """Matrices whose rows follow one another in it, each with scales of its own."""

    @property
    def stop_row(self) -> int:
        """The row behind its last one."""
        return self.first_row + self.num_rows


@dataclass(frozen=True)
class Copy:
    """Bytes of a checkpoint file that fill rows of a parameter on this rank: one matrix, or a vector."""

    tensor: StoredTensor
    offset: int
    num_bytes: int
    target: str
    slot: int | None
    """Slot of the parameter's first axis, for experts."""
    first_row: int
    num_rows: int
    scale: StoredScale | None = None
    """Of a quantised matrix."""
    zero_points: StoredTensor | None = None
    """Of an int4 matrix that has some."""

    @property
    def width(self) -> int:
        """Values of a row; 1 for a vector."""
        return self.tensor.shape[-1] if len(self.tensor.shape) > 1 else 1

    @property
    def total_bytes(self) -> int:
        """With its scales and zero points."""
        beside = (self.scale, self.zero_points)
        return self.num_bytes + sum(part.num_bytes for part in beside if part is not None)


def plan_copies(
    rules: WeightRules,
    spec: ModelSpec,
    stored: Mapping[str, StoredTensor],
    local_experts: Sequence[Sequence[int]],
) -> list[Copy]:
    """What this rank reads, in file order.

    stored: the checkpoint's tensors. local_experts: for each MoE layer, the expert in each local slot, -1 if empty.
    Raises CheckpointError naming tensors that are missing, unknown, there twice, of a wrong shape or of a wrong type.
    """
    wanted = _expand(rules.rules, spec)
    skipped = {copy for copy, original in rules.copies if copy in stored and original in stored}
    present = {name: pieces for name, pieces in wanted.items() if name in stored and name not in skipped}
    static = spec.stored is not None and spec.stored.static_activations
    ignored = (*rules.ignored, ACTIVATION_SCALES) if static else rules.ignored
    _check_names({*wanted, *scale_names(wanted, spec.stored)}, stored, ignored)
    _check_coverage(wanted, present)
    for name in [*present, *skipped]:
        _check_tensor(stored[name], wanted[name][0], spec.stored)
    scales = find_scales(stored, {name: (p[0].shape, p[0].parts) for name, p in present.items()}, spec.stored)
    zeros = find_zero_points(stored, scales, {name: p[0].shape for name, p in present.items()}, spec.stored)
    slots: dict[tuple[int, int], list[int]] = defaultdict(list)
    for moe_layer, experts in enumerate(local_experts):
        for slot, expert in enumerate(experts):
            slots[moe_layer, expert].append(slot)
    copies = [
        _copy(piece, part, stored[name], scales.get(name), zeros.get(name), slot)
        for name, pieces in present.items()
        for piece in pieces
        for slot in _slots_of(piece.place, slots)
        for part in range(piece.parts)
    ]
    return sorted(copies, key=lambda copy: (copy.tensor.path, copy.offset))


def _slots_of(place: Place, slots: Mapping[tuple[int, int], list[int]]) -> Sequence[int | None]:
    if place.expert is None or place.moe_layer is None:
        return (None,)
    return slots.get((place.moe_layer, place.expert), ())


def _expand(rules: Iterable[WeightRule], spec: ModelSpec) -> dict[str, list[Piece]]:
    """Every tensor name the rules know, with what it fills."""
    moe_index = {layer: i for i, layer in enumerate(spec.moe_layers)}
    wanted: dict[str, list[Piece]] = {}
    for rule in rules:
        for layer in rule.layers if rule.per_layer else (None,):
            target = rule.target.format(layer=layer)
            if rule.per_expert or rule.stacked:
                assert layer is not None
                pieces = [
                    Piece(
                        source=rule.source.format(layer=layer, expert=expert),
                        place=Place(target, expert, moe_index[layer]),
                        first_row=rule.first_row,
                        num_rows=rule.num_rows,
                        shape=rule.shape,
                        index=expert if rule.stacked else None,
                        parts=rule.parts,
                    )
                    for expert in range(spec.num_experts)
                ]
            else:
                source = rule.source.format(layer=layer)
                pieces = [Piece(source, Place(target), rule.first_row, rule.num_rows, rule.shape)]
            for piece in pieces:
                wanted.setdefault(piece.source, []).append(piece)
    return wanted


def _check_names(known: set[str], stored: Mapping[str, StoredTensor], ignored: Iterable[str]) -> None:
    patterns = [re.compile(pattern) for pattern in ignored]
    unknown = [
        tensor.name
        for name, tensor in stored.items()
        if name not in known and not any(p.fullmatch(name) for p in patterns)
    ]
    if unknown:
        raise CheckpointError(f"the checkpoint has tensors this model does not know: {_some(unknown)}")


def _check_coverage(wanted: Mapping[str, list[Piece]], present: Mapping[str, list[Piece]]) -> None:
    """Every row of every place exactly once."""
    known, filled = _by_place(wanted), _by_place(present)
    missing: dict[str, None] = {}
    for place, pieces in known.items():
        end = 0
        for piece in sorted(filled.get(place, []), key=lambda p: (p.first_row, p.source)):
            if piece.first_row < end:
                others = [p.source for p in filled[place] if p.source != piece.source]
                raise CheckpointError(
                    f"the checkpoint holds the same weights twice: {_some([*others, piece.source])}"
                )
            _add_gap(missing, pieces, end, piece.first_row)
            end = piece.stop_row
        _add_gap(missing, pieces, end, max(p.stop_row for p in pieces))
    if missing:
        raise CheckpointError(f"the checkpoint lacks tensors of this model: {_some(list(missing))}")


def _add_gap(missing: dict[str, None], pieces: list[Piece], first: int, stop: int) -> None:
    """Name the tensors that would fill rows first..stop-1, in the first layout that the rules know."""
    if first >= stop:
        return
    covered: list[Piece] = []
    for piece in pieces:
        overlaps = piece.first_row < stop and first < piece.stop_row
        if overlaps and not any(
            piece.first_row < c.stop_row and c.first_row < piece.stop_row for c in covered
        ):
            covered.append(piece)
            missing[piece.source] = None


def _by_place(names: Mapping[str, list[Piece]]) -> dict[Place, list[Piece]]:
    places: dict[Place, list[Piece]] = defaultdict(list)
    for pieces in names.values():
        for piece in pieces:
            places[piece.place].append(piece)
    return places


def _check_tensor(tensor: StoredTensor, piece: Piece, quantization: StoredQuantization | None) -> None:
    where = f"{tensor.name} in {tensor.path}"
    payload = None if quantization is None else payload_dtype(quantization)
    quantised, matrix = tensor.dtype == payload, len(piece.shape) > 1
    if quantization is None and tensor.dtype in (FP8_PAYLOAD, INT8_PAYLOAD):
        raise CheckpointError(
            f"{where} is of type {tensor.dtype}, but config.json has no quantization_config that says how it is scaled"
        )
    if tensor.dtype not in DTYPES and not (quantised and matrix):
        supported = [*DTYPES, payload] if payload is not None and matrix else list(DTYPES)
        raise CheckpointError(f"{where} is of type {tensor.dtype}; supported are {', '.join(supported)}")
    if piece.place.expert is not None and quantised != (quantization is not None and quantization.experts):
        raise CheckpointError(
            f"{where} is of type {tensor.dtype}, but quantization_config in config.json says that the experts are"
            f" {_named(quantization)}"
        )
    if tensor.shape != piece.shape:
        raise CheckpointError(
            f"{where} has shape {list(tensor.shape)}, but the configuration asks for {list(piece.shape)}"
        )


def _named(quantization: StoredQuantization | None) -> str:
    """How the experts are stored, for messages."""
    if quantization is None or not quantization.experts:
        return "not quantised"
    return quantization.scheme.payload_name + (", packed into words" if quantization.packed else "")


def _copy(
    piece: Piece,
    part: int,
    tensor: StoredTensor,
    scale: StoredTensor | None,
    zero_points: StoredTensor | None,
    slot: int | None,
) -> Copy:
    """One matrix of a piece: all of it, or one of its parts."""
    num_experts = 1 if piece.index is None else piece.shape[0]
    num_bytes = tensor.num_bytes // (num_experts * piece.parts)
    index = (piece.index or 0) * piece.parts + part
    num_rows = piece.num_rows // piece.parts
    return Copy(
        tensor=tensor,
        offset=tensor.offset + index * num_bytes,
        num_bytes=num_bytes,
        target=piece.place.target,
        slot=slot,
        first_row=piece.first_row + part * num_rows,
        num_rows=num_rows,
        scale=None if scale is None else scale_of_part(scale, index, num_experts * piece.parts),
        zero_points=zero_points,
    )


def _some(names: Sequence[str]) -> str:
    """A few names and the number of the rest."""
    shown = ", ".join(sorted(names)[:MAX_NAMES])
    rest = len(names) - MAX_NAMES
    return f"{shown} and {rest} more" if rest > 0 else shown
