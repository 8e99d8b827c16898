"""Offline batches: every line of a file of OpenAI requests is answered, whatever happens in between."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from moe_runtime.config import BatchConfig, EngineConfig
from moe_runtime.engine.async_llm import AsyncLLM
from moe_runtime.engine.outputs import RequestOutput
from moe_runtime.errors import CapacityError, RequestError
from moe_runtime.server.batch_file import AnswerFile, BadLine, BatchRequest, check_paths, read_requests
from moe_runtime.server.chat import ChatJob
from moe_runtime.server.completions import CompletionJob
from moe_runtime.server.context import ModelContext
from moe_runtime.server.errors import ApiError, as_api_error, invalid

JOBS: dict[str, type[ChatJob] | type[CompletionJob]] = {
    "/v1/chat/completions": ChatJob,
    "/v1/completions": CompletionJob,
}
_REQUESTS_PER_SEAT = 2
"""Requests sent to the ranks, for each that they can run at once: enough that no rank waits for work."""


@dataclass(frozen=True)
class Summary:
    """How a batch ended."""

    num_requests: int
    num_failed: int


async def run_batch(config: EngineConfig, batch: BatchConfig) -> Summary:
    """Answer all requests of `batch.input` that are not answered in `batch.output` yet.

    A request that is wrong gets an error line. Raises ConfigError about files, what the ranks fail with at start, and
    EngineDeadError if one dies later; whatever was written by then stays, and the same call goes on from there.
    """
    check_paths(batch.input, batch.output)
    urls = tuple(JOBS)
    with AnswerFile(batch.output) as answers:
        # Read twice rather than kept: the first time only to know how much there is.
        lines = [answers.is_done(line) for line in read_requests(batch.input, urls)]
        num_done = sum(lines)
        if num_done < len(lines):
            todo = (line for line in read_requests(batch.input, urls) if not answers.is_done(line))
            await _answer_all(config, batch, todo, answers, num_done, len(lines))
        return Summary(len(lines), answers.num_failed)


async def _answer_all(
    config: EngineConfig,
    batch: BatchConfig,
    todo: Iterator[BatchRequest | BadLine],
    answers: AnswerFile,
    num_done: int,
    num_lines: int,
) -> None:
    engine = await AsyncLLM.from_config(config, chat_template=batch.chat_template, limit_queue=False)
    try:
        context = _context(engine, config, batch)

        async def work() -> None:
            for line in todo:
                if isinstance(line, BadLine):
                    answers.refuse(line, line.error)
                else:
                    await _answer(engine, context, line, answers)
                bar.update()

        # Not shown before the engine's own display of its start has gone.
        bar = tqdm(total=num_lines, initial=num_done, desc="Requests", dynamic_ncols=True)
        with bar:
            async with asyncio.TaskGroup() as group:
                for _ in range(_REQUESTS_PER_SEAT * config.max_num_seqs * config.ep):
                    group.create_task(work())
        if batch.record is not None:
            await engine.dump_expert_distribution_record(batch.record)
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    finally:
        await engine.close()


async def _answer(engine: AsyncLLM, context: ModelContext, line: BatchRequest, answers: AnswerFile) -> None:
    try:
        job = JOBS[line.url].prepare(context, line.body)
        if job.request.stream:
            raise invalid("a batch has no streams: leave out `stream`", "stream")
        outputs = await _complete(engine, job)
    except (ApiError, RequestError, CapacityError) as error:
        answers.refuse(line, as_api_error(error))
    else:
        answers.answer(line, job.id, job.respond(outputs))


async def _complete(engine: AsyncLLM, job: ChatJob | CompletionJob) -> list[RequestOutput]:
    rank = job.request.routed_dp_rank
    tasks = [
        asyncio.create_task(engine.complete(prompt, job.params, routed_dp_rank=rank))
        for prompt in job.prompts
    ]
    try:
        return await asyncio.gather(*tasks)
    finally:
        # If one fails, the others are not wanted any more.
        for task in tasks:
            task.cancel()


def _context(engine: AsyncLLM, config: EngineConfig, batch: BatchConfig) -> ModelContext:
    name = config.model if config.model == "demo" else Path(config.model).resolve().name
    return ModelContext(
        name=batch.served_model_name or name,
        root=config.model,
        tokenizer=engine.tokenizer,
        max_model_len=engine.max_model_len,
        vocab_size=engine.vocab_size,
        sampling_defaults=engine.default_sampling if batch.generation_config == "auto" else {},
    )
