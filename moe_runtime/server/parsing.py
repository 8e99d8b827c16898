"""From a decoded JSON value to a request, and how what is wrong with it becomes an ApiError that names the field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from moe_runtime.server.errors import ApiError, invalid
from moe_runtime.server.fields import check_fields, drop_unread

R = TypeVar("R", bound="Request")


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
    if isinstance(cause, FieldError):
        return cause.located(error["loc"])
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error["loc"]).lstrip(".")
    what = str(cause) if isinstance(cause, ValueError) else error["msg"]
    if error["type"] == "missing":
        return invalid(f"missing field `{path}`", path, "missing_required_parameter")
    got = "" if cause or isinstance(error["input"], dict | list) else f"; got {str(error['input'])[:100]!r}"
    return invalid(f"`{path}`: {what}{got}" if path else what, path or None)


class FieldError(ValueError):
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
