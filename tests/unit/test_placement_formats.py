"""Placement files: round trips through every format, and what peers write."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from moe_runtime.core import ExpertPlacement
from moe_runtime.errors import ConfigError
from moe_runtime.placement import formats
from moe_runtime.placement.formats import FORMATS, read_file, read_placement, write_placement
from moe_runtime.placement.layout import contiguous
from moe_runtime.placement.stored import Model, StoredLoads, StoredPlacement
from tests.helpers.placement_files import npz_file, torch_file
from tests.helpers.placements import random_placement

SHAPES = [(1, 1, 1, 1), (2, 3, 2, 2), (3, 5, 3, 4), (2, 7, 4, 2), (4, 8, 1, 8), (1, 2, 5, 1), (3, 64, 8, 9)]
"""(MoE layers, experts, ranks, slots per rank)."""


def random_model(draw: random.Random, num_moe: int, num_experts: int, num_ranks: int) -> Model:
    """With a few decoder layers that have no experts, anywhere."""
    num_layers = num_moe + draw.randint(0, 3)
    return Model(num_experts, num_ranks, tuple(sorted(draw.sample(range(num_layers), num_moe))), num_layers)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_round_trip(name: str, shape: tuple[int, int, int, int], tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    num_moe, num_experts, num_ranks, width = shape
    model = random_model(draw, num_moe, num_experts, num_ranks)
    placement = random_placement(draw, num_moe, num_experts, num_ranks, width)
    path = tmp_path / "placement"
    assert write_placement(path, placement, model, name, ["because"]) == name
    # Which format it is follows from the content; naming it changes nothing.
    assert read_placement(path, model) == placement
    assert read_placement(path, model, name) == placement
    first = path.read_bytes()
    write_placement(path, read_placement(path, model), model, name, ["because"])
    assert path.read_bytes() == first or name in ("sglang_pt", "eplb")  # those hold times or the like
    assert [p.name for p in tmp_path.iterdir()] == ["placement"]


@pytest.mark.parametrize("source", FORMATS)
def test_conversion_both_ways(source: str, tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    model = random_model(draw, 3, 6, 3)
    placement = random_placement(draw, 3, 6, 3, 3)
    for target in FORMATS:
        write_placement(tmp_path / "a", placement, model, source)
        write_placement(tmp_path / "b", read_placement(tmp_path / "a", model), model, target)
        write_placement(tmp_path / "a", read_placement(tmp_path / "b", model), model, source)
        assert read_placement(tmp_path / "a", model) == placement


def test_the_suffix_names_the_format(tmp_path: Path) -> None:
    model, placement = Model.of_moe_layers(1, 2, 2), contiguous(1, 2, 2)
    for suffix, name in [("json", "moe_runtime"), ("pt", "sglang_pt"), ("npz", "eplb"), ("yaml", "trtllm")]:
        assert write_placement(tmp_path / f"x.{suffix}", placement, model) == name
        assert read_file(tmp_path / f"x.{suffix}").format == name
    with pytest.raises(ConfigError, match=r"suffix '\.txt' tells no format; allowed formats are moe_runtime"):
        write_placement(tmp_path / "x.txt", placement, model)
    with pytest.raises(ConfigError, match="'pickle' is unknown"):
        write_placement(tmp_path / "x.json", placement, model, "pickle")


def test_only_ours_has_empty_slots(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    model = Model.of_moe_layers(2, 5, 3)
    for placement in (contiguous(2, 5, 3), random_placement(draw, 2, 5, 3, 4, empty=0.8)):
        write_placement(tmp_path / "ours.json", placement, model)
        assert read_placement(tmp_path / "ours.json", model) == placement
        if any(-1 in rank for layer in placement.slots for rank in layer):
            for name in FORMATS[1:]:
                with pytest.raises(
                    ConfigError, match=rf"{name} has no empty slots, but MoE layer \d, rank \d, slot \d"
                ):
                    write_placement(tmp_path / "theirs", placement, model, name)
    assert [p.name for p in tmp_path.iterdir()] == ["ours.json"]


def test_ours_keeps_its_reasons(tmp_path: Path) -> None:
    model = Model.of_moe_layers(1, 2, 2, checkpoint="abc")
    why = ['expert 0: 2 replicas because it has 2.7 x the mean "load" Ä']
    write_placement(tmp_path / "x.json", contiguous(1, 2, 2), model, why=why)
    stored = read_file(tmp_path / "x.json")
    assert isinstance(stored, StoredPlacement)
    assert (stored.why, stored.checkpoint, stored.num_experts) == (tuple(why), "abc", 2)


# What follows are files as the peers' own code writes them, spelt out.

PEER_MODEL = Model(num_experts=3, num_ranks=2, moe_layers=(1, 2), num_layers=3)
PEER_PLACEMENT = ExpertPlacement(slots=(((0, 1), (2, 0)), ((2, 1), (0, 1))), num_experts=3)
ROWS = [[0, 1, 2, 0], [2, 1, 0, 1]]
ALL_ROWS = [[0, 1, 2, 0], *ROWS]


def ascend(rows: list[list[list[int]]], first_id: int = 0) -> dict[str, Any]:
    return {
        "moe_layer_count": len(rows),
        "layer_list": [
            {
                "layer_id": i + first_id,
                "device_count": len(devices),
                # The order of devices is told by their numbers.
                "device_list": [
                    {"device_id": d, "device_expert": e} for d, e in reversed(list(enumerate(devices)))
                ],
            }
            for i, devices in enumerate(rows)
        ],
    }


BY_RANK = [[row[:2], row[2:]] for row in ROWS]
PEER_FILES: list[tuple[str, bytes]] = [
    ("sglang_pt", torch_file({"physical_to_logical_map": torch.tensor(ALL_ROWS)})),
    ("sglang_pt", torch_file({"physical_to_logical_map": torch.tensor(ALL_ROWS, dtype=torch.int32), "rank": 0})),
    ("sglang_pt", torch_file({"physical_to_logical_map": ROWS}, _use_new_zipfile_serialization=False)),
    ("sglang_json", json.dumps({"physical_to_logical_map": ALL_ROWS}).encode()),
    ("sglang_json", json.dumps({"physical_to_logical_map": ROWS}).encode()),
    ("trtllm", yaml.safe_dump({"num_slots": 4, "layer_updates_per_iter": 0, "initial_global_assignments": {2: ROWS[1], 1: ROWS[0]}}).encode()),
    ("trtllm", yaml.safe_dump({"num_slots": 4, "initial_global_assignments": {0: ROWS[0], 1: ROWS[1]}}, default_flow_style=True).encode()),
    ("trtllm", yaml.safe_dump({"num_slots": 4, "initial_global_assignments": dict(enumerate(ALL_ROWS))}).encode()),
    ("vllm", json.dumps(ROWS, indent=2).encode()),
    ("vllm_ascend", json.dumps(ascend(BY_RANK)).encode()),
    ("vllm_ascend", json.dumps(ascend(BY_RANK, first_id=1)).encode()),
    ("eplb", npz_file(phy2log=np.array(ROWS))),
    ("eplb", npz_file(phy2log=np.array(ALL_ROWS, dtype=np.int32), logcnt=np.array([[2, 1, 1], [2, 1, 1], [1, 2, 1]]))),
    ("eplb", npz_file(phy2log=np.array(ROWS), log2phy=np.array([[[3, 0], [1, -1], [2, -1]], [[2, -1], [1, 3], [0, -1]]]))),
]  # fmt: skip


@pytest.mark.parametrize(("name", "data"), PEER_FILES)
def test_files_of_peers(name: str, data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(data)
    assert read_file(path).format == name
    assert read_placement(path, PEER_MODEL) == PEER_PLACEMENT


def test_one_list_for_all_layers(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("[0, 1, 2, 0]")
    assert read_placement(path, PEER_MODEL).slots == (((0, 1), (2, 0)),) * 2


def test_what_peers_are_given() -> None:
    """Read with their own libraries, not with this package's readers."""

    def written(name: str) -> bytes:
        return formats._WRITERS[name](PEER_PLACEMENT, PEER_MODEL, [])

    loaded = torch.load(io.BytesIO(written("sglang_pt")), weights_only=True)
    assert loaded["physical_to_logical_map"].tolist()[1:] == ROWS
    assert loaded["physical_to_logical_map"].shape == (3, 4)
    assert (
        json.loads(written("sglang_json"))["physical_to_logical_map"]
        == loaded["physical_to_logical_map"].tolist()
    )
    assert yaml.safe_load(written("trtllm")) == {
        "num_slots": 4,
        "layer_updates_per_iter": 0,
        "initial_global_assignments": {1: ROWS[0], 2: ROWS[1]},
    }
    assert json.loads(written("vllm")) == ROWS
    devices = [layer["device_list"] for layer in json.loads(written("vllm_ascend"))["layer_list"]]
    assert [[d["device_expert"] for d in layer] for layer in devices] == BY_RANK
    arrays = np.load(io.BytesIO(written("eplb")))
    assert arrays["phy2log"].tolist() == ROWS
    assert arrays["logcnt"].tolist() == [[2, 1, 1], [1, 2, 1]]
    assert arrays["log2phy"].tolist() == [[[0, 3], [1, -1], [2, -1]], [[2, -1], [1, 3], [0, -1]]]


@pytest.mark.parametrize("as_torch", [True, False])
@pytest.mark.parametrize("steps", [True, False])
def test_statistics_instead_of_a_placement(as_torch: bool, steps: bool, tmp_path: Path, seed: int) -> None:
    counts = np.random.default_rng(seed).integers(0, 1000, (4, 3, 5))
    given = counts if steps else counts[0]
    path = tmp_path / "file"
    path.write_bytes(
        torch_file({"logical_count": torch.tensor(given), "rank": 0})
        if as_torch
        else json.dumps({"logical_count": given.tolist()}).encode()
    )
    stored = read_file(path)
    assert isinstance(stored, StoredLoads)
    assert np.array_equal(stored.loads_WLE, counts if steps else counts[:1])
    with pytest.raises(ConfigError, match=r"holds loads of experts, not a placement; `launch/plan\.py plan`"):
        read_placement(path, PEER_MODEL)
