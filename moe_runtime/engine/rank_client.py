"""The ranks as the front-end deals with them: commands go out, news comes back into the requests' streams, and death ends them."""

from __future__ import annotations

import asyncio
import itertools
import logging
from typing import TYPE_CHECKING, Any, Literal

from moe_runtime.engine.in_flight import InFlight, InFlightSequence
from moe_runtime.engine.messages import (
    Abort,
    Failed,
    LoadNews,
    Profile,
    Profiled,
    Recorded,
    RecordLoads,
    SequenceUpdate,
    StepOutput,
    Stop,
)
from moe_runtime.engine.streams import CompletionStream, RequestStream
from moe_runtime.errors import CapacityError, EngineDeadError, LockstepError, RequestError
from moe_runtime.placement.balancedness import BalanceWatch

if TYPE_CHECKING:
    from moe_runtime.engine.frontend_link import FrontendLink
    from moe_runtime.engine.messages import Command
    from moe_runtime.engine.rank_chooser import RankChooser
    from moe_runtime.engine.requests import CheckedRequest
    from moe_runtime.engine.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

RecordAction = Literal["start", "stop", "dump"]
_RECORD_S = 60.0
"""How long all ranks together may take to carry out a command about the record."""
_LAST_WORDS_S = 0.3
"""A dying rank's reason may arrive after its death is noticed; streams get the better of the two."""
_LEAVE_S = 10.0
"""Ranks told to stop finish their step and free what they hold; then they are killed."""
_LEAVE_DEAD_S = 2.0
"""Ranks leave by themselves when a peer has died."""


class RankClient:
    """Talks to ranks that are ready. All calls are made on the event loop it was made on."""

    def __init__(self, link: FrontendLink, chooser: RankChooser) -> None:
        """`chooser` is told of the load that requests make, and of the ranks' own figures."""
        self.in_flight = InFlight(chooser)
        self.balance = BalanceWatch(link.num_ranks)
        self._answers: dict[int, asyncio.Queue[Any]] = {}
        """Of commands that wait for them, by number."""
        self._link = link
        self._chooser = chooser
        self._numbers = itertools.count()
        self._loop = asyncio.get_running_loop()
        self._dead: asyncio.Future[EngineDeadError] = self._loop.create_future()
        self._failures: dict[int | None, EngineDeadError] = {}
        """What ranks have failed with."""
        link.dead.add_done_callback(self._on_death)
        self._receiver = self._loop.create_task(self._receive())

    @property
    def dead(self) -> EngineDeadError | None:
        """Why nothing can be served any more, once that is so."""
        return self._dead.result() if self._dead.done() else None

    async def wait_dead(self) -> EngineDeadError:
        """Returns when the ranks have gone, with the reason."""
        return await asyncio.shield(self._dead)

    def raise_if_dead(self) -> None:
        """Raises EngineDeadError once nothing can be served any more."""
        if self._dead.done():
            raise EngineDeadError(str(self._dead.result()))

    def tell_all(self, command: Command) -> None:
        """Send every rank a command."""
        self._link.send_tick({rank: [command] for rank in range(self._link.num_ranks)})

    async def record(self, action: RecordAction, folder: str = "", model: str = "") -> list[Recorded]:
        """Have every rank start, stop or write its record; their answers, by rank.

        Raises CapacityError with what went wrong on a rank, or if one does not answer (it may be in a long step), EngineDeadError.
        """
        self.raise_if_dead()
        told: list[Recorded] = []
        try:
            async with asyncio.timeout(_RECORD_S):
                told = await self._ask(RecordLoads(next(self._numbers), action, folder, model))
        except TimeoutError:
            raise CapacityError(
                f"{action} of the record: not all ranks answered within {_RECORD_S:.0f} s"
            ) from None
        wrong = [f"rank {answer.rank}: {answer.error}" for answer in told if answer.error]
        if wrong:
            raise CapacityError(f"{action} of the record: " + "; ".join(wrong))
        return sorted(told, key=lambda answer: answer.rank)

    async def profile(self, num_steps: int) -> list[Profiled]:
        """What every rank does in the next `num_steps` steps, or up to `end_profile`. Raises EngineDeadError."""
        self.raise_if_dead()
        told: list[Profiled] = await self._ask(Profile(next(self._numbers), num_steps))
        return told

    def end_profile(self) -> None:
        """Have the ranks send what they have for a `profile` under way."""
        self.tell_all(Profile(0, 0))

    async def _ask(self, command: RecordLoads | Profile) -> list[Any]:
        """Send a command to all ranks and wait for their answers, or raise EngineDeadError if the ranks are gone first."""
        answers = self._answers[command.request] = asyncio.Queue()
        told: list[Any] = []
        try:
            self.tell_all(command)
            while len(told) < self._link.num_ranks:
                task = self._loop.create_task(answers.get())
                either: list[asyncio.Future[Any]] = [task, self._dead]
                try:
                    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                    self.raise_if_dead()
                    told.append(await task)
                finally:
                    task.cancel()
            return told
        finally:
            del self._answers[command.request]

    def send(
        self,
        checked: CheckedRequest,
        request_id: str,
        rank: int,
        eos_ids: list[int],
        tokenizer: Tokenizer | None,
    ) -> RequestStream:
        """Start the request's completions on `rank`; its stream.

        They end at `eos_ids`, or as the request says; without a `tokenizer` they have no text.
        """
        params, ids = checked.params, checked.prompt_token_ids
        stream = RequestStream(request_id, checked.prompt, ids, params.n)
        stop_ids = frozenset([*eos_ids, *(params.stop_token_ids or [])])
        commands = []
        for index in range(params.n):
            # Never used again, so that late news of an aborted sequence cannot reach another.
            sequence_id = f"{request_id}#{next(self._numbers)}"
            load = checked.max_output_tokens + (len(ids) if index == 0 else 0)
            completion = CompletionStream(index, ids, params, stop_ids, tokenizer)
            self.in_flight.add(InFlightSequence(sequence_id, rank, stream, completion, load))
            commands.append(checked.submission(index, sequence_id, eos_ids))
        self._link.send_tick({rank: commands})
        return stream

    def abort(self, request_id: str) -> None:
        """End a request: its unfinished completions get the finish_reason `abort`. Unknown ids are ignored."""
        for sequence in self.in_flight.of_request(request_id):
            sequence.request.put(sequence.completion.abort())
            self._drop(sequence)

    def abandon(self, request: RequestStream) -> None:
        """Forget what is unfinished of a request that nobody reads any more."""
        for sequence in self.in_flight.of_request(request.request_id):
            # The id may have been taken by a new request since this one finished.
            if sequence.request is request:
                self._drop(sequence)

    async def stop(self) -> None:
        """Tell the ranks to leave, end all streams with EngineDeadError, and wait for the ranks; kill those that stay."""
        was_dead = self._dead.done()
        if not was_dead:
            self.tell_all(Stop())
            self._link.flush()
        self._set_dead(EngineDeadError("the engine has been closed"))
        await self._link.wait_exits(_LEAVE_DEAD_S if was_dead else _LEAVE_S)
        # One that is stuck, or stopped, would stay.
        self._link.kill()

    async def close(self) -> None:
        """After `stop`: stop listening, and close the link."""
        self._receiver.cancel()
        await asyncio.gather(self._receiver, return_exceptions=True)
        self._link.close()

    def _drop(self, sequence: InFlightSequence) -> None:
        self.in_flight.remove(sequence)
        self._link.send_tick({sequence.rank: [Abort(sequence.sequence_id)]})

    async def _receive(self) -> None:
        try:
            while True:
                message = await self._link.recv()
                if isinstance(message, StepOutput):
                    self._chooser.stats[message.rank] = message.stats
                    for news in message.updates:
                        self._on_news(news)
                elif isinstance(message, LoadNews):
                    self.balance.see(message.rank, message.steps)
                elif isinstance(message, Recorded | Profiled):
                    if message.request in self._answers:
                        self._answers[message.request].put_nowait(message)
                elif isinstance(message, Failed):
                    self._on_failure(message)
        except Exception as exc:
            logger.exception("the front-end cannot go on")
            self._set_dead(EngineDeadError(f"the front-end failed: {exc}"))

    def _on_news(self, news: SequenceUpdate) -> None:
        sequence = self.in_flight.get(news.request_id)
        if sequence is None:
            return
        if news.finish_reason == "error":
            error = RequestError(news.error or "the rank refused the request", news.error_param)
            sequence.request.fail(error)
            self.abandon(sequence.request)
            return
        delta = sequence.completion.update(news)
        sequence.request.put(delta)
        self.in_flight.credit(sequence, delta)
        if news.finish_reason is not None:
            self.in_flight.remove(sequence)
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
        for sequence in self.in_flight.all():
            sequence.request.fail(error)
            self.in_flight.remove(sequence)
