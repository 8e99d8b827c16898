"""Chat completions: from a decoded JSON request to engine calls, and from their results to the answer.

Used by the HTTP server and by the offline batch tool alike; nothing here knows about HTTP.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from msgspec import UNSET, UnsetType

from moe_runtime.core import SamplingParams
from moe_runtime.engine.outputs import CompletionDelta, CompletionOutput, RequestOutput
from moe_runtime.server.collect import UsageCounter
from moe_runtime.server.context import ModelContext, new_id
from moe_runtime.server.parsing import parse
from moe_runtime.server.protocol import ChatRequest
from moe_runtime.server.responses import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    Delta,
    Message,
    Usage,
)


@dataclass
class ChatJob:
    """One request, ready to run: `prompts[0]` with `params`; then `respond`, or `chunks` for every delta."""

    context: ModelContext
    request: ChatRequest
    prompts: list[list[int]]
    params: SamplingParams
    id: str = field(default_factory=lambda: new_id("chatcmpl"))
    created: int = field(default_factory=lambda: int(time.time()))
    _started: set[int] = field(default_factory=set)

    @classmethod
    def prepare(cls, context: ModelContext, data: Any) -> ChatJob:
        """Check, render and tokenize. Raises ApiError or RequestError."""
        request = parse(ChatRequest, data)
        context.check_model(request.model)
        params = request.to_sampling_params(context.sampling_defaults)
        ids = context.render(
            request.messages,
            add_generation_prompt=request.opens_turn,
            continue_final_message=bool(request.continue_final_message),
            variables=request.chat_template_kwargs,
            at_most=context.max_model_len,
        )
        context.check_prompt(ids, params, "messages")
        return cls(context, request, [ids], params)

    def respond(self, outputs: list[RequestOutput]) -> ChatCompletion:
        """The whole answer."""
        (output,) = outputs
        counter = UsageCounter()
        counter.add_output(0, output)
        prompt_ids = self.prompts[0] if self.request.return_token_ids else UNSET
        choices = [self._choice(completion) for completion in output.outputs]
        return ChatCompletion(
            self.id, self.created, self.context.name, choices, counter.usage, prompt_token_ids=prompt_ids
        )

    def _choice(self, completion: CompletionOutput) -> ChatChoice:
        return ChatChoice(
            completion.index,
            Message(completion.text),
            self._logprobs(completion),
            completion.finish_reason,
            completion.stop_reason,
            completion.token_ids if self.request.return_token_ids else UNSET,
        )

    def chunks(self, prompt_index: int, delta: CompletionDelta, counter: UsageCounter) -> Iterator[ChatChunk]:
        """Chunks for one delta: the role first, then content, the finish_reason in the last."""
        if delta.index not in self._started:
            self._started.add(delta.index)
            first = ChatChunkChoice(delta.index, Delta(role="assistant", content=""))
            chunk = self._chunk([first], counter)
            if self.request.return_token_ids:
                chunk.prompt_token_ids = self.prompts[prompt_index]
            yield chunk
        shown = delta.text or delta.logprobs or (self.request.return_token_ids and delta.token_ids)
        if not shown and delta.finish_reason is None:
            return  # Text is held back while it may become a stop string or a whole character.
        choice = ChatChunkChoice(
            delta.index,
            Delta(content=delta.text) if shown else Delta(),
            self._logprobs(delta),
            delta.finish_reason,
        )
        if delta.finish_reason is not None:
            choice.stop_reason = delta.stop_reason
        if self.request.return_token_ids:
            choice.token_ids = delta.token_ids
        yield self._chunk([choice], counter)

    def usage_chunk(self, counter: UsageCounter) -> ChatChunk:
        """The last chunk when usage was asked for: no choices."""
        return ChatChunk(self.id, self.created, self.context.name, [], counter.usage)

    def _chunk(self, choices: list[ChatChunkChoice], counter: UsageCounter) -> ChatChunk:
        usage: Usage | UnsetType | None = UNSET
        if self.request.include_usage:
            usage = counter.usage if self.request.continuous_usage else None
        return ChatChunk(self.id, self.created, self.context.name, choices, usage)

    def _logprobs(self, part: CompletionOutput | CompletionDelta) -> ChatLogprobs | None:
        return self.context.texts.chat_logprobs(part.token_ids, part.logprobs, self.params.logprobs or 0)
