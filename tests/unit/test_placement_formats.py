"""Placement files: round trips through every format, what peers write, and files made to do harm."""

from __future__ import annotations

import io
import json
import os
import random
import zipfile
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
from moe_runtime.placement.validate import to_placement
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


def torch_file(value: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, **options)
    return file.getvalue()


def npz_file(**arrays: Any) -> bytes:
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


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


class Bomb:
    """Unpickled, it would make a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def zip_file(**entries: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in entries.items():
            archive.writestr(name.replace("__", "/"), data)
    return file.getvalue()


def npy_header(shape: str, dtype: str = "<i8") -> bytes:
    text = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}}}\n".encode()
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


def ours(**changes: Any) -> bytes:
    good = {"format": "moe-runtime-placement", "version": 1, "num_experts": 2, "slots": [[[0], [1]]]}
    return json.dumps({k: v for k, v in (good | changes).items() if v is not None}).encode()


HOSTILE: list[tuple[bytes, str]] = [
    (b"", "its format is not known"),
    (b"\x00" * 64, "nor valid YAML"),
    (b"\xff\xfe\xff", "nor valid YAML"),
    (b"hello", "its format is not known: it is no mapping"),
    (b"{", "not valid JSON"),
    (b"[" * 100_000, "not valid JSON"),
    (b"a: " + b"[" * 900, "deep nesting"),
    (b'{"a": 1}', "it is a mapping with a; a placement has one of format"),
    (b"[[0, NaN]]", "layer 0, slot 1: 'NaN' is not the number of an expert"),
    (b"[[0, 1.0]]", r"layer 0, slot 1: '1.0' is not the number of an expert"),
    (b"[[0, true]]", r"layer 0, slot 1: 'True' is not"),
    (b"[[0], 1]", "layer 1 must be a list of experts, not int"),
    (b"[]", "must be a list of experts, or one such list per layer"),
    (b"[[0, 99999999999999999999]]", "layer 0, slot 1|out of range"),
    (b"[" + b"9" * 10_000 + b"]", "not valid JSON|is not the number of an expert"),
    (b"!!python/object/apply:os.system ['touch owned']", "tags"),
    (b"initial_global_assignments: !!python/name:os.system x", "tags"),
    (b"a: &a [0]\ninitial_global_assignments: {0: *a}", "aliases"),
    (b"a: 1\n---\nb: 2", "nor valid YAML"),
    (b"num_slots: 2\ninitial_global_assignments: {0: [0]}", "layer 0 has 1 slots, but `num_slots` is 2"),
    (b"initial_global_assignments: {0: [0]}", "`num_slots` is 'None'"),
    (b"num_slots: 1\ninitial_global_assignments: {x: [0]}", "a layer's number is 'x'"),
    (b"num_slots: 1\ninitial_global_assignments: {0: [.nan]}", "layer 0, slot 0: 'nan' is not"),
    (b"num_slots: 1\ninitial_global_assignments: [0]", "must map 1 to 4096 layers"),
    (b'{"physical_to_logical_map": 3}', "`physical_to_logical_map` must be a list"),
    (b'{"logical_count": [[1, -2]]}', r"layer 0, expert 1 has the load -2.0; loads are finite and not negative"),
    (b'{"logical_count": [[1], [2, 3]]}', "not an array of numbers"),
    (b'{"logical_count": []}', "has shape"),
    (b'{"layer_list": [{}], "moe_layer_count": 2}', "`moe_layer_count` is '2'; it must be an integer from 1 to 1"),
    (b'{"layer_list": [{}], "moe_layer_count": 1}', "entry 0: `layer_id` is 'None'"),
    (json.dumps({"moe_layer_count": 1, "layer_list": [{"layer_id": 4, "device_count": 1, "device_list": [{"device_id": 1, "device_expert": [0]}]}]}).encode(),
     "layer 4: `device_id` is '1'; it must be an integer from 0 to 0"),
    (ours(version=2), "`version` is '2'"),
    (ours(slotz=[]), "unknown field 'slotz'"),
    (ours(slots=None), "`slots` must be a list"),
    (ours(slots=[[0]]), "layer 0, rank 0 must be a list"),
    (ours(why="x"), "`why` must be a list of texts"),
    (torch_file([1, 2]), "must hold a dict, not list"),
    (torch_file({"last_physical_to_logical_map": torch.zeros(1), "records": []}), "has last_physical_to_logical_map, records"),
    (torch_file({"physical_to_logical_map": torch.zeros(2, 2)}), "must be integers"),
    (torch_file({"physical_to_logical_map": torch.zeros(2, dtype=torch.int64)}), "must be integers"),
    (torch_file({"physical_to_logical_map": torch.zeros(1, dtype=torch.int64).expand(10**6, 10**6)}), "at most"),
    (torch_file({"logical_count": torch.tensor([[1.0, float("nan")]])}), "has the load nan"),
    (torch_file({"logical_count": torch.zeros(1, 1, dtype=torch.complex64)}), "wanted .layers, experts."),
    (torch_file({"physical_to_logical_map": torch.zeros(2, 2)})[:200], "damaged zip"),
    (zip_file(a__data="x" * 10), "refuses it"),  # type: ignore[arg-type]
    (b"\x80\x04garbage", "refuses it"),
    (npz_file(other=np.zeros(1)), "needs the array phy2log"),
    (npz_file(phy2log=np.zeros((1, 1))), "must be integers"),
    (npz_file(phy2log=np.array([[object()]], dtype=object)), "without pickles|claims to be object"),
    (npz_file(phy2log=np.array([[0, 1]]), logcnt=np.array([[2, 1]])), "layer 0: logcnt and phy2log differ about expert 0"),
    (npz_file(phy2log=np.array([[0, 1]]), log2phy=np.array([[[1], [0]]])), "layer 0: log2phy and phy2log differ about expert 0"),
    (npz_file(phy2log=np.array([[0, 1]]), logcnt=np.array([2, 1])), "does not fit phy2log's"),
    (npz_file(weight=np.array([[1.0, np.inf]])), "has the load inf"),
    (zip_file(**{"phy2log.npy": npy_header("(100000, 100000, 100000)")}), "claims to be int64"),
    (zip_file(**{"phy2log.npy": npy_header("(1000, 1000)")}), "claims to be int64"),
    (zip_file(**{"phy2log.npy": b"x" * 100}), "cannot be read"),
]  # fmt: skip


@pytest.mark.parametrize(("data", "message"), HOSTILE)
def test_hostile_files(data: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=message) as caught:
        read_file(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("name", [None, "sglang_pt"])
def test_pickles_are_not_run(zipped: bool, name: str | None, tmp_path: Path) -> None:
    path, made = tmp_path / "file.pt", tmp_path / "made"
    path.write_bytes(
        torch_file({"physical_to_logical_map": Bomb(made)}, _use_new_zipfile_serialization=zipped)
    )
    with pytest.raises(ConfigError, match=r"weights_only=True. refuses it"):
        read_file(path, name)
    assert not made.exists()
    # The same file does its harm where it is trusted.
    torch.load(path, weights_only=False)
    assert made.exists()


def test_zip_bombs_are_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    monkeypatch.setattr("moe_runtime.placement.format_arrays.MAX_UNPACKED_BYTES", 10_000)
    for data in (
        npz_file(phy2log=np.zeros((1, 10_000), dtype=np.int64)),
        torch_file({"x": torch.zeros(10_000)}),
    ):
        path.write_bytes(data)
        with pytest.raises(ConfigError, match=r"would take \d+ bytes unpacked; at most 10000"):
            read_file(path)


def test_paths_that_are_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path, message in [
        (tmp_path / "absent", "there is no such file"),
        (tmp_path, "is not a file"),
        (tmp_path / "fifo", "is not a file"),
        (Path("/dev/zero"), "is not a file"),
        (tmp_path / ("x" * 300), "File name too long|no such file"),
    ]:
        with pytest.raises(ConfigError, match=message):
            read_file(path)
    monkeypatch.setattr(formats, "MAX_FILE_BYTES", 3)
    (tmp_path / "large").write_text("[0, 1]")
    with pytest.raises(ConfigError, match="has 6 bytes; at most 3 are read"):
        read_file(tmp_path / "large")


def mutated(data: bytes, draw: random.Random) -> bytes:
    """With a few bytes changed, lost, repeated or put in."""
    out = bytearray(data)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(out))
        way = draw.randrange(4)
        if way == 0:
            out[at] = draw.randrange(256)
        elif way == 1 and len(out) > 20:
            del out[at : at + draw.randint(1, 9)]
        elif way == 2:
            out[at:at] = out[draw.randrange(len(out)) :][: draw.randint(1, 20)]
        else:
            out[at:at] = draw.choice([b"[", b"{", b"-", b"9" * 30, b"null", b"1e9", b"\x00", b"\n"])
    return bytes(out)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FORMATS)
def test_damaged_files_are_read_or_refused(name: str, seed: int) -> None:
    """Whatever happened to a file, it gives a placement or one line that says why not."""
    draw = random.Random(seed)
    model = Model(5, 2, (1, 2), 3)
    good = formats._WRITERS[name](random_placement(draw, 2, 5, 2, 3), model, ["x"])
    messages = []
    for _ in range(200):
        data = mutated(good, draw)
        try:
            stored = formats.parse(data)
            if isinstance(stored, StoredPlacement):
                to_placement(stored, model, "FILE")
        except ConfigError as error:
            messages.append(str(error))
    assert messages
    assert [text for text in messages if "\n" in text] == []


def test_a_format_given_wrongly(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for content, name, message in [
        (b"[[0]]", "sglang_pt", "is not a file of format sglang_pt"),
        (b"[[0]]", "sglang_json", "must be a mapping"),
        (b"[[0]]", "trtllm", "needs `initial_global_assignments`"),
        (npz_file(phy2log=np.array([[0]])), "vllm", "not a file of format vllm, but looks like eplb"),
        (npz_file(phy2log=np.array([[0]])), "sglang_pt", "refuses it"),
        (torch_file({}), "eplb", "needs the array phy2log"),
        (b"[[0]]", "yaml", "format 'yaml' is unknown; allowed are moe_runtime"),
    ]:
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=message):
            read_file(path, name)
