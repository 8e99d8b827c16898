"""Clients that leave, read slowly, or come in crowds; and what the metrics say of it."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from moe_runtime.engine.messages import REQUEST_TIME_BOUNDS, STEP_TOKEN_BOUNDS
from tests.helpers.live_server import LiveServer, make_folder
from tests.helpers.rank_tasks import NUM_BLOCKS


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with LiveServer(make_folder(tmp_path_factory.mktemp("model")), max_model_len=200_000) as live:
        yield live


def metrics_of(server: LiveServer) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """(name, labels without model_name) -> value."""
    text = httpx.get(server.base_url + "/metrics").text
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = tuple(sorted((k, v) for k, v in sample.labels.items() if k != "model_name"))
            found[sample.name.removeprefix("moe_runtime:"), labels] = sample.value
    return found


def post_raw(server: LiveServer, path: str, body: dict[str, Any]) -> socket.socket:
    """Send a request on a plain socket, so that the test decides when to read and when to leave."""
    host, port = server.base_url.removeprefix("http://").split(":")
    sock = socket.create_connection((host, int(port)), timeout=20)
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: test\r\nContent-Length: {len(content)}\r\n\r\n"
    sock.sendall(head.encode() + content)
    return sock


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("started", [False, True])
def test_a_client_that_leaves_frees_its_request(server: LiveServer, stream: bool, started: bool) -> None:
    if not started:
        server.hold()
    body = {"prompt": ["one two", "the router"], "n": 3, "max_tokens": 100_000, "stream": stream}
    sock = post_raw(server, "/v1/completions", body)
    server.wait_for(lambda: server.num_active() == 6)
    if started and stream:
        assert b"data: " in sock.recv(65536) + sock.recv(65536)
    sock.close()
    # While the ranks are held no token passes by: the end of the connection alone must be noticed.
    server.wait_for(lambda: sum(len(rank.aborted) for rank in server.ranks) == 6)
    assert server.call(server.num_active) == 0
    server.wait_for(lambda: server.life.state.num_in_flight == 0)
    server.release()
    values = metrics_of(server)
    assert values["request_success_total", (("finished_reason", "abort"),)] == 6
    assert values["request_success_total", (("finished_reason", "length"),)] == 0


def test_a_slow_reader_delays_nobody_and_misses_nothing(server: LiveServer) -> None:
    num_tokens = 30_000
    body = {"prompt": "who runs", "max_tokens": num_tokens, "stream": True, "return_token_ids": True}
    slow = post_raw(server, "/v1/completions", body)
    for _ in range(20):
        quick = httpx.post(
            server.base_url + "/v1/completions", json={"prompt": "x", "max_tokens": 3}, timeout=20
        )
        assert quick.json()["choices"][0]["text"] == "xxx"
    server.wait_for(lambda: server.num_active() == 0)
    received = bytearray()
    while b"[DONE]" not in received[-100:]:
        piece = slow.recv(1 << 20)
        assert piece
        received += piece
    slow.close()
    ids = [
        token
        for line in received.splitlines()
        if line.startswith(b"data: {")
        for token in json.loads(line.removeprefix(b"data: "))["choices"][0]["token_ids"]
    ]
    assert len(ids) == num_tokens


def test_a_crowd_of_clients_some_of_whom_leave(server: LiveServer, seed: int) -> None:
    draw = random.Random(seed)

    async def one(http: httpx.AsyncClient, number: int) -> str:
        text = "".join(draw.choices("expert ", k=draw.randint(2, 30))) + str(number)
        length = draw.randint(1, 60)
        body = {"prompt": text, "max_tokens": length, "stream": number % 2 == 0, "return_token_ids": True}
        call = asyncio.create_task(http.post("/v1/completions", json=body))
        if number % 3 == 0:
            await asyncio.sleep(draw.random() / 20)
            if call.cancel():
                return "left"
        answer = (await call).text
        if number % 2 == 0:
            lines = answer.split("\n\n")
            assert lines[-2] == "data: [DONE]"
            choices = [json.loads(line[6:])["choices"][0] for line in lines[:-2]]
        else:
            choices = json.loads(answer)["choices"]
        assert sum(len(choice["token_ids"]) for choice in choices) == length
        assert (text * 60).startswith("".join(choice["text"] for choice in choices))
        return "served"

    async def everyone() -> list[str]:
        limits = httpx.Limits(max_connections=200)
        async with httpx.AsyncClient(base_url=server.base_url, timeout=60, limits=limits) as http:
            return await asyncio.gather(*(one(http, number) for number in range(60)))

    fates = asyncio.run(everyone())
    assert fates.count("served") >= 40
    server.wait_for(lambda: server.num_active() == 0 and server.life.state.num_in_flight == 0)


def test_an_overloaded_server_says_when_to_come_back(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = make_folder(tmp_path_factory.mktemp("model"))
    options = {"max_num_seqs": 1, "max_queued_requests": 1}
    with LiveServer(folder, num_ranks=1, engine=options) as live:
        live.hold()
        waiting = [post_raw(live, "/v1/completions", {"prompt": "x"}) for _ in range(2)]
        live.wait_for(lambda: live.num_active() == 2)
        for stream in (False, True):
            answer = httpx.post(live.base_url + "/v1/completions", json={"prompt": "x", "stream": stream})
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "overloaded")
            assert int(answer.headers["retry-after"]) >= 1
        load = httpx.get(live.base_url + "/load").json()
        assert load["server_load"] == 2
        live.release()
        for sock in waiting:
            assert b"200 OK" in sock.recv(65536)
            sock.close()


def test_metrics_are_what_happened(server: LiveServer, seed: int) -> None:
    draw = random.Random(seed)
    lengths = [draw.randint(2, 20) for _ in range(6)]
    prompts = ["ab" * draw.randint(1, 9) for _ in lengths]
    began = time.perf_counter()
    for index, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        body = {"prompt": prompt, "max_tokens": length, "n": 2, "stream": index % 2 == 0}
        httpx.post(server.base_url + "/v1/completions", json=body).raise_for_status()
    wall_s = time.perf_counter() - began
    stopped = {"prompt": [40, 2], "max_tokens": 9}
    assert (
        httpx.post(server.base_url + "/v1/completions", json=stopped).json()["choices"][0]["finish_reason"]
        == "stop"
    )
    httpx.post(server.base_url + "/v1/completions", json={"prompt": "x", "top_p": 9})
    for rank in server.ranks:
        rank.stats.num_free_blocks, rank.stats.num_cached_blocks = 60, 15
        rank.stats.num_waiting, rank.stats.preemptions = 4 + rank.rank, 2
        rank.stats.prefix_queries, rank.stats.prefix_hits = 50, 20
        for tokens in (1, 2, 8, 16385):
            rank.stats.tokens_of_steps.add(tokens, STEP_TOKEN_BOUNDS)
        for seconds in (0.0, 0.3, 7.0):
            rank.stats.queue_times_s.add(seconds, REQUEST_TIME_BOUNDS)
    for rank in (0, 1):
        body = {"prompt": "x", "max_tokens": 1, "routed_dp_rank": rank}
        httpx.post(server.base_url + "/v1/completions", json=body).raise_for_status()
    values = metrics_of(server)

    sent = server.submitted()
    for rank in (0, 1):
        label = (("engine", str(rank)),)
        assert values["num_requests_running", label] == 0
        assert values["num_requests_waiting", label] == 4 + rank
        assert values["kv_cache_usage_perc", label] == pytest.approx((NUM_BLOCKS - 75) / NUM_BLOCKS)
        assert values["prefix_cache_queries_total", label] == 50
        assert values["prefix_cache_hits_total", label] == 20
        assert values["num_preemptions_total", label] == 2
        ends = {
            end: values["iteration_tokens_total_bucket", (*label, ("le", end))]
            for end in ("1.0", "8.0", "16384.0", "+Inf")
        }
        assert list(ends.values()) == [1, 3, 3, 4]
        assert values["iteration_tokens_total_sum", label] == 1 + 2 + 8 + 16385
        ends = {
            end: values["request_queue_time_seconds_bucket", (*label, ("le", end))]
            for end in ("0.3", "5.0", "10.0", "+Inf")
        }
        assert list(ends.values()) == [2, 2, 3, 3]
    per_rank = [values["generation_tokens_total", (("engine", str(r)),)] for r in (0, 1)]
    assert sum(per_rank) == 2 * sum(lengths) + 2 + 2
    per_rank = [values["prompt_tokens_total", (("engine", str(r)),)] for r in (0, 1)]
    assert sum(per_rank) == sum(len(submit.prompt_token_ids) for submit in sent)

    num_prompts, num_completions = len(prompts) + 3, 2 * len(prompts) + 3
    assert values["time_to_first_token_seconds_count", ()] == num_prompts
    assert values["e2e_request_latency_seconds_count", ()] == num_prompts
    assert values["request_prompt_tokens_count", ()] == num_prompts
    assert values["request_generation_tokens_count", ()] == num_completions
    assert values["request_params_n_sum", ()] == num_completions
    assert values["request_params_max_tokens_sum", ()] == sum(lengths) + 9 + 2
    assert values["request_generation_tokens_sum", ()] == 2 * sum(lengths) + 2 + 2
    assert values["request_success_total", (("finished_reason", "length"),)] == num_completions - 1
    assert values["request_success_total", (("finished_reason", "stop"),)] == 1
    assert values["request_success_total", (("finished_reason", "abort"),)] == 0
    # Tokens after a completion's first delta; a first delta of several tokens takes some of them away.
    gaps = 2 * sum(lengths) + 2 - (2 * len(lengths) + 1)
    assert 0 < values["inter_token_latency_seconds_count", ()] <= gaps
    assert values["time_to_first_token_seconds_sum", ()] <= values["e2e_request_latency_seconds_sum", ()]
    assert 0 < values["e2e_request_latency_seconds_sum", ()] < wall_s + 10
    assert 0 < values["request_time_per_output_token_seconds_count", ()] <= 2 * len(lengths) + 1
