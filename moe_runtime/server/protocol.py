"""The requests of the OpenAI API as this server takes them. Nothing here knows about HTTP.

`parsing.parse(Model, data)` checks a decoded JSON object and raises ApiError naming the field. Extensions to OpenAI's fields are
named as vLLM and SGLang name them. What is known but not supported is listed in fields.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from moe_runtime.core import SamplingParams
from moe_runtime.errors import RequestError
from moe_runtime.server.chat_messages import ChatMessage, TemplatedRequest
from moe_runtime.server.errors import ApiError, invalid
from moe_runtime.server.fields import check_fields
from moe_runtime.server.parsing import FieldError, Request

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default `max_tokens` of /v1/completions."""

SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""What a model's generation_config.json may set for requests that say nothing."""

Prompt = str | list[int]


def _strings(value: Any) -> Any:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return value
    raise ValueError("must be a string or a list of strings")


def _token_keys(value: Any) -> Any:
    """JSON has only string keys: {"50256": -100} -> {50256: -100.0}."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise ValueError("must be an object from token ids to numbers from -100 to 100")
    biases: dict[int, float] = {}
    for key, bias in value.items():
        if not str(key).isascii() or not str(key).isdigit() or isinstance(bias, bool):
            raise ValueError(f"{key!r}: {bias!r} is not a token id and a number from -100 to 100")
        if not isinstance(bias, int | float):
            raise ValueError(f"the bias of token {key} must be a number, not {bias!r}")
        biases[int(key)] = float(bias)
    return biases


class StreamOptions(BaseModel):
    """OpenAI's `include_usage`: a last chunk with the usage. `continuous_usage_stats`: usage in every chunk."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    include_usage: bool = False
    continuous_usage_stats: bool = False


class GenerationRequest(Request):
    """What chat and plain completions have in common."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[int, float] | None, BeforeValidator(_token_keys)] = None
    seed: int | None = None
    n: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: Annotated[str | list[str] | None, BeforeValidator(_strings)] = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = Field(None, description="Also give token ids of prompt and output")
    routed_dp_rank: int | None = Field(None, description="Rank that must serve the request")

    @model_validator(mode="before")
    @classmethod
    def _check_stream_options(cls, data: Any) -> Any:
        options = data.get("stream_options")
        if isinstance(options, Mapping):
            try:
                check_fields(options, StreamOptions.model_fields, "stream_options.")
            except ApiError as exc:
                raise FieldError(exc) from None
        return data

    @model_validator(mode="after")
    def _check_stream(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise FieldError(invalid("`stream_options` needs `stream`: true", "stream_options"))
        return self

    @property
    def include_usage(self) -> bool:
        """Whether the stream ends with a chunk that has the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk has the usage so far."""
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def _sampling(
        self, defaults: Mapping[str, Any], max_tokens: int | None, logprobs: int | None
    ) -> SamplingParams:
        """Fields the client left out come from `defaults`, then from SamplingParams. Raises RequestError."""
        chosen: dict[str, Any] = {k: defaults[k] for k in SAMPLING_DEFAULTS if defaults.get(k) is not None}
        for name in SamplingParams.__struct_fields__:
            value = getattr(self, name, None)
            if value is not None:
                chosen[name] = value
        chosen.update(max_tokens=max_tokens, logprobs=logprobs)
        return SamplingParams(**chosen)


class ChatRequest(TemplatedRequest, GenerationRequest):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    @model_validator(mode="after")
    def _check(self) -> ChatRequest:
        self.check_template(self.messages)
        both = self.max_tokens is not None and self.max_completion_tokens is not None
        if both and self.max_tokens != self.max_completion_tokens:
            raise FieldError(
                invalid("max_tokens and max_completion_tokens are the same; give one", "max_tokens")
            )
        if self.top_logprobs and not self.logprobs:
            raise FieldError(invalid("`top_logprobs` needs `logprobs`: true", "top_logprobs"))
        return self

    def to_sampling_params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """Without a limit from the client, as many tokens as the context allows. Raises RequestError."""
        limit = self.max_completion_tokens if self.max_tokens is None else self.max_tokens
        try:
            return self._sampling(defaults, limit, (self.top_logprobs or 0) if self.logprobs else None)
        except RequestError as exc:
            raise self._in_own_words(exc) from None

    def _in_own_words(self, error: RequestError) -> RequestError:
        """The error with the names that these fields have in chats."""
        names = {"logprobs": "top_logprobs"}
        if self.max_tokens is None:
            names["max_tokens"] = "max_completion_tokens"
        name = names.get(error.param or "")
        return (
            error if name is None else RequestError(str(error).replace(f"{error.param}=", f"{name}="), name)
        )


def _prompts(value: Any) -> list[Prompt]:
    """str | list[str] | list[int] | list[list[int]] -> a list of texts and id lists, not empty."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if all(type(item) is int for item in value):
            return [value]
        if all(isinstance(item, str) for item in value):
            return list(value)
        if all(isinstance(p, list) and p and all(type(t) is int for t in p) for p in value):
            return list(value)
    raise ValueError("must be text, a list of texts, a list of token ids, or a list of lists of token ids")


class CompletionRequest(GenerationRequest):
    """POST /v1/completions. `prompt` holds a list after parsing, one entry per prompt."""

    prompt: Annotated[list[str | list[int]], BeforeValidator(_prompts)]
    echo: bool | None = None
    logprobs: int | None = None
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _check(self) -> CompletionRequest:
        if self.echo and self.logprobs is not None:
            raise FieldError(
                invalid("`echo` with `logprobs` is not supported: prompts have no logprobs here", "echo")
            )
        return self

    def to_sampling_params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """Raises RequestError on a value out of range."""
        limit = DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens
        return self._sampling(defaults, limit, self.logprobs)


class TokenizeRequest(TemplatedRequest):
    """POST /tokenize: either `prompt` or `messages`."""

    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool = True
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _check(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise FieldError(invalid("give either `prompt` or `messages`", "prompt"))
        if self.messages is not None:
            self.check_template(self.messages)
        return self


class DetokenizeRequest(Request):
    """POST /detokenize."""

    tokens: list[int]
    skip_special_tokens: bool = False
