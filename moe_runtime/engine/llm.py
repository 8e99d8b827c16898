"""The offline API: `LLM(model=..., ep=2).generate(prompts, SamplingParams(...))`."""

from __future__ import annotations

import asyncio
import contextlib
import numbers
import queue
import threading
import weakref
from collections.abc import Coroutine, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Self, TypeVar, cast

from tqdm.auto import tqdm

from moe_runtime.cli import from_keywords
from moe_runtime.config import EngineConfig
from moe_runtime.core import SamplingParams
from moe_runtime.engine.async_llm import AsyncLLM
from moe_runtime.engine.messages import RankStats
from moe_runtime.engine.outputs import ProfileResult, RequestOutput
from moe_runtime.engine.rebalance_request import Rebalanced, Slots, wanted_slots
from moe_runtime.engine.requests import Prompt, PromptDict
from moe_runtime.errors import ConfigError, EngineDeadError, RequestError

T = TypeVar("T")
Message = dict[str, Any]

_REQUESTS_PER_SEAT = 2
"""Requests sent to the ranks, for each that they can run at once: enough that no rank waits for work."""


class LLM:
    """A model on its own `ep` expert-parallel ranks, which are processes started here and ended by `close`.

    Works in scripts, with or without a `__main__` guard, and in notebooks. Not for use by several threads at once.
    Keyword arguments are the fields of `EngineConfig`, named like the flags of the scripts; other spellings of the flags
    work too (`gpu_memory_utilization`). Raises ConfigError, CheckpointError, CapacityError, ... if the ranks cannot start.
    """

    def __init__(self, model: str | None = None, **flags: Any) -> None:
        """`model`: the folder of a checkpoint, or `demo`, the default."""
        self.config = from_keywords(EngineConfig, flags if model is None else {"model": model, **flags})
        self._thread = _LoopThread()
        try:
            self._engine = self._thread.run(AsyncLLM.from_config(self.config, limit_queue=False))
        except BaseException:
            self._thread.stop()
            raise
        self._finalizer = weakref.finalize(self, _shut_down, self._thread, self._engine)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        routed_dp_rank: int | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts, in any number; the results are in their order.

        A prompt is text, a list of token ids, or `{"prompt_token_ids": [...]}` / `{"prompt": "..."}`. One set of
        sampling parameters serves all prompts, or there is one for each; None means the model's own defaults.
        `routed_dp_rank` has one rank serve all of them; by default each goes to the least-loaded. Raises
        RequestError naming the prompt's index before anything is computed, EngineDeadError if a rank dies.
        Ctrl-C aborts all of them and leaves the LLM usable.
        """
        self._raise_if_closed()
        listed = _as_list(prompts)
        params = self._params_for(listed, sampling_params)
        requests = self._thread.run(_check_all(self._engine, listed, params))
        seats = _REQUESTS_PER_SEAT * self.config.max_num_seqs * self.config.ep
        results: queue.SimpleQueue[tuple[int, RequestOutput] | None] = queue.SimpleQueue()
        job = self._thread.submit(_run_all(self._engine, requests, seats, routed_dp_rank, results))
        job.add_done_callback(lambda _: results.put(None))
        outputs: dict[int, RequestOutput] = {}
        try:
            with tqdm(total=len(requests), desc="Prompts", disable=not use_tqdm, dynamic_ncols=True) as bar:
                while (result := results.get()) is not None:
                    outputs[result[0]] = result[1]
                    bar.update()
        finally:
            job.cancel()
        job.result()
        return [outputs[index] for index in range(len(requests))]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        routed_dp_rank: int | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of them, each a list of `{"role": ..., "content": ...}`.

        `chat_template` is the text of a template that replaces the model's. Otherwise like `generate`.
        """
        self._raise_if_closed()
        tokenizer = self._engine.tokenizer
        if tokenizer is None:
            raise RequestError(
                "chat needs a tokenizer, and this LLM runs without (skip_tokenizer_init)", "messages"
            )
        single = bool(messages) and isinstance(messages[0], dict)
        conversations = cast("Sequence[Sequence[Message]]", [messages] if single else messages)
        prompts: list[Prompt] = []
        for index, conversation in enumerate(conversations):
            with _naming("conversation", index, len(conversations)):
                text = tokenizer.render_chat(
                    conversation,
                    tools=tools,
                    add_generation_prompt=add_generation_prompt,
                    continue_final_message=continue_final_message,
                    chat_template=chat_template,
                    template_kwargs=chat_template_kwargs,
                )
            ids = tokenizer.encode(text, add_special_tokens=False)
            prompts.append(PromptDict(prompt=text, prompt_token_ids=ids))
        return self.generate(prompts, sampling_params, use_tqdm, routed_dp_rank=routed_dp_rank)

    def get_tokenizer(self) -> Any:
        """The transformers tokenizer. Raises ConfigError with `skip_tokenizer_init`."""
        if self._engine.tokenizer is None:
            raise ConfigError("there is no tokenizer: skip_tokenizer_init=True")
        return self._engine.tokenizer.hf

    def get_default_sampling_params(self) -> SamplingParams:
        """The model's own defaults, from its generation_config.json."""
        return SamplingParams(**self._engine.default_sampling)

    @property
    def stats(self) -> list[RankStats]:
        """The latest gauges and counters of each rank."""
        self._raise_if_closed()
        return self._engine.stats

    def reset_prefix_cache(self) -> None:
        """Drop the cached KV of all ranks; it takes effect before any later request."""
        self._raise_if_closed()
        self._thread.run(self._engine.reset_prefix_cache())

    def rebalance(
        self, placement: Slots | Path | str | None = None, *, force: bool = False, timeout: float = 600.0
    ) -> Rebalanced:
        """Move experts between ranks now, and wait for the outcome; needs `enable_eplb=True`.

        placement: [MoE layer][rank][slot] -> expert, -1 for an empty slot, or a file of any format that `init_expert_location`
        takes; by default it is planned from the live load, and carried out if it is expected to pay or with `force`. May be
        called while another thread generates.
        """
        self._raise_if_closed()
        given = _file_content(placement) if isinstance(placement, str | Path) else placement
        shape = self._engine.ready[0].moe
        # Without a shape experts stay where they are, which rebalance() says.
        slots = None if given is None or shape is None else wanted_slots(given, shape, self.config.ep)
        return self._thread.run(self._engine.rebalance(slots, force=force, timeout=timeout))

    @property
    def placement(self) -> Slots | None:
        """Where experts are now, [MoE layer][rank][slot]; None without `enable_eplb`."""
        self._raise_if_closed()
        news = self._engine.placements[0]
        return None if news is None else news.slots

    def start_expert_distribution_record(self) -> None:
        """Forget the expert loads recorded so far and record from now on. (Recording is on from the start.)"""
        self._raise_if_closed()
        self._thread.run(self._engine.start_expert_distribution_record())

    def stop_expert_distribution_record(self) -> None:
        """Record no more; what was recorded can still be written."""
        self._raise_if_closed()
        self._thread.run(self._engine.stop_expert_distribution_record())

    def dump_expert_distribution_record(self, folder: str | Path | None = None) -> Path:
        """Write what was recorded; returns the folder, by default a new one inside `expert_distribution_dir`.

        Raises CapacityError if a rank cannot write there.
        """
        self._raise_if_closed()
        return self._thread.run(self._engine.dump_expert_distribution_record(folder)).folder

    def start_profile(self, num_steps: int = 20) -> None:
        """Trace the next steps of all ranks, as many as `num_steps` at most. Raises RequestError if that is under way."""
        self._raise_if_closed()
        self._thread.run(self._engine.start_profile(num_steps))

    def stop_profile(self, file: str | Path | None = None) -> ProfileResult:
        """Write what was traced, all ranks in one file for https://ui.perfetto.dev, by default a new one in `trace_dir`."""
        self._raise_if_closed()
        return self._thread.run(self._engine.stop_profile(file))

    def close(self) -> None:
        """End the ranks and wait for them. Repeated calls have no effect; leaving the program does it too."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _params_for(
        self, prompts: list[Prompt], given: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[SamplingParams]:
        if given is None:
            given = self.get_default_sampling_params()
        if isinstance(given, SamplingParams):
            return [given] * len(prompts)
        if not isinstance(given, Sequence) or not all(isinstance(p, SamplingParams) for p in given):
            raise RequestError(
                f"sampling_params must be SamplingParams or a list of them, not {type(given).__name__}",
                "sampling_params",
            )
        if len(given) != len(prompts):
            raise RequestError(
                f"{len(prompts)} prompts but {len(given)} sampling_params: give one, or one for each",
                "sampling_params",
            )
        return list(given)

    def _raise_if_closed(self) -> None:
        if not self._finalizer.alive:
            raise EngineDeadError("this LLM has been closed")


def _file_content(path: str | Path) -> bytes:
    """Raises RequestError."""
    from moe_runtime.placement.formats import read_bytes  # takes long to import

    try:
        return read_bytes(Path(path))
    except ConfigError as error:
        raise RequestError(str(error), "placement") from error


class _LoopThread:
    """An event loop on a thread of its own, so that a loop of the caller's (a notebook's) is left alone."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="moe-runtime-client", daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`. If the caller is interrupted, `work` is cancelled and its clean-up waited for."""
        done = threading.Event()
        tasks: list[asyncio.Task[T]] = []

        def begin() -> None:
            tasks.append(self._loop.create_task(work))
            tasks[0].add_done_callback(lambda _: done.set())

        self._loop.call_soon_threadsafe(begin)
        try:
            done.wait()
        except BaseException:
            self._loop.call_soon_threadsafe(lambda: tasks[0].cancel())
            done.wait()
            raise
        return tasks[0].result()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @property
    def is_current(self) -> bool:
        return threading.current_thread() is self._thread


def _shut_down(thread: _LoopThread, engine: AsyncLLM) -> None:
    if thread.is_current:
        # The garbage collector may run anywhere; the loop cannot wait for itself.
        threading.Thread(target=_shut_down, args=(thread, engine)).start()
        return
    try:
        thread.run(engine.close())
    finally:
        thread.stop()


async def _check_all(
    engine: AsyncLLM, prompts: list[Prompt], params: list[SamplingParams]
) -> list[tuple[PromptDict, SamplingParams]]:
    """All requests with prompts as ids and seeds drawn, or a RequestError that names the first bad one."""
    requests = []
    for index, (prompt, sampling) in enumerate(zip(prompts, params, strict=True)):
        with _naming("prompt", index, len(prompts)):
            checked = await engine.check(prompt, sampling)
        ready = PromptDict(prompt_token_ids=checked.prompt_token_ids)
        if checked.prompt is not None:
            ready["prompt"] = checked.prompt
        requests.append((ready, checked.params))
    return requests


async def _run_all(
    engine: AsyncLLM,
    requests: list[tuple[PromptDict, SamplingParams]],
    seats: int,
    routed_dp_rank: int | None,
    results: queue.SimpleQueue[tuple[int, RequestOutput] | None],
) -> None:
    """Run all requests in order, at most `seats` at a time. The first error ends the others."""
    numbered = iter(enumerate(requests))

    async def work() -> None:
        for index, (prompt, sampling) in numbered:
            with _naming("prompt", index, len(requests)):
                results.put((index, await engine.complete(prompt, sampling, routed_dp_rank=routed_dp_rank)))

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(seats, len(requests))):
                group.create_task(work())
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many, as a list. A list of integers is one prompt."""
    if isinstance(prompts, str | dict):
        return [prompts]
    try:
        listed = list(prompts)
    except TypeError:
        raise RequestError(f"prompts: a prompt or a list of prompts, not {prompts!r}", "prompt") from None
    if listed and all(isinstance(item, numbers.Integral) for item in listed):
        return [cast("Prompt", listed)]
    return cast("list[Prompt]", listed)


@contextlib.contextmanager
def _naming(what: str, index: int, num: int) -> Iterator[None]:
    """Put the index of the bad one into a RequestError, where there are several."""
    try:
        yield
    except RequestError as exc:
        if num == 1:
            raise
        raise RequestError(f"{what} {index}: {exc}", exc.param) from exc
