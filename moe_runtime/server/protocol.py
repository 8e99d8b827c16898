"""The requests of the OpenAI API as this server takes them. Nothing here knows about HTTP.

`parse(Model, data)` checks a decoded JSON object and raises ApiError naming the field. Extensions to OpenAI's fields are
named as vLLM and SGLang name them. What is known but not supported is listed in fields.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from moe_runtime.core import SamplingParams
from moe_runtime.engine.tokenizer import join_content
from moe_runtime.errors import RequestError
from moe_runtime.server.errors import ApiError, invalid
from moe_runtime.server.fields import check_fields, drop_unread

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default `max_tokens` of /v1/completions."""

SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""What a model's generation_config.json may set for requests that say nothing."""

R = TypeVar("R", bound="Request")
Prompt = str | list[int]


class Request(BaseModel):
    """Base of all requests: strict types (no "5" for 5), immutable."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    model: str | None = Field(None, description="The served model's name; may be left out")


def parse(model: type[R], data: Any) -> R:
    """Check a decoded JSON value. Raises ApiError 400 (or 501 for a missing feature) naming the first wrong field."""
    if not isinstance(data, Mapping):
        raise invalid(f"the request must be a JSON object, not {type(data).__name__}")
    known = model.model_fields.keys()
    check_fields(data, known)
    try:
        return model.model_validate(drop_unread(data, known))
    except ValidationError as exc:
        raise _from_validation(exc) from None


def _from_validation(exc: ValidationError) -> ApiError:
    error = exc.errors(include_url=False)[0]
    cause = error.get("ctx", {}).get("error")
    if isinstance(cause, _FieldError):
        return cause.located(error["loc"])
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error["loc"]).lstrip(".")
    what = str(cause) if isinstance(cause, ValueError) else error["msg"]
    if error["type"] == "missing":
        return invalid(f"missing field `{path}`", path, "missing_required_parameter")
    got = "" if cause or isinstance(error["input"], dict | list) else f"; got {str(error['input'])[:100]!r}"
    return invalid(f"`{path}`: {what}{got}" if path else what, path or None)


class _FieldError(ValueError):
    """Carries an ApiError through pydantic, which lets only ValueErrors pass."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(error.message)
        self.error = error

    def located(self, path: tuple[int | str, ...]) -> ApiError:
        """The error, with the message's index put into `messages[]`."""
        index = next((part for part in path if isinstance(part, int)), None)
        if index is not None:
            for name in ("message", "param"):
                text = getattr(self.error, name)
                setattr(self.error, name, text and text.replace("messages[]", f"messages[{index}]"))
        return self.error


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
                raise _FieldError(exc) from None
        return data

    @model_validator(mode="after")
    def _check_stream(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise _FieldError(invalid("`stream_options` needs `stream`: true", "stream_options"))
        return self

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
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


def _content(value: Any) -> Any:
    """A message's content as text; parts of type `text` are joined by newlines."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("must be a string or a list of content parts")
    for index, part in enumerate(value):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind != "text":
            where = f"messages[].content[{index}].type"
            raise _FieldError(
                ApiError(501, f"content parts of type {kind!r} are not supported, only 'text'", param=where)
            )
    try:
        return join_content(value)
    except RequestError as exc:
        raise ValueError(str(exc)) from None


_REPLAYED = ("tool_calls", "function_call", "audio", "refusal", "annotations", "reasoning")
"""Fields of an answer that clients send back with it; accepted while empty."""


class ChatMessage(BaseModel):
    """One turn. `developer` is what newer models call `system`, and is given to the template as that."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str | None, BeforeValidator(_content)] = None
    name: str | None = None
    reasoning_content: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _check_fields(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            raise ValueError("must be an object with `role` and `content`")
        try:
            if data.get("role") in ("tool", "function"):
                raise ApiError(501, "messages of tools are not supported", param="messages[].role")
            for name in _REPLAYED:
                if data.get(name):
                    raise ApiError(501, f"`{name}` in a message is not supported", param=f"messages[].{name}")
            rest = {k: v for k, v in data.items() if k not in _REPLAYED}
            check_fields(rest, cls.model_fields, "messages[].")
        except ApiError as exc:
            raise _FieldError(exc) from None
        if rest.get("content") is None and rest.get("role") != "assistant":
            raise ValueError("`content` is missing")
        return rest

    def for_template(self) -> dict[str, str]:
        """The message as chat templates expect it."""
        role = "system" if self.role == "developer" else self.role
        extra = {"name": self.name, "reasoning_content": self.reasoning_content}
        return {
            "role": role,
            "content": self.content or "",
            **{k: v for k, v in extra.items() if v is not None},
        }


class _Templated(Request):
    """Fields that steer the chat template."""

    add_generation_prompt: bool | None = Field(
        None, description="Open the assistant's turn; default: unless continue_final_message"
    )
    continue_final_message: bool | None = Field(
        None, description="Go on with the last (assistant) message instead of opening a new one"
    )
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Variables for the chat template")

    @property
    def opens_turn(self) -> bool:
        """`add_generation_prompt` with its default resolved."""
        return (
            not self.continue_final_message
            if self.add_generation_prompt is None
            else self.add_generation_prompt
        )

    def _check_template(self, messages: list[ChatMessage]) -> None:
        if not messages:
            raise _FieldError(invalid("`messages` is empty", "messages"))
        if not self.continue_final_message:
            return
        if self.add_generation_prompt:
            raise _FieldError(
                invalid(
                    "add_generation_prompt and continue_final_message exclude one another",
                    "add_generation_prompt",
                )
            )
        if messages[-1].role != "assistant":
            raise _FieldError(
                invalid("continue_final_message needs a last message of the assistant", "messages")
            )


class ChatRequest(_Templated, GenerationRequest):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    @model_validator(mode="after")
    def _check(self) -> ChatRequest:
        self._check_template(self.messages)
        both = self.max_tokens is not None and self.max_completion_tokens is not None
        if both and self.max_tokens != self.max_completion_tokens:
            raise _FieldError(
                invalid("max_tokens and max_completion_tokens are the same; give one", "max_tokens")
            )
        if self.top_logprobs and not self.logprobs:
            raise _FieldError(invalid("`top_logprobs` needs `logprobs`: true", "top_logprobs"))
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
            raise _FieldError(
                invalid("`echo` with `logprobs` is not supported: prompts have no logprobs here", "echo")
            )
        return self

    def to_sampling_params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """Raises RequestError on a value out of range."""
        limit = DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens
        return self._sampling(defaults, limit, self.logprobs)


class TokenizeRequest(_Templated):
    """POST /tokenize: either `prompt` or `messages`."""

    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool = True
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _check(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise _FieldError(invalid("give either `prompt` or `messages`", "prompt"))
        if self.messages is not None:
            self._check_template(self.messages)
        return self


class DetokenizeRequest(Request):
    """POST /detokenize."""

    tokens: list[int]
    skip_special_tokens: bool = False
