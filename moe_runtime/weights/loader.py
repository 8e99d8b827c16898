"""Filling a decoder from a checkpoint folder: streamed, without the experts of other ranks, and checked.

Tensors go straight from the file into the parameters that `Decoder` allocated; where the type differs, or FP8, int8 or int4 is
made or undone, through one small buffer (`reading`). So a rank's private memory stays at the weights it keeps.
"""

from __future__ import annotations

import json
import logging
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from moe_runtime.errors import CheckpointError
from moe_runtime.experts.router import route
from moe_runtime.layers.ops import TORCH_OPS
from moe_runtime.models.decoder import Decoder
from moe_runtime.weights.packed import unpacked
from moe_runtime.weights.reading import CHUNK_BYTES, WeightReader
from moe_runtime.weights.rules import Copy, plan_copies
from moe_runtime.weights.safetensors_file import StoredTensor, read_bytes, read_header

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from moe_runtime.experts.router import Router
    from moe_runtime.layers.ops import LayerOps
    from moe_runtime.models.base import ModelAdapter
    from moe_runtime.models.spec import ModelSpec
    from moe_runtime.quantization import QuantScheme

logger = logging.getLogger(__name__)

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
SCALE_SUFFIX = "_scale"
"""Of the parameter with the scales of a quantised parameter."""
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")


@dataclass(frozen=True)
class LoadReport:
    """What loading read."""

    bytes_read: int
    """Of weights and scales, each counted once."""
    expert_bytes_read: int
    """Of them, bytes of routed experts."""
    bytes_in_checkpoint: int
    num_tensors: int
    """Tensors in the checkpoint."""


def load_weights(
    model_dir: str | Path,
    spec: ModelSpec,
    adapter: ModelAdapter,
    local_experts: Sequence[Sequence[int]],
    dtype: torch.dtype,
    device: torch.device | str,
    progress: Callable[[float], None] | None = None,
    ops: LayerOps = TORCH_OPS,
    router: Router = route,
) -> Decoder:
    """A decoder on `device` with one rank's weights.

    local_experts: for each MoE layer in order, the expert in each local slot, -1 for an empty slot (filled with zeros).
    progress: called with the share of bytes read so far, from 0 to 1. ops, router: what the decoder computes with.
    Raises CheckpointError naming files or tensors. Nothing is allocated before names, shapes and types were checked.
    """
    return load_with_report(model_dir, spec, adapter, local_experts, dtype, device, progress, ops, router)[0]


def load_with_report(
    model_dir: str | Path,
    spec: ModelSpec,
    adapter: ModelAdapter,
    local_experts: Sequence[Sequence[int]],
    dtype: torch.dtype,
    device: torch.device | str,
    progress: Callable[[float], None] | None = None,
    ops: LayerOps = TORCH_OPS,
    router: Router = route,
) -> tuple[Decoder, LoadReport]:
    """As `load_weights`, and what was read."""
    listed = list_tensors(Path(model_dir))
    packed = spec.stored is not None and spec.stored.packed
    stored = unpacked(listed, spec.stored.scheme) if packed and spec.stored is not None else listed
    rules = adapter.rules(spec)
    for copy, original in rules.copies:
        if copy in stored and original in stored:
            _check_equal(stored[copy], stored[original])
    copies = plan_copies(rules, spec, stored, local_experts)
    decoder = Decoder(spec, [len(experts) for experts in local_experts], dtype, device, ops, router)
    _clear_empty_slots(decoder, local_experts)
    _check_filled(decoder, copies, local_experts)
    _read_all(decoder, copies, progress or _silent)
    report = LoadReport(
        bytes_read=sum(copy.total_bytes for copy in copies),
        expert_bytes_read=sum(copy.total_bytes for copy in copies if copy.slot is not None),
        bytes_in_checkpoint=sum(tensor.num_bytes for tensor in listed.values()),
        num_tensors=len(listed),
    )
    read, total = report.bytes_read / 2**20, report.bytes_in_checkpoint / 2**20
    logger.info("read %.1f of %.1f MiB of weights from %s", read, total, model_dir)
    return decoder, report


def weight_bytes(spec: ModelSpec, num_slots_per_moe_layer: Sequence[int], dtype: torch.dtype) -> int:
    """What a decoder with so many expert slots in each MoE layer will take; allocates nothing."""
    decoder = Decoder(spec, num_slots_per_moe_layer, dtype, "meta", TORCH_OPS)
    return sum(parameter.numel() * parameter.element_size() for parameter in decoder.parameters())


def list_tensors(folder: Path) -> dict[str, StoredTensor]:
    """All tensors of a checkpoint folder in the hub's layout: one file, or shards and an index.

    Raises CheckpointError if the folder, the files or tensors named by the index are not there, or a file is damaged.
    """
    if not folder.is_dir():
        raise CheckpointError(f"no model folder at {folder}")
    if (folder / SINGLE_FILE).is_file():
        return read_header(folder / SINGLE_FILE)
    if (folder / INDEX_FILE).is_file():
        return _list_shards(folder)
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLE_SUFFIXES)
    if pickles:
        raise CheckpointError(
            f"{folder} has no safetensors, only {pickles[0]}: pickle files can run code and are never loaded;"
            " convert the checkpoint to safetensors"
        )
    raise CheckpointError(f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}")


def _list_shards(folder: Path) -> dict[str, StoredTensor]:
    index = folder / INDEX_FILE
    try:
        weight_map: dict[str, str] = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{index} cannot be read: {error!r}") from error
    stored: dict[str, StoredTensor] = {}
    for shard in sorted(set(weight_map.values())):
        if Path(shard).name != shard:
            raise CheckpointError(f"{index} names {shard!r}, which is not a file of its folder")
        if not (folder / shard).is_file():
            raise CheckpointError(f"{index} names the shard {shard}, which is missing")
        tensors = read_header(folder / shard)
        listed = {name for name, file in weight_map.items() if file == shard}
        for name in sorted(listed ^ tensors.keys()):
            where = "is not in the shard" if name in listed else "is in the shard but not in the index"
            raise CheckpointError(f"{name} {where}: {index} and {shard} do not fit together")
        stored |= tensors
    return stored


def _check_equal(copy: StoredTensor, original: StoredTensor) -> None:
    """A tied head may be stored beside the embedding, if it is the same; otherwise the model is not tied at all."""
    same = (copy.dtype, copy.shape) == (original.dtype, original.shape)
    if same:
        buffers = [torch.empty(CHUNK_BYTES, dtype=torch.uint8) for _ in range(2)]
        with copy.path.open("rb") as first, original.path.open("rb") as second:
            for start in range(0, copy.num_bytes, CHUNK_BYTES):
                size = min(CHUNK_BYTES, copy.num_bytes - start)
                read_bytes(first.fileno(), copy.offset + start, buffers[0][:size])
                read_bytes(second.fileno(), original.offset + start, buffers[1][:size])
                same = same and torch.equal(buffers[0][:size], buffers[1][:size])
    if not same:
        raise CheckpointError(
            f"tie_word_embeddings is true, but {copy.name} differs from {original.name};"
            " set tie_word_embeddings to false in config.json to use both"
        )


def _clear_empty_slots(decoder: Decoder, local_experts: Sequence[Sequence[int]]) -> None:
    for mlp, experts in zip(decoder.moe_mlps(), local_experts, strict=True):
        for slot, expert in enumerate(experts):
            if expert < 0:
                mlp.gate_up[slot].zero_()
                mlp.down[slot].zero_()
                for scale in (mlp.gate_up_scale, mlp.down_scale):
                    if scale is not None:
                        scale[slot].zero_()


def _check_filled(decoder: Decoder, copies: Sequence[Copy], local_experts: Sequence[Sequence[int]]) -> None:
    """An invariant of the rules: the copies fill every parameter, slot by slot, exactly."""
    rows: dict[str, int] = {}
    for copy in copies:
        rows[copy.target] = rows.get(copy.target, 0) + copy.num_rows
    # A matrix brings its scale.
    expected = {
        name: parameter.shape[0]
        for name, parameter in decoder.named_parameters()
        if not name.endswith(SCALE_SUFFIX)
    }
    for layer, experts in zip(decoder.spec.moe_layers, local_experts, strict=True):
        held = sum(expert >= 0 for expert in experts)
        for name in ("gate_up", "down"):
            target = f"layers.{layer}.mlp.{name}"
            expected[target] = held * decoder.get_parameter(target).shape[1]
    assert rows == {name: count for name, count in expected.items() if count}, (
        "weight rules and decoder differ"
    )


def _read_all(decoder: Decoder, copies: Sequence[Copy], progress: Callable[[float], None]) -> None:
    total, done = sum(copy.total_bytes for copy in copies), 0
    spec = decoder.spec
    stored = None if spec.stored is None else spec.stored.scheme
    progress(0.0)
    with ExitStack() as stack:
        reader = WeightReader(stack, stored)
        for copy in copies:
            target = decoder.get_parameter(copy.target)
            block = target if copy.slot is None else target[copy.slot]
            rows = block[copy.first_row : copy.first_row + copy.num_rows]
            reader.fill(copy, rows, *_kept(decoder, copy))
            done += copy.total_bytes
            progress(done / total)


def _kept(decoder: Decoder, copy: Copy) -> tuple[QuantScheme | None, torch.Tensor | None]:
    """The scheme of the parameter that a matrix goes to and where its scales go, [rows, columns]; None for what is not quantised."""
    spec = decoder.spec
    scheme = spec.dense_scheme if copy.slot is None else spec.expert_scheme
    if scheme is None or decoder.get_parameter(copy.target).dtype != scheme.payload:
        return None, None
    scale = decoder.get_parameter(copy.target + SCALE_SUFFIX)
    if copy.slot is not None:
        own = scale[copy.slot]
        return scheme, own.view(-1, *own.shape[-2:])[copy.first_row // copy.num_rows]
    return scheme, scheme.scale_rows(scale, copy.first_row, copy.first_row + copy.num_rows)


def _silent(share: float) -> None:
    """Progress that nobody asked for."""
