"""The whole server on a tiny random checkpoint at ep 2: what it answers."""

from __future__ import annotations

import json
import random
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.helpers.parity import Reference, answer_of, check_answers
from tests.helpers.real_server import RealServer
from tests.helpers.tiny_models import make_tiny
from tests.helpers.tiny_tokenizer import VOCAB_SIZE, build_tokenizer, save_tokenizer

EP = 2
FLAGS = ("--num-kv-blocks", "64", "--dtype", "float32")
LONG = {"prompt": [40, 50, 60], "max_tokens": 400, "ignore_eos": True}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A folder and transformers' model of the same weights."""
    folder = tmp_path_factory.mktemp("tiny-mixtral")
    seed = random.SystemRandom().randrange(2**31)
    print(f"checkpoint seed {seed}")
    model = make_tiny("mixtral", folder, seed, vocab_size=VOCAB_SIZE)
    save_tokenizer(folder)
    return folder, model


@pytest.fixture(scope="module")
def server(checkpoint: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    log = tmp_path_factory.mktemp("log") / "server.log"
    with RealServer(checkpoint[0], EP, log, *FLAGS) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: RealServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.base_url + "/v1", api_key="unused", max_retries=0)


@pytest.fixture(scope="module")
def http(server: RealServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.base_url, timeout=120) as session:
        yield session


def model_name(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


def test_greedy_tokens_and_logprobs_are_those_of_transformers(
    http: httpx.Client, checkpoint: tuple[Path, Any], seed: int
) -> None:
    draw = random.Random(seed)
    prompts = [[draw.randrange(5, VOCAB_SIZE) for _ in range(draw.randint(1, 70))] for _ in range(6)]
    body = {"prompt": prompts, "max_tokens": 24, "temperature": 0, "ignore_eos": True, "logprobs": 3}
    answer = http.post("/v1/completions", json=body | {"return_token_ids": True}).json()
    assert answer["usage"]["completion_tokens"] == 6 * 24
    answers = [answer_of(prompt, choice) for prompt, choice in zip(prompts, answer["choices"], strict=True)]
    check_answers(Reference(checkpoint[1]), answers, 24)


def test_chat_is_the_same_streamed_or_not(client: openai.OpenAI, checkpoint: tuple[Path, Any]) -> None:
    messages: Any = [{"role": "user", "content": "who runs the naïve router?"}]
    options: Any = {"model": model_name(client), "messages": messages, "max_tokens": 20, "temperature": 0}
    whole = client.chat.completions.create(**options)
    stream = client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert whole.usage is not None
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    rendered = build_tokenizer().apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert whole.usage.prompt_tokens == len(build_tokenizer().encode(rendered))


def test_a_seed_repeats_a_draw_on_any_rank(http: httpx.Client) -> None:
    body = {
        "prompt": [9, 33, 71],
        "max_tokens": 30,
        "temperature": 1.5,
        "ignore_eos": True,
        "return_token_ids": True,
    }

    def ids(seed: int, rank: int) -> Any:
        answer = http.post("/v1/completions", json=body | {"seed": seed, "routed_dp_rank": rank}).json()
        return answer["choices"][0]["token_ids"]

    assert ids(5, 0) == ids(5, 1)
    assert ids(5, 0) != ids(6, 0)


def test_prefixes_are_reused_to_the_token(http: httpx.Client, seed: int) -> None:
    draw = random.Random(seed)
    prefix = [draw.randrange(5, VOCAB_SIZE) for _ in range(37)]
    http.post("/reset_prefix_cache")
    cached = []
    for last in (10, 11):
        body = {"prompt": [*prefix, last, 12], "max_tokens": 1, "routed_dp_rank": 1}
        answer = http.post("/v1/completions", json=body).json()
        cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert cached == [0, 37]


def test_choices_come_with_their_reasons(http: httpx.Client) -> None:
    for rank in http.get("/server_info").json()["ranks"]:
        chosen = rank["chosen"]
        # Which dispatcher it is depends on the room in /dev/shm; that the others lost for a reason does not.
        assert chosen["dispatcher"] in ("one_sided", "collective")
        assert "not local: 2 ranks" in chosen["dispatcher_reason"]
        assert chosen["quantization"] == "none"
        for what in ("moe_backend", "attention_backend"):
            assert chosen[what] == "cpu"
            assert chosen[f"{what}_reason"].startswith("auto; not ")
            for other in ("triton", "deterministic", "reference"):
                assert f"not {other}: " in chosen[f"{what}_reason"]


def scraped(http: httpx.Client) -> dict[str, float]:
    """Samples of /metrics by name and labels as written, without the prefix."""
    lines = [line for line in http.get("/metrics").text.splitlines() if not line.startswith("#")]
    pairs = [line.removeprefix("moe_runtime:").rsplit(" ", 1) for line in lines]
    return {name: float(value) for name, value in pairs}


def test_both_ranks_serve_and_are_counted(http: httpx.Client) -> None:
    def generated() -> list[float]:
        lines = http.get("/metrics").text.splitlines()
        found = [line for line in lines if line.startswith("moe_runtime:generation_tokens_total{")]
        return [float(line.split()[-1]) for line in sorted(found)]

    before = generated()
    body = {"prompt": [[20 + i, 30] for i in range(8)], "max_tokens": 10, "ignore_eos": True}
    http.post("/v1/completions", json=body).raise_for_status()
    gained = [b - a for a, b in zip(before, generated(), strict=True)]
    assert len(gained) == EP
    assert sum(gained) == 80
    assert all(gained)
    values = scraped(http)
    info = http.get("/load").json()["ranks"]
    for rank in range(EP):
        label = f'engine="{rank}",model_name="'
        (steps,) = (v for k, v in values.items() if k.startswith(f"iteration_tokens_total_count{{{label}"))
        (tokens,) = (v for k, v in values.items() if k.startswith(f"iteration_tokens_total_sum{{{label}"))
        (waited,) = (
            v for k, v in values.items() if k.startswith(f"request_queue_time_seconds_count{{{label}")
        )
        # A rank also takes part in steps that have none of its tokens.
        assert 10 <= steps <= info[rank]["num_steps"]
        assert tokens >= gained[rank]
        assert waited >= 4
    assert http.get("/health_generate").status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_request(server: RealServer, http: httpx.Client, stream: bool) -> None:
    content = json.dumps(LONG | {"n": 4, "stream": stream}).encode()
    with socket.create_connection(("127.0.0.1", server.port)) as sock:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: test\r\nContent-Length: {len(content)}\r\n\r\n"
        sock.sendall(head.encode() + content)
        wait_running(http, lambda num: num > 0)
    wait_running(http, lambda num: num == 0)
    text = http.get("/metrics").text
    aborted = [line for line in text.splitlines() if 'finished_reason="abort"' in line and "_total" in line]
    assert float(aborted[0].split()[-1]) >= 4
    # What it held is free again.
    usage = [rank["kv_cache_usage_perc"] for rank in http.get("/load").json()["ranks"]]
    assert usage == [0] * EP


def wait_running(http: httpx.Client, wanted: Any) -> None:
    for _ in range(600):
        ranks = http.get("/load").json()["ranks"]
        if wanted(sum(rank["num_requests_running"] + rank["num_requests_waiting"] for rank in ranks)):
            return
        time.sleep(0.05)
    pytest.fail(f"timed out: {ranks}")
