"""Placement formats that are JSON or YAML: ours, SGLang, vLLM, vllm-ascend and TensorRT-LLM.

Nothing in these files is executed: JSON by msgspec, YAML by PyYAML's safe loader, without aliases and tags.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import yaml

from moe_runtime.core import ExpertPlacement
from moe_runtime.placement.stored import (
    MAX_LAYERS,
    Model,
    StoredLoads,
    StoredPlacement,
    integer,
    integers,
    loads,
    refuse,
)

OURS, OURS_VERSION = "moe-runtime-placement", 1
MAX_DEPTH = 16
"""Of YAML collections inside one another; TensorRT-LLM's have 3."""
MAX_NODES = 2**24
_SafeLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_Row = tuple[int, ...]
Why = Sequence[str]


def parse_json(text: bytes) -> Any:
    """Plain Python values. Raises ValueError."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ValueError(str(error)) from error


def parse_yaml(text: bytes) -> Any:
    """Plain Python values, of YAML without aliases, tags and second documents. Raises ValueError."""
    try:
        depth = 0
        for nodes, event in enumerate(yaml.parse(text, Loader=_SafeLoader)):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if (
                isinstance(event, yaml.AliasEvent)
                or getattr(event, "tag", None)
                or depth > MAX_DEPTH
                or nodes > MAX_NODES
            ):
                raise ValueError(
                    f"line {event.start_mark.line + 1}: aliases, tags, deep nesting and huge files are not read"
                )
        return yaml.load(text, Loader=_SafeLoader)
    except (yaml.YAMLError, RecursionError, UnicodeDecodeError) as error:
        raise ValueError(" ".join(str(error).split())) from error


# --- ours -------------------------------------------------------------------------------------------------------------


def read_ours(data: Any) -> StoredPlacement:
    """{"format", "version", "checkpoint", "num_experts", "slots": [MoE layer][rank][slot], "why": [...], "prediction": {...}}."""
    name = "moe_runtime"
    fields = {"format", "version", "checkpoint", "num_experts", "slots", "why", "prediction"}
    if not isinstance(data, dict) or data.get("format") != OURS:
        refuse(name, f"has no `format` {OURS!r}")
    integer(data.get("version"), name, "`version`", OURS_VERSION, OURS_VERSION)
    if unknown := sorted(str(key)[:40] for key in data.keys() - fields):
        refuse(name, f"has the unknown field {unknown[0]!r}; known are {', '.join(sorted(fields))}")
    checkpoint, why = data.get("checkpoint", ""), data.get("why", [])
    if not isinstance(checkpoint, str):
        refuse(name, "`checkpoint` must be a text")
    if not isinstance(why, list) or not all(isinstance(sentence, str) for sentence in why):
        refuse(name, "`why` must be a list of texts")
    prediction = data.get("prediction")
    if prediction is not None and not isinstance(prediction, dict):
        refuse(name, "`prediction` must be a mapping")
    layers = _layers(data.get("slots"), name, "`slots`")
    slots = []
    for i, ranks in enumerate(layers):
        if not isinstance(ranks, list) or not ranks:
            refuse(name, f"layer {i} must be a list with one list of experts per rank")
        slots.append(tuple(integers(r, name, f"layer {i}, rank {n}") for n, r in enumerate(ranks)))
    return StoredPlacement(
        format=name,
        slots=tuple(slots),
        ranks_known=True,
        num_experts=integer(data.get("num_experts"), name, "`num_experts`", 1, 2**20),
        checkpoint=checkpoint,
        why=tuple(why),
        prediction=prediction,
    )


def write_ours(
    placement: ExpertPlacement, model: Model, why: Why, prediction: Mapping[str, Any] | None = None
) -> bytes:
    """With one line per rank, so that two files can be compared with diff. prediction: `report_data.Prediction` as a mapping."""
    head: dict[str, Any] = {
        "format": OURS, "version": OURS_VERSION, "checkpoint": model.checkpoint, "num_experts": placement.num_experts, "why": list(why),
    }  # fmt: skip
    if prediction is not None:
        head["prediction"] = prediction
    lines = [f' "{key}": {json.dumps(value, ensure_ascii=False)},' for key, value in head.items()]
    layers = [
        "  [\n" + ",\n".join(f"   {json.dumps(list(rank))}" for rank in layer) + "\n  ]"
        for layer in placement.slots
    ]
    return ("{\n" + "\n".join(lines) + '\n "slots": [\n' + ",\n".join(layers) + "\n ]\n}\n").encode()


# --- SGLang -----------------------------------------------------------------------------------------------------------


def read_sglang(data: Mapping[Any, Any], name: str) -> StoredPlacement | StoredLoads:
    """{"physical_to_logical_map": [layer][slot]} or {"logical_count": [step][layer][expert]}; layers are all of the decoder."""
    if "physical_to_logical_map" in data:
        rows = _layers(data["physical_to_logical_map"], name, "`physical_to_logical_map`")
        return _flat(name, [integers(row, name, f"layer {i}") for i, row in enumerate(rows)])
    if "logical_count" not in data:
        found = ", ".join(sorted(str(key)[:40] for key in data)) or "nothing"
        refuse(name, f"needs `physical_to_logical_map` or `logical_count`; has {found}")
    return StoredLoads(name, loads(data["logical_count"], name, "`logical_count`"))


def sglang_map(placement: ExpertPlacement, model: Model) -> list[list[int]]:
    """[decoder layer][slot]. SGLang has a row for every decoder layer; where there are no experts it is never used."""
    num_slots = len(placement.slots[0]) * len(placement.slots[0][0])
    unused = [slot % placement.num_experts for slot in range(num_slots)]
    by_layer = dict(zip(model.moe_layers, flat_rows(placement), strict=True))
    return [by_layer.get(layer, unused) for layer in range(model.num_layers)]


def write_sglang(placement: ExpertPlacement, model: Model, _why: Why) -> bytes:
    """For --init-expert-location."""
    return _json_rows("physical_to_logical_map", sglang_map(placement, model))


# --- vLLM -------------------------------------------------------------------------------------------------------------


def read_vllm(data: Any) -> StoredPlacement:
    """[slot] for all layers alike, or [MoE layer][slot]."""
    name = "vllm"
    if not isinstance(data, list) or not data:
        refuse(name, "must be a list of experts, or one such list per layer")
    if not isinstance(data[0], list):
        return _flat(name, [integers(data, name, "the list")], for_every_layer=True)
    rows = _layers(data, name, "the file")
    return _flat(name, [integers(row, name, f"layer {i}") for i, row in enumerate(rows)])


def write_vllm(placement: ExpertPlacement, _model: Model, _why: Why) -> bytes:
    """[MoE layer][slot]."""
    rows = ",\n".join(json.dumps(row) for row in flat_rows(placement))
    return f"[\n{rows}\n]\n".encode()


# --- vllm-ascend ------------------------------------------------------------------------------------------------------


def read_ascend(data: Any) -> StoredPlacement:
    """{"moe_layer_count", "layer_list": [{"layer_id", "device_count", "device_list": [{"device_id", "device_expert"}]}]}."""
    name = "vllm_ascend"
    if not isinstance(data, dict) or "layer_list" not in data:
        refuse(name, "needs `layer_list`")
    layers = _layers(data["layer_list"], name, "`layer_list`")
    integer(data.get("moe_layer_count"), name, "`moe_layer_count`", len(layers), len(layers))
    ids, slots = [], []
    for i, layer in enumerate(layers):
        where = f"`layer_list` entry {i}"
        if not isinstance(layer, dict):
            refuse(name, f"{where} must be a mapping")
        ids.append(integer(layer.get("layer_id"), name, f"{where}: `layer_id`", 0, MAX_LAYERS))
        slots.append(_devices(layer, name, f"layer {ids[-1]}"))
    if len(set(ids)) < len(ids):
        refuse(name, "has a `layer_id` twice")
    return StoredPlacement(name, tuple(slots), ranks_known=True, layer_ids=tuple(ids))


def _devices(layer: dict[Any, Any], name: str, where: str) -> tuple[_Row, ...]:
    """[rank][slot] of one layer, in order of `device_id`."""
    devices = layer.get("device_list")
    if not isinstance(devices, list) or not devices or not all(isinstance(d, dict) for d in devices):
        refuse(name, f"{where}: `device_list` must be a list of mappings")
    integer(layer.get("device_count"), name, f"{where}: `device_count`", len(devices), len(devices))
    by_id: dict[int, _Row] = {}
    for device in devices:
        rank = integer(device.get("device_id"), name, f"{where}: `device_id`", 0, len(devices) - 1)
        if rank in by_id:
            refuse(name, f"{where} has `device_id` {rank} twice")
        by_id[rank] = integers(device.get("device_expert"), name, f"{where}, device {rank}")
    return tuple(by_id[rank] for rank in range(len(devices)))


def write_ascend(placement: ExpertPlacement, _model: Model, _why: Why) -> bytes:
    """`layer_id` counts MoE layers, as vllm-ascend's own record of its maps does."""
    layers = [
        {
            "layer_id": i,
            "device_count": len(ranks),
            "device_list": [{"device_id": n, "device_expert": list(r)} for n, r in enumerate(ranks)],
        }
        for i, ranks in enumerate(placement.slots)
    ]
    return (json.dumps({"moe_layer_count": len(layers), "layer_list": layers}, indent=1) + "\n").encode()


# --- TensorRT-LLM -----------------------------------------------------------------------------------------------------


def read_trtllm(data: Any) -> StoredPlacement:
    """num_slots, layer_updates_per_iter, initial_global_assignments: {decoder layer: [expert per slot]}."""
    name = "trtllm"
    if not isinstance(data, dict) or "initial_global_assignments" not in data:
        refuse(name, "needs `initial_global_assignments`")
    layers = data["initial_global_assignments"]
    if not isinstance(layers, dict) or not 0 < len(layers) <= MAX_LAYERS:
        refuse(name, f"`initial_global_assignments` must map 1 to {MAX_LAYERS} layers to lists of experts")
    ids = tuple(integer(key, name, "a layer's number", 0, MAX_LAYERS) for key in layers)
    rows = [integers(row, name, f"layer {key}") for key, row in layers.items()]
    num_slots = integer(data.get("num_slots"), name, "`num_slots`", 1, 2**20)
    for key, row in zip(ids, rows, strict=True):
        if len(row) != num_slots:
            refuse(name, f"layer {key} has {len(row)} slots, but `num_slots` is {num_slots}")
    return _flat(name, rows, layer_ids=ids)


def write_trtllm(placement: ExpertPlacement, model: Model, _why: Why) -> bytes:
    """For moe_config.load_balancer; layer_updates_per_iter 0 keeps the placement as it is."""
    rows = flat_rows(placement)
    lines = [f"num_slots: {len(rows[0])}", "layer_updates_per_iter: 0", "initial_global_assignments:"]
    lines += [f"  {layer}: {row}" for layer, row in zip(model.moe_layers, rows, strict=True)]
    return ("\n".join(lines) + "\n").encode()


# --- common -----------------------------------------------------------------------------------------------------------


def flat_rows(placement: ExpertPlacement) -> list[list[int]]:
    """[MoE layer][slot], the ranks' slots one after the other."""
    return [[expert for rank in layer for expert in rank] for layer in placement.slots]


def _flat(
    name: str,
    rows: Sequence[_Row],
    layer_ids: tuple[int, ...] | None = None,
    for_every_layer: bool = False,
) -> StoredPlacement:
    slots = tuple((row,) for row in rows)
    return StoredPlacement(name, slots, False, layer_ids, for_every_layer)


def _layers(value: object, name: str, where: str) -> list[Any]:
    if not isinstance(value, list) or not 0 < len(value) <= MAX_LAYERS:
        refuse(name, f"{where} must be a list of 1 to {MAX_LAYERS} layers")
    return value


def _json_rows(key: str, rows: Sequence[Sequence[float]]) -> bytes:
    body = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    return f'{{"{key}": [\n{body}\n]}}\n'.encode()
