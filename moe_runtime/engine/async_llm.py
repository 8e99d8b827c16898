"""The front-end: takes requests, chooses ranks, and gives back text as it comes. Server and `LLM` both use it."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import uuid
from collections.abc import AsyncIterator
from typing import Any

from moe_runtime.config import EngineConfig, replace
from moe_runtime.core import SamplingParams
from moe_runtime.engine.frontend_link import FrontendLink
from moe_runtime.engine.in_flight import InFlight, InFlightSequence
from moe_runtime.engine.messages import (
    Abort,
    Failed,
    PlacementNews,
    RankStats,
    Ready,
    Rebalance,
    ResetPrefixCache,
    SequenceUpdate,
    StepOutput,
    Stop,
)
from moe_runtime.engine.outputs import CompletionDelta, RequestOutput
from moe_runtime.engine.rank_chooser import RankChooser
from moe_runtime.engine.ranks import WORKER, LocalRanks
from moe_runtime.engine.rebalance_request import Rebalanced, Slots, request_rebalance
from moe_runtime.engine.requests import (
    CheckedRequest,
    ModelLimits,
    Prompt,
    check_request,
    read_generation_defaults,
)
from moe_runtime.engine.startup import StartupDisplay, wait_until_ready
from moe_runtime.engine.streams import CompletionStream, OutputBuilder, RequestStream
from moe_runtime.engine.tokenizer import Tokenizer, load_tokenizer
from moe_runtime.errors import EngineDeadError, LockstepError, OverloadedError, RequestError
from moe_runtime.weights.demo_model import resolve_model

logger = logging.getLogger(__name__)

_LAST_WORDS_S = 0.3
"""A dying rank's reason may arrive after its death is noticed; streams get the better of the two."""
_LEAVE_S = 10.0
"""Ranks told to stop finish their step and free what they hold; then they are killed."""
_LEAVE_DEAD_S = 2.0
"""Ranks leave by themselves when a peer has died."""
_LONG_TEXT = 4096
"""Characters from which a prompt is tokenized beside the event loop."""


class AsyncLLM:
    """A client of running ranks. All calls are made on the event loop it was started on.

    Start it with `from_config` (starts its own ranks) or `start` (ranks that somebody else started).
    """

    def __init__(
        self,
        config: EngineConfig,
        link: FrontendLink,
        ready: list[Ready],
        tokenizer: Tokenizer | None,
        *,
        ranks: LocalRanks | None = None,
        limit_queue: bool = True,
    ) -> None:
        """`config.model` is a folder. `limit_queue`: refuse requests beyond `max_queued_requests`."""
        self.config = config
        self.ready = ready
        """What every rank said when it became ready, by rank."""
        self.tokenizer = tokenizer
        """None with `skip_tokenizer_init`."""
        self.max_model_len = min(r.max_model_len for r in ready)
        self.vocab_size = ready[0].vocab_size
        defaults = read_generation_defaults(config.model, tokenizer)
        self.eos_token_ids = defaults.eos_token_ids
        self.default_sampling: dict[str, Any] = defaults.sampling
        """Arguments for SamplingParams that the model's generation_config.json sets."""
        self.placements = [
            None if r.placement is None else PlacementNews(r.rank, 0, r.placement) for r in ready
        ]
        """Where each rank says that experts are; None without rebalancing."""
        self._link = link
        self._ranks = ranks
        self._chooser = RankChooser(
            len(ready), config.max_num_seqs, config.max_queued_requests if limit_queue else None
        )
        self._seeds = random.Random(config.seed)
        self._numbers = itertools.count()
        self._num_rebalances = 0
        self._in_flight = InFlight(self._chooser)
        self._loop = asyncio.get_running_loop()
        self._dead: asyncio.Future[EngineDeadError] = self._loop.create_future()
        self._failures: dict[int | None, EngineDeadError] = {}
        """What ranks have failed with."""
        self._draining = False
        self._closing: asyncio.Task[None] | None = None
        link.dead.add_done_callback(self._on_death)
        self._receiver = self._loop.create_task(self._receive())

    @classmethod
    async def from_config(
        cls,
        config: EngineConfig,
        *,
        chat_template: str | None = None,
        limit_queue: bool = True,
        worker: str = WORKER,
    ) -> AsyncLLM:
        """Start `config.ep` ranks as processes of this program. `worker` is the module each runs; others as in `start`.

        Raises ConfigError, CheckpointError, CapacityError, ... as the ranks do; then none of them is left.
        """
        config = replace(config, model=str(await asyncio.to_thread(resolve_model, config.model)))
        link = FrontendLink(config.ep)
        ranks: LocalRanks | None = None
        try:
            assert link.folder is not None
            ranks = LocalRanks.spawn(config, link.address, link.folder, worker)
            for rank, pid in enumerate(ranks.pids):
                link.watch(rank, pid)
            return await cls.start(
                config, link, ranks=ranks, chat_template=chat_template, limit_queue=limit_queue
            )
        except BaseException as exc:
            how = ranks.describe_exit() if ranks else None
            if ranks:
                ranks.kill()
            died = link.dead.done() and exc is link.dead.result()
            link.close()
            if died:
                raise EngineDeadError(f"{how or exc} while starting; the reason is in its output") from None
            raise

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        link: FrontendLink,
        *,
        ranks: LocalRanks | None = None,
        chat_template: str | None = None,
        limit_queue: bool = True,
    ) -> AsyncLLM:
        """Wait for the ranks that connect to `link`, showing their progress, and load the tokenizer meanwhile.

        `chat_template` is a file that replaces the model's; `limit_queue`: see the constructor. Raises what a rank
        failed with.
        """
        with StartupDisplay(config.ep) as display:
            waiting = asyncio.ensure_future(wait_until_ready(link, display))
            loading = asyncio.ensure_future(asyncio.to_thread(load_tokenizer, config, chat_template))
            try:
                ready, tokenizer = await asyncio.gather(waiting, loading)
            finally:
                for task in (waiting, loading):
                    task.cancel()
                await asyncio.gather(waiting, loading, return_exceptions=True)
        link.remove_folder()
        return cls(config, link, ready, tokenizer, ranks=ranks, limit_queue=limit_queue)

    @property
    def stats(self) -> list[RankStats]:
        """The last news of every rank, by rank."""
        return self._chooser.stats

    @property
    def dead(self) -> EngineDeadError | None:
        """Why nothing can be served any more, once that is so."""
        return self._dead.result() if self._dead.done() else None

    @property
    def num_unfinished(self) -> int:
        """Requests being served."""
        return len(self._in_flight.request_ids)

    async def wait_dead(self) -> EngineDeadError:
        """Returns when the ranks have gone, with the reason."""
        return await asyncio.shield(self._dead)

    async def stream(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str | None = None,
        routed_dp_rank: int | None = None,
    ) -> AsyncIterator[CompletionDelta]:
        """Deltas of the request's `n` completions, interleaved. Closing the iterator aborts what is not finished.

        Raises RequestError, OverloadedError or EngineDeadError on the first step; EngineDeadError later too.
        """
        request = await self._submit(prompt, params, request_id, routed_dp_rank)
        try:
            async for delta in request:
                yield delta
        finally:
            self._abandon(request)

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str | None = None,
        routed_dp_rank: int | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Like `stream`, but each item holds everything generated so far; the last has `finished` set."""
        request = await self._submit(prompt, params, request_id, routed_dp_rank)
        builder = OutputBuilder(request, params)
        try:
            async for delta in request:
                builder.add(delta)
                yield builder.snapshot()
        finally:
            self._abandon(request)

    async def complete(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str | None = None,
        routed_dp_rank: int | None = None,
    ) -> RequestOutput:
        """The finished output of a request. Cancelling the call aborts the request."""
        request = await self._submit(prompt, params, request_id, routed_dp_rank)
        builder = OutputBuilder(request, params)
        try:
            async for delta in request:
                builder.add(delta)
        finally:
            self._abandon(request)
        return builder.output

    async def check(self, prompt: Prompt, params: SamplingParams) -> CheckedRequest:
        """Tokenize a prompt and check the request without sending it. Raises RequestError."""
        limits = ModelLimits(self.max_model_len, self.vocab_size)
        seed = self._seeds.getrandbits(63)
        text = prompt
        if isinstance(prompt, dict) and "prompt_token_ids" not in prompt:
            text = prompt.get("prompt", "")
        if isinstance(text, str) and len(text) > _LONG_TEXT:
            return await asyncio.to_thread(check_request, prompt, params, limits, self.tokenizer, seed)
        return check_request(prompt, params, limits, self.tokenizer, seed)

    async def abort(self, request_id: str) -> None:
        """End a request: its unfinished completions get the finish_reason `abort`. Unknown ids are ignored."""
        for sequence in self._in_flight.of_request(request_id):
            sequence.request.put(sequence.completion.abort())
            self._drop(sequence)

    async def reset_prefix_cache(self) -> None:
        """Tell all ranks to drop the cached blocks that no running sequence uses."""
        self._raise_if_dead()
        self._link.send_tick({rank: [ResetPrefixCache()] for rank in range(len(self.ready))})

    async def rebalance(
        self, slots: Slots | None = None, *, force: bool = False, timeout: float = 60.0
    ) -> Rebalanced:
        """Have the ranks look at the load now, or move experts to `slots`, and wait for the outcome.

        slots: [layer][rank][slot] -> expert, -1 for an empty slot. `force`: move even if it is not expected to pay.
        Raises RequestError without --enable-eplb.
        """
        self._raise_if_dead()
        if not self.config.enable_eplb:
            raise RequestError("experts cannot be moved: the ranks were started without --enable-eplb")

        def send(command: Rebalance) -> None:
            self._link.send_tick({0: [command]})

        def stats() -> RankStats:
            self._raise_if_dead()
            return self.stats[0]

        self._num_rebalances += 1
        command = Rebalance(self._num_rebalances, slots, force)
        return await request_rebalance(send, stats, command, timeout)

    async def drain(self, timeout: float) -> bool:
        """Refuse new requests and let those running finish; after `timeout` seconds abort them. Whether all finished."""
        self._draining = True
        try:
            async with asyncio.timeout(timeout):
                await self._in_flight.idle.wait()
            return True
        except TimeoutError:
            for request_id in self._in_flight.request_ids:
                await self.abort(request_id)
            return False

    async def close(self) -> None:
        """Stop the ranks and wait until they have left. Streams still open raise EngineDeadError."""
        if self._closing is None:
            self._closing = self._loop.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        was_dead = self._dead.done()
        if not was_dead:
            self._link.send_tick({rank: [Stop()] for rank in range(len(self.ready))})
            self._link.flush()
        self._set_dead(EngineDeadError("the engine has been closed"))
        await self._link.wait_exits(_LEAVE_DEAD_S if was_dead else _LEAVE_S)
        # One that is stuck, or stopped, would stay.
        self._link.kill()
        if self._ranks is not None:
            self._ranks.kill()
        self._receiver.cancel()
        await asyncio.gather(self._receiver, return_exceptions=True)
        self._link.close()

    async def _submit(
        self, prompt: Prompt, params: SamplingParams, request_id: str | None, rank: int | None
    ) -> RequestStream:
        self._raise_if_dead()
        checked = await self.check(prompt, params)
        self._raise_if_dead()
        if self._draining:
            raise OverloadedError("shutting down; no new requests are taken")
        request_id = request_id or uuid.uuid4().hex
        if self._in_flight.of_request(request_id):
            raise RequestError(f"request_id {request_id!r} is in use by an unfinished request", "request_id")
        return self._send(checked, request_id, self._chooser.choose(rank))

    def _send(self, checked: CheckedRequest, request_id: str, rank: int) -> RequestStream:
        params, ids = checked.params, checked.prompt_token_ids
        stream = RequestStream(request_id, checked.prompt, ids, params.n)
        eos_ids = [] if params.ignore_eos else self.eos_token_ids
        stop_ids = frozenset([*eos_ids, *(params.stop_token_ids or [])])
        tokenizer = self.tokenizer if params.detokenize else None
        commands = []
        for index in range(params.n):
            # Never used again, so that late news of an aborted sequence cannot reach another.
            sequence_id = f"{request_id}#{next(self._numbers)}"
            load = checked.max_output_tokens + (len(ids) if index == 0 else 0)
            completion = CompletionStream(index, ids, params, stop_ids, tokenizer)
            self._in_flight.add(InFlightSequence(sequence_id, rank, stream, completion, load))
            commands.append(checked.submission(index, sequence_id, eos_ids))
        self._link.send_tick({rank: commands})
        return stream

    def _abandon(self, request: RequestStream) -> None:
        """Forget what is unfinished of a request that nobody reads any more."""
        for sequence in self._in_flight.of_request(request.request_id):
            # The id may have been taken by a new request since this one finished.
            if sequence.request is request:
                self._drop(sequence)

    def _drop(self, sequence: InFlightSequence) -> None:
        self._in_flight.remove(sequence)
        self._link.send_tick({sequence.rank: [Abort(sequence.sequence_id)]})

    async def _receive(self) -> None:
        try:
            while True:
                message = await self._link.recv()
                if isinstance(message, StepOutput):
                    self._chooser.stats[message.rank] = message.stats
                    for news in message.updates:
                        self._on_news(news)
                elif isinstance(message, PlacementNews):
                    self.placements[message.rank] = message
                elif isinstance(message, Failed):
                    self._on_failure(message)
        except Exception as exc:
            logger.exception("the front-end cannot go on")
            self._set_dead(EngineDeadError(f"the front-end failed: {exc}"))

    def _on_news(self, news: SequenceUpdate) -> None:
        sequence = self._in_flight.get(news.request_id)
        if sequence is None:
            return
        if news.finish_reason == "error":
            error = RequestError(news.error or "the rank refused the request", news.error_param)
            sequence.request.fail(error)
            self._abandon(sequence.request)
            return
        delta = sequence.completion.update(news)
        sequence.request.put(delta)
        self._in_flight.credit(sequence, delta)
        if news.finish_reason is not None:
            self._in_flight.remove(sequence)
        elif delta.finish_reason is not None:
            # A stop string: the rank, which knows no text, would go on.
            self._drop(sequence)

    def _on_failure(self, failed: Failed) -> None:
        error = EngineDeadError(f"rank {failed.rank} failed: {failed.kind}: {failed.message}")
        self._failures[failed.rank] = error
        # One that lost a peer reports a consequence; whoever is the cause may still be heard of.
        if failed.kind == LockstepError.__name__:
            self._loop.call_later(2 * _LAST_WORDS_S, self._set_dead, error)
        else:
            self._set_dead(error)

    def _on_death(self, dead: asyncio.Future[EngineDeadError]) -> None:
        if not dead.cancelled():
            self._loop.call_later(_LAST_WORDS_S, self._on_death_settled, dead.result())

    def _on_death_settled(self, error: EngineDeadError) -> None:
        """The first rank to go may have said why."""
        self._set_dead(self._failures.get(self._link.dead_rank, error))

    def _set_dead(self, error: EngineDeadError) -> None:
        if self._dead.done():
            return
        self._dead.set_result(error)
        for sequence in self._in_flight.all():
            sequence.request.fail(error)
            self._in_flight.remove(sequence)

    def _raise_if_dead(self) -> None:
        if self._dead.done():
            raise EngineDeadError(str(self._dead.result()))
