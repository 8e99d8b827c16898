"""The client's side of bench_serving: requests sent and timed, answers checked."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from rich.progress import Progress


@dataclass
class Request:
    """One prompt, and how much to generate."""

    prompt: list[int]
    """Token ids."""
    output_len: int
    """Tokens."""


@dataclass
class Outcome:
    """One request as the client saw it. Times in seconds."""

    start: float
    ttft: float = 0.0
    itls: list[float] = field(default_factory=list)
    """Between the arrivals of chunks with new text or tokens."""
    latency: float = 0.0
    input_len: int = 0
    output_len: int = 0
    text: str = ""
    error: str | None = None


class Client:
    """Sends requests to /v1/completions and times what comes back."""

    def __init__(self, http: httpx.AsyncClient, fields: dict[str, Any]) -> None:
        """`fields` go into every request."""
        self._http = http
        self._fields = fields

    def _body(self, request: Request) -> dict[str, Any]:
        lengths = {"max_tokens": request.output_len, "ignore_eos": True}
        return {"prompt": request.prompt, **lengths, **self._fields}

    async def whole(self, request: Request) -> dict[str, Any]:
        """The answer at once, not streamed."""
        answer = await self._http.post("/v1/completions", json=self._body(request))
        if answer.status_code != 200:
            raise SystemExit(f"error: the server answers {answer.status_code}: {answer.text}")
        found: dict[str, Any] = answer.json()
        return found

    async def timed(self, request: Request) -> Outcome:
        """Send one streamed request; what goes wrong is in `error`."""
        outcome = Outcome(time.perf_counter())
        body = self._body(request) | {"stream": True, "stream_options": {"include_usage": True}}
        try:
            async with self._http.stream("POST", "/v1/completions", json=body) as answer:
                if answer.status_code != 200:
                    outcome.error = f"{answer.status_code}: {(await answer.aread()).decode()}"
                    return outcome
                await self._read(answer, outcome)
        except httpx.HTTPError as exc:
            outcome.error = f"{type(exc).__name__}: {exc}"
        return outcome

    async def _read(self, answer: httpx.Response, outcome: Outcome) -> None:
        last = outcome.start
        async for line in answer.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            now = time.perf_counter()
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                outcome.error = str(chunk["error"])
                return
            if chunk["choices"]:
                if outcome.ttft == 0.0:
                    outcome.ttft = now - outcome.start
                else:
                    outcome.itls.append(now - last)
                last = now
                outcome.text += chunk["choices"][0]["text"]
            if chunk.get("usage"):
                outcome.input_len = chunk["usage"]["prompt_tokens"]
                outcome.output_len = chunk["usage"]["completion_tokens"]
        outcome.latency = last - outcome.start


async def wait_ready(http: httpx.AsyncClient, timeout_s: float) -> None:
    """Return when /health answers 200; SystemExit after `timeout_s` seconds."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            if (await http.get("/health")).status_code == 200:
                return
        except httpx.TransportError:
            pass
        await asyncio.sleep(0.5)
    raise SystemExit(f"error: no healthy server at {http.base_url} within {timeout_s:.0f} s")


async def check_answers(client: Client, request: Request) -> None:
    """The same greedy request, alone, in company, and streamed, has one answer of the length asked for."""
    first = await client.whole(request)
    others = await asyncio.gather(*(client.whole(request) for _ in range(3)))
    streamed = await client.timed(request)
    if streamed.error is not None:
        raise SystemExit(f"error: a streamed request fails: {streamed.error}")
    texts = {answer["choices"][0]["text"] for answer in (first, *others)} | {streamed.text}
    counts = {answer["usage"]["completion_tokens"] for answer in (first, *others)} | {streamed.output_len}
    if len(texts) != 1 or counts != {request.output_len}:
        raise SystemExit(
            f"error: wrong answers: texts {texts}, lengths {counts}, asked for {request.output_len}"
        )


async def run_all(
    client: Client, requests: list[Request], args: argparse.Namespace
) -> tuple[list[Outcome], float]:
    """Send all requests at their times; outcomes in their order, and the wall time in seconds."""
    draw = random.Random(args.seed + 1)
    limit = asyncio.Semaphore(args.max_concurrency or len(requests))

    async def one(request: Request, bar: Progress, task: Any) -> Outcome:
        async with limit:
            outcome = await client.timed(request)
        bar.advance(task)
        return outcome

    began = time.perf_counter()
    with Progress(disable=args.disable_tqdm) as bar:
        task = bar.add_task("requests", total=len(requests))
        running = []
        for request in requests:
            running.append(asyncio.create_task(one(request, bar, task)))
            if math.isfinite(args.request_rate):
                shape = args.burstiness
                await asyncio.sleep(draw.gammavariate(shape, 1 / (args.request_rate * shape)))
        outcomes = await asyncio.gather(*running)
    return outcomes, time.perf_counter() - began


async def describe_server(http: httpx.AsyncClient) -> dict[str, Any]:
    """What /server_info says, without the folder that the model lies in; empty for servers without it."""
    answer = await http.get("/server_info")
    found: dict[str, Any] = answer.json() if answer.status_code == 200 else {}
    if "model" in found.get("engine", {}):
        found["engine"]["model"] = Path(found["engine"]["model"]).name
    return found
