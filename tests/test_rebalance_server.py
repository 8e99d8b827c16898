"""Moving experts of a running server over HTTP: outcome, state, metrics, and what /health says when a move is given up."""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from moe_runtime.core import ExpertPlacement
from moe_runtime.placement.formats import FORMATS, write_placement
from moe_runtime.placement.stored import Model
from tests.helpers.live_server import LiveServer, make_folder
from tests.helpers.real_server import RealServer
from tests.helpers.tiny_models import make_tiny
from tests.helpers.tiny_tokenizer import VOCAB_SIZE, save_tokenizer

LAYERS, EXPERTS = 6, 16
# Moving everything takes seconds, at so few bytes a step; exchanging two experts a fraction of one.
FLAGS = (
    "--enable-eplb", "--num-kv-blocks", "64", "--eplb-config.deadline_seconds", "1.0",
    "--eplb-config.max_bytes_per_step", "4096", "--eplb-config.step_interval", "1000000",
)  # fmt: skip


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("model")
    make_tiny(
        "qwen3_moe", folder, 3, vocab_size=VOCAB_SIZE, num_hidden_layers=LAYERS, num_experts=EXPERTS,
        hidden_size=96, moe_intermediate_size=64,
    )  # fmt: skip
    save_tokenizer(folder)
    with (
        RealServer(folder, 2, tmp_path_factory.mktemp("log") / "log", *FLAGS) as server,
        httpx.Client(base_url=server.base_url, timeout=60) as client,
    ):
        yield client


def metrics(http: httpx.Client) -> dict[str, float]:
    lines = [line for line in http.get("/metrics").text.splitlines() if not line.startswith("#")]
    found = [re.fullmatch(r"moe_runtime:(eplb_\S+) (\S+)", line) for line in lines]
    return {
        re.sub(r'model_name="[^"]*",|,?model_name="[^"]*"', "", m[1]): float(m[2])
        for m in found
        if m is not None
    }


def generate(http: httpx.Client) -> list[Any]:
    body = {"prompt": [40, 50, 60], "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return [choice["text"] for choice in answer.json()["choices"]]


def held(slots: list[list[list[int]]]) -> list[list[set[int]]]:
    return [[set(rank) - {-1} for rank in layer] for layer in slots]


def test_moves_state_and_metrics(http: httpx.Client) -> None:
    want = generate(http)
    assert http.get("/health").json() == {"status": "ready"}
    before = http.get("/placement").json()
    slots = before["slots"]
    assert held(slots) == [[set(range(8)), set(range(8, 16))]] * LAYERS
    # Two experts of one layer change places.
    swapped = [[sorted(rank - {0, 8}) for rank in layer] for layer in held(slots)[:1]]
    target = [
        [[*swapped[0][0], 8], [*swapped[0][1], 0]],
        *([sorted(r) for r in layer] for layer in held(slots)[1:]),
    ]
    answer = http.post("/rebalance", json={"placement": {"slots": target}})
    assert answer.status_code == 200, answer.text
    assert answer.json()["result"] == "applied"
    assert held(http.get("/placement").json()["slots"]) == held(target)
    assert generate(http) == want
    seen = metrics(http)
    assert seen['eplb_rebalances_total{result="applied"}'] == 1
    assert seen["eplb_rebalancing{}"] == 0
    assert seen["eplb_last_rebalance_timestamp_seconds{}"] > 1e9
    expert_bytes = 3 * 96 * 64 * 4
    assert (
        seen['eplb_moved_bytes_total{engine="0"}']
        == seen['eplb_moved_bytes_total{engine="1"}']
        == expert_bytes
    )
    assert seen['eplb_stall_seconds_count{engine="0"}'] == 1
    info = http.get("/server_info").json()["eplb"]
    assert info["settings"]["max_bytes_per_step"] == 4096
    assert [rank["version"] for rank in info["ranks"]] == [1, 1]
    assert info["ranks"][0]["state"] == "idle"
    assert "moves 2 experts" in info["ranks"][0]["decision"]


def test_a_move_that_is_given_up_shows_until_one_succeeds(http: httpx.Client) -> None:
    want = generate(http)
    before = http.get("/placement").json()["slots"]
    reversed_ranks = [[sorted(layer[1]), sorted(layer[0])] for layer in held(before)]
    answer = http.post("/rebalance", json={"placement": reversed_ranks})
    assert answer.status_code == 409
    assert answer.json()["result"] == "rolled_back"
    assert "the deadline has passed" in answer.json()["reason"]
    health = http.get("/health")
    assert health.status_code == 200
    assert health.json()["status"] == "degraded"
    assert "the deadline has passed" in health.json()["reason"]
    assert metrics(http)['eplb_rebalances_total{result="rolled_back"}'] == 1
    assert generate(http) == want
    now = http.get("/placement").json()["slots"]
    # A round that was complete stays; each is a whole placement.
    assert all(set().union(*layer) - {-1} == set(range(EXPERTS)) for layer in now)
    first = held(now)[0]
    a, b = min(first[0] - first[1]), min(first[1] - first[0])
    target = [[sorted(rank) for rank in layer] for layer in held(now)]
    target[0] = [sorted(first[0] - {a} | {b}), sorted(first[1] - {b} | {a})]
    assert http.post("/rebalance", json={"placement": target}).json()["result"] == "applied"
    assert http.get("/health").json() == {"status": "ready"}
    assert generate(http) == want


def test_bad_orders_are_explained(http: httpx.Client) -> None:
    for body, status, part in (
        ({"placement": [[[0]]]}, 400, "placement: has 1 layers; wanted 6 (MoE layers)"),
        ({"placement": [[[0], [1]]] * LAYERS}, 400, "MoE layer 0: expert 2 has no slot"),
        ({"placement": [[[0] * 99, list(range(16))]] * LAYERS}, 400, "rank 0, slot 1: holds expert 0 again"),
        ({"placement": [[list(range(16)), [1]]] * LAYERS}, 409, "16 experts; it has 9 slots"),
        ({"placement": {"slot": []}}, 400, "its format is not known: it is a mapping with slot"),
        ({"placement": [[["x"]]]}, 400, "Expected `int`, got `str`"),
        ({"placement": 5}, 400, "its format is not known"),
        ({"placement": {"logical_count": [[1] * 16] * LAYERS}}, 400, "holds loads of experts"),
        ({"plan": 5}, 400, "plan"),
        ({"timeout": -1}, 400, "timeout"),
        ({"timeout": 1e9}, 400, "timeout"),
    ):
        answer = http.post("/rebalance", json=body)
        assert answer.status_code == status, answer.text
        assert part in answer.text
    # Without a body: look at the load. There has not been enough of it.
    answer = http.post("/rebalance")
    assert answer.status_code == 200
    assert answer.json()["result"] == "skipped"
    assert "not enough evidence" in answer.json()["reason"]


@pytest.mark.parametrize("name", FORMATS)
def test_files_of_every_format_are_taken(http: httpx.Client, name: str, tmp_path: Path) -> None:
    """As the body itself; and as `placement` what is JSON."""
    now = held(http.get("/placement").json()["slots"])
    a, b = min(now[0][0] - now[0][1]), min(now[0][1] - now[0][0])
    target = [[sorted(rank) for rank in layer] for layer in now]
    target[0] = [sorted(now[0][0] - {a} | {b}), sorted(now[0][1] - {b} | {a})]
    placement = ExpertPlacement(tuple(tuple(tuple(rank) for rank in layer) for layer in target), EXPERTS)
    file = tmp_path / "placement"
    write_placement(file, placement, Model.of_moe_layers(LAYERS, EXPERTS, 2), name)
    if name in ("moe_runtime", "vllm"):
        answer = http.post("/rebalance", json={"placement": json.loads(file.read_text()), "force": True})
    else:
        answer = post_file(http, file.read_bytes(), "?force=true&timeout=30")
    assert answer.status_code == 200, answer.text
    assert answer.json()["result"] == "applied"
    assert held(http.get("/placement").json()["slots"]) == held(target)


def post_file(http: httpx.Client, content: bytes, query: str = "") -> httpx.Response:
    return http.post(
        f"/rebalance{query}", content=content, headers={"content-type": "application/octet-stream"}
    )


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, ("evil",))


def test_bad_files_are_explained_and_nothing_of_them_runs(
    http: httpx.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = http.get("/placement").json()
    evil = io.BytesIO()
    torch.save({"physical_to_logical_map": Evil()}, evil)
    bare = io.BytesIO()
    torch.save(Evil(), bare, _use_new_zipfile_serialization=False)
    arrays = io.BytesIO()
    np.savez(arrays, phy2log=np.array([[Evil()]], dtype=object))
    for content, query, part in (
        (evil.getvalue(), "", "torch.load(weights_only=True) refuses it"),
        (bare.getvalue(), "", "torch.load(weights_only=True) refuses it"),
        (arrays.getvalue(), "", "which the file does not hold or is too large"),
        (b"a: !!python/object/apply:os.mkdir [evil]", "", "tags"),
        (b"PK\x03\x04", "", "damaged zip"),
        (b"", "", "empty"),
        (b"[" * 100_000, "", "not valid"),
        (b"x" * (16 * 2**20 + 1), "", "larger than"),
        (b"[[0]]", "?force=maybe", "not valid JSON"),
        (b"[[0]]", "?force=5", "force"),
        (b"[[0]]", "?placement=5", "leave it out"),
        (b"[[0]]", "?plan=5", "plan"),
    ):
        answer = post_file(http, content, query)
        assert answer.status_code == 400, answer.text
        assert part in answer.text, answer.text
    assert http.post("/rebalance?force=true").status_code == 400
    assert http.get("/placement").json() == before
    assert not list(tmp_path.iterdir())


def test_without_the_flag_it_is_refused(tmp_path: Path) -> None:
    with LiveServer(make_folder(tmp_path)) as live, httpx.Client(base_url=live.base_url) as client:
        for answer in (client.post("/rebalance"), client.get("/placement")):
            assert answer.status_code == 501
            assert "--enable-eplb" in answer.json()["error"]["message"]
        assert client.get("/server_info").json()["eplb"] is None
        assert client.get("/health").json() == {"status": "ready"}
        assert "eplb_rebalances" not in client.get("/metrics").text
