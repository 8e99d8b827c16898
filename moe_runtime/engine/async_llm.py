"""The front-end: takes requests, chooses ranks, and gives back text as it comes. Server and `LLM` both use it."""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from moe_runtime.config import EngineConfig, replace
from moe_runtime.core import SamplingParams
from moe_runtime.engine.frontend_link import FrontendLink
from moe_runtime.engine.messages import (
    PlacementNews,
    Profiled,
    RankStats,
    Ready,
    Rebalance,
    ResetPrefixCache,
)
from moe_runtime.engine.outputs import CompletionDelta, DumpedRecord, ProfileResult, RequestOutput
from moe_runtime.engine.rank_chooser import RankChooser
from moe_runtime.engine.rank_client import RankClient
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
from moe_runtime.engine.streams import OutputBuilder, RequestStream
from moe_runtime.engine.tokenizer import Tokenizer, load_tokenizer
from moe_runtime.errors import CapacityError, EngineDeadError, OverloadedError, RequestError
from moe_runtime.placement.balancedness import BalanceWatch
from moe_runtime.profiling.joined import joined_events, summarize
from moe_runtime.profiling.trace import write_trace
from moe_runtime.weights.demo_model import resolve_model

MAX_PROFILE_STEPS = 1000
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
        self._ranks = ranks
        self._chooser = RankChooser(
            len(ready), config.max_num_seqs, config.max_queued_requests if limit_queue else None
        )
        self._seeds = random.Random(config.seed)
        self._draining = False
        self._closing: asyncio.Task[None] | None = None
        placements = [None if r.placement is None else PlacementNews(r.rank, 0, r.placement) for r in ready]
        self._client = RankClient(link, self._chooser, placements)
        self._num_rebalances = 0
        self._profile: asyncio.Task[list[Profiled]] | None = None
        """The trace under way, or over and not asked for yet."""

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
        return self._client.dead

    @property
    def num_unfinished(self) -> int:
        """Requests being served."""
        return len(self._client.in_flight.request_ids)

    async def wait_dead(self) -> EngineDeadError:
        """Returns when the ranks have gone, with the reason."""
        return await self._client.wait_dead()

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
            self._client.abandon(request)

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
            self._client.abandon(request)

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
            self._client.abandon(request)
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
        self._client.abort(request_id)

    async def reset_prefix_cache(self) -> None:
        """Tell all ranks to drop the cached blocks that no running sequence uses."""
        self._client.raise_if_dead()
        self._client.tell_all(ResetPrefixCache())

    @property
    def placements(self) -> list[PlacementNews | None]:
        """Where each rank says that experts are; None without rebalancing."""
        return self._client.placements

    async def rebalance(
        self, slots: Slots | None = None, *, force: bool = False, timeout: float = 60.0
    ) -> Rebalanced:
        """Have the ranks look at the load now, or move experts to `slots`, and wait for the outcome.

        slots: [layer][rank][slot] -> expert, -1 for an empty slot. `force`: move even if it is not expected to pay.
        Raises RequestError without --enable-eplb.
        """
        self._client.raise_if_dead()
        if not self.config.enable_eplb:
            raise RequestError("experts cannot be moved: the ranks were started without --enable-eplb")

        def stats() -> RankStats:
            self._client.raise_if_dead()
            return self.stats[0]

        self._num_rebalances += 1
        command = Rebalance(self._num_rebalances, slots, force)
        return await request_rebalance(
            lambda c: self._client.tell(0, c), stats, lambda: self.placements, command, timeout
        )

    @property
    def balance(self) -> BalanceWatch:
        """How evenly the ranks' experts are loaded."""
        return self._client.balance

    async def start_expert_distribution_record(self) -> None:
        """Forget the expert loads recorded so far and record from now on. (Recording is on from the start.)"""
        await self._client.record("start")

    async def stop_expert_distribution_record(self) -> None:
        """Record no more; what was recorded can still be written."""
        await self._client.record("stop")

    async def dump_expert_distribution_record(self, folder: str | Path | None = None) -> DumpedRecord:
        """Write what was recorded since the start; the ranks write, each on its own host.

        By default into a new folder inside `expert_distribution_dir`. Raises CapacityError if a rank cannot write.
        """
        if folder is None:
            stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%f")
            folder = Path(self.config.expert_distribution_dir) / stamp
        folder = Path(folder).resolve()
        answers = await self._client.record("dump", str(folder), Path(self.config.model).name)
        return DumpedRecord(folder, answers[0].num_windows, answers[0].num_steps)

    async def start_profile(self, num_steps: int = 20) -> None:
        """Trace the next `num_steps` steps of all ranks, 1 to MAX_PROFILE_STEPS. Raises RequestError if a trace is under way."""
        if not 1 <= num_steps <= MAX_PROFILE_STEPS:
            raise RequestError(f"num_steps={num_steps}: must be from 1 to {MAX_PROFILE_STEPS}", "num_steps")
        if self._profile is not None and not self._profile.done():
            raise RequestError("a trace is under way; end it with stop_profile", None)
        self._client.raise_if_dead()
        self._profile = asyncio.create_task(self._client.profile(num_steps))
        # Nobody may ever ask for it.
        self._profile.add_done_callback(lambda task: task.cancelled() or task.exception())

    async def stop_profile(self, file: str | Path | None = None) -> ProfileResult:
        """End the trace, unless its steps are over, and write it for https://ui.perfetto.dev: all ranks in one file.

        By default a new file in `trace_dir`. Raises RequestError if no trace was started, CapacityError if it cannot be written
        (then it is kept, and may be asked for again).
        """
        if self._profile is None:
            raise RequestError("no trace was started; call start_profile first", None)
        profile = self._profile
        if not profile.done():
            self._client.end_profile()
        spans = {told.rank: told.spans for told in await profile}
        if file is None:
            file = Path(self.config.trace_dir) / f"trace-{datetime.now(UTC):%Y%m%dT%H%M%S.%f}.json"
        file = Path(file).resolve()
        distant = [ready.rank for ready in self.ready if not ready.pid]
        summary = summarize(spans)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            await asyncio.to_thread(write_trace, file, joined_events(spans, distant))
        except OSError as error:
            raise CapacityError(f"the trace cannot be written: {file}: {error.strerror}") from error
        if self._profile is profile:
            self._profile = None
        return ProfileResult(file, summary)

    async def drain(self, timeout: float) -> bool:
        """Refuse new requests and let those running finish; after `timeout` seconds abort them. Whether all finished."""
        self._draining = True
        try:
            async with asyncio.timeout(timeout):
                await self._client.in_flight.idle.wait()
            return True
        except TimeoutError:
            for request_id in self._client.in_flight.request_ids:
                await self.abort(request_id)
            return False

    async def close(self) -> None:
        """Stop the ranks and wait until they have left. Streams still open raise EngineDeadError."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        await self._client.stop()
        if self._ranks is not None:
            self._ranks.kill()
        await self._client.close()

    async def _submit(
        self, prompt: Prompt, params: SamplingParams, request_id: str | None, rank: int | None
    ) -> RequestStream:
        self._client.raise_if_dead()
        checked = await self.check(prompt, params)
        self._client.raise_if_dead()
        if self._draining:
            raise OverloadedError("shutting down; no new requests are taken")
        request_id = request_id or uuid.uuid4().hex
        if self._client.in_flight.of_request(request_id):
            raise RequestError(f"request_id {request_id!r} is in use by an unfinished request", "request_id")
        eos_ids = [] if checked.params.ignore_eos else self.eos_token_ids
        tokenizer = self.tokenizer if checked.params.detokenize else None
        return self._client.send(checked, request_id, self._chooser.choose(rank), eos_ids, tokenizer)
