"""Runs jobs on the engine: their prompts side by side, every delta timed and counted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing
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
    def id(self) -> str: ...
    @property
    def request(self) -> GenerationRequest: ...
    @property
    def prompts(self) -> list[list[int]]: ...
    @property
    def params(self) -> SamplingParams: ...
    def respond(self, outputs: list[RequestOutput]) -> Any: ...
    def chunks(self, prompt_index: int, delta: CompletionDelta, counter: UsageCounter) -> Iterator[Any]: ...
    def usage_chunk(self, counter: UsageCounter) -> Any: ...


async def whole_answer(engine: Engine, metrics: ServerMetrics, job: Job, rank: int | None) -> Any:
    """Run a job to its end. Cancelling it aborts its requests."""
    collectors = [OutputCollector(job.id, ids) for ids in job.prompts]
    async with aclosing(_deltas(engine, metrics, job, rank)) as deltas:
        async for prompt_index, delta in deltas:
            collectors[prompt_index].add(delta)
    return job.respond([collector.finish() for collector in collectors])


async def events(
    engine: Engine, metrics: ServerMetrics, job: Job, rank: int | None
) -> AsyncGenerator[bytes, None]:
    """A job's server-sent events without the closing [DONE]. Closing it aborts its requests."""
    counter = UsageCounter()
    async with aclosing(_deltas(engine, metrics, job, rank)) as deltas:
        async for prompt_index, delta in deltas:
            counter.add(prompt_index, delta)
            body = b"".join(event(chunk) for chunk in job.chunks(prompt_index, delta, counter))
            if body:
                yield body
    if job.request.include_usage:
        yield event(job.usage_chunk(counter))


async def _deltas(
    engine: Engine, metrics: ServerMetrics, job: Job, rank: int | None
) -> AsyncGenerator[tuple[int, CompletionDelta], None]:
    """(prompt index, delta) of all prompts as they come."""
    streams = [_one_prompt(engine, metrics, job, index, rank) for index in range(len(job.prompts))]
    merged = streams[0] if len(streams) == 1 else _merge(streams)
    async with aclosing(merged):
        async for item in merged:
            yield item


async def _one_prompt(
    engine: Engine, metrics: ServerMetrics, job: Job, index: int, rank: int | None
) -> AsyncGenerator[tuple[int, CompletionDelta], None]:
    request_id = job.id if len(job.prompts) == 1 else f"{job.id}-{index}"
    timer = metrics.start(job.params.n)
    stream = _closable(engine.stream(job.prompts[index], job.params, request_id, rank))
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
