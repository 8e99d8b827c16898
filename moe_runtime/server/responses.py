"""The answers of the OpenAI API, as msgspec structs: encoding one per generated token has to be cheap.

Fields set to UNSET are left out of the JSON; those set to None appear as null, as OpenAI sends them.
"""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType


class PromptTokensDetails(msgspec.Struct):
    """Where the prompt's KV came from."""

    cached_tokens: int = 0
    """Prompt tokens whose KV came from the prefix cache."""


class Usage(msgspec.Struct):
    """Token counts of one request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> Usage:
    """A prompt counts once, however many completions it has."""
    total = prompt_tokens + completion_tokens
    return Usage(prompt_tokens, completion_tokens, total, PromptTokensDetails(cached_tokens))


class TopLogprob(msgspec.Struct):
    """A candidate for a place in the text."""

    token: str
    logprob: float
    bytes: list[int] | None
    """The token's own bytes, which need not be valid UTF-8 alone."""


class ChatTokenLogprob(TopLogprob):
    """The chosen token of a place, and the best candidates for it."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """One entry per generated token."""

    content: list[ChatTokenLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct):
    """The older format: parallel lists, and offsets into `text`."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


class Message(msgspec.Struct):
    """What the model said."""

    content: str
    role: str = "assistant"
    refusal: None = None


class ChatChoice(msgspec.Struct):
    """One of a request's `n` answers."""

    index: int
    message: Message
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct):
    """A whole answer of /v1/chat/completions."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: str = "chat.completion"
    system_fingerprint: None = None
    prompt_token_ids: list[int] | UnsetType = UNSET


class Delta(msgspec.Struct):
    """What a chunk adds to the message."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct):
    """What a chunk says of one of the `n` answers."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    """Only in the chunk with the finish_reason."""
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct):
    """An event of a streamed answer of /v1/chat/completions."""

    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    """null in all chunks but the last when usage was asked for."""
    object: str = "chat.completion.chunk"
    system_fingerprint: None = None
    prompt_token_ids: list[int] | UnsetType = UNSET


class CompletionChoice(msgspec.Struct):
    """Of a whole answer and of a chunk alike."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Completion(msgspec.Struct):
    """A whole answer or a chunk of one."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    object: str = "text_completion"
    system_fingerprint: None = None


class ModelCard(msgspec.Struct):
    """The served model, under one of its names."""

    id: str
    created: int
    root: str
    max_model_len: int
    object: str = "model"
    owned_by: str = "moe-runtime"
    parent: None = None
    permission: list[None] = []


class ModelList(msgspec.Struct):
    """Answer of /v1/models."""

    data: list[ModelCard]
    object: str = "list"


class Tokens(msgspec.Struct):
    """Answer of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Text(msgspec.Struct):
    """Answer of /detokenize."""

    prompt: str
