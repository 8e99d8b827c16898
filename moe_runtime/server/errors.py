"""What goes wrong, in OpenAI's error shape: {"error": {"message", "type", "param", "code"}} and a status."""

from __future__ import annotations

from typing import Any

from moe_runtime.errors import (
    CapacityError,
    EngineDeadError,
    OverloadedError,
    PromptTooLongError,
    RequestError,
)

RETRY_OVERLOAD_S = 1
RETRY_LOADING_S = 5
RETRY_DEAD_S = 10

_TYPES = {
    400: "invalid_request_error",
    401: "invalid_request_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    500: "server_error",
    501: "not_implemented_error",
    503: "service_unavailable_error",
}


class ApiError(Exception):
    """An answer that is an error. Raised anywhere below the HTTP layer; `body` is what the client reads."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after = retry_after

    @property
    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {
            "error": {"message": self.message, "type": kind, "param": self.param, "code": self.code},
        }

    @property
    def headers(self) -> dict[str, str]:
        """Retry-After where trying again may help; where it cannot, a hint that stops OpenAI's clients from retrying."""
        if self.retry_after is not None:
            return {"retry-after": str(self.retry_after)}
        return {"x-should-retry": "false"} if self.status == 501 else {}


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """400: the request itself is wrong."""
    return ApiError(400, message, param=param, code=code)


def unavailable(message: str, code: str, retry_after: int = RETRY_LOADING_S) -> ApiError:
    """503: the server cannot take requests now."""
    return ApiError(503, message, code=code, retry_after=retry_after)


def as_api_error(exc: BaseException) -> ApiError:
    """The answer for any exception. What was not raised on purpose becomes a 500 that tells nothing of the inside."""
    if isinstance(exc, ApiError):
        return exc
    if isinstance(exc, PromptTooLongError):
        return invalid(str(exc), exc.param, "context_length_exceeded")
    if isinstance(exc, RequestError):
        return invalid(str(exc), exc.param)
    if isinstance(exc, CapacityError):
        return invalid(str(exc))
    if isinstance(exc, OverloadedError):
        return unavailable(str(exc), "overloaded", RETRY_OVERLOAD_S)
    if isinstance(exc, EngineDeadError):
        return unavailable(str(exc) or "the ranks have gone", "engine_dead", RETRY_DEAD_S)
    return ApiError(500, "internal error; the server's log has the details", code="internal_error")
