"""Recording the expert loads of a real server at ep 2, over HTTP and from Python."""

from __future__ import annotations

import itertools
import json
import random
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import numpy as np
import pytest

from moe_runtime import LLM, SamplingParams
from moe_runtime.errors import CapacityError
from moe_runtime.placement.record import load_record
from tests.helpers.real_server import RealServer
from tests.helpers.tiny_models import make_tiny
from tests.helpers.tiny_tokenizer import VOCAB_SIZE, save_tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator

FLAGS = ("--num-kv-blocks", "64", "--dtype", "float32", "--record-routes-share", "1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    seed = random.SystemRandom().randrange(2**31)
    print(f"checkpoint seed {seed}")
    make_tiny("qwen3_moe", folder, seed, vocab_size=VOCAB_SIZE)
    save_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def http(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    where = tmp_path_factory.mktemp("records")
    flags = (*FLAGS, "--expert-distribution-dir", str(where), "--trace-dir", str(where))
    with (
        RealServer(folder, 2, where / "server.log", *flags) as server,
        httpx.Client(base_url=server.base_url, timeout=120) as client,
    ):
        yield client


def complete(http: httpx.Client, prompt: list[int], num_tokens: int) -> list[str]:
    body = {"model": http.get("/v1/models").json()["data"][0]["id"], "prompt": prompt, "max_tokens": num_tokens,
            "ignore_eos": True, "temperature": 0}  # fmt: skip
    answer = http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return [choice["text"] for choice in answer.json()["choices"]]


def test_a_record_over_http(http: httpx.Client) -> None:
    assert http.post("/start_expert_distribution_record").json() == {"success": True, "recording": True}
    complete(http, list(range(5, 25)), 9)
    assert http.post("/stop_expert_distribution_record").json() == {"success": True, "recording": False}
    complete(http, list(range(30, 40)), 5)
    dumped = http.post("/dump_expert_distribution_record").json()
    record = load_record(Path(dumped["folder"]))
    meta = record.meta
    assert (meta.num_ranks, meta.architecture) == (2, "Qwen3MoeForCausalLM")
    # 20 tokens of a prompt, then 8 of the 9 that were generated; those of the second request came after the stop.
    assert meta.split == "auto"
    assert record.tokens_WPN.sum(axis=(0, 2)).tolist() == [20, 8]
    assert dumped["num_steps"] == record.num_steps_W.sum() == 9
    sums = record.counts_WPNLE.sum(axis=(0, 2, 4))
    assert sums.tolist() == [[20 * meta.top_k] * meta.num_layers, [8 * meta.top_k] * meta.num_layers]
    # The routes say the same.
    routes = record.routes
    assert routes.topk_ids_tLK.shape == (28, meta.num_layers, meta.top_k)
    for layer in range(meta.num_layers):
        counted = np.bincount(routes.topk_ids_tLK[:, layer].ravel(), minlength=meta.num_experts)
        assert counted.tolist() == record.loads[:, layer].sum(axis=0).tolist()
    assert (record.forward_us_WN.sum(axis=0) > 0).all()


def test_metrics_tell_of_loads(http: httpx.Client) -> None:
    for _ in range(3):
        complete(http, list(range(7, 30)), 40)
    text = http.get("/metrics").text
    values = {
        name: float(value)
        for name, value in re.findall(
            r"^moe_runtime:(\S+) (\S+)$", text.replace("model_name=", ""), re.MULTILINE
        )
    }
    even = {name: value for name, value in values.items() if name.startswith("eplb_balancedness")}
    assert len(even) == 2
    # With two ranks, from one that has it all to even.
    assert all(0.5 <= value <= 1.0 for value in even.values()), even
    for what in ("moe_rank_tokens_total", "moe_dispatch_wait_seconds_total", "moe_dispatch_bytes_total"):
        assert any(name.startswith(what) and value > 0 for name, value in values.items()), what
    for rank, scope in itertools.product("01", ("local", "intra", "inter")):
        (name,) = [n for n in values if f'engine="{rank}"' in n and f'scope="{scope}"' in n]
        assert (values[name] > 0) == (scope != "inter"), name


def test_recording_from_python_changes_nothing(folder: Path, tmp_path: Path) -> None:
    prompts = [list(range(5, 20)), list(range(8, 30)), [9]]
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=1)
    results = []
    for share in (0.0, 1.0):
        with LLM(
            model=str(folder), skip_tokenizer_init=True, num_kv_blocks=64, deterministic=True,
            record_routes_share=share, expert_distribution_dir=str(tmp_path / "records"),
        ) as llm:  # fmt: skip
            results.append(
                [
                    (o.outputs[0].token_ids, o.outputs[0].logprobs)
                    for o in llm.generate(prompts, params, use_tqdm=False)
                ]
            )
            record = load_record(llm.dump_expert_distribution_record())
            assert record.tokens_WPN.sum() == sum(map(len, prompts)) + 3 * 5
            assert len(record.routes.step_t) == (record.tokens_WPN.sum() if share else 0)
            blocked = tmp_path / "file"
            blocked.touch()
            with pytest.raises(CapacityError, match=r"rank 0: .*file"):
                llm.dump_expert_distribution_record(blocked / "below")
    assert results[0] == results[1]


@contextmanager
def busy(http: httpx.Client, seed: int) -> Iterator[None]:
    """While clients ask for completions, and many leave before theirs are done."""
    draw, stop = random.Random(seed), threading.Event()
    name = http.get("/v1/models").json()["data"][0]["id"]

    def client(seed: int) -> None:
        mine = random.Random(seed)
        with httpx.Client(base_url=http.base_url, timeout=60) as own:
            while not stop.is_set():
                prompt = [mine.randrange(5, 200) for _ in range(mine.randint(1, 40))]
                body = {"model": name, "prompt": prompt, "max_tokens": 60, "ignore_eos": True, "stream": True}
                with own.stream("POST", "/v1/completions", json=body) as answer:
                    lines = answer.iter_lines()
                    for _ in range(mine.choice([1, 5, 1000])):
                        if next(lines, None) is None:
                            break

    threads = [threading.Thread(target=client, args=(draw.getrandbits(32),)) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_records_under_load_have_the_same_steps_on_all_ranks(http: httpx.Client, seed: int) -> None:
    draw = random.Random(seed)
    with busy(http, seed):
        for number in range(12):
            assert http.post("/start_expert_distribution_record").status_code == 200
            time.sleep(draw.uniform(0, 0.2))
            if number % 2:
                assert http.post("/stop_expert_distribution_record").status_code == 200
            dumped = http.post("/dump_expert_distribution_record").json()
            record = load_record(Path(dumped["folder"]))
            assert record.num_steps_W.sum() == dumped["num_steps"], "every rank has all of them"
            # Every token chose its experts in every layer, also those of clients that left.
            chosen_WPNL = record.counts_WPNLE.sum(axis=4)
            assert (chosen_WPNL == record.tokens_WPN[..., None] * record.meta.top_k).all()
            assert len(record.routes.step_t) == record.tokens_WPN.sum()


def test_traces_under_load_have_the_same_steps_on_all_ranks(http: httpx.Client, seed: int) -> None:
    with busy(http, seed):
        for _ in range(5):
            assert http.post("/start_profile", json={"num_steps": 1000}).status_code == 200
            time.sleep(0.5)  # a step or more, also where others keep the machine busy
            done = http.post("/stop_profile").json()
            events = json.loads(Path(done["file"]).read_text())["traceEvents"]
            first, second = (
                [e["ts"] for e in events if e["pid"] == rank and e["name"] == "step"] for rank in range(2)
            )
            assert len(first) == len(second) > 0


def test_records_are_started_and_stopped_in_any_order(http: httpx.Client) -> None:
    for path in ("stop", "stop", "dump", "start", "start", "dump", "stop", "dump"):
        answer = http.post(f"/{path}_expert_distribution_record", content=b'{"folder": "/", ')
        assert answer.status_code == 200, "it has no body; records go where the operator said"
        if path == "dump":
            record = load_record(Path(answer.json()["folder"]))
            assert len(record.num_steps_W) == answer.json()["num_windows"]
    assert record.num_steps_W.sum() == 0, "nothing was computed since the start"
    assert http.get("/dump_expert_distribution_record").status_code == 405
    assert http.post("/start_expert_distribution_record").json()["recording"]


def test_dumps_at_once_are_whole_or_refused(http: httpx.Client) -> None:
    complete(http, list(range(5, 25)), 30)
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: http.post("/dump_expert_distribution_record"), range(16)))
    written = [a.json()["folder"] for a in answers if a.status_code == 200]
    assert len(set(written)) == len(written) >= 1
    records = [load_record(Path(folder)) for folder in written]
    assert all(np.array_equal(r.counts_WPNLE, records[0].counts_WPNLE) for r in records)
    for answer in answers:
        if answer.status_code != 200:
            assert answer.status_code == 503
            assert "another record is still being written" in answer.text


@contextmanager
def blocked(folder: Path) -> Iterator[None]:
    """A file is in the folder's place."""
    aside = folder.with_name(folder.name + "-aside")
    folder.rename(aside)
    folder.touch()
    try:
        yield
    finally:
        folder.unlink()
        aside.rename(folder)


def test_a_folder_that_cannot_be_written_harms_nobody(http: httpx.Client) -> None:
    folder = Path(http.post("/dump_expert_distribution_record").json()["folder"])
    http.post("/start_profile", json={"num_steps": 3})
    text = complete(http, list(range(5, 25)), 9)
    with blocked(folder.parent):
        for path in ("dump_expert_distribution_record", "stop_profile", "stop_profile"):
            answer = http.post(f"/{path}")
            assert answer.status_code == 503, answer.text
            assert str(folder.parent) in answer.text
        assert complete(http, list(range(5, 25)), 9) == text
    # What was traced has been kept.
    assert [r["steps"] for r in http.post("/stop_profile").json()["summary"]["ranks"]] == [3, 3]
    assert http.post("/stop_profile").status_code == 400
    assert http.post("/dump_expert_distribution_record").status_code == 200
    assert not [*folder.parent.rglob("*.draft")]


@pytest.mark.parametrize(
    "body",
    ["[]", "3", "null", "{", '{"num_steps": 1001}', '{"num_steps": 1e300}', '{"num_steps": -1}', '{"num_steps": "5"}',
     '{"num_steps": null}', '{"num_steps": true}', '{"num_steps": 2.5}', '{"num_steps": ' + "9" * 400 + "}", "[" * 5000,
     '{"output_dir": "/tmp"}', '{"num_steps": NaN}', "\xff"],
)  # fmt: skip
def test_bad_traces_are_refused(http: httpx.Client, body: str) -> None:
    answer = http.post("/start_profile", content=body.encode("latin-1"))
    assert answer.status_code == 400, answer.text
    assert http.post("/stop_profile").status_code == 400, "none was started"


def test_a_trace_over_http(http: httpx.Client) -> None:
    assert http.post("/stop_profile").status_code == 400
    assert http.post("/start_profile", json={"num_steps": 0}).status_code == 400
    assert http.post("/start_profile", json={"steps": 3}).status_code == 400
    assert http.post("/start_profile", json={"num_steps": 4}).json() == {"success": True, "num_steps": 4}
    assert http.post("/start_profile").status_code == 400
    complete(http, list(range(5, 25)), 9)
    done = http.post("/stop_profile").json()
    events = json.loads(Path(done["file"]).read_text())["traceEvents"]
    for rank in range(2):
        own = [e for e in events if e["pid"] == rank and e["ph"] == "X"]
        assert sum(e["name"] == "step" for e in own) == 4
        assert {"attention", "router", "dispatch", "experts", "combine", "wait"} <= {e["name"] for e in own}
    assert [r["steps"] for r in done["summary"]["ranks"]] == [4, 4]
    assert done["summary"]["verdict"]
    # Ended by hand: what there is, which is nothing on an idle server.
    http.post("/start_profile")
    assert http.post("/stop_profile").json()["summary"]["verdict"] == "No step was computed."
