"""Many requests at once, some of whose clients leave, on a cache that is too small for them; the real server at ep 2."""

from __future__ import annotations

import asyncio
import json
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.helpers.parity import Answer, Reference, check_answers
from tests.helpers.real_server import RealServer
from tests.helpers.tiny_models import make_tiny
from tests.helpers.tiny_tokenizer import VOCAB_SIZE, save_tokenizer

EP = 2
NUM_REQUESTS = 200
NUM_ALONE = 20
LONGEST = 96
BLOCK_SIZE = 4
# Room for little more than one of the longest per rank.
FLAGS = ("--max-model-len", str(LONGEST), "--block-size", str(BLOCK_SIZE), "--max-num-batched-tokens", "50")
FLAGS += ("--num-kv-blocks", str(LONGEST // BLOCK_SIZE + 2))


@dataclass
class Request:
    prompt: list[int]
    max_tokens: int
    stream: bool
    leaves_after_s: float | None
    """When the client closes the connection, if it does."""

    @property
    def body(self) -> dict[str, Any]:
        sampling = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
        return sampling | {"prompt": self.prompt, "max_tokens": self.max_tokens, "stream": self.stream}


def draw_requests(draw: random.Random) -> list[Request]:
    # Some prompts begin alike, so that sequences share blocks.
    shared = [draw.randrange(5, VOCAB_SIZE) for _ in range(30)]
    requests = []
    for number in range(NUM_REQUESTS):
        length = draw.randint(1, 60)
        kept = draw.choice([0, 0, min(length - 1, draw.randint(0, 30))])
        prompt = shared[:kept] + [draw.randrange(5, VOCAB_SIZE) for _ in range(length - kept)]
        leaves = draw.uniform(0.0, 3.0) if number % 3 == 0 else None
        requests.append(Request(prompt, draw.randint(1, LONGEST - 60), draw.random() < 0.5, leaves))
    return requests


async def send(client: httpx.AsyncClient, request: Request) -> list[int] | None:
    """The tokens generated; None if the client left before the end."""
    try:
        async with asyncio.timeout(request.leaves_after_s):
            if not request.stream:
                answer = await client.post("/v1/completions", json=request.body)
                assert answer.status_code == 200, answer.text
                return answer.json()["choices"][0]["token_ids"]
            ids: list[int] = []
            async with client.stream("POST", "/v1/completions", json=request.body) as answer:
                assert answer.status_code == 200
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                        ids += choice["token_ids"]
            return ids
    except TimeoutError:
        assert request.leaves_after_s is not None
        return None


async def send_all(base_url: str, requests: list[Request]) -> list[list[int] | None]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=base_url, timeout=None, limits=limits) as client:
        return await asyncio.gather(*(send(client, request) for request in requests))


def check_idle(client: httpx.Client) -> None:
    """Nothing runs or waits, and every block is free or cached."""
    for _ in range(200):
        ranks = client.get("/load").json()["ranks"]
        if not any(rank["num_requests_running"] + rank["num_requests_waiting"] for rank in ranks):
            break
        time.sleep(0.05)
    for rank in ranks:
        assert rank["num_requests_running"] == rank["num_requests_waiting"] == 0
        assert rank["kv_cache_usage_perc"] == 0, "blocks leaked"


@pytest.mark.slow
def test_the_answers_under_stress_are_those_alone(tmp_path: Path, seed: int) -> None:
    model = make_tiny("mixtral", tmp_path / "model", seed, vocab_size=VOCAB_SIZE)
    save_tokenizer(tmp_path / "model")
    requests = draw_requests(random.Random(seed))
    with RealServer(tmp_path / "model", EP, tmp_path / "log", *FLAGS) as server:
        client = httpx.Client(base_url=server.base_url, timeout=60)
        outputs = asyncio.run(send_all(server.base_url, requests))
        check_idle(client)
        metrics = client.get("/metrics").text
        alone = [asyncio.run(send_all(server.base_url, [r]))[0] for r in requests[1 : 3 * NUM_ALONE : 3]]
        assert "Traceback" not in server.log()
    preempted = [line for line in metrics.splitlines() if line.startswith("moe_runtime:num_preemptions_total")]
    assert sum(float(line.split()[-1]) for line in preempted) > 0, "the cache was too large for this test"
    answered = [(r, output) for r, output in zip(requests, outputs, strict=True) if output is not None]
    assert all(len(output) == request.max_tokens for request, output in answered)
    assert len(requests) - len(answered) > NUM_REQUESTS // 10, "too fast for clients to leave"
    for request, output in zip(requests[1 : 3 * NUM_ALONE : 3], alone, strict=True):
        assert output is not None
        answered.append((request, output))
    # Tokens alone.
    answers = [Answer(request.prompt, output, [{}] * len(output)) for request, output in answered]
    check_answers(Reference(model), answers)
