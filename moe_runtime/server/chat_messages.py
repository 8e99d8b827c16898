"""Chat messages, and the fields that say how a template makes a prompt of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from moe_runtime.engine.tokenizer import join_content
from moe_runtime.errors import RequestError
from moe_runtime.server.errors import ApiError, invalid
from moe_runtime.server.fields import check_fields
from moe_runtime.server.parsing import FieldError, Request


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
            raise FieldError(
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
            raise FieldError(exc) from None
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


class TemplatedRequest(Request):
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

    def check_template(self, messages: list[ChatMessage]) -> None:
        """Raises FieldError where `messages` and these fields do not go together."""
        if not messages:
            raise FieldError(invalid("`messages` is empty", "messages"))
        if not self.continue_final_message:
            return
        if self.add_generation_prompt:
            raise FieldError(
                invalid(
                    "add_generation_prompt and continue_final_message exclude one another",
                    "add_generation_prompt",
                )
            )
        if messages[-1].role != "assistant":
            raise FieldError(
                invalid("continue_final_message needs a last message of the assistant", "messages")
            )
