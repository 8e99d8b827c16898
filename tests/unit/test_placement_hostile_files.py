"""Placement files that are damaged, made to do harm, or given as a format they are not."""

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

from moe_runtime.errors import ConfigError
from moe_runtime.placement import formats
from moe_runtime.placement.formats import FORMATS, read_file
from moe_runtime.placement.stored import Model, StoredPlacement
from moe_runtime.placement.validate import to_placement
from tests.helpers.placement_files import npz_file, torch_file
from tests.helpers.placements import random_placement


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


@pytest.mark.filterwarnings("ignore:Detected pickle protocol:UserWarning")
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
