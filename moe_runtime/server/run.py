"""Runs jobs on the engine: their prompts side by side, every delta timed and counted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol, cast

from moe_runtime.core import SamplingParams
from moe_runtime.engine.outputs import CompletionDelta, RequestOutput
from moe_runtime.server.base import Engine
from moe_runtime.server.collect import OutputCollector, UsageCounter
from moe_runtime.server.metrics import ServerMetrics
from moe_runtime.server.protocol import GenerationRequest
from moe_runtime.server.transport import event


class Job(Protocol):
    """What chat and plain completions have in common once they are prepared."""

    @property
    def id(self) -> str:
        """The answer's id."""

    @property
    def request(self) -> GenerationRequest:
        """What the client asked for."""

    @property
    def prompts(self) -> list[list[int]]:
        """Token ids of each prompt; each becomes a request to the engine."""

    @property
    def params(self) -> SamplingParams:
        """The same for all prompts."""

    def respond(self, outputs: list[RequestOutput]) -> Any:
        """The answer as one object; an output for each prompt, in their order."""

    def chunks(self, prompt_index: int, delta: CompletionDelta, counter: UsageCounter) -> Iterator[Any]:
        """A stream's objects for one delta of a prompt."""

    def usage_chunk(self, counter: UsageCounter) -> Any:
        """A stream's last object, if the client wants usage."""


@dataclass(frozen=True)
class Run:
    """A job about to run."""

    engine: Engine
    metrics: ServerMetrics
    job: Job
    rank: int | None
    """The rank that must serve it, if the client wants a certain one."""
    arrival: float
    """When its request came in, by time.perf_counter()."""


async def whole_answer(run: Run) -> Any:
    """Run a job to its end. Cancelling it aborts its requests."""
    collectors = [OutputCollector(run.job.id, ids) for ids in run.job.prompts]
    async with aclosing(_deltas(run)) as deltas:
        async for prompt_index, delta in deltas:
            collectors[prompt_index].add(delta)
    return run.job.respond([collector.finish() for collector in collectors])


async def events(run: Run) -> AsyncGenerator[bytes, None]:
    """A job's server-sent events without the closing [DONE]. Closing it aborts its requests."""
    counter = UsageCounter()
    async with aclosing(_deltas(run)) as deltas:
        async for prompt_index, delta in deltas:
            counter.add(prompt_index, delta)
            body = b"".join(event(chunk) for chunk in run.job.chunks(prompt_index, delta, counter))
            if body:
                yield body
    if run.job.request.include_usage:
        yield event(run.job.usage_chunk(counter))


async def _deltas(run: Run) -> AsyncGenerator[tuple[int, CompletionDelta], None]:
    """(prompt index, delta) of all prompts as they come."""
    streams = [_one_prompt(run, index) for index in range(len(run.job.prompts))]
    merged = streams[0] if len(streams) == 1 else _merge(streams)
    async with aclosing(merged):
        async for item in merged:
            yield item


async def _one_prompt(run: Run, index: int) -> AsyncGenerator[tuple[int, CompletionDelta], None]:
    job = run.job
    request_id = job.id if len(job.prompts) == 1 else f"{job.id}-{index}"
    timer = run.metrics.start(job.params, run.arrival)
    stream = _closable(run.engine.stream(job.prompts[index], job.params, request_id, run.rank))
    try:
        async with aclosing(stream):
            async for delta in stream:
                timer.see(delta)
                yield index, delta
    except (asyncio.CancelledError, GeneratorExit):
        timer.abort()
        raise
    timer.finish()


def _closable(stream: AsyncIterator[CompletionDelta]) -> AsyncGenerator[CompletionDelta, None]:
    """The engine's contract: closing the iterator aborts the request."""
    return cast("AsyncGenerator[CompletionDelta, None]", stream)


async def _merge(
    streams: list[AsyncGenerator[tuple[int, CompletionDelta], None]],
) -> AsyncGenerator[tuple[int, CompletionDelta], None]:
    """Items of all streams in order of arrival. The first error ends all of them."""
    queue: asyncio.Queue[tuple[int, CompletionDelta] | Exception | None] = asyncio.Queue()

    async def feed(stream: AsyncGenerator[tuple[int, CompletionDelta], None]) -> None:
        try:
            async with aclosing(stream):
                async for item in stream:
                    queue.put_nowait(item)
            queue.put_nowait(None)
        except Exception as exc:  # noqa: BLE001 - it is raised again by the reader
            queue.put_nowait(exc)

    tasks = [asyncio.create_task(feed(stream)) for stream in streams]
    try:
        for _ in tasks:
            while (item := await queue.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
