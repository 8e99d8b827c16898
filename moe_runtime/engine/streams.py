"""A request on its way from the ranks to its caller: text, stop strings, logprobs, and the queue between."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

from moe_runtime.core import SamplingParams, TokenLogprobs
from moe_runtime.engine.detokenizer import IncrementalDecoder, StopStrings
from moe_runtime.engine.messages import SequenceUpdate
from moe_runtime.engine.outputs import CompletionDelta, CompletionOutput, Logprob, RequestOutput
from moe_runtime.engine.tokenizer import Tokenizer


class CompletionStream:
    """One completion: turns a rank's updates into deltas."""

    def __init__(
        self,
        index: int,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        stop_ids: frozenset[int],
        tokenizer: Tokenizer | None,
    ) -> None:
        """`stop_ids` are the ids that end it on the rank; `tokenizer` is None where no text is wanted."""
        self.index = index
        self.finished = False
        self.num_tokens = 0
        self._num_prompt_tokens = len(prompt_token_ids)
        self._num_cached_tokens = 0
        self._params = params
        self._stop_ids = stop_ids
        self._tokenizer = tokenizer
        self._decoder: IncrementalDecoder | None = None
        if tokenizer:
            self._decoder = IncrementalDecoder(tokenizer, params.skip_special_tokens, prompt_token_ids)
        self._stops = StopStrings(params.stop_strings, params.include_stop_str_in_output)

    def update(self, news: SequenceUpdate) -> CompletionDelta:
        """The delta for a rank's update. Without a finish_reason in `news` but with one in the delta, a stop
        string was found: the rank still has to be told."""
        self._num_cached_tokens = max(self._num_cached_tokens, news.num_cached_tokens)
        token_ids = news.new_token_ids
        text, num_used = self._decode(token_ids, ended_by_token=news.finish_reason == "stop")
        finish_reason = news.finish_reason
        stop_reason: int | str | None = news.stop_reason
        if self._stops.matched is not None:
            token_ids = token_ids[:num_used]
            finish_reason, stop_reason = "stop", self._stops.matched
        elif finish_reason is not None:
            text += self._rest()
        logprobs = news.new_logprobs
        self.num_tokens += len(token_ids)
        return self._delta(
            text,
            token_ids,
            [self._logprobs(*pair) for pair in zip(token_ids, logprobs, strict=False)] if logprobs else None,
            finish_reason,
            stop_reason,
        )

    def abort(self) -> CompletionDelta:
        """The last delta of a completion that is no longer wanted: the text held back, reason `abort`."""
        return self._delta(self._rest(), [], None, "abort", None)

    def _delta(
        self,
        text: str,
        token_ids: list[int],
        logprobs: list[dict[int, Logprob]] | None,
        finish_reason: str | None,
        stop_reason: int | str | None,
    ) -> CompletionDelta:
        self.finished = finish_reason is not None
        return CompletionDelta(
            index=self.index,
            text=text,
            token_ids=token_ids,
            logprobs=logprobs,
            num_prompt_tokens=self._num_prompt_tokens,
            num_cached_tokens=self._num_cached_tokens,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
        )

    def _decode(self, token_ids: list[int], ended_by_token: bool) -> tuple[str, int]:
        """Text that may be shown, and how many of the ids were read: fewer than all if a stop string was found."""
        if self._decoder is None:
            return "", len(token_ids)
        shown = []
        for i, token_id in enumerate(token_ids):
            last = ended_by_token and i == len(token_ids) - 1
            if last and token_id in self._stop_ids and not self._params.include_stop_str_in_output:
                continue
            may_stop = self.num_tokens + i + 1 >= self._params.min_tokens
            shown.append(self._stops.push(self._decoder.push(token_id), may_stop))
            if self._stops.matched is not None:
                return "".join(shown), i + 1
        return "".join(shown), len(token_ids)

    def _rest(self) -> str:
        """What decoder and stop strings hold back."""
        if self._decoder is None or self._stops.matched is not None:
            return ""
        return self._stops.push(self._decoder.flush(), may_stop=False) + self._stops.flush()

    def _logprobs(self, token_id: int, found: TokenLogprobs) -> dict[int, Logprob]:
        ranked = {token_id: (found.logprob, found.rank)}
        for rank, (other_id, logprob) in enumerate(found.top, start=1):
            ranked.setdefault(other_id, (logprob, rank))
        text = self._tokenizer.token_text if self._tokenizer else lambda _: None
        return {i: Logprob(logprob, rank, text(i)) for i, (logprob, rank) in ranked.items()}


class RequestStream:
    """The deltas of a request's completions, interleaved. Iterate once; ends when all completions have.

    Never makes the writer wait: while the reader is away, the deltas of each completion are joined into one.
    """

    def __init__(self, request_id: str, prompt: str | None, prompt_token_ids: list[int], num: int) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self._num_unfinished = num
        self._deltas: dict[int, CompletionDelta] = {}
        self._error: Exception | None = None
        self._news = asyncio.Event()

    def put(self, delta: CompletionDelta) -> None:
        """Give the reader a delta; never waits."""
        before = self._deltas.get(delta.index)
        self._deltas[delta.index] = delta if before is None else _join(before, delta)
        self._num_unfinished -= delta.finish_reason is not None
        self._news.set()

    def fail(self, error: Exception) -> None:
        """Raise `error` in the reader, after the deltas it has not read yet."""
        self._error = error
        self._news.set()

    async def __aiter__(self) -> AsyncIterator[CompletionDelta]:
        while True:
            await self._news.wait()
            self._news.clear()
            deltas, self._deltas = self._deltas, {}
            # Read before the first yield: what arrives while the reader is busy sets the event again.
            done, error = self._num_unfinished == 0, self._error
            for delta in deltas.values():
                yield delta
            if done:
                return
            if error is not None:
                raise error


class OutputBuilder:
    """Adds up deltas to what `LLM.generate` returns."""

    def __init__(self, stream: RequestStream, params: SamplingParams) -> None:
        with_logprobs = params.logprobs is not None
        self.output = RequestOutput(
            request_id=stream.request_id,
            prompt=stream.prompt,
            prompt_token_ids=stream.prompt_token_ids,
            outputs=[
                CompletionOutput(
                    i,
                    logprobs=[] if with_logprobs else None,
                    cumulative_logprob=0.0 if with_logprobs else None,
                )
                for i in range(params.n)
            ],
        )

    def add(self, delta: CompletionDelta) -> None:
        """Append a delta to its completion."""
        completion = self.output.outputs[delta.index]
        completion.text += delta.text
        completion.token_ids.extend(delta.token_ids)
        if delta.logprobs and completion.logprobs is not None:
            completion.logprobs.extend(delta.logprobs)
            chosen = (
                entry[token_id].logprob
                for token_id, entry in zip(delta.token_ids, delta.logprobs, strict=True)
            )
            completion.cumulative_logprob = sum(chosen, completion.cumulative_logprob or 0.0)
        completion.finish_reason, completion.stop_reason = delta.finish_reason, delta.stop_reason
        if delta.index == 0:
            self.output.num_cached_tokens = delta.num_cached_tokens
        self.output.finished = all(c.finish_reason is not None for c in self.output.outputs)

    def snapshot(self) -> RequestOutput:
        """A copy that later deltas leave alone."""
        completions = [
            replace(c, token_ids=list(c.token_ids), logprobs=None if c.logprobs is None else list(c.logprobs))
            for c in self.output.outputs
        ]
        return replace(self.output, outputs=completions)


def _join(first: CompletionDelta, second: CompletionDelta) -> CompletionDelta:
    logprobs = None
    if first.logprobs is not None or second.logprobs is not None:
        logprobs = (first.logprobs or []) + (second.logprobs or [])
    return replace(
        second,
        text=first.text + second.text,
        token_ids=first.token_ids + second.token_ids,
        logprobs=logprobs,
    )
