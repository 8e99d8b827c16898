"""Plain completions: from a decoded JSON request to engine calls, and from their results to the answer.

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
from moe_runtime.server.protocol import CompletionRequest
from moe_runtime.server.responses import Completion, CompletionChoice, Usage
from moe_runtime.server.token_text import CompletionLogprobsWriter


@dataclass
class CompletionJob:
    """One request, ready to run: each of `prompts` with `params`; then `respond`, or `chunks` for every delta.

    Choice `i` is completion `i % n` of prompt `i // n`.
    """

    context: ModelContext
    request: CompletionRequest
    prompts: list[list[int]]
    params: SamplingParams
    id: str = field(default_factory=lambda: new_id("cmpl"))
    created: int = field(default_factory=lambda: int(time.time()))
    _writers: dict[int, CompletionLogprobsWriter] = field(default_factory=dict)

    @classmethod
    def prepare(cls, context: ModelContext, data: Any) -> CompletionJob:
        """Check and tokenize. Raises ApiError or RequestError."""
        request = parse(CompletionRequest, data)
        context.check_model(request.model)
        params = request.to_sampling_params(context.sampling_defaults)
        prompts = [
            context.encode(prompt, add_special_tokens=request.add_special_tokens)
            if isinstance(prompt, str)
            else prompt
            for prompt in request.prompt
        ]
        for ids in prompts:
            context.check_prompt(ids, params, "prompt")
        return cls(context, request, prompts, params)

    def respond(self, outputs: list[RequestOutput]) -> Completion:
        """The whole answer; `outputs` in the order of `prompts`."""
        counter = UsageCounter()
        choices = []
        for prompt_index, output in enumerate(outputs):
            counter.add_output(prompt_index, output)
            for part in output.outputs:
                choice = self._choice(prompt_index, part, part.text)
                choice.stop_reason = part.stop_reason
                choices.append(choice)
        return Completion(self.id, self.created, self.context.name, choices, counter.usage)

    def chunks(
        self, prompt_index: int, delta: CompletionDelta, counter: UsageCounter
    ) -> Iterator[Completion]:
        """Chunks for one delta; the echo, if asked for, opens the choice's text."""
        choice = self._choice(prompt_index, delta, delta.text)
        shown = choice.text or choice.logprobs or (self.request.return_token_ids and delta.token_ids)
        if not shown and delta.finish_reason is None:
            return  # Text is held back while it may become a stop string or a whole character.
        if delta.finish_reason is not None:
            choice.stop_reason = delta.stop_reason
        usage: Usage | UnsetType | None = UNSET
        if self.request.include_usage:
            usage = counter.usage if self.request.continuous_usage else None
        yield Completion(self.id, self.created, self.context.name, [choice], usage)

    def usage_chunk(self, counter: UsageCounter) -> Completion:
        """The last chunk when usage was asked for: no choices."""
        return Completion(self.id, self.created, self.context.name, [], counter.usage)

    def _choice(
        self, prompt_index: int, part: CompletionOutput | CompletionDelta, text: str
    ) -> CompletionChoice:
        index = prompt_index * self.params.n + part.index
        first = index not in self._writers
        if first:
            self._writers[index] = CompletionLogprobsWriter(
                self.context.texts,
                self.params.logprobs or 0,
                skip_special_tokens=self.params.skip_special_tokens,
            )
        if first and self.request.echo:
            text = self._echo(prompt_index) + text
        logprobs = self._writers[index].write(part.token_ids, part.logprobs)
        choice = CompletionChoice(index, text, logprobs, part.finish_reason)
        if self.request.return_token_ids:
            choice.token_ids = part.token_ids
            choice.prompt_token_ids = self.prompts[prompt_index] if first else UNSET
        return choice

    def _echo(self, prompt_index: int) -> str:
        prompt = self.request.prompt[prompt_index]
        if isinstance(prompt, str):
            return prompt
        return self.context.decode(prompt, skip_special_tokens=self.params.skip_special_tokens)
