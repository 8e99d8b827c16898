"""Counts the tokens of one request, and gathers its deltas into whole outputs."""

from __future__ import annotations

from dataclasses import dataclass, field

from moe_runtime.engine.outputs import CompletionDelta, CompletionOutput, RequestOutput
from moe_runtime.server.responses import Usage, usage


@dataclass
class UsageCounter:
    """Tokens so far, over all prompts of a request."""

    prompt_tokens: dict[int, int] = field(default_factory=dict)
    cached_tokens: dict[int, int] = field(default_factory=dict)
    completion_tokens: int = 0

    def add(self, prompt_index: int, delta: CompletionDelta) -> None:
        """Count a delta of a prompt's completions."""
        self.prompt_tokens[prompt_index] = delta.num_prompt_tokens
        if delta.index == 0:
            # Further completions of a prompt reuse the first one's KV; that is no saving of the client's.
            self.cached_tokens[prompt_index] = delta.num_cached_tokens
        self.completion_tokens += len(delta.token_ids)

    def add_output(self, prompt_index: int, output: RequestOutput) -> None:
        """Count the whole output of a prompt."""
        self.prompt_tokens[prompt_index] = len(output.prompt_token_ids)
        self.cached_tokens[prompt_index] = output.num_cached_tokens
        self.completion_tokens += sum(len(part.token_ids) for part in output.outputs)

    @property
    def usage(self) -> Usage:
        """The sums, as OpenAI's object."""
        return usage(
            sum(self.prompt_tokens.values()), self.completion_tokens, sum(self.cached_tokens.values())
        )


class OutputCollector:
    """Gathers the deltas of one prompt into a RequestOutput."""

    def __init__(self, request_id: str, prompt_token_ids: list[int]) -> None:
        self._output = RequestOutput(request_id, None, prompt_token_ids, [])
        self._parts: dict[int, CompletionOutput] = {}
        self._texts: dict[int, list[str]] = {}

    def add(self, delta: CompletionDelta) -> None:
        """Take in the next delta of any of the prompt's completions."""
        part = self._parts.setdefault(delta.index, CompletionOutput(delta.index))
        self._texts.setdefault(delta.index, []).append(delta.text)
        part.token_ids.extend(delta.token_ids)
        if delta.logprobs is not None:
            part.logprobs = (part.logprobs or []) + delta.logprobs
        part.finish_reason, part.stop_reason = delta.finish_reason, delta.stop_reason
        if delta.index == 0:
            self._output.num_cached_tokens = delta.num_cached_tokens

    def finish(self) -> RequestOutput:
        """The output, once all deltas have been added."""
        for index, part in self._parts.items():
            part.text = "".join(self._texts[index])
        self._output.outputs = [self._parts[index] for index in sorted(self._parts)]
        self._output.finished = True
        return self._output
